"""What a subscriber has in its hands: a delivery or a batch of them, and the transaction it works in.

    async with delivery.transaction() as tx:
        placed = await tx.publish("invoices", key=b"a", value=b"...")

The body's end acknowledges and commits; an exception rolls everything back and the delivery comes again.
`tx.ack()` in the body seals the transaction earlier: from then on only the owner of the partition decides,
whatever becomes of the caller, and later statements are dropped with a `DeliveryStateError`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self, overload

from semel.client.metadata import TopicPartition
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import ConfigError, SemelError
from semel.subscriptions.errors import (
    DeliveryLostError,
    DeliveryStateError,
    OutcomeUnknownError,
    TransactionRejectedError,
)
from semel.subscriptions.options import MAX_STATEMENTS
from semel.subscriptions.owner import REJECTED_PAUSE_MS, PartitionOwner
from semel.subscriptions.states import (
    DELIVERY_ALLOWED_FROM,
    STATEMENT_ALLOWED_FROM,
    TRANSACTION_ALLOWED_FROM,
    DeliveryState,
    StatementState,
    TransactionState,
)
from semel.subscriptions.window import Held
from semel.wire.batch import NO_TIMESTAMP
from semel.wire.records import Headers, Record

TIMED_OUT: Final = "it was not acknowledged in time"


class Placed(NamedTuple):
    """Where a statement's record is, in a transaction that is still open."""

    topic: str
    partition: int
    offset: int


class Placements(Sequence[Placed]):
    """Where the records of one call are, in their order. They are made when somebody looks: few do."""

    __slots__ = ("_count", "_made", "_runs", "_topic")

    def __init__(self, topic: str, runs: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._topic = topic
        self._runs = runs  # of each a partition, and the offsets in it
        self._count = sum(len(offsets) for _, offsets in runs)
        self._made: list[Placed] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Placed: ...

    @overload
    def __getitem__(self, index: slice) -> list[Placed]: ...

    def __getitem__(self, index: int | slice) -> Placed | list[Placed]:
        if self._made is None:
            self._made = [
                Placed(self._topic, partition, offset)
                for partition, offsets in self._runs
                for offset in offsets
            ]
        return self._made[index]

    def __repr__(self) -> str:
        return repr(list(self))


class Statement:
    """What one call publishes in a transaction: a record, or many that share their fate."""

    __slots__ = ("placed", "state", "topic")

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.state = StatementState.PENDING
        self.placed: Sequence[Placed] = ()

    def enter(self, state: StatementState) -> None:
        assert self.state in STATEMENT_ALLOWED_FROM[state], f"{self.state} to {state}"
        self.state = state


class Dealt:
    """Records that went out together and come back together."""

    def __init__(
        self, owner: PartitionOwner, held: Sequence[Held], on_done: Callable[["Dealt"], None]
    ) -> None:
        self.held = held
        self.state = DeliveryState.OPEN
        self._owner = owner
        self._on_done = on_done
        self._why = ""
        self._transaction: Transaction | None = None
        self._ending: asyncio.Task[None] | None = None
        timeout_s = owner.options.delivery_timeout_ms / 1000
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)
        owner.out.add(self)

    @property
    def topic(self) -> str:
        return self._owner.where.topic

    @property
    def partition(self) -> int:
        return self._owner.where.partition

    @property
    def taken_back_because(self) -> str:
        """Why it was taken from its subscriber; empty if it was not."""
        return self._why

    def transaction(self) -> "Transaction":
        """The transaction that ends with this delivery's acknowledgement: the same each time."""
        if self._transaction is None:
            self._require_open("begin a transaction")
            self._transaction = Transaction(self, self._owner)
        return self._transaction

    async def ack(self) -> None:
        """Acknowledges, and commits the transaction if there is one; returns when that is durable."""
        self.seal()
        await self._wait_for(self._end(self._commit()))

    async def nack(self, reason: str = "", *, delay_ms: int | None = None) -> None:
        """Gives it back, to be dealt again after the back-off, or after `delay_ms`."""
        self._require_open("nack")
        self.enter(DeliveryState.RETURNED)
        rolling_back = self._roll_back(reason or "nack", counts=True, delay_ms=delay_ms)
        await self._wait_for(self._end(rolling_back))

    def take_back(self, reason: str, *, counts: bool) -> None:
        """Takes it from its subscriber, if that has not acknowledged it."""
        if self.state is DeliveryState.OPEN:
            self._why = reason
            self.enter(DeliveryState.RETURNED)
            self._end(self._roll_back(reason, counts=counts, delay_ms=None))

    def lose(self, error: SemelError) -> None:
        """The partition is gone, and with it all that could have been done here."""
        if self.state is DeliveryState.OPEN and self._transaction is not None:
            self._transaction.reject()  # of a sealed one nobody here knows what becomes of it
        if self.state in (DeliveryState.OPEN, DeliveryState.SEALED):
            self._why = str(error)
            self.enter(DeliveryState.LOST)
        self._done()

    def seal(self) -> None:
        """Nothing more may be said about it."""
        self._require_open("ack")
        self.enter(DeliveryState.SEALED)
        self._timer.cancel()
        self._owner.step("sealed")

    def enter(self, state: DeliveryState) -> None:
        assert self.state in DELIVERY_ALLOWED_FROM[state], f"{self.state} to {state}"
        self.state = state

    def _require_open(self, what: str) -> None:
        if self.state is DeliveryState.OPEN:
            return
        if self.state is DeliveryState.LOST or self._why:
            raise DeliveryLostError(f"{self} was taken back: {self._why}")
        raise DeliveryStateError(f"{self} is {self.state.value} already: it is too late to {what}")

    def __str__(self) -> str:
        return f"the delivery of {self._owner.where} offset {self.held[0].offset}"

    def _expire(self) -> None:
        self.take_back(TIMED_OUT, counts=True)

    def _end(self, work: Awaitable[None]) -> "asyncio.Task[None]":
        """Ends it, whether or not its subscriber waits for that."""
        self._timer.cancel()
        self._ending = self._owner.start(_run(work))
        return self._ending

    async def _wait_for(self, ending: "asyncio.Task[None]") -> None:
        """Waits for its end, which goes on if the waiting is cancelled."""
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            if not ending.cancelled():
                raise
            # The owner has given up: its partition is another's, who reads in the entry what became of this.
            raise OutcomeUnknownError(str(self)) from None

    async def _commit(self) -> None:
        transaction = self._transaction
        try:
            if transaction is None:
                await self._owner.settle(self.held)
            else:
                await transaction.commit(self.held)
        except TransactionRejectedError as error:
            if transaction is not None:
                await transaction.roll_back()
            if self.state is DeliveryState.SEALED:
                self.enter(DeliveryState.RETURNED)
                is_its_fault = transaction is not None and transaction.failure is not None
                delay_ms = None if is_its_fault else REJECTED_PAUSE_MS
                await self._owner.give_back(self.held, str(error), counts=is_its_fault, delay_ms=delay_ms)
            raise
        finally:
            self._done()
        if self.state is DeliveryState.SEALED:
            self.enter(DeliveryState.ACKNOWLEDGED)

    async def _roll_back(self, reason: str, *, counts: bool, delay_ms: int | None) -> None:
        try:
            if self._transaction is not None:
                await self._transaction.roll_back()
            await self._owner.give_back(self.held, reason, counts=counts, delay_ms=delay_ms)
        finally:
            self._done()

    def _done(self) -> None:
        self._timer.cancel()
        self._owner.came_back(self)
        self._on_done(self)


class Delivery(Dealt):
    """One record."""

    def __init__(
        self, owner: PartitionOwner, held: Sequence[Held], on_done: Callable[["Dealt"], None]
    ) -> None:
        super().__init__(owner, held, on_done)
        self.record: Record = held[0].shown
        self.attempt = held[0].attempt

    @property
    def key(self) -> bytes | None:
        return self.record.key

    @property
    def value(self) -> bytes | None:
        return self.record.value

    @property
    def headers(self) -> Headers:
        return self.record.headers

    @property
    def offset(self) -> int:
        return self.held[0].offset

    @property
    def timestamp_ms(self) -> int:
        return self.record.timestamp


class Batch(Dealt):
    """Records of one partition, in order, that are acknowledged together."""

    @property
    def records(self) -> list[Record]:
        return [held.shown for held in self.held]

    @property
    def offsets(self) -> list[int]:
        return [held.offset for held in self.held]

    @property
    def attempt(self) -> int:
        return max(held.attempt for held in self.held)

    def __len__(self) -> int:
        return len(self.held)


class Transaction:
    """Pending until its delivery is acknowledged or given back. The first statement borrows a slot."""

    def __init__(self, dealt: Dealt, owner: PartitionOwner) -> None:
        self.state = TransactionState.PENDING
        self.statements: list[Statement] = []
        self.failure: SemelError | None = None  # what the first rejected statement was told
        self._dealt = dealt
        self._owner = owner
        self._slot: TransactionalProducer | None = None
        self._borrowing = asyncio.Lock()
        self._records = 0
        self._applying = 0
        self._is_applied = asyncio.Event()
        self._is_applied.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        dealt = self._dealt
        if error is None:
            if dealt.state is not DeliveryState.ACKNOWLEDGED and not self._is_nacked():
                await dealt.ack()
        elif dealt.state is not DeliveryState.OPEN:
            return
        elif isinstance(error, Exception):
            await dealt.nack(repr(error))
        else:
            dealt.take_back("its task was cancelled", counts=False)

    def _is_nacked(self) -> bool:
        return self._dealt.state is DeliveryState.RETURNED and not self._dealt._why

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
        timestamp_ms: int | None = None,
    ) -> Placed:
        """Returns when the record is durable in the open transaction. Several may be under way at once."""
        timestamp = NO_TIMESTAMP if timestamp_ms is None else timestamp_ms
        placed = await self._publish(topic, [Record(key, value, timestamp, headers)], partition)
        return placed[0]

    async def publish_many(self, topic: str, records: Sequence[Record]) -> Sequence[Placed]:
        """Publishes records, each to the partition of its key: the same as many times `publish`, for less."""
        return await self._publish(topic, records, None)

    async def _publish(
        self, topic: str, records: Sequence[Record], partition: int | None
    ) -> Sequence[Placed]:
        self._dealt._require_open("publish: the statement was dropped")
        if self._records + len(records) > MAX_STATEMENTS:
            raise ConfigError(f"a transaction has at most {MAX_STATEMENTS} statements: this one was dropped")
        self._records += len(records)
        statement = Statement(topic)
        self.statements.append(statement)
        self._applying += 1
        self._is_applied.clear()
        try:
            statement.placed = await self._apply(topic, records, partition)
            statement.enter(StatementState.APPLIED)
            self._owner.step("published")
        except SemelError as error:
            raise self._rejected(statement, error) from error
        except asyncio.CancelledError:
            # Nobody can tell whether it is in the transaction, so that must not be committed.
            self._rejected(statement, TransactionRejectedError("a statement was cancelled"))
            raise
        finally:
            self._applying -= 1
            if not self._applying:
                self._is_applied.set()
        return statement.placed

    async def _apply(self, topic: str, records: Sequence[Record], partition: int | None) -> Placements:
        slot = await self._borrowed()
        runs = await slot.send_many(topic, records, partition)
        placed = [(run.where.partition, run.offsets(await run)) for run in runs]
        self._require_pending()  # it may have been rolled back since the last answer came
        return Placements(topic, placed)

    def _rejected(self, statement: Statement, error: SemelError) -> SemelError:
        if statement.state is not StatementState.REJECTED:
            statement.enter(StatementState.REJECTED)
        if self._dealt.state in (DeliveryState.RETURNED, DeliveryState.LOST):
            return DeliveryLostError(f"{self._dealt} was taken back: {self._dealt._why or error}")
        meaning = error if self._slot is None else self._owner.meaning_of(error, self._slot)
        if self.failure is None:
            self.failure = meaning
        return meaning

    async def ack(self) -> None:
        """Seals and commits; returns when that is durable."""
        await self._dealt.ack()

    async def nack(self, reason: str = "", *, delay_ms: int | None = None) -> None:
        """Rolls back, and gives the delivery back."""
        await self._dealt.nack(reason, delay_ms=delay_ms)

    async def _borrowed(self) -> TransactionalProducer:
        async with self._borrowing:
            if self._slot is None:
                self._require_pending()
                self._slot = await self._owner.borrow()
            return self._slot

    def _require_pending(self) -> None:
        if self.state is not TransactionState.PENDING:
            raise TransactionRejectedError("the transaction was rolled back")

    async def commit(self, held: Sequence[Held]) -> None:
        """For the delivery: commits when every statement is applied; raises if one is not."""
        while self._applying:
            await self._is_applied.wait()
        if self.failure is not None:
            raise TransactionRejectedError(f"a statement was rejected: {self.failure}") from self.failure
        slot = self._slot
        if slot is None:
            await self._owner.settle(held)
        else:
            await self._owner.commit(slot, held)
            self._slot = None
            self._owner.lend_again(slot)
        self._enter(TransactionState.COMMITTED, StatementState.COMMITTED)

    async def roll_back(self) -> None:
        """For the delivery: nothing of it will ever be seen."""
        self.reject()
        async with self._borrowing:
            slot, self._slot = self._slot, None
        if slot is not None:
            await self._owner.roll_back(slot)
            self._owner.lend_again(slot)

    def reject(self) -> None:
        if self.state is TransactionState.PENDING:
            self._enter(TransactionState.REJECTED, StatementState.REJECTED)

    def _enter(self, state: TransactionState, statements: StatementState) -> None:
        assert self.state in TRANSACTION_ALLOWED_FROM[state], f"{self.state} to {state}"
        self.state = state
        for statement in self.statements:
            if statement.state is not StatementState.REJECTED:
                statement.enter(statements)


async def _run(work: Awaitable[None]) -> None:
    await work


def where_of(dealt: Dealt) -> TopicPartition:
    return TopicPartition(dealt.topic, dealt.partition)
