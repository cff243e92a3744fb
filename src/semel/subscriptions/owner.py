"""The owner of one source partition: takes it over, deals its records, and alone commits for it.

The rules are in docs/design/subscriptions.md: how it takes over, what an entry is, and why commits go one at
a time. In short:

- `take_over` fences every slot of the last owner, reads the entry when it is stable, and commits its own.
- `take` gives records to deal; while there are suspects it first commits an entry that says which one is out.
- `commit` ends a transaction together with an entry that acknowledges its records; `settle` commits an entry
  for acknowledgements, failures and marks that have no transaction of their own, gathered in slot 0.
- Whatever shows that the slots belong to somebody else makes the owner *lost*: everything it has out is lost,
  and `on_lost` is told once. It never opens its slots again; another `PartitionOwner` may.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from enum import Enum
from typing import Final, Protocol, TypeVar

from semel.client.admin import EARLIEST, LATEST, READ_COMMITTED, Admin
from semel.client.cluster import DEFAULT_RETRY_TIMEOUT_MS, Backoff, Cluster
from semel.client.consumer import FetchedBatch
from semel.client.errors import UnknownOutcomeError
from semel.client.group_offsets import CommittedOffset, GroupMetadata, fetch_offsets
from semel.client.metadata import TopicPartition
from semel.client.shared_transaction import State, TransactionOptions
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import BrokerError, ConfigError, RetriableError, SemelError
from semel.subscriptions import options as settings
from semel.subscriptions.dead_letters import dead_letter_headers, dead_letter_topic, is_for_another
from semel.subscriptions.entry import Entry, parse_entry
from semel.subscriptions.errors import (
    DeliveryLostError,
    OutcomeUnknownError,
    SubscriptionClosedError,
    TransactionRejectedError,
)
from semel.subscriptions.gate import CommitGate
from semel.subscriptions.options import SubscriptionOptions
from semel.subscriptions.slots import FIRST_SLOTS, Slots, can_abort
from semel.subscriptions.window import NOT_DUE, Held, Window
from semel.wire.errors import ErrorCode
from semel.wire.records import Record, RecordReader

log = logging.getLogger("semel.subscriptions")

T = TypeVar("T")

BUFFERED_BYTES: Final = 1024 * 1024
"""Fetched and not yet looked at; fetching pauses there and goes on at half of it."""
UNPACKED_AT_ONCE: Final = 100
"""Records that are made from a fetched batch at a time."""
SETTLE_PAUSE_S: Final = 0.1
IDLE_COMMIT_S: Final = 1.0
"""How long an offset that moved past what nobody has to see waits for a commit that takes it along."""
STABLE_END_TIMEOUT_S: Final = 5.0
DEAD_LETTER_PAUSE_S: Final = 2.0
REJECTED_PAUSE_MS: Final = 100
CLOSE_TIMEOUT_S: Final = 10.0
# These refuse every entry, whoever commits it.
HOPELESS: Final = frozenset(
    {
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.OFFSET_METADATA_TOO_LARGE,
    }
)


class OwnerState(Enum):
    NEW = "new"
    OWNING = "owning"
    RELEASING = "releasing"
    LOST = "lost"


class Dealt(Protocol):
    """A delivery or a batch that is out."""

    held: Sequence[Held]

    def lose(self, error: SemelError) -> None: ...

    def take_back(self, reason: str, *, counts: bool) -> None: ...


class Settlement:
    """Acknowledgements that wait to be committed together."""

    __slots__ = ("done", "held")

    def __init__(self, held: Sequence[Held], done: asyncio.Future[None]) -> None:
        self.held = held
        self.done = done


class PartitionOwner:
    """One partition, from its take-over until it is released or lost."""

    def __init__(
        self,
        cluster: Cluster,
        writers: Sequence[Cluster],
        where: TopicPartition,
        options: SubscriptionOptions,
        group: Callable[[], GroupMetadata],
        gate: CommitGate,
        on_ready: Callable[["PartitionOwner"], None],
        on_lost: Callable[["PartitionOwner", SemelError], None],
    ) -> None:
        self.where = where
        self.options = options
        self.state = OwnerState.NEW
        self.out: set[Dealt] = set()
        self._cluster = cluster
        self._group = group
        self._group_id = group().group_id
        self._gate = gate
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._slots = Slots(
            writers,
            self._group_id,
            where,
            TransactionOptions(
                transaction_timeout_ms=options.transaction_timeout_ms,
                max_version=options.max_transaction_version,
            ),
            options.max_in_flight,
            self.settle,
        )
        self._window = Window(Entry(0), options.max_in_flight, options.max_attempts)
        self._turn = asyncio.Lock()
        self._unsettled: list[Settlement] = []
        self._settling: asyncio.Task[None] | None = None
        self._batches: deque[FetchedBatch] = deque()  # fetched, and not looked at yet
        self._buffered_bytes = 0
        self._unpacking: RecordReader[Held] | None = None  # of the batch before those
        self._buffer: deque[Held] = deque()  # what was unpacked of it, and not admitted yet
        self._from_offset = 0  # where reading began: what lies before it is nothing to us
        self._marked: deque[list[Held]] = deque()
        self._is_marking = False
        self._gathering_since_ms: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle_commit: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._something_ended = asyncio.Event()
        self._failure: SemelError | None = None

    # Taking over

    async def take_over(self) -> int:
        """Fences the last owner and commits an entry of this one; returns where to read on."""
        await self._slots.take(1)
        self.step("slot-taken")
        entry = await self._fence_and_read()
        start_offset, stable_end = await self._range(0 if entry is None else entry.offset)
        entry = self._place(entry, start_offset, stable_end).after_crash(stable_end)
        count = min(FIRST_SLOTS, self.options.max_in_flight + 1)
        await self._slots.take(count)
        await self._slots.keep(count)
        self._window = Window(entry, self.options.max_in_flight, self.options.max_attempts)
        self.state = OwnerState.OWNING
        await self.settle()
        self._slots.lend_all()
        self.step("taken-over")
        if entry.suspect_end is not None:
            log.warning(
                "%s of group %r was left by a process that died: up to %d deliveries from offset %d on are "
                "dealt one by one",
                self.where,
                self._group_id,
                entry.max_in_flight,
                entry.offset,
            )
        return entry.offset

    async def _fence_and_read(self) -> Entry | None:
        while True:
            unstable = await self._read(require_stable=False)
            await self._slots.take(self._slots_to_fence(unstable))
            self.step("slots-taken")
            stable = await self._read(require_stable=True)
            if self._slots_to_fence(stable) <= self._slots.count:
                self.step("entry-read")
                return _entry_of(stable)

    async def _read(self, *, require_stable: bool) -> CommittedOffset | None:
        timeout_ms = max(DEFAULT_RETRY_TIMEOUT_MS, 2 * self.options.transaction_timeout_ms)
        found = await fetch_offsets(
            self._cluster, self._group_id, [self.where], require_stable=require_stable, timeout_ms=timeout_ms
        )
        return found.get(self.where)

    def _slots_to_fence(self, committed: CommittedOffset | None) -> int:
        if committed is None:
            return 1
        entry = parse_entry(committed.offset, committed.metadata)
        return self.options.max_in_flight + 1 if entry is None else entry.slots

    async def _range(self, offset: int) -> tuple[int, int]:
        """Where the log begins, and where it ends for read_committed; waits a while if that is too low.

        A broker that has just started may not know yet how far its log is stable.
        """
        admin = Admin(self._cluster)
        earliest = await admin.list_offsets({self.where: EARLIEST})
        give_up = self._loop.time() + STABLE_END_TIMEOUT_S
        while True:
            latest = await admin.list_offsets({self.where: LATEST}, isolation_level=READ_COMMITTED)
            if latest[self.where].offset >= offset or self._loop.time() > give_up:
                return earliest[self.where].offset, latest[self.where].offset
            await asyncio.sleep(SETTLE_PAUSE_S)

    def _place(self, entry: Entry | None, start_offset: int, stable_end: int) -> Entry:
        """Where to begin: at the entry, as far as the log has it."""
        if entry is None:
            is_latest = self.options.start == settings.LATEST
            return Entry(stable_end if is_latest else start_offset, is_released=True)
        if entry.offset > stable_end:
            raise ConfigError(
                f"group {self._group_id!r} is at offset {entry.offset} of {self.where}, whose last is "
                f"{stable_end - 1}: was the topic deleted and made anew? Use `semel group reset` then"
            )
        if entry.offset < start_offset:
            log.error(
                "%s: offsets %d to %d of group %r were deleted by retention before they were delivered",
                self.where,
                entry.offset,
                start_offset - 1,
                self._group_id,
            )
            return entry.moved_to(start_offset)
        return entry

    # Records come in

    @property
    def is_lost(self) -> bool:
        return self.state is OwnerState.LOST

    @property
    def failure(self) -> SemelError | None:
        """Why it was lost, if it was."""
        return self._failure

    @property
    def wants_records(self) -> bool:
        return self._buffered_bytes < BUFFERED_BYTES // 2

    @property
    def is_full(self) -> bool:
        return self._buffered_bytes >= BUFFERED_BYTES

    @property
    def low(self) -> int:
        """The lowest offset that is not acknowledged."""
        return self._window.low

    def feed(self, batch: FetchedBatch) -> None:
        """Batches as the log has them, in order."""
        self._batches.append(batch)
        self._buffered_bytes += len(batch.batch)
        self._admit()

    def reached(self, offset: int) -> None:
        """Nothing lies below this offset that was not fed."""
        if not (self._batches or self._unpacking or self._buffer or self._window.held_count):
            self._window.skip_to(offset)
            self._commit_when_idle()

    def _admit(self) -> None:
        window, buffer = self._window, self._buffer
        has_filter = self.options.filter is not None
        while (buffer or self._has_next()) and window.has_room(buffer[0].offset):
            record = buffer.popleft()
            if (has_filter or record.headers) and self._is_dropped(record):
                window.skip_to(record.offset + 1)
            else:
                window.admit(record)
        if buffer and window.needs_commit(buffer[0].offset):
            window.skip_to(buffer[0].offset)
            self.start(self._settle_and_admit())
        self._commit_when_idle()
        self._changed()

    def _has_next(self) -> bool:
        """Whether there is another record; batches are unpacked bit by bit, when they are needed."""
        while not self._buffer:
            if self._unpacking is None:
                if not self._batches:
                    return False
                batch = self._batches.popleft()
                self._buffered_bytes -= len(batch.batch)
                self._from_offset = batch.from_offset
                self._unpacking = RecordReader(batch.batch, Held)
            records = self._unpacking.read(UNPACKED_AT_ONCE)
            if records and records[0].offset < self._from_offset:
                records = [held for held in records if held.offset >= self._from_offset]
            self._buffer.extend(records)
            if not self._unpacking.left:
                self._unpacking = None
        return True

    def _is_dropped(self, record: Record) -> bool:
        """Whether nobody here wants a record. A filter that fails is asked again when it is dealt."""
        try:
            return not self._is_wanted(record)
        except Exception:
            return False

    async def _settle_and_admit(self) -> None:
        await self.settle()
        self._admit()

    def _changed(self) -> None:
        """Something may be ready to be dealt, now or at some time."""
        if self.state is not OwnerState.OWNING:
            return
        due_ms = self._window.next_due_ms()
        if due_ms is not None:
            self._wake_at(due_ms)
        self._on_ready(self)

    def _wake_at(self, due_ms: int) -> None:
        when = due_ms / 1000
        if self._timer is not None:
            if self._timer.when() <= when and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._woken)

    def _woken(self) -> None:
        self._timer = None
        self._changed()

    def now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    # Dealing

    def take(self, limit: int) -> list[Held]:
        """Records to deal now, at most so many; none if nothing is ready. They count as out."""
        while self.state is OwnerState.OWNING:
            if self._marked:
                return self._marked.popleft()
            if self._is_marking or self._gathers(limit):
                return []
            taken = self._window.take(limit, self.now_ms())
            if not taken:
                return []
            ready = taken if self._pass_all(taken) else [held for held in taken if self._passes(held)]
            if not ready:
                self._admit()
            elif ready[0].is_marked:
                self._is_marking = True
                self.start(self._mark(ready))
            else:
                self.step("dealt")
                return ready
        return []

    def _gathers(self, limit: int) -> bool:
        """Whether a batch waits for more records."""
        now_ms = self.now_ms()
        count = self._window.waiting_count(now_ms)
        if limit == 1 or count >= limit or self._window.must_mark or count == 0:
            self._gathering_since_ms = None
            return False
        if self._gathering_since_ms is None:
            self._gathering_since_ms = now_ms
        until_ms = self._gathering_since_ms + self.options.max_wait_ms
        if now_ms < until_ms:
            self._wake_at(until_ms)
            return True
        self._gathering_since_ms = None
        return False

    def _pass_all(self, taken: list[Held]) -> bool:
        """Whether there is nothing to ask: no hooks, and no record of several has ever failed."""
        return len(taken) > 1 and self.options.filter is None and self.options.transform is None

    def _passes(self, held: Held) -> bool:
        """Whether a record is to be dealt: not one that is given up, or that the program's hooks fail on."""
        if held.attempts >= self.options.max_attempts:
            self.start(self._bury(held))
            return False
        try:
            if self.options.filter is not None:
                self.options.filter(held)
            if self.options.transform is not None:
                held.show(self.options.transform(held))
        except Exception as error:
            self.start(self.give_back([held], f"a hook failed: {error!r}", counts=True))
            return False
        return True

    def _is_wanted(self, record: Record) -> bool:
        if record.headers and is_for_another(record, self._group_id):
            return False
        return self.options.filter is None or self.options.filter(record)

    async def _mark(self, held: list[Held]) -> None:
        """Says in an entry who is out alone, so that its process' death is blamed on nobody else."""
        await self.settle()
        self.step("marked")
        self._is_marking = False
        if self.state is OwnerState.OWNING:
            self._marked.append(held)
            self._on_ready(self)
        else:
            self._window.give_back(held, NOT_DUE)  # nobody has seen it

    # Coming back

    async def give_back(
        self, held: Sequence[Held], reason: str, *, counts: bool, delay_ms: int | None = None
    ) -> None:
        """Records are to be dealt again. What counts is a failed attempt, and durable when this returns."""
        if self.is_lost:
            return
        if counts:
            self._window.fail(held, reason)
        dead = [each for each in held if each.attempts >= self.options.max_attempts]
        alive = [each for each in held if each.attempts < self.options.max_attempts]
        if alive:
            if delay_ms is None:
                attempts = max(each.attempts for each in alive) if counts else 0
                delay_ms = self.options.backoff.delay_ms(attempts, random.random()) if attempts else 0
            self._window.give_back(alive, self.now_ms() + delay_ms if delay_ms else NOT_DUE)
        for each in dead:
            self.start(self._bury(each))
        self._changed()
        self.step("returned")
        if counts:
            await self.settle()

    async def _bury(self, held: Held) -> None:
        """The dead-letter topic gets a record that has failed too often, by what acknowledges it."""
        topic = dead_letter_topic(self.options.dead_letter_topic, self.where.topic, self._group_id)
        while not self.is_lost:
            try:
                await self._bury_once(held, topic)
                return
            except SemelError as error:
                if self.is_lost:
                    return
                log.warning("%s offset %d is not in %r yet: %s", self.where, held.offset, topic, error)
            await asyncio.sleep(DEAD_LETTER_PAUSE_S)

    async def _bury_once(self, held: Held, topic: str) -> None:
        await self._ensure_topic(topic)
        slot = await self.borrow()
        headers = dead_letter_headers(held, self.where, self._group_id, held.attempts, held.cause)
        try:
            await slot.send(topic, held.value, key=held.key, headers=headers)
            await slot.flush()
            self.step("dead-published")
            await self.commit(slot, [held])
        except SemelError:
            await self.roll_back(slot)
            raise
        finally:
            self._slots.give_back(slot)
        log.warning(
            "%s offset %d has failed %d times (%s) and is in %r now",
            self.where,
            held.offset,
            held.attempts,
            held.cause,
            topic,
        )

    async def _ensure_topic(self, topic: str) -> None:
        try:
            await self._cluster.topic(topic)
        except RetriableError as error:
            if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            source = await self._cluster.topic(self.where.topic)
            await Admin(self._cluster).create_topic(topic, partitions=len(source.partitions))

    # Committing

    async def borrow(self) -> TransactionalProducer:
        """A slot with a transaction begun in it. Give it back with `lend_again`."""
        self._require_owning()
        slot = await self._slots.borrow()
        try:
            await slot.begin()
        except SemelError as error:
            self._slots.give_back(slot)
            raise self.meaning_of(error, slot) from error
        except asyncio.CancelledError:
            self._slots.give_back(slot)
            raise
        self.step("begun")
        return slot

    def lend_again(self, slot: TransactionalProducer) -> None:
        self._slots.give_back(slot)

    async def roll_back(self, slot: TransactionalProducer) -> None:
        """Aborts what is open in a slot, if that is still possible."""
        while can_abort(slot):
            try:
                await slot.abort()
            except SemelError as error:
                if slot.state is State.FAILED:
                    self.lose(error)  # one is fenced, so all of them are
                if self.is_lost:
                    return
                log.warning("%s: a transaction could not be aborted yet: %s", self.where, error)
                await asyncio.sleep(SETTLE_PAUSE_S)

    async def commit(self, slot: TransactionalProducer, held: Sequence[Held]) -> None:
        """Commits what the slot's transaction holds, and with it that these records are acknowledged."""
        async with self._turn:
            await self._commit_in_turn(slot, held)

    async def _commit_in_turn(
        self, slot: TransactionalProducer, held: Sequence[Held], *, is_released: bool = False
    ) -> None:
        async with self._gate:
            if self.is_lost:
                raise self._lost_error()
            entry = self._window.entry(held, self._slots.count, is_released=is_released)
            try:
                self.step("sending-offsets")
                await slot.send_offsets(
                    self._group(), {self.where: CommittedOffset(entry.offset, entry.note())}
                )
                self.step("offsets-sent")
                await self._end(slot)
                self.step("committed")
            except SemelError as error:
                raise self.meaning_of(error, slot) from error
        self._window.committed(entry)
        self._window.acknowledge(held)
        self._admit()

    async def _end(self, slot: TransactionalProducer) -> None:
        """Sends the commit until its outcome is known. Nobody else's turn comes before."""
        while True:
            try:
                await slot.commit()
                return
            except UnknownOutcomeError as error:
                if self.is_lost:
                    raise
                log.warning("%s: the outcome of a commit is not known yet: %s", self.where, error)

    async def settle(self, held: Sequence[Held] = ()) -> None:
        """Commits an entry that acknowledges these records, together with others that wait for one."""
        if self.is_lost:
            raise self._lost_error()
        settlement = Settlement(held, self._loop.create_future())
        self._unsettled.append(settlement)
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle_all(), name=f"entries of {self.where}")
        await asyncio.shield(settlement.done)

    async def _settle_all(self) -> None:
        backoff = Backoff()
        try:
            while self._unsettled:
                if await self._settle_once():
                    backoff.reset()
                else:
                    await asyncio.sleep(backoff.next_pause_s())
        finally:
            self._settling = None

    async def _settle_once(self) -> bool:
        """Commits what waits; False if it has to be tried again."""
        async with self._turn:
            settlements, self._unsettled = self._unsettled, []
            held = [each for settlement in settlements for each in settlement.held]
            try:
                await self._slots.own.begin()
                await self._commit_in_turn(self._slots.own, held)
            except SemelError as error:
                meaning = self.meaning_of(error, self._slots.own)
                await self.roll_back(self._slots.own)
                if not self.is_lost:
                    log.warning("an entry of %s was not committed, and will be: %s", self.where, error)
                    self._unsettled = settlements + self._unsettled
                    return False
                _fail(settlements, meaning)
                return True
        for settlement in settlements:
            if not settlement.done.done():
                settlement.done.set_result(None)
        return True

    def _commit_when_idle(self) -> None:
        if self._window.low > self._window.committed_offset and self._idle_commit is None:
            self._idle_commit = self._loop.call_later(IDLE_COMMIT_S, self._commit_idle)

    def _commit_idle(self) -> None:
        self._idle_commit = None
        if self.state is OwnerState.OWNING and self._window.low > self._window.committed_offset:
            self.start(self.settle())

    def meaning_of(self, error: SemelError, slot: TransactionalProducer) -> SemelError:
        """What an error in a transaction means for its delivery; a fenced slot means that all is lost."""
        if isinstance(error, DeliveryLostError | TransactionRejectedError):
            return error
        if slot.state is State.FAILED or is_hopeless(error):
            self.lose(error)
        if self.is_lost:
            return OutcomeUnknownError(str(self.where)) if slot.answer_was_lost else self._lost_error()
        return TransactionRejectedError(f"the transaction was rolled back: {error}")

    # The end

    def lose(self, error: SemelError) -> None:
        """The partition is somebody else's: what is out is lost, and nothing can be committed any more."""
        if self.is_lost:
            return
        self.state = OwnerState.LOST
        self._failure = error
        lost = self._lost_error()
        for dealt in list(self.out):
            dealt.lose(lost)
        self.out.clear()
        self._slots.fail_waiting(lost)
        self._stop_timers()
        self._on_lost(self, error)

    def _lost_error(self) -> DeliveryLostError:
        return DeliveryLostError(
            f"{self.where} is no longer owned here ({self._failure}): what was published for this delivery "
            "is rolled back, and whoever has the partition now goes on"
        )

    def _require_owning(self) -> None:
        if self.is_lost:
            raise self._lost_error()

    async def release(self, drain_timeout_ms: int) -> None:
        """Gives the partition up cleanly: lets what is out come to its end, then commits that it is free.

        May be called again, with less patience, after a cancellation.
        """
        if self.state is OwnerState.OWNING:
            self.state = OwnerState.RELEASING
        if self.state is OwnerState.RELEASING:
            await self._drain(drain_timeout_ms)
        if self.state is OwnerState.RELEASING:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S), self._turn:
                    await self._slots.own.begin()
                    await self._commit_in_turn(self._slots.own, (), is_released=True)
                self.step("released")
            except (SemelError, TimeoutError) as error:
                log.warning("%s was not released cleanly: %s", self.where, error)
        await self.close()

    async def _drain(self, timeout_ms: int) -> None:
        await self._wait_until_quiet(timeout_ms / 1000)
        for dealt in list(self.out):
            dealt.take_back("its partition moved", counts=False)
        while self._marked:
            self._window.give_back(self._marked.popleft(), NOT_DUE)
        await self._wait_until_quiet(CLOSE_TIMEOUT_S)

    async def _wait_until_quiet(self, timeout_s: float) -> None:
        """Until nothing is out and nothing is being ended, or the time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.out or self._tasks:
                    self._something_ended.clear()
                    await self._something_ended.wait()

    def came_back(self, dealt: Dealt) -> None:
        self.out.discard(dealt)
        self._something_ended.set()

    async def close(self) -> None:
        """Ends everything; what is open is aborted."""
        if not self.is_lost:
            self.state = OwnerState.LOST
            self._failure = SubscriptionClosedError("the subscription was closed, or the partition moved")
            for dealt in list(self.out):
                dealt.lose(self._lost_error())
            self.out.clear()
        self._stop_timers()
        tasks = [*self._tasks, *([self._settling] if self._settling is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        _fail(self._unsettled, self._lost_error())
        self._slots.fail_waiting(self._lost_error())
        await self._slots.close()

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._idle_commit):
            if timer is not None:
                timer.cancel()

    def start(self, work: Coroutine[object, object, T]) -> "asyncio.Task[T]":
        """Work that goes on whether or not somebody waits for it."""
        task = asyncio.create_task(work, name=f"{self.where} of {self._group_id}")
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[T]") -> None:
        self._tasks.discard(task)
        self._something_ended.set()
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, SemelError):
            log.error("a task of a subscription failed: this is a bug", exc_info=error)

    def step(self, name: str) -> None:
        if self.options.on_step is not None:
            self.options.on_step(name)


def _entry_of(committed: CommittedOffset | None) -> Entry | None:
    if committed is None:
        return None
    entry = parse_entry(committed.offset, committed.metadata)
    return Entry(committed.offset, is_released=True) if entry is None else entry


def is_hopeless(error: SemelError) -> bool:
    """Whether no retry and no other owner would fare better: a permission is missing, or a limit too low."""
    return isinstance(error, BrokerError) and error.code in HOPELESS


def _fail(settlements: Sequence[Settlement], error: SemelError) -> None:
    for settlement in settlements:
        if not settlement.done.done():
            settlement.done.set_exception(error)
            settlement.done.exception()
