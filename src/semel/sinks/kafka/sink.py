"""The Kafka sink: an epoch is one shared transaction, and its marker is a committed offset inside it.

The owner takes a transactional id that derives from the sink's id, begins a transaction an epoch, hands its
identity to the writers, and ends it once for all of them (`semel.client.shared_transaction`). The marker is
the offset `epoch + 1` of the group `<sink_id>.epoch` on partition 0 of the output topic; its note says the
rest. Offsets of the source become those of the group `<sink_id>.source`, in the same transaction if source
and sink are one cluster.

- Before EndTxn(commit) a failure is retried until `commit_timeout`, and then the epoch is not committed.
- After it was sent it is only sent again; past `commit_timeout` the outcome is unknown, and the next `open`
  tells: it waits for the decision, and reads the marker.
- A fencing error is final. Where it may be that the transaction has timed out, the abort tells: if the broker
  accepts it, no other owner has come, and the epoch may be begun again (on version 2 of transactions).
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Final

from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.client.coordinator import VERSION_2
from semel.client.errors import UnknownOutcomeError
from semel.client.metadata import TopicPartition
from semel.client.shared_transaction import SharedTransaction, TransactionOptions
from semel.client.shared_transaction import State as TransactionState
from semel.errors import AbortableError, BrokerError, ConfigError, FencedError, SemelError
from semel.sinks.errors import (
    AbortFailed,
    BeginFailed,
    CommitFailed,
    FencedOut,
    InitFailed,
    SinkError,
    UnknownOutcome,
)
from semel.sinks.kafka.claim_service import ClaimService, LocalClaims
from semel.sinks.kafka.claims import ClaimBook
from semel.sinks.kafka.clock import MAX_OVERLONG_ATTEMPTS, TransactionClock
from semel.sinks.kafka.markers import MarkerStore, other_than, transactional_id_of
from semel.sinks.kafka.opening import (
    is_wrong_setting,
    refused_timeout,
    require_no_owner,
    warn_unless_verified,
)
from semel.sinks.kafka.rows import RecordLayout
from semel.sinks.kafka.topics import TopicShape, TopicShapes
from semel.sinks.kafka.writer import HomeAccess, KafkaPlan, WriterSettings
from semel.sinks.marker import NO_MARKER, Marker, Owner
from semel.sinks.receipts import Place, Receipt
from semel.sinks.service import ServiceAddress
from semel.sinks.settings import OnBadRow, SinkSettings
from semel.sinks.sink import TransactionalSink
from semel.sinks.source_group import Home, SourceGroup, SourceOffsets
from semel.wire.compression import Codec
from semel.wire.errors import ErrorCode

DEFAULT_TRANSACTION_TIMEOUT_S: Final = 300.0


class KafkaSink(TransactionalSink):
    """A sink that writes to topics of one cluster."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        value: str = "value",
        key: str | None = "key",
        headers: str | None = None,
        topic_column: str | None = None,
        partition_column: str | None = None,
        timestamp_column: str | None = None,
        dead_letter_topic: str | None = None,
        compression: str = "none",
        transaction_timeout: float = DEFAULT_TRANSACTION_TIMEOUT_S,
        connection: ConnectionOptions | None = None,
        settings: SinkSettings | None = None,
    ) -> None:
        """`key`, `value` and so on name columns of the rows. `transaction_timeout` is the longest epoch."""
        super().__init__(settings)
        if transaction_timeout <= 0:
            raise ConfigError("transaction_timeout is a number of seconds above 0")
        if (self.settings.on_bad_row is OnBadRow.DEAD_LETTER) != (dead_letter_topic is not None):
            raise ConfigError("on_bad_row=dead_letter and dead_letter_topic go together: give both, or none")
        self.bootstrap = bootstrap
        self.topic = topic
        self.dead_letter_topic = dead_letter_topic
        self.layout = RecordLayout(value, key, headers, topic_column, partition_column, timestamp_column)
        self.codec = parse_codec(compression)
        self.transaction_timeout = transaction_timeout
        self.connection = connection or ConnectionOptions()
        self._book = ClaimBook()
        self._service: ClaimService | None = None
        self._service_address: ServiceAddress | None = None
        self._cluster: Cluster | None = None
        self._transaction: SharedTransaction | None = None
        self._home: HomeAccess | None = None
        self._owner: Owner | None = None
        self._markers = MarkerStore("", topic)
        self._clock = TransactionClock(transaction_timeout, time.monotonic)
        self._topics: TopicShapes | None = None

    # Opening

    async def _open(self, owner: Owner) -> Marker:
        await self._close()
        self._owner = owner
        self._clock = TransactionClock(self.transaction_timeout, time.monotonic)
        self._markers = MarkerStore(self.sink_id, self.topic)
        try:
            return await self._take(owner)
        except FencedError as error:
            try:
                raise await self._fenced_out(error) from error
            finally:
                await self._close()
        except BaseException as error:
            await self._close()  # it belongs to this loop, and whoever tries again may have another
            if isinstance(error, SemelError | OSError) and not isinstance(error, SinkError):
                raise InitFailed(
                    f"sink {self.sink_id!r} cannot be opened: {error}", is_permanent=is_wrong_setting(error)
                ) from error
            raise

    async def _take(self, owner: Owner) -> Marker:
        cluster = self._cluster = self._new_cluster()
        connected = await cluster.retry(cluster.connect)
        self._source = SourceGroup(self.sink_id, Home(cluster.bootstrap, connected.cluster_id))
        topics = self._topics = TopicShapes(cluster, self._own_topics)
        await topics.open()
        if not self.settings.fence_on_open:
            await require_no_owner(cluster, self._markers)
        self._check_before_fencing(await self._markers.peek(cluster))
        claims = LocalClaims(self._book, self._join, topics.find)
        self._home = HomeAccess(claims, cluster, self.metrics)
        if self._shared_host is not None:
            self._service = ClaimService(claims)
            self._service_address = await self._service.start(self._shared_host)
        transaction = self._transaction = SharedTransaction(
            cluster, transactional_id_of(self.sink_id), self._transaction_options()
        )
        try:
            await transaction.open()
        except BrokerError as error:
            if error.code != ErrorCode.INVALID_TRANSACTION_TIMEOUT:
                raise
            raise await refused_timeout(cluster, self.sink_id, self.transaction_timeout) from error
        if transaction.version < VERSION_2:
            await warn_unless_verified(cluster, self.sink_id)
        found = await self._markers.read(cluster)
        marker = NO_MARKER if found is None else found[0]
        await self._sign(transaction, marker, owner)
        return marker

    def _new_cluster(self) -> Cluster:
        return Cluster(self.bootstrap, self.connection)

    def _transaction_options(self) -> TransactionOptions:
        return TransactionOptions(
            transaction_timeout_ms=round(self.transaction_timeout * 1000),
            end_timeout_ms=round(self.settings.commit_timeout * 1000),
        )

    def _writer_settings(self, topics: Mapping[str, TopicShape]) -> WriterSettings:
        return WriterSettings(
            sink_id=self.sink_id,
            topic=self.topic,
            dead_letter_topic=self.dead_letter_topic,
            layout=self.layout,
            codec=self.codec,
            connection=self.connection,
            transaction_timeout_ms=round(self.transaction_timeout * 1000),
            max_buffered=self.settings.max_buffered,
            topics=topics,
        )

    @property
    def _own_topics(self) -> list[str]:
        return [self.topic] if self.dead_letter_topic is None else [self.topic, self.dead_letter_topic]

    async def _join(self, partitions: Iterable[TopicPartition]) -> None:
        """Partitions that writers are about to write to."""
        self._clock.join()
        await self._require_transaction().add_partitions(partitions)

    async def _sign(self, transaction: SharedTransaction, marker: Marker, owner: Owner) -> None:
        """Writes the marker again: that keeps it from expiring, and tells those it fences who did it."""
        await transaction.begin()
        await self._markers.put(transaction, marker, owner)
        await transaction.commit()

    # Epochs

    async def _begin(self, place: Place) -> KafkaPlan:
        transaction = self._require_transaction()
        if not self._clock.may_begin:
            raise BeginFailed(
                f"epoch {place.epoch} of sink {self.sink_id!r} took too long {MAX_OVERLONG_ATTEMPTS} times: "
                f"{self._longest}. Then open the sink anew"
            )
        assert self._topics is not None
        await self._topics.count_again()
        try:
            await transaction.begin()
        except FencedError as error:
            raise await self._fenced_out(error) from error
        except SemelError as error:
            raise BeginFailed(
                f"epoch {place.epoch} of sink {self.sink_id!r} was not begun: {error}. "
                "Close the sink and open it anew"
            ) from error
        self._book.open(place)
        self._clock.begin()
        return KafkaPlan(
            place,
            transaction.handle(),
            self._writer_settings(self._topics.known),
            self._service_address,
            self._home,
        )

    async def _commit(
        self, marker: Marker, receipts: list[Receipt], source_offsets: SourceOffsets | None
    ) -> None:
        transaction = self._require_transaction()
        self._book.check_covered(receipts)
        self._book.close()
        joins = source_offsets is not None and await self._source.joins(source_offsets)
        try:
            async with asyncio.timeout(self.settings.commit_timeout):
                await self._put_marker(transaction, marker, source_offsets if joins else None)
        except TimeoutError as error:
            if joins:
                self._source.leave_transaction(error)  # it may be its offsets that nobody takes
            raise CommitFailed(
                f"the marker of epoch {marker.epoch} of sink {self.sink_id!r} was not accepted within "
                f"{self.settings.commit_timeout:g} s; nothing was committed: abort the epoch"
            ) from error
        except FencedError as error:
            raise await self._lost_transaction(error) from error
        except SemelError as error:
            raise CommitFailed(
                f"epoch {marker.epoch} of sink {self.sink_id!r} was not committed: {error}"
            ) from error
        await self._end(transaction, marker.epoch)
        self._clock.commit()

    async def _put_marker(
        self, transaction: SharedTransaction, marker: Marker, source_offsets: SourceOffsets | None
    ) -> None:
        """The marker, and offsets of a source on our own cluster, join the transaction."""
        assert self._owner is not None
        self._clock.join()
        await self._markers.put(transaction, marker, self._owner)
        if source_offsets is not None:
            try:
                await transaction.commit_offsets(self._source.group, source_offsets.as_committed())
            except AbortableError as error:
                self._source.leave_transaction(error)
                raise

    async def _end(self, transaction: SharedTransaction, epoch: int) -> None:
        """From here on the epoch may be committed, so nothing says that it is not, unless the broker does."""
        try:
            await transaction.commit()
        except FencedError as error:
            raise await self._lost_transaction(error) from error
        except UnknownOutcomeError as error:
            raise UnknownOutcome(
                f"whether epoch {epoch} of sink {self.sink_id!r} is committed is not known after "
                f"{self.settings.commit_timeout:g} s: open the sink anew, the marker tells. {error}"
            ) from error
        except AbortableError as error:
            raise CommitFailed(
                f"epoch {epoch} of sink {self.sink_id!r} was not committed: "
                f"{self._why_timed_out(error) or error}"
            ) from error
        except SemelError as error:
            raise UnknownOutcome(
                f"whether epoch {epoch} of sink {self.sink_id!r} is committed is not known: {error}. "
                "Open the sink anew, the marker tells"
            ) from error

    async def _abort(self) -> None:
        self._book.close()
        self._clock.abort()
        try:
            await self._require_transaction().abort()
        except FencedError as error:
            raise await self._lost_transaction(error, aborting=True) from error
        except SemelError as error:
            raise AbortFailed(
                f"the abort of sink {self.sink_id!r} was not confirmed: {error}. Open the sink anew"
            ) from error

    async def _close(self) -> None:
        self._book.close()
        if self._service is not None:
            await self._service.stop()
            self._service = self._service_address = None
        if self._transaction is not None:
            await self._transaction.close()
            self._transaction = None
        if self._cluster is not None:
            await self._cluster.close()
            self._cluster = None

    def _require_transaction(self) -> SharedTransaction:
        assert self._transaction is not None, "the base class lets nothing through before open"
        return self._transaction

    # Fencing

    async def _lost_transaction(self, error: FencedError, *, aborting: bool = False) -> SinkError:
        """What a fencing error means: another owner, or a transaction that has timed out."""
        transaction = self._require_transaction()
        timed_out = self._why_timed_out(error)
        signed_by = await self._last_owner()
        if (successor := other_than(self.run, signed_by)) is not None:
            return self._markers.fenced_out(successor, error)
        if transaction.state is TransactionState.SPOILED:  # the abort tells
            return CommitFailed(timed_out or f"the transaction of sink {self.sink_id!r} is over: {error}")
        # On version 2 it has told: after a mere timeout it is refused only by brokers that raise the epoch
        # twice (Kafka 4.0, KAFKA-19367), and then the marker has to show that nobody has come.
        is_replaced = transaction.version >= VERSION_2 and signed_by is None
        if timed_out is None or is_replaced:
            return self._markers.fenced_out(None, error)
        if aborting:
            return AbortFailed(f"{timed_out}. Open the sink anew")
        if transaction.answer_was_lost:
            return UnknownOutcome(f"{timed_out}. Or it was committed before: open the sink anew, which tells")
        return CommitFailed(timed_out)

    def _why_timed_out(self, error: SemelError) -> str | None:
        """What to do about an epoch that took longer than it may; None if it did not."""
        if not self._clock.is_over:
            return None
        return (
            f"the transaction of sink {self.sink_id!r} was open for {self._clock.open_for_s:.0f} s, and the "
            f"broker has aborted it ({error}): {self._longest}"
        )

    @property
    def _longest(self) -> str:
        """How long an epoch may take, and what to do about it."""
        return (
            f"transaction_timeout is {self.transaction_timeout:g} s. Raise it (up to the broker's "
            "transaction.max.timeout.ms), or make epochs smaller (Spark: maxOffsetsPerTrigger)"
        )

    async def _fenced_out(self, error: FencedError) -> FencedOut:
        return self._markers.fenced_out(other_than(self.run, await self._last_owner()), error)

    async def _last_owner(self) -> Owner | None:
        assert self._cluster is not None
        return await self._markers.last_owner(self._cluster, self.run)


def parse_codec(compression: str) -> Codec:
    try:
        return Codec[compression.upper()]
    except KeyError:
        names = ", ".join(codec.name.lower() for codec in Codec)
        raise ConfigError(f"compression {compression!r} is none of {names}") from None
