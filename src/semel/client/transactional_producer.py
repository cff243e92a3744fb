"""A producer whose records become visible together, or not at all.

It owns a transactional id (`SharedTransaction` has the rules of its states and of what to do about failures)
and writes in its transactions by itself, with one `Producer` for each of them:

    async with TransactionalProducer(cluster, "orders-1") as producer:
        async with producer.transaction():
            await producer.send("orders", b"...")
            await producer.send_offsets(group, offsets)

Errors say what to do: `AbortableError`: abort and do it again; `FencedError`: another instance runs, stop
this one; `UnknownOutcomeError`: call `commit` again; `FatalError`: give up.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self

from semel.client.cluster import Cluster
from semel.client.errors import TransactionStateError
from semel.client.group_offsets import CommittedOffset, GroupMetadata
from semel.client.metadata import TopicPartition
from semel.client.producer import PendingRecord, PendingRun, Producer, ProducerIdentity, ProducerOptions
from semel.client.shared_transaction import (
    Outcome,
    Resumed,
    SharedTransaction,
    State,
    TransactionOptions,
)
from semel.errors import SemelError
from semel.wire.batch import NO_TIMESTAMP
from semel.wire.records import Headers, Record

ABORTABLE_STATES = (State.OPEN, State.SPOILED, State.ABORTING)


class TransactionalProducer:
    """Sends records in transactions, one after the other. Use it as an async context manager."""

    def __init__(
        self,
        cluster: Cluster,
        transactional_id: str,
        options: TransactionOptions | None = None,
        producer_options: ProducerOptions | None = None,
    ) -> None:
        self._cluster = cluster
        self._owner = SharedTransaction(cluster, transactional_id, options)
        self._producer_options = producer_options or ProducerOptions()
        self._producer: Producer | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def transactional_id(self) -> str:
        return self._owner.transactional_id

    @property
    def state(self) -> State:
        return self._owner.state

    @property
    def version(self) -> int:
        """The version of transactions that is spoken with this broker: 1 or 2."""
        return self._owner.version

    @property
    def identity(self) -> ProducerIdentity:
        return self._owner.identity

    @property
    def answer_was_lost(self) -> bool:
        """Whether a commit was sent and its answer never came: refused now, it may still have been done."""
        return self._owner.answer_was_lost

    async def open(self) -> ProducerIdentity:
        """Takes the transactional id: fences earlier instances and aborts what they left open."""
        return await self._owner.open()

    async def close(self) -> None:
        """Aborts what is open and gives the id up. A prepared transaction stays."""
        await self._drop_producer()
        await self._owner.close()

    async def begin(self) -> None:
        await self._owner.begin()
        self._producer = Producer(self._cluster, self._producer_options, self._owner.scope())

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Self]:
        """Begins; commits if the body succeeds, aborts and raises what it raised if not."""
        await self.begin()
        try:
            yield self
            await self.commit()
        except BaseException:
            if self.state in ABORTABLE_STATES:
                with suppress(SemelError):  # what the body raised says more, and the broker aborts it in time
                    await self.abort()
            raise

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> PendingRecord:
        """Queues a record, waiting for room if there is none."""
        timestamp = NO_TIMESTAMP if timestamp_ms is None else timestamp_ms
        return (await self.send_many(topic, [Record(key, value, timestamp, headers)], partition))[0]

    async def send_many(
        self, topic: str, records: Sequence[Record], partition: int | None = None
    ) -> list[PendingRun]:
        """As many times `send`, for less. A record without a timestamp gets the present one."""
        producer = self._writing()
        try:
            return await producer.send_many(topic, records, partition)
        except SemelError as error:
            if producer is not self._producer:
                raise  # its transaction was ended meanwhile, and another may be open
            raise self._owner.spoil(error) from error

    async def send_offsets(
        self, group: GroupMetadata, offsets: Mapping[TopicPartition, CommittedOffset]
    ) -> None:
        """The offsets from which the group shall go on reading are committed with the transaction."""
        self._writing()
        await self._owner.commit_offsets(group, offsets)

    async def flush(self) -> None:
        """Waits until all that was sent is acknowledged."""
        try:
            await self._writing().flush()
        except SemelError as error:
            raise self._owner.spoil(error) from error

    async def commit(self) -> None:
        """Sends what is left and makes all of it visible at once; see `SharedTransaction.commit`."""
        if self.state is State.OPEN:
            await self.flush()
            producer, self._producer = self._writing(), None
            producer.stop()
        await self._owner.commit()

    async def abort(self) -> None:
        await self._drop_producer()
        await self._owner.abort()

    # Two-phase commit

    async def prepare(self) -> str:
        """Sends what is left and leaves the decision to `complete`; the result is to be stored."""
        await self.flush()
        state = self._owner.prepare()
        await self._drop_producer()
        return state

    async def resume(self, state: str | None) -> Resumed:
        """Opens like `open`, but keeps a prepared transaction; see `SharedTransaction.resume`."""
        return await self._owner.resume(state)

    async def complete(self, outcome: Outcome) -> None:
        """Ends the prepared transaction."""
        await self._owner.complete(outcome)

    def _writing(self) -> Producer:
        if self._producer is None:
            raise TransactionStateError(
                f"producer {self.transactional_id!r} has no transaction open: call begin first"
            )
        return self._producer

    async def _drop_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.abandon()
