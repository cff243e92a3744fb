"""The Kafka sink: an epoch is one shared transaction, and its marker is a committed offset inside it.

The owner takes a transactional id that derives from the sink's id, begins a transaction an epoch, hands its
identity to the writers, and ends it once for all of them (`semel.client.shared_transaction`). The marker is
the offset `epoch + 1` of the group `<sink_id>.epoch` on partition 0 of the output topic; its note says the
rest. Offsets of the source become those of the group `<sink_id>`, in the same transaction if source and sink
are one cluster.

- Before EndTxn(commit) a failure is retried until `commit_timeout`, and then the epoch is not committed.
- After it was sent it is only sent again; past `commit_timeout` the outcome is unknown, and the next `open`
  tells: it waits for the decision, and reads the marker.
- A fencing error is final, except where the transaction has timed out and no other owner has come.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from semel.client.admin import Admin, ConfigEntry
from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.client.coordinator import VERSION_2
from semel.client.errors import UnknownOutcomeError
from semel.client.group_offsets import CommittedOffset, GroupMetadata, commit_offsets, fetch_offsets
from semel.client.metadata import TopicPartition
from semel.client.shared_transaction import SharedTransaction, TransactionOptions
from semel.errors import ConfigError, FencedError, SemelError
from semel.sinks.claims import ClaimAddress, ClaimBook, ClaimService, LocalClaims
from semel.sinks.errors import (
    AbortFailed,
    BeginFailed,
    CommitFailed,
    FencedOut,
    InitFailed,
    SinkError,
    UnknownOutcome,
)
from semel.sinks.kafka.rows import RecordLayout
from semel.sinks.kafka.writer import KafkaPlan, TopicShape, WriterSettings
from semel.sinks.marker import NO_MARKER, Marker, Owner, decode_marker
from semel.sinks.receipts import Place, Receipt
from semel.sinks.settings import SinkSettings
from semel.sinks.sink import SourceOffsets, TransactionalSink
from semel.wire.columns import DEFAULT_MAX_BATCH_BYTES
from semel.wire.compression import Codec

LOGGER: Final = logging.getLogger(__name__)

DEFAULT_TRANSACTION_TIMEOUT_S: Final = 300.0
TRANSACTIONAL_ID_PREFIX: Final = "semel-sink."
MARKER_GROUP_SUFFIX: Final = ".epoch"
MARKER_PARTITION: Final = 0
# How long a fenced owner looks for the name of its successor, who writes it within milliseconds.
SUCCESSOR_TIMEOUT_S: Final = 2.0
SUCCESSOR_POLL_S: Final = 0.1


def transactional_id_of(sink_id: str) -> str:
    return f"{TRANSACTIONAL_ID_PREFIX}{sink_id}"


def marker_group_of(sink_id: str) -> str:
    return f"{sink_id}{MARKER_GROUP_SUFFIX}"


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
        compression: str = "none",
        transaction_timeout: float = DEFAULT_TRANSACTION_TIMEOUT_S,
        connection: ConnectionOptions | None = None,
        settings: SinkSettings | None = None,
    ) -> None:
        """`key`, `value` and so on name columns of the rows. `transaction_timeout` is the longest epoch."""
        super().__init__(settings)
        if transaction_timeout <= 0:
            raise ConfigError("transaction_timeout is a number of seconds above 0")
        self.bootstrap = bootstrap
        self.topic = topic
        self.layout = RecordLayout(value, key, headers, topic_column, partition_column, timestamp_column)
        self.codec = parse_codec(compression)
        self.transaction_timeout = transaction_timeout
        self.connection = connection or ConnectionOptions()
        self._book = ClaimBook()
        self._shared_host: str | None = None
        self._service: ClaimService | None = None
        self._service_address: ClaimAddress | None = None
        self._cluster: Cluster | None = None
        self._cluster_id: str | None = None
        self._transaction: SharedTransaction | None = None
        self._claims: LocalClaims | None = None
        self._owner: Owner | None = None
        self._begun_at = 0.0
        self._writer_settings = self._new_writer_settings({})

    def share(self, host: str = "127.0.0.1") -> None:
        """Lets writers be in other processes: they claim partitions at this host. Call it before `open`."""
        if self._cluster is not None:
            raise ConfigError("share is called before open")
        self._shared_host = host

    @property
    def partition_count(self) -> int:
        """How many partitions the output topic had when the sink was opened."""
        shape = self._writer_settings.topics.get(self.topic)
        if shape is None:
            raise ConfigError("the number of partitions is known once the sink is open")
        return shape.partition_count

    # Opening

    async def _open(self, owner: Owner) -> Marker:
        await self._close()
        self._owner = owner
        try:
            cluster = self._cluster = Cluster(self.bootstrap, self.connection)
            self._cluster_id = (await cluster.retry(cluster.connect)).cluster_id
            self._writer_settings = self._new_writer_settings(
                {self.topic: await self._shape(Admin(cluster), self.topic)}
            )
            transaction = self._transaction = SharedTransaction(
                cluster, transactional_id_of(self.sink_id), self._transaction_options()
            )
            await transaction.open()
            if transaction.version < VERSION_2:
                await self._warn_unless_verified(Admin(cluster))
            self._claims = LocalClaims(self._book, transaction.add_partitions)
            if self._shared_host is not None:
                self._service = ClaimService(self._claims)
                self._service_address = await self._service.start(self._shared_host)
            marker = await self._read_marker()
            await self._renew_marker(transaction, marker, owner)
        except FencedError as error:
            raise await self._fenced_out(error) from error
        except SinkError:
            raise
        except (SemelError, OSError) as error:
            raise InitFailed(f"sink {self.sink_id!r} cannot be opened: {error}") from error
        return marker

    def _transaction_options(self) -> TransactionOptions:
        return TransactionOptions(
            transaction_timeout_ms=round(self.transaction_timeout * 1000),
            end_timeout_ms=round(self.settings.commit_timeout * 1000),
        )

    def _new_writer_settings(self, topics: dict[str, TopicShape]) -> WriterSettings:
        return WriterSettings(
            topic=self.topic,
            layout=self.layout,
            codec=self.codec,
            connection=self.connection,
            transaction_timeout_ms=round(self.transaction_timeout * 1000),
            max_buffered=self.settings.max_buffered,
            topics=topics,
        )

    async def _shape(self, admin: Admin, topic: str) -> TopicShape:
        described = await admin.describe_topic(topic)
        limit = _config(await admin.topic_configs(topic), "max.message.bytes")
        return TopicShape(len(described.partitions), DEFAULT_MAX_BATCH_BYTES if limit is None else int(limit))

    async def _warn_unless_verified(self, admin: Admin) -> None:
        """Version 2 always verifies that a transaction is open; before it, Kafka does from 3.6 on."""
        controller = (await admin.describe_cluster()).brokers[0]
        configs = await admin.broker_configs(controller.node_id)
        if _config(configs, "transaction.partition.verification.enable") != "true":
            LOGGER.warning(
                "the broker at %s does not verify that a transaction is open before it takes a batch (Semel "
                "does, and Kafka from 3.6 on): a writer of sink %r that wakes up late is not fenced",
                self.bootstrap,
                self.sink_id,
            )

    async def _read_marker(self) -> Marker:
        found = await self._stored_marker()
        return NO_MARKER if found is None else found[0]

    async def _stored_marker(self) -> tuple[Marker, Owner] | None:
        """Waits until no transaction has the marker pending."""
        assert self._cluster is not None
        group_id = marker_group_of(self.sink_id)
        where = TopicPartition(self.topic, MARKER_PARTITION)
        committed = (await fetch_offsets(self._cluster, group_id, [where])).get(where)
        return None if committed is None else parse_marker(group_id, committed)

    async def _renew_marker(self, transaction: SharedTransaction, marker: Marker, owner: Owner) -> None:
        """Writes the marker again: that keeps it from expiring, and tells those it fences who did it."""
        await transaction.begin()
        await self._put_marker(transaction, marker, owner)
        await transaction.commit()

    async def _put_marker(self, transaction: SharedTransaction, marker: Marker, owner: Owner) -> None:
        await transaction.commit_offsets(
            GroupMetadata(marker_group_of(self.sink_id)),
            {
                TopicPartition(self.topic, MARKER_PARTITION): CommittedOffset(
                    marker.epoch + 1, marker.encode(owner)
                )
            },
        )

    # Epochs

    async def _begin(self, epoch: int) -> KafkaPlan:
        transaction = self._require_transaction()
        try:
            await transaction.begin()
        except FencedError as error:
            raise await self._fenced_out(error) from error
        except SemelError as error:
            raise BeginFailed(
                f"epoch {epoch} of sink {self.sink_id!r} was not begun: {error}. "
                "Close the sink and open it anew"
            ) from error
        place = Place(self.run, epoch)
        self._book.open(place)
        self._begun_at = asyncio.get_running_loop().time()
        return KafkaPlan(
            place,
            transaction.handle(),
            self._writer_settings,
            self._service_address,
            self._claims,
            self.metrics,
        )

    async def _commit(
        self, marker: Marker, receipts: list[Receipt], source_offsets: SourceOffsets | None
    ) -> None:
        transaction = self._require_transaction()
        self._book.check_covered(receipts)
        self._book.close()
        try:
            async with asyncio.timeout(self.settings.commit_timeout):
                source = await self._stage(transaction, marker, source_offsets)
        except TimeoutError as error:
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
        if source is not None and source_offsets is not None:
            await self._commit_elsewhere(source, source_offsets)

    async def _stage(
        self, transaction: SharedTransaction, marker: Marker, source_offsets: SourceOffsets | None
    ) -> Cluster | None:
        """Marker and offsets join the transaction. Returns the source where it is another cluster."""
        assert self._owner is not None
        await self._put_marker(transaction, marker, self._owner)
        if source_offsets is None:
            return None
        offsets = as_committed(source_offsets)
        source = await self._source(source_offsets.bootstrap)
        if source is not None:
            return source
        await transaction.commit_offsets(GroupMetadata(self.sink_id), offsets)
        return None

    async def _source(self, bootstrap: str) -> Cluster | None:
        """The source's cluster, if it is another one than ours."""
        if bootstrap == self.bootstrap:
            return None
        source = Cluster(bootstrap, self.connection)
        try:
            if (await source.connect()).cluster_id == self._cluster_id:
                await source.close()
                return None
        except SemelError as error:
            LOGGER.warning("the source at %s does not answer: %s", bootstrap, error)
        return source

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
        except SemelError as error:
            raise CommitFailed(
                f"epoch {epoch} of sink {self.sink_id!r} was not committed: {error}"
            ) from error

    async def _commit_elsewhere(self, source: Cluster, source_offsets: SourceOffsets) -> None:
        """The source is another cluster: its offsets are for tools that show lag; nothing depends on it."""
        try:
            async with asyncio.timeout(self.settings.commit_timeout):
                await commit_offsets(source, GroupMetadata(self.sink_id), as_committed(source_offsets))
        except (SemelError, TimeoutError) as error:
            LOGGER.warning(
                "the offsets of group %r at the source were not committed: %s", self.sink_id, error
            )
        finally:
            await source.close()

    async def _abort(self) -> None:
        self._book.close()
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
        open_for_s = asyncio.get_running_loop().time() - self._begun_at
        successor = await self._successor()
        if successor is not None or open_for_s < self.transaction_timeout:
            return self._name_successor(successor, error)
        reason = (
            f"the transaction of sink {self.sink_id!r} was open for {open_for_s:.0f} s, and the broker has "
            f"aborted it: transaction_timeout is {self.transaction_timeout:g} s. Raise it (up to the "
            "broker's transaction.max.timeout.ms), or make epochs smaller (Spark: maxOffsetsPerTrigger)"
        )
        return AbortFailed(f"{reason}. Open the sink anew") if aborting else CommitFailed(reason)

    async def _fenced_out(self, error: FencedError) -> FencedOut:
        return self._name_successor(await self._successor(), error)

    def _name_successor(self, successor: Owner | None, error: FencedError) -> FencedOut:
        who = "another owner" if successor is None else str(successor)
        return FencedOut(
            f"sink {self.sink_id!r} was fenced by {who}: stop this process; if it opened the sink again, it "
            f"would fence its successor. ({error})"
        )

    async def _successor(self) -> Owner | None:
        """Who has signed the marker after us, waiting a moment for a signature that is under way."""
        give_up_at = asyncio.get_running_loop().time() + SUCCESSOR_TIMEOUT_S
        while True:
            try:
                async with asyncio.timeout_at(give_up_at):
                    found = await self._stored_marker()
            except (SemelError, TimeoutError):
                return None
            if found is not None and found[1].run != self.run:
                return found[1]
            if asyncio.get_running_loop().time() + SUCCESSOR_POLL_S > give_up_at:
                return None
            await asyncio.sleep(SUCCESSOR_POLL_S)


def parse_codec(compression: str) -> Codec:
    try:
        return Codec[compression.upper()]
    except KeyError:
        names = ", ".join(codec.name.lower() for codec in Codec)
        raise ConfigError(f"compression {compression!r} is none of {names}") from None


def parse_marker(group_id: str, committed: CommittedOffset) -> tuple[Marker, Owner]:
    """The marker in an offset's note."""
    try:
        return decode_marker(committed.metadata)
    except (ValueError, TypeError, KeyError) as error:
        raise InitFailed(
            f"group {group_id!r} holds an offset that is no marker of a sink ({error}): somebody else uses "
            "that group, or has reset it. Give the sink another name, or `semel sink adopt` it"
        ) from error


def as_committed(source_offsets: SourceOffsets) -> dict[TopicPartition, CommittedOffset]:
    return {
        TopicPartition(topic, partition): CommittedOffset(offset)
        for topic, partitions in source_offsets.offsets.items()
        for partition, offset in partitions.items()
    }


def _config(entries: Iterable[ConfigEntry], name: str) -> str | None:
    for entry in entries:
        if entry.name == name:
            return entry.value
    return None
