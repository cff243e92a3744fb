"""What a producer asks of the coordinator of its transactional id, one method a request.

There are two versions of transactions. Version 2 (KIP-890) is used where the broker has finalized it: a
partition joins by its first batch, a group by its offsets, and the end of a transaction answers with the
identity of the next. In version 1 partitions and groups are added beforehand and the identity stays. Which of
the two a request belongs to is told by its API version, so version 1 keeps below certain ones.

All of these may be sent twice, so they are retried when the connection is lost too; only the end of a
transaction is tried once here, because its caller has to know when an answer was lost.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from semel.client.cluster import GROUP_COORDINATOR, TRANSACTION_COORDINATOR, Cluster
from semel.client.connection import Connection
from semel.client.errors import UnsupportedRequestError, broker_error, check
from semel.client.group_offsets import CommittedOffset, GroupMetadata, by_topic
from semel.client.metadata import TopicPartition
from semel.client.producer import NO_IDENTITY, ProducerIdentity
from semel.errors import FatalError, RetriableError
from semel.wire.apis import ApiKey
from semel.wire.batch import NO_PRODUCER_ID
from semel.wire.errors import ErrorCode
from semel.wire.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from semel.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from semel.wire.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)
from semel.wire.messages.end_txn import EndTxnRequest, EndTxnResponse
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)

# The state of a transaction with something in it, until it is decided.
ONGOING: Final = "Ongoing"
TRANSACTION_VERSION_FEATURE: Final = "transaction.version"
VERSION_1: Final = 1
VERSION_2: Final = 2

# The first API versions that mean transaction version 2, and the last that clients use otherwise.
VERSION_2_SINCE: Final = {ApiKey.PRODUCE: 12, ApiKey.TXN_OFFSET_COMMIT: 5, ApiKey.END_TXN: 5}
PRODUCE_VERSIONS: Final = {VERSION_1: 11, VERSION_2: 12}
TXN_OFFSET_COMMIT_VERSIONS: Final = {VERSION_1: 4, VERSION_2: 5}
END_TXN_VERSIONS: Final = {VERSION_1: 4, VERSION_2: 5}
# From 4 on the request is one between brokers.
ADD_PARTITIONS_VERSION: Final = 3
INIT_PRODUCER_ID_VERSION: Final = 5
TWO_PHASE_VERSION: Final = 6


class Identified(NamedTuple):
    """An answer of InitProducerId; `ongoing` is the identity that a kept transaction was written under."""

    identity: ProducerIdentity
    ongoing: ProducerIdentity


class TransactionCoordinator:
    """The coordinator of one transactional id, wherever it is at the moment."""

    def __init__(self, cluster: Cluster, transactional_id: str) -> None:
        self._cluster = cluster
        self.transactional_id = transactional_id

    async def version(self, highest: int = VERSION_2) -> int:
        """The version of transactions that both sides know, at most `highest`."""
        connection = await self._cluster.retry(self._connection)
        finalized = connection.finalized_features.get(TRANSACTION_VERSION_FEATURE, 0)
        speaks_it = all(
            connection.versions.get(api, (0, 0))[1] >= since for api, since in VERSION_2_SINCE.items()
        )
        return VERSION_2 if min(finalized, highest) >= VERSION_2 and speaks_it else VERSION_1

    async def init_producer_id(
        self, timeout_ms: int, *, two_phase: bool = False, keep_prepared: bool = False
    ) -> Identified:
        """A new identity: it fences who had one before and aborts what is open, unless it is to be kept."""
        request = self._init_request(timeout_ms, NO_IDENTITY, two_phase)
        request.keep_prepared_txn = keep_prepared
        return await self._cluster.retry(partial(self._init_producer_id, request))

    async def next_identity(
        self, timeout_ms: int, identity: ProducerIdentity, *, two_phase: bool = False
    ) -> ProducerIdentity:
        """The one after this, for an owner that has ended its transaction this very moment (version 1).

        Refused where somebody else has the id by now. But while a transaction is open brokers do not look at
        the epoch, and would abort it: so whoever has to ask again looks first whether a successor has one.
        """
        request = self._init_request(timeout_ms, identity, two_phase)
        with suppress(RetriableError):
            return (await self._init_producer_id(request)).identity
        return (await self._cluster.retry(partial(self._init_if_nothing_is_open, request))).identity

    def _init_request(
        self, timeout_ms: int, identity: ProducerIdentity, two_phase: bool
    ) -> InitProducerIdRequest:
        return InitProducerIdRequest(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=timeout_ms,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            enable_2pc=two_phase,
        )

    async def _init_if_nothing_is_open(self, request: InitProducerIdRequest) -> Identified:
        connection = await self._connection()
        if ApiKey.DESCRIBE_TRANSACTIONS in connection.versions:  # Kafka 3.0 and later
            looking = DescribeTransactionsRequest(transactional_ids=[self.transactional_id])
            seen = await connection.request(looking, DescribeTransactionsResponse)
            for each in seen.transaction_states:
                check(each.error_code, f"{self._name} cannot see whether another has a transaction")
                if each.transaction_state == ONGOING:
                    why = f"{self._name} has ended its transaction, and another is open"
                    raise broker_error(ErrorCode.PRODUCER_FENCED, why)
        return await self._init_producer_id(request)

    async def _init_producer_id(self, request: InitProducerIdRequest) -> Identified:
        connection = await self._connection()
        if request.enable_2pc:
            _check_two_phase(connection, request)
        response = await connection.request(
            request,
            InitProducerIdResponse,
            max_version=TWO_PHASE_VERSION if request.enable_2pc else INIT_PRODUCER_ID_VERSION,
        )
        if request.enable_2pc and response.error_code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            raise FatalError(
                f"{self._name} may not use two-phase commit: the broker needs "
                "transaction.two.phase.commit.enable=true, and the user its ACL on the transactional id",
                response.error_code,
            )
        check(response.error_code, f"{self._name} got no producer id")
        return Identified(
            ProducerIdentity(response.producer_id, response.producer_epoch),
            ProducerIdentity(response.ongoing_txn_producer_id, response.ongoing_txn_producer_epoch),
        )

    async def add_partitions(self, identity: ProducerIdentity, partitions: Iterable[TopicPartition]) -> None:
        """Partitions join the transaction (version 1)."""
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=identity.producer_id,
            v3_and_below_producer_epoch=identity.producer_epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnTopic(name=name, partitions=indexes)
                for name, indexes in by_topic(partitions).items()
            ],
        )
        await self._cluster.retry(partial(self._add_partitions, request))

    async def _add_partitions(self, request: AddPartitionsToTxnRequest) -> None:
        connection = await self._connection()
        response = await connection.request(
            request, AddPartitionsToTxnResponse, max_version=ADD_PARTITIONS_VERSION
        )
        unattempted: TopicPartition | None = None
        for topic in response.results_by_topic_v3_and_below:
            for result in topic.results_by_partition:
                where = TopicPartition(topic.name, result.partition_index)
                if result.partition_error_code == ErrorCode.OPERATION_NOT_ATTEMPTED:
                    unattempted = where  # another partition is to blame, and says why
                else:
                    check(
                        result.partition_error_code, f"{where} did not join the transaction of {self._name}"
                    )
        if unattempted is not None:
            check(ErrorCode.OPERATION_NOT_ATTEMPTED, f"{unattempted} did not join the transaction")

    async def add_group(self, identity: ProducerIdentity, group_id: str) -> None:
        """A group's offsets join the transaction (version 1)."""
        request = AddOffsetsToTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            group_id=group_id,
        )
        await self._cluster.retry(partial(self._add_group, request))

    async def _add_group(self, request: AddOffsetsToTxnRequest) -> None:
        connection = await self._connection()
        response = await connection.request(request, AddOffsetsToTxnResponse)
        check(
            response.error_code,
            f"the offsets of group {request.group_id!r} did not join the transaction of {self._name}",
        )

    async def commit_offsets(
        self,
        identity: ProducerIdentity,
        group: GroupMetadata,
        offsets: Mapping[TopicPartition, CommittedOffset],
        version: int,
    ) -> None:
        """Offsets that are committed when the transaction is."""
        request = TxnOffsetCommitRequest(
            transactional_id=self.transactional_id,
            group_id=group.group_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            generation_id=group.generation_id,
            member_id=group.member_id,
            group_instance_id=group.group_instance_id,
            topics=[
                TxnOffsetCommitRequestTopic(
                    name=name,
                    partitions=[_offset_in_request(offsets, name, index) for index in indexes],
                )
                for name, indexes in by_topic(offsets).items()
            ],
        )
        await self._cluster.retry(partial(self._commit_offsets, request, version))

    async def _commit_offsets(self, request: TxnOffsetCommitRequest, version: int) -> None:
        connection = await self._cluster.coordinator(GROUP_COORDINATOR, request.group_id)
        response = await connection.request(
            request, TxnOffsetCommitResponse, max_version=TXN_OFFSET_COMMIT_VERSIONS[version]
        )
        for topic in response.topics:
            for result in topic.partitions:
                where = TopicPartition(topic.name, result.partition_index)
                what = f"the offset of group {request.group_id!r} for {where} was not accepted"
                check(result.error_code, f"{what} from {self._name}")

    async def end(self, identity: ProducerIdentity, *, commit: bool, version: int) -> ProducerIdentity:
        """Commits or aborts; answers with the identity of the next transaction (in version 1 the same).

        Tried once: what a lost answer means is for the caller to know.
        """
        request = EndTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            committed=commit,
        )
        connection = await self._connection()
        response = await connection.request(request, EndTxnResponse, max_version=END_TXN_VERSIONS[version])
        outcome = "committed" if request.committed else "aborted"
        check(
            response.error_code,
            f"the transaction of {self._name} (producer id {request.producer_id}, "
            f"epoch {request.producer_epoch}) was not {outcome}",
        )
        if response.producer_id == NO_PRODUCER_ID:
            return ProducerIdentity(request.producer_id, request.producer_epoch)
        return ProducerIdentity(response.producer_id, response.producer_epoch)

    @property
    def _name(self) -> str:
        return f"producer {self.transactional_id!r}"

    async def _connection(self) -> Connection:
        return await self._cluster.coordinator(TRANSACTION_COORDINATOR, self.transactional_id)


def _offset_in_request(
    offsets: Mapping[TopicPartition, CommittedOffset], topic: str, partition: int
) -> TxnOffsetCommitRequestPartition:
    committed = offsets[TopicPartition(topic, partition)]
    return TxnOffsetCommitRequestPartition(
        partition_index=partition,
        committed_offset=committed.offset,
        committed_leader_epoch=committed.leader_epoch,
        committed_metadata=committed.metadata,
    )


def _check_two_phase(connection: Connection, request: InitProducerIdRequest) -> None:
    if connection.version_of(request, TWO_PHASE_VERSION) < TWO_PHASE_VERSION:
        raise UnsupportedRequestError(
            f"{connection.peer} has no two-phase commit: it needs InitProducerId v{TWO_PHASE_VERSION} "
            "(KIP-939), which Semel has with transaction.two.phase.commit.enable=true"
        )
