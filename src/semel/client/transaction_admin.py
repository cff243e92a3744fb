"""Looking at transactions from outside, and ending those that nobody ends: on Semel and on any Kafka 3.0+.

What the pieces know: a *coordinator* knows transactional ids, the state of their transactions and which
partitions are in them; the *leader* of a partition knows which producer ids have a transaction open in its
log. A transaction hangs when a leader has it open and no coordinator does: nothing will ever end it, and
readers of committed records wait at its first record (KIP-664). One that a coordinator has open for long is
not hanging in that sense, it has a timeout, but readers wait for it just the same.

Aborting goes through the coordinator wherever one knows the transaction: InitProducerId for its id raises the
epoch first, so that its producer cannot commit afterwards, and then all of it is aborted. Only what no
coordinator knows gets a marker by hand. A two-phase transaction may be prepared, and its other half committed
elsewhere: aborting it takes force.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from semel.client.admin import LATEST, READ_COMMITTED, Admin
from semel.client.cluster import TRANSACTION_COORDINATOR, Cluster
from semel.client.coordinator import ONGOING, TransactionCoordinator
from semel.client.errors import UnsupportedRequestError, broker_error, check
from semel.client.group_offsets import by_topic
from semel.client.metadata import NO_NODE, TopicPartition
from semel.client.producer import ProducerIdentity
from semel.errors import BrokerError, FatalError
from semel.wire.errors import ErrorCode
from semel.wire.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    TopicRequest,
)
from semel.wire.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    TransactionState,
)
from semel.wire.messages.list_transactions import ListTransactionsRequest, ListTransactionsResponse
from semel.wire.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

# In these the coordinator has something to end, or is about to.
OPEN_STATES: Final = frozenset({ONGOING, "PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
# All that a coordinator may say; Kafka and Semel have the same.
STATES: Final = (
    "Empty",
    ONGOING,
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "Dead",
    "PrepareEpochFence",
)
NO_START: Final = -1
ANY_DURATION: Final = -1
DURATION_FILTER_SINCE: Final = 1
# What a coordinator says of a transaction without a timeout: only two-phase commit has those (KIP-939).
NO_TIMEOUT_MS: Final = 2**31 - 1
# The longest timeout that an abort leaves behind; the id's next producer brings its own.
ABORT_TIMEOUT_MS: Final = 60_000


@dataclass(slots=True, frozen=True)
class ListedTransaction:
    transactional_id: str
    producer_id: int
    state: str
    coordinator_id: int


@dataclass(slots=True, frozen=True)
class DescribedTransaction:
    """A transactional id as its coordinator knows it; without a start where nothing is open."""

    transactional_id: str
    coordinator_id: int
    state: str
    identity: ProducerIdentity
    timeout_ms: int
    start_time_ms: int | None
    partitions: tuple[TopicPartition, ...]

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_STATES

    @property
    def is_two_phase(self) -> bool:
        """Whether it may be prepared, and wait for a decision that is made elsewhere."""
        return self.timeout_ms == NO_TIMEOUT_MS

    def open_for_ms(self, now_ms: int) -> int | None:
        return None if self.start_time_ms is None or not self.is_open else max(0, now_ms - self.start_time_ms)


@dataclass(slots=True, frozen=True)
class ActiveProducer:
    """A producer as the leader of a partition knows it; without a start offset it has nothing open there."""

    where: TopicPartition
    identity: ProducerIdentity
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    start_offset: int | None


@dataclass(slots=True, frozen=True)
class BlockingTransaction:
    """A transaction that holds up the readers of a partition; without an id no coordinator knows it."""

    producer: ActiveProducer
    transactional_id: str | None
    open_for_ms: int | None
    last_stable_offset: int
    end_offset: int
    is_two_phase: bool = False
    """Whether it may be prepared; it takes force to abort it then."""

    @property
    def is_hanging(self) -> bool:
        return self.transactional_id is None

    @property
    def lag(self) -> int:
        """How many offsets readers of committed records do not get to see."""
        return self.end_offset - self.last_stable_offset


@dataclass(slots=True, frozen=True)
class TransactionStats:
    counts: dict[str, int]
    oldest: DescribedTransaction | None


class TransactionAdmin:
    """Transactions of one cluster, seen from outside."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._admin = Admin(cluster)

    # Looking

    async def list_transactions(
        self,
        *,
        states: Iterable[str] = (),
        producer_ids: Iterable[int] = (),
        longer_than_ms: int = ANY_DURATION,
    ) -> list[ListedTransaction]:
        """The transactional ids of all coordinators, by name; only open ones have a duration."""
        request = ListTransactionsRequest(
            state_filters=list(states),
            producer_id_filters=list(producer_ids),
            duration_filter=longer_than_ms,
        )
        return await self._cluster.retry(partial(self._list_transactions, request))

    async def _list_transactions(self, request: ListTransactionsRequest) -> list[ListedTransaction]:
        found: list[ListedTransaction] = []
        for broker in (await self._cluster.view()).brokers:
            connection = await self._cluster.connection(broker.node_id)
            knows_duration = connection.version_of(request) >= DURATION_FILTER_SINCE
            if request.duration_filter != ANY_DURATION and not knows_duration:
                raise UnsupportedRequestError(
                    f"{connection.peer} cannot select transactions by duration (Kafka 3.8); leave that out"
                )
            response = await connection.request(request, ListTransactionsResponse)
            check(response.error_code, f"the transactions of broker {broker.node_id} could not be listed")
            if response.unknown_state_filters:
                raise broker_error(
                    ErrorCode.INVALID_REQUEST,
                    f"no such state: {', '.join(response.unknown_state_filters)}; "
                    f"there are {', '.join(STATES)}",
                )
            found += [
                ListedTransaction(
                    each.transactional_id, each.producer_id, each.transaction_state, broker.node_id
                )
                for each in response.transaction_states
            ]
        return sorted(found, key=_transactional_id)

    async def describe(self, transactional_id: str) -> DescribedTransaction:
        """One transactional id; raises TRANSACTIONAL_ID_NOT_FOUND where nobody knows it."""
        return await self._cluster.retry(partial(self._describe, transactional_id))

    async def _describe(self, transactional_id: str) -> DescribedTransaction:
        coordinator_id = await self._cluster.coordinator_id(TRANSACTION_COORDINATOR, transactional_id)
        request = DescribeTransactionsRequest(transactional_ids=[transactional_id])
        for answer in await self._describe_many(coordinator_id, request):
            check(answer.error_code, f"transactional id {transactional_id!r} cannot be described")
            return _described(answer, coordinator_id)
        raise broker_error(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, f"{transactional_id!r} cannot be described")

    async def describe_listed(self, listed: Sequence[ListedTransaction]) -> list[DescribedTransaction]:
        """Many of them, with one request a coordinator; those that have gone meanwhile are left out."""
        by_coordinator: dict[int, list[str]] = {}
        for each in listed:
            by_coordinator.setdefault(each.coordinator_id, []).append(each.transactional_id)
        found: list[DescribedTransaction] = []
        for coordinator_id, transactional_ids in by_coordinator.items():
            request = DescribeTransactionsRequest(transactional_ids=transactional_ids)
            answers = await self._cluster.retry(partial(self._describe_many, coordinator_id, request))
            found += [_described(answer, coordinator_id) for answer in answers if not answer.error_code]
        return found

    async def two_phase_ids(self, listed: Sequence[ListedTransaction]) -> dict[str, bool]:
        """Of those that are open, whether each is of two-phase commit; only a description says so."""
        described = await self.describe_listed([each for each in listed if each.state in OPEN_STATES])
        return {each.transactional_id: each.is_two_phase for each in described}

    async def _describe_many(
        self, coordinator_id: int, request: DescribeTransactionsRequest
    ) -> list[TransactionState]:
        connection = await self._cluster.connection(coordinator_id)
        return (await connection.request(request, DescribeTransactionsResponse)).transaction_states

    async def producers(self, partitions: Iterable[TopicPartition]) -> list[ActiveProducer]:
        """The producers that the leaders of these partitions remember."""
        return await self._cluster.retry(partial(self._producers, tuple(partitions)))

    async def _producers(self, partitions: tuple[TopicPartition, ...]) -> list[ActiveProducer]:
        by_leader: dict[int, list[TopicPartition]] = {}
        for where in partitions:
            by_leader.setdefault(await self._cluster.leader_id(where), []).append(where)
        found: list[ActiveProducer] = []
        for leader_id, led in by_leader.items():
            connection = await self._cluster.connection(leader_id)
            request = DescribeProducersRequest(
                topics=[
                    TopicRequest(name=name, partition_indexes=indexes)
                    for name, indexes in by_topic(led).items()
                ]
            )
            response = await connection.request(request, DescribeProducersResponse)
            found += _active_producers(response)
        return found

    async def stats(self) -> TransactionStats:
        """How many transactional ids are in which state, and which has been open for longest."""
        listed = await self.list_transactions()
        counts: dict[str, int] = {}
        for each in listed:
            counts[each.state] = counts.get(each.state, 0) + 1
        described = await self.describe_listed([each for each in listed if each.state in OPEN_STATES])
        oldest = min(
            (each for each in described if each.start_time_ms is not None and each.is_open),
            key=_start_time_ms,
            default=None,
        )
        return TransactionStats(counts, oldest)

    # What blocks readers

    async def find_blocking(
        self, longer_than_ms: int, *, topic: str | None = None, include_internal: bool = False
    ) -> list[BlockingTransaction]:
        """Transactions that hold up readers: those that no coordinator knows, and those open for so long."""
        ends, stable = await self._ends(topic, include_internal)
        lagging = [where for where, end in ends.items() if stable[where] < end]
        suspects = [each for each in await self.producers(lagging) if each.start_offset is not None]
        if not suspects:
            return []
        owners = await self._owners({each.identity.producer_id for each in suspects})
        unknown = [each for each in suspects if not _is_known(each, owners)]
        # A transaction may have ended between the questions: what is hanging is still there, unchanged.
        still_there = set(await self.producers({each.where for each in unknown})) if unknown else set()
        now_ms = int(time.time() * 1000)
        found: list[BlockingTransaction] = []
        for each in suspects:
            owner = owners[each.identity.producer_id] if _is_known(each, owners) else None
            open_for_ms = None if owner is None else owner.open_for_ms(now_ms)
            if each in still_there or (open_for_ms is not None and open_for_ms >= longer_than_ms):
                found.append(
                    BlockingTransaction(
                        each,
                        None if owner is None else owner.transactional_id,
                        open_for_ms,
                        stable[each.where],
                        ends[each.where],
                        owner is not None and owner.is_two_phase,
                    )
                )
        return found

    async def _ends(
        self, topic: str | None, include_internal: bool
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """The ends of partitions, for readers of everything and for those of committed records."""
        if topic is None:
            topics = await self._admin.list_topics(include_internal=include_internal)
        else:
            topics = [await self._admin.describe_topic(topic)]
        led = [
            TopicPartition(each.name, partition.partition)
            for each in topics
            for partition in each.partitions
            if partition.leader_id != NO_NODE
        ]
        wanted = dict.fromkeys(led, LATEST)
        # The last stable offset first: asked for second, it might have passed the end that was seen.
        stable = await self._admin.list_offsets(wanted, isolation_level=READ_COMMITTED)
        ends = await self._admin.list_offsets(wanted)
        return (
            {where: answer.offset for where, answer in ends.items()},
            {where: answer.offset for where, answer in stable.items()},
        )

    async def _owners(self, producer_ids: set[int]) -> dict[int, DescribedTransaction]:
        """The transactional ids that have these producer ids."""
        listed = await self.list_transactions(producer_ids=sorted(producer_ids))
        return {each.identity.producer_id: each for each in await self.describe_listed(listed)}

    # Ending

    async def abort(self, transactional_id: str, *, force: bool = False) -> DescribedTransaction:
        """Aborts what a transactional id has open and fences its producer; returns what it was before.

        What may be prepared is aborted only by force.
        """
        before = await self.describe(transactional_id)
        if before.is_open and before.is_two_phase and not force:
            raise FatalError(
                f"the transaction of {transactional_id!r} is one of two-phase commit: if it is prepared, its "
                "other half may have been committed elsewhere. Let its application recover, or, if it never "
                "will, abort with force (`semel txn abort --force`)",
                ErrorCode.INVALID_TXN_STATE,
            )
        timeout_ms = min(max(before.timeout_ms, 1), ABORT_TIMEOUT_MS)
        await TransactionCoordinator(self._cluster, transactional_id).init_producer_id(timeout_ms)
        return before

    async def abort_in(self, where: TopicPartition, producer_id: int, *, force: bool = False) -> str | None:
        """Aborts the transaction that a producer has open in a partition.

        Returns the transactional id through which it was done, or None where no coordinator knew it and a
        marker was written by hand.
        """
        producer = await self._open_producer(where, producer_id)
        owners = await self._owners({producer_id})
        if _is_known(producer, owners):
            return (await self.abort(owners[producer_id].transactional_id, force=force)).transactional_id
        await self._cluster.retry(partial(self._write_abort_marker, producer))
        return None

    async def _open_producer(self, where: TopicPartition, producer_id: int) -> ActiveProducer:
        for each in await self.producers((where,)):
            if each.identity.producer_id == producer_id and each.start_offset is not None:
                return each
        raise BrokerError(
            f"producer {producer_id} has no transaction open in {where}; see `semel txn producers`",
            ErrorCode.TRANSACTIONAL_ID_NOT_FOUND,
        )

    async def _write_abort_marker(self, producer: ActiveProducer) -> None:
        where = producer.where
        connection = await self._cluster.connection(await self._cluster.leader_id(where))
        marker = WritableTxnMarker(
            producer_id=producer.identity.producer_id,
            producer_epoch=producer.identity.producer_epoch,
            transaction_result=False,
            topics=[WritableTxnMarkerTopic(name=where.topic, partition_indexes=[where.partition])],
            # A leader that has seen no marker of this producer yet says -1, and takes none with -1.
            coordinator_epoch=max(producer.coordinator_epoch, 0),
        )
        response = await connection.request(WriteTxnMarkersRequest(markers=[marker]), WriteTxnMarkersResponse)
        for result in response.markers:
            for topic in result.topics:
                for answer in topic.partitions:
                    check(
                        answer.error_code,
                        f"no marker was written to {where} for producer {result.producer_id}",
                    )


def _is_known(producer: ActiveProducer, owners: dict[int, DescribedTransaction]) -> bool:
    """Whether a coordinator has this very transaction open, and will end it."""
    owner = owners.get(producer.identity.producer_id)
    return owner is not None and owner.is_open and producer.where in owner.partitions


def _described(answer: TransactionState, coordinator_id: int) -> DescribedTransaction:
    return DescribedTransaction(
        transactional_id=answer.transactional_id,
        coordinator_id=coordinator_id,
        state=answer.transaction_state,
        identity=ProducerIdentity(answer.producer_id, answer.producer_epoch),
        timeout_ms=answer.transaction_timeout_ms,
        start_time_ms=None if answer.transaction_start_time_ms < 0 else answer.transaction_start_time_ms,
        partitions=tuple(
            TopicPartition(topic.topic, index) for topic in answer.topics for index in topic.partitions
        ),
    )


def _active_producers(response: DescribeProducersResponse) -> list[ActiveProducer]:
    found: list[ActiveProducer] = []
    for topic in response.topics:
        for partition in topic.partitions:
            where = TopicPartition(topic.name, partition.partition_index)
            check(partition.error_code, f"the producers of {where} cannot be read", partition.error_message)
            found += [
                ActiveProducer(
                    where,
                    ProducerIdentity(each.producer_id, each.producer_epoch),
                    each.last_sequence,
                    each.last_timestamp,
                    each.coordinator_epoch,
                    None if each.current_txn_start_offset < 0 else each.current_txn_start_offset,
                )
                for each in partition.active_producers
            ]
    return found


def _transactional_id(listed: ListedTransaction) -> str:
    return listed.transactional_id


def _start_time_ms(described: DescribedTransaction) -> int:
    return NO_START if described.start_time_ms is None else described.start_time_ms
