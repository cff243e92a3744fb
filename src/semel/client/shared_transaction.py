"""A transaction that one process owns and any number of processes write in.

A Kafka transaction belongs to a producer id and epoch, not to a process. The owner begins it and hands out a
small `TransactionHandle`; whoever has the handle writes batches, each writer to partitions of its own
(`semel.client.partition_writer`); the owner ends it, once, for all of them. Rules:

- One transaction, one epoch. Version 2 brokers give the next identity with the end of a transaction. On
  version 1 the owner asks for it at once, in the background, naming its own identity. A writer that is late
  can therefore never reach the next transaction, and sequences begin at 0 in each.
- The next identity is asked for only on the heels of an accepted end, and again only after a look. A process
  that slept meanwhile could otherwise abort what its successor has open: brokers of version 1 do not check
  the epoch then.
- Before the end is sent, partitions that still join are given up (`semel.client.joins`): after it they would
  open a transaction anew, or be fenced by our own next epoch.
- Before the commit is sent, any failure but fencing spoils the transaction: abort it and begin another. After
  the commit was sent, abort is never sent. The same commit is sent again, until `end_timeout_ms`; then
  `UnknownOutcomeError` is raised, and `commit` may be called again to go on asking.
- Fencing is final. An owner that answers it with a new `open` would fence the one that replaced it.
- But whoever takes too long is fenced, too, and on version 2 an abort with one's own identity tells: it is
  accepted, and gives the next identity, only where this very transaction was aborted and nobody has taken the
  id since; whoever has is not touched by it. So there fencing inside a transaction spoils it, and is final if
  the abort is refused. On version 1 nothing tells.
- Where neither a partition nor a group can have joined there is nothing to end, and nothing is sent; but an
  epoch that writers were given is ended, so that no other transaction has it.

Two-phase commit (KIP-939): `prepare` gives a text to store with the other half of the commit. Such a
transaction has no timeout: only `complete` ends it, in this process or, after `resume`, in another.
"""

import asyncio
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Final, Self

from semel.client.cluster import Cluster
from semel.client.coordinator import PRODUCE_VERSIONS, VERSION_1, VERSION_2, TransactionCoordinator
from semel.client.errors import (
    TransactionStateError,
    UnknownOutcomeError,
    UnreachableError,
    spoiling,
)
from semel.client.group_offsets import CommittedOffset, GroupMetadata
from semel.client.joins import Joins
from semel.client.metadata import TopicPartition
from semel.client.producer import NO_IDENTITY, ProducerIdentity, TransactionScope
from semel.errors import (
    AbortableError,
    BrokerError,
    ConfigError,
    FatalError,
    FencedError,
    RetriableError,
    SemelError,
)
from semel.wire.errors import ErrorCode

DEFAULT_TRANSACTION_TIMEOUT_MS: Final = 60_000
DEFAULT_END_TIMEOUT_MS: Final = 30_000
# Whoever closes wants to be gone; a broker that does not answer ends the transaction by its timeout.
CLOSE_TIMEOUT_MS: Final = 5_000


class State(Enum):
    NEW = "new"  # without an identity
    READY = "ready"  # between transactions
    OPEN = "open"
    SPOILED = "spoiled"  # can only be aborted
    PREPARED = "prepared"  # decided elsewhere, and ended by `complete`
    COMMITTING = "committing"  # commit was sent; its outcome is not known
    ABORTING = "aborting"  # abort was sent; its answer is not here
    FAILED = "failed"
    CLOSED = "closed"


ALLOWED_FROM: Final = {
    State.READY: {
        State.NEW,
        State.OPEN,
        State.SPOILED,
        State.PREPARED,
        State.COMMITTING,
        State.ABORTING,
    },
    State.OPEN: {State.READY},
    State.SPOILED: {State.OPEN, State.COMMITTING},
    State.PREPARED: {State.OPEN, State.NEW},
    State.COMMITTING: {State.OPEN, State.PREPARED},
    State.ABORTING: {State.OPEN, State.SPOILED, State.PREPARED},
    State.FAILED: set(State),
    State.CLOSED: set(State),
}

# No partition joins a transaction that is ended, or about to be, or decided elsewhere.
NOTHING_JOINS: Final = {State.READY, State.PREPARED, State.COMMITTING, State.ABORTING, State.CLOSED}

NEXT_STEPS: Final = {
    State.NEW: "; open it first",
    State.READY: "; begin first",
    State.SPOILED: "; abort it and begin another",
    State.PREPARED: "; complete it",
    State.COMMITTING: "; its outcome is not known: call commit again, it is never aborted",
    State.ABORTING: "; call abort again",
}


class Outcome(Enum):
    COMMIT = "commit"
    ABORT = "abort"


class Resumed(Enum):
    """What `resume` found."""

    NOTHING = "nothing"  # no transaction is open: it was completed, or never prepared
    SAME = "same"  # the one that the stored state names
    OTHER = "other"  # another one; it can only be aborted


@dataclass(slots=True, frozen=True)
class TransactionOptions:
    """The broker aborts what is open longer than its timeout. `max_version` 1 keeps to version 1."""

    transaction_timeout_ms: int = DEFAULT_TRANSACTION_TIMEOUT_MS
    end_timeout_ms: int = DEFAULT_END_TIMEOUT_MS
    two_phase: bool = False
    max_version: int = VERSION_2


@dataclass(slots=True, frozen=True)
class TransactionHandle:
    """All that a writer needs to know of a transaction. Small, and made to be pickled."""

    bootstrap: str
    transactional_id: str
    producer_id: int
    producer_epoch: int
    version: int

    @property
    def identity(self) -> ProducerIdentity:
        return ProducerIdentity(self.producer_id, self.producer_epoch)


class SharedTransaction:
    """The owner of one transactional id and of its transactions, one after the other.

    `async with` opens and closes it. Not for use by several tasks at once, but for partitions that join.
    """

    def __init__(
        self, cluster: Cluster, transactional_id: str, options: TransactionOptions | None = None
    ) -> None:
        if not transactional_id:
            raise ConfigError("a transactional id is a name of at least one character")
        self.options = options or TransactionOptions()
        self.transactional_id = transactional_id
        self._cluster = cluster
        self._coordinator = TransactionCoordinator(cluster, transactional_id)
        self._version = VERSION_1
        self._identity = NO_IDENTITY
        self._state = State.NEW
        self._failure: SemelError | None = None
        self._next_identity: asyncio.Task[ProducerIdentity] | None = None
        self._joins = Joins(self._add_partitions)
        self._groups: set[str] = set()
        self._may_hold = False  # something may have joined, so there is something to end
        self._is_handed_out = False
        self._answer_was_lost = False

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def state(self) -> State:
        return self._state

    @property
    def version(self) -> int:
        """The version of transactions that is spoken with this broker: 1 or 2."""
        return self._version

    @property
    def identity(self) -> ProducerIdentity:
        """The producer id and epoch of the present or the next transaction."""
        return self._identity

    @property
    def answer_was_lost(self) -> bool:
        """Whether a commit was sent and its answer never came: refused now, it may still have been done."""
        return self._answer_was_lost

    # The id

    async def open(self) -> ProducerIdentity:
        """Takes the transactional id: fences earlier owners and aborts what they left open."""
        self._require(State.NEW)
        await self._identify(keep_prepared=False)
        self._enter(State.READY)
        return self._identity

    async def resume(self, state: str | None) -> Resumed:
        """Takes the transactional id and keeps a prepared transaction; `state` is what `prepare` gave.

        If one is open it must be ended by `complete` before another is begun.
        """
        self._require(State.NEW)
        stored = None if state is None else parse_prepared(state)
        if not self.options.two_phase:
            raise ConfigError("resume is for two-phase commit: set two_phase in the options")
        ongoing = await self._identify(keep_prepared=True)
        if ongoing == NO_IDENTITY:
            self._enter(State.READY)
            return Resumed.NOTHING
        self._may_hold = True
        self._enter(State.PREPARED)
        return Resumed.SAME if ongoing == stored else Resumed.OTHER

    async def _identify(self, *, keep_prepared: bool) -> ProducerIdentity:
        self._version = await self._coordinator.version(self.options.max_version)
        identified = await self._coordinator.init_producer_id(
            self.options.transaction_timeout_ms, two_phase=self.options.two_phase, keep_prepared=keep_prepared
        )
        self._identity = identified.identity
        return identified.ongoing

    async def close(self) -> None:
        """Aborts what is open, if that is still possible, and gives the id up. A prepared one stays."""
        if self._state in (State.OPEN, State.SPOILED):
            with suppress(SemelError, TimeoutError):  # the broker aborts it in time
                async with asyncio.timeout(CLOSE_TIMEOUT_MS / 1000):
                    await self.abort()
        if self._next_identity is not None:
            self._next_identity.cancel()
            await asyncio.gather(self._next_identity, return_exceptions=True)
            self._next_identity = None
        self._enter(State.CLOSED)

    # The transaction

    async def begin(self) -> None:
        """Begins a transaction. Nothing is sent, except where the next identity is still on its way."""
        self._require(State.READY)
        await self._take_next_identity()
        self._joins, self._groups = Joins(self._add_partitions), set()
        self._may_hold = self._is_handed_out = self._answer_was_lost = False
        self._enter(State.OPEN)

    async def _take_next_identity(self) -> None:
        """At hand on version 2, awaited on version 1."""
        if self._next_identity is not None:
            try:
                self._identity = await asyncio.shield(self._next_identity)
            except SemelError as error:
                self._fail(error)
                raise
            self._next_identity = None

    def handle(self) -> TransactionHandle:
        """What writers need. From here on the owner counts on their having written.

        If in the end neither they wrote nor the owner committed offsets, `abort` it: a commit with nothing
        in it is refused, with an AbortableError.
        """
        self._require(State.OPEN)
        self._is_handed_out = True
        return TransactionHandle(
            self._cluster.bootstrap,
            self.transactional_id,
            self._identity.producer_id,
            self._identity.producer_epoch,
            self._version,
        )

    def scope(self) -> TransactionScope:
        """For a producer in this process that writes in the present transaction."""
        self._require(State.OPEN)
        return TransactionScope(
            self.transactional_id, self._identity, PRODUCE_VERSIONS[self._version], self.join
        )

    async def add_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Announces the partitions that writers will write to. Version 1 needs it before their first batch.

        The clock of the transaction's timeout runs from here; on version 2 from the first batch.
        """
        self._require(State.OPEN)
        if self._version < VERSION_2:
            await self._joins.join(partitions)

    async def join(self, where: TopicPartition) -> None:
        """One partition joins; several tasks may ask at once, and then share requests."""
        if self._version < VERSION_2:
            await self._joins.join((where,))
        else:
            self._may_hold = True  # its first batch says it to the broker

    async def _add_partitions(self, partitions: Set[TopicPartition]) -> None:
        self._may_hold = True
        try:
            await self._coordinator.add_partitions(self._identity, partitions)
        except SemelError as error:
            raise self.spoil(error) from error

    async def commit_offsets(
        self, group: GroupMetadata, offsets: Mapping[TopicPartition, CommittedOffset]
    ) -> None:
        """A group's offsets become part of the transaction: committed with it, or not at all."""
        self._require(State.OPEN)
        if not offsets:
            return
        self._may_hold = True
        try:
            if self._version < VERSION_2 and group.group_id not in self._groups:
                await self._coordinator.add_group(self._identity, group.group_id)
                self._groups.add(group.group_id)
            await self._coordinator.commit_offsets(self._identity, group, offsets, self._version)
        except SemelError as error:
            raise self.spoil(error) from error

    def spoil(self, error: SemelError) -> SemelError:
        """Something failed inside the transaction; returns what that means for it, to be raised."""
        meaning = spoiling(error)
        if isinstance(meaning, ConfigError):
            return meaning  # the call was wrong, and nothing was sent
        is_over = isinstance(meaning, BrokerError) and not isinstance(meaning, AbortableError)
        if is_over and not self._may_have_timed_out(meaning):
            self._fail(meaning)
        elif self._state is State.OPEN:
            self._enter(State.SPOILED)
        return meaning

    def _may_have_timed_out(self, error: SemelError) -> bool:
        """Whether a fencing error leaves it open who has ended the transaction, so that the abort tells."""
        return self._version >= VERSION_2 and isinstance(error, FencedError)

    # Its end

    async def commit(self) -> None:
        """Makes all of it visible at once.

        May be called again after `UnknownOutcomeError` or a cancellation. An AbortableError says that it is
        not committed and never will be.
        """
        self._require(State.OPEN, State.COMMITTING)
        await self._commit()

    async def abort(self) -> None:
        """Drops all of it. May be called again after a failure. Never possible once commit was sent."""
        self._require(State.OPEN, State.SPOILED, State.ABORTING)
        await self._abort()

    def prepare(self) -> str:
        """Takes the decision out of the broker's hands: what is written stays until `complete`.

        Everything must have been acknowledged. Store the result with whatever the transaction shall share its
        fate with.
        """
        self._require(State.OPEN)
        if not self.options.two_phase:
            raise ConfigError("prepare is for two-phase commit: set two_phase in the options")
        self._enter(State.PREPARED)
        return format_prepared(self._identity)

    async def complete(self, outcome: Outcome) -> None:
        """Ends a prepared transaction. May be called again, with the same outcome, after a failure."""
        if outcome is Outcome.COMMIT:
            self._require(State.PREPARED, State.COMMITTING)
            await self._commit()
        else:
            self._require(State.PREPARED, State.ABORTING)
            await self._abort()

    async def _commit(self) -> None:
        if not self._has_end():
            self._enter(State.READY)
            return
        if self._version < VERSION_2 and not self._may_hold:
            # Nothing is in it. Of the two ends, brokers of version 1 take the abort.
            await self._abort()
            return
        if self._state is not State.COMMITTING:
            self._enter(State.COMMITTING)
        try:
            successor = await self._cluster.retry(self._send_commit, timeout_ms=self.options.end_timeout_ms)
        except RetriableError as error:
            self._answer_was_lost = True
            raise UnknownOutcomeError(
                f"whether the transaction of producer {self.transactional_id!r} was committed is not known "
                f"after {self.options.end_timeout_ms} ms: call commit again, or open anew and look. "
                f"The last error was: {error}",
                error.code,
            ) from error
        except AbortableError:
            self._enter(State.SPOILED)  # the broker has aborted it
            raise
        except SemelError as error:
            failure = self._doubtful(error) if self._answer_was_lost else error
            self._fail(failure)
            raise failure from error
        self._ended(successor)

    async def _send_commit(self) -> ProducerIdentity:
        try:
            return await self._coordinator.end(self._identity, commit=True, version=self._version)
        except UnreachableError:
            self._answer_was_lost = True
            raise
        except FatalError as error:
            # In version 2 the state is that of this very transaction: it timed out, or nothing is in it.
            if self._version >= VERSION_2 and error.code == ErrorCode.INVALID_TXN_STATE:
                raise spoiling(error) from error
            raise

    async def _abort(self) -> None:
        if not self._has_end():
            self._enter(State.READY)
            return
        if self._state is not State.ABORTING:
            self._enter(State.ABORTING)
        try:
            successor = await self._cluster.retry(self._send_abort, timeout_ms=self.options.end_timeout_ms)
        except RetriableError:
            raise
        except SemelError as error:
            self._fail(error)
            raise
        self._ended(successor)

    async def _send_abort(self) -> ProducerIdentity:
        try:
            return await self._coordinator.end(self._identity, commit=False, version=self._version)
        except FatalError as error:
            # Nothing is in it: what was to join was refused, or never arrived. Brokers look at the identity
            # first, and on version 1 no other transaction has had it. Of this one, an abort that is repeated
            # is accepted; and it is not committed, for where a commit was sent abort never is.
            if self._version < VERSION_2 and error.code == ErrorCode.INVALID_TXN_STATE:
                return self._identity
            raise

    def _has_end(self) -> bool:
        """Whether the broker has to be told: something may have joined, or writers know the epoch."""
        return self._may_hold or self._is_handed_out

    def _ended(self, successor: ProducerIdentity) -> None:
        self._enter(State.READY)
        if self._version >= VERSION_2:
            self._identity = successor
        else:
            asking = self._coordinator.next_identity(
                self.options.transaction_timeout_ms, self._identity, two_phase=self.options.two_phase
            )
            self._next_identity = asyncio.create_task(asking, name=f"next epoch of {self.transactional_id}")

    def _doubtful(self, error: SemelError) -> SemelError:
        """A commit whose answer was lost and that is refused now may have been done in between."""
        message = f"{error}. An earlier attempt may have committed it: look before doing the work again"
        if isinstance(error, BrokerError):
            return type(error)(message, error.code)
        return error

    # States

    def _require(self, *allowed: State) -> None:
        if self._state in allowed:
            return
        if self._failure is not None:
            raise self._failure
        raise TransactionStateError(
            f"the transaction of producer {self.transactional_id!r} is {self._state.value}, and this needs "
            f"{' or '.join(state.value for state in allowed)}{NEXT_STEPS.get(self._state, '')}"
        )

    def _enter(self, state: State) -> None:
        assert self._state in ALLOWED_FROM[state], f"{self._state} to {state}"
        self._state = state
        if state in NOTHING_JOINS:
            self._joins.end()

    def _fail(self, error: SemelError) -> None:
        if self._failure is None:
            self._failure = error
        self._enter(State.FAILED)


def format_prepared(identity: ProducerIdentity) -> str:
    """The text for a prepared transaction, as KIP-939 writes it."""
    return f"{identity.producer_id}:{identity.producer_epoch}"


def parse_prepared(state: str) -> ProducerIdentity:
    producer_id, colon, epoch = state.partition(":")
    if not (colon and producer_id.isdecimal() and epoch.isdecimal()):
        raise ConfigError(f"{state!r} names no prepared transaction: it should read PRODUCER_ID:EPOCH")
    return ProducerIdentity(int(producer_id), int(epoch))
