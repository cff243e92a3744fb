"""The contract of a transactional sink, and the part of it that is the same for every target.

A sink takes numbered epochs, in order, and makes each visible exactly once, whole or not at all. Its owner is
one process at a time; the writers of an epoch may be many, in other processes and on other machines.

    last = await sink.open("orders-to-billing")      # fences earlier owners, aborts what they left
    plan = await sink.begin(epoch)                   # None: this epoch is there already
    receipt = ...                                    # plan.writer(task, attempt): write, write, finish
    await sink.commit(epoch, [receipt])              # or: await sink.abort(epoch)
    await sink.close()

The states, and what leads from one to the next (`ALLOWED_FROM`):

| from | to | by |
|---|---|---|
| closed | idle | `open` |
| idle | active | `begin` of an epoch that is not there yet |
| active | committing → idle | `commit` |
| active | aborting → idle | `abort` |
| committing | active | `CommitFailed`: it is certainly not committed, and must be aborted |
| committing | failed | `UnknownOutcome`, `FencedOut`, a cancellation: only the next `open` tells |
| aborting | failed | the abort was not confirmed: the next `open` does it |
| failed | idle | `open`, except after `FencedOut` |
| any | closed | `close` |

Once commit was sent, abort is never sent. Not for use by several tasks at once.
"""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from semel.errors import ConfigError
from semel.sinks.errors import (
    AbortFailed,
    BeginFailed,
    CommitFailed,
    FencedOut,
    SinkError,
    UnknownOutcome,
)
from semel.sinks.marker import (
    NO_MARKER,
    Marker,
    Owner,
    Start,
    Verdict,
    judge,
    require_fit,
    require_same_query,
)
from semel.sinks.metrics import SinkMetrics
from semel.sinks.receipts import NO_ORIGIN, Origin, Place, Receipt, check_receipts
from semel.sinks.service import WILDCARD_HOSTS
from semel.sinks.settings import SinkSettings
from semel.sinks.source_group import SourceGroup, SourceOffsets
from semel.sinks.tracker import EpochTracker

if TYPE_CHECKING:
    import pyarrow as pa

# What a writer takes: Arrow data, or rows as mappings from column to value.
Rows: TypeAlias = "pa.RecordBatch | pa.Table | Sequence[Mapping[str, object]]"

MAX_SINK_ID_CHARACTERS: Final = 200


class State(Enum):
    CLOSED = "closed"
    IDLE = "idle"
    ACTIVE = "active"
    COMMITTING = "committing"
    ABORTING = "aborting"
    FAILED = "failed"


ALLOWED_FROM: Final = {
    State.IDLE: {State.CLOSED, State.FAILED, State.COMMITTING, State.ABORTING},
    State.ACTIVE: {State.IDLE, State.COMMITTING},
    State.COMMITTING: {State.ACTIVE},
    State.ABORTING: {State.ACTIVE},
    State.FAILED: set(State),
    State.CLOSED: set(State),
}


class Writer(ABC):
    """One attempt of one task at its part of an epoch: used once, and dropped after `finish` or `cancel`.

    A writer never commits and never aborts: an error is for the owner, who aborts the epoch.
    """

    @abstractmethod
    async def write(self, rows: Rows) -> None:
        """Takes rows, in order; they reach the target at the latest with `finish`.

        Not idempotent. Not cancellation-safe: a cancelled write leaves it fit for `cancel` only. After
        a crash the rows are invisible, and gone with the abort of the epoch.
        """

    @abstractmethod
    async def finish(self) -> Receipt:
        """Waits until all rows are acknowledged by the target, and says how many they are.

        Not idempotent: a receipt is given once. Not cancellation-safe: a writer that is cancelled in it gives
        none, and its task is run again. After a crash the rows are invisible, whether the receipt was given
        or not, until the owner commits it.
        """

    @abstractmethod
    async def cancel(self) -> None:
        """Lets go of connections and promises nothing: what was written goes with the epoch.

        Idempotent, also after `finish`, where it does nothing. Cancellation-safe. A crash does the same.
        """


class WriterPlan(ABC):
    """What an epoch's writers need to know, read once by the owner. Small, and made to be pickled."""

    place: Place

    @abstractmethod
    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> Writer:
        """The writer for task number `task` of `tasks`. Nothing is sent before its first write.

        `attempt` tells attempts at one task apart, across retries of stages and lives of the driver. A call
        that is repeated makes another writer, which counts as another attempt.
        """


class TransactionalSink(ABC):
    """A sink and its one owner. `async with` closes it; `open` needs the sink's id."""

    def __init__(self, settings: SinkSettings | None = None) -> None:
        self.settings = settings or SinkSettings()
        self.metrics = SinkMetrics()
        self.tracker = EpochTracker()
        self.sink_id = ""
        self.run = ""
        self._state = State.CLOSED
        self._marker = NO_MARKER
        self._query_id: str | None = None
        self._epoch: int | None = None
        self._turn = 0
        self._shared_host: str | None = None
        self._origin = NO_ORIGIN
        self._plan: WriterPlan | None = None
        self._fenced: FencedOut | None = None
        self._source = SourceGroup("")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def state(self) -> State:
        """Where it is in the table above: which calls are allowed now."""
        return self._state

    @property
    def marker(self) -> Marker:
        """The last committed epoch and its origin, as last read or written."""
        return self._marker

    @property
    def plan(self) -> WriterPlan | None:
        """The present epoch's, if one is active."""
        return self._plan

    def share(self, host: str = "127.0.0.1") -> None:
        """Lets writers be in other processes: they reach the owner at this host. Call it before `open`."""
        if self._state is not State.CLOSED:
            raise ConfigError("share is called before open")
        if host in WILDCARD_HOSTS:
            raise ConfigError(f"share needs an address of this machine that writers can reach, not {host!r}")
        self._shared_host = host

    # The contract

    async def open(self, sink_id: str, query_id: str | None = None) -> int | None:
        """Takes the sink: fences earlier owners, aborts what they left; returns the last committed epoch.

        With `query_id`, of which all epochs are going to be, a marker of another query is a MarkerMismatch,
        and nobody is fenced for it.

        Idempotent in effect: after `close` or a failure it may be repeated, and each call is a new run.
        Cancellation-safe. After a cancellation or a crash at any point inside it earlier owners may be fenced
        already, and nothing else has changed: open again.
        """
        if self._fenced is not None:
            raise self._fenced
        if self._state not in (State.CLOSED, State.FAILED):
            raise ConfigError(f"sink {self.sink_id!r} is open already")
        if not sink_id or len(sink_id) > MAX_SINK_ID_CHARACTERS:
            raise ConfigError(f"a sink's id is a name of 1 to {MAX_SINK_ID_CHARACTERS} characters")
        self.sink_id, self.run = sink_id, secrets.token_hex(8)
        self._plan, self._epoch = None, None
        await self._source.close()
        self._source = SourceGroup(sink_id)
        self._query_id = query_id
        try:
            self._marker = await self._open(Owner.here(self.run))
        except FencedOut as error:
            raise self._fail(error) from error
        self._enter(State.IDLE)
        self.tracker.last_committed = None if self._marker.epoch < 0 else self._marker.epoch
        return self.tracker.last_committed

    def require_fit(self, start: Start) -> None:
        """Raises MarkerMismatch where this epoch cannot be next, whatever it is made from.

        For an owner that learns what comes next from elsewhere: it looks there once it has the sink, when
        nobody else goes on any more.
        """
        require_fit(self.sink_id, self._marker, start)

    async def begin(self, epoch: int, origin: Origin = NO_ORIGIN) -> WriterPlan | None:
        """Begins an epoch; None if the marker proves that it is committed, and then nothing is to be done.

        Not idempotent: an epoch that is active is committed or aborted before the next one begins.
        Cancellation-safe: the sink stays idle, and may begin it again. After a crash the epoch is aborted by
        the next `open`.
        """
        self._require(State.IDLE)
        if judge(self.sink_id, self._marker, epoch, origin) is Verdict.COMMITTED:
            self.metrics.skips += 1
            self.tracker.skipped(epoch)
            return None
        try:
            self._turn += 1
            self._plan = await self._begin(Place(self.run, epoch, self._turn))
        except FencedOut as error:
            raise self._fail(error) from error
        self._epoch, self._origin = epoch, origin
        self.tracker.begun(epoch)
        self._enter(State.ACTIVE)
        return self._plan

    def writer(self, task: int = 0, attempt: str = "0", *, tasks: int = 1) -> Writer:
        """A writer in this process for the present epoch."""
        self._require(State.ACTIVE)
        assert self._plan is not None
        return self._plan.writer(task, attempt, tasks=tasks)

    async def commit(
        self, epoch: int, receipts: Iterable[Receipt], source_offsets: SourceOffsets | None = None
    ) -> None:
        """Makes the epoch visible, with its marker, in one step.

        Not idempotent, and need not be: after a failure `begin` says whether it is committed. `CommitFailed`:
        it is certainly not, abort it. `UnknownOutcome`: it may be; the next `open` waits for the decision and
        reads the marker. Not cancellation-safe: a cancellation is an unknown outcome. A crash before the
        target has decided leaves the epoch to be aborted by the next `open`; after it, `begin` says that it
        is committed.
        """
        self._require(State.ACTIVE)
        self._require_epoch(epoch)
        accepted = self._accept(epoch, receipts)
        marker = Marker(epoch, self._origin.query_id, self._origin.offsets_digest)
        started = time.monotonic()
        self._enter(State.COMMITTING)
        try:
            await self._commit(marker, accepted, source_offsets)
        except CommitFailed:
            self.metrics.failures += 1
            self._enter(State.ACTIVE)
            raise
        except SinkError as error:
            raise self._fail(error) from error
        except BaseException:
            self._fail(UnknownOutcome(f"the commit of epoch {epoch} was cut short; open the sink anew"))
            raise
        self._committed(marker, accepted, time.monotonic() - started)
        if source_offsets is not None:
            await self._source.commit(source_offsets)

    async def abort(self, epoch: int, reason: str = "") -> None:
        """Drops the epoch: none of it was or will be visible. Then the same epoch may be begun again.

        Never possible once commit was sent. Not idempotent: the epoch is over with it. `AbortFailed` and a
        cancellation: what was written stays invisible, and the next `open` removes it. After a crash, too.
        """
        self._require(State.ACTIVE)
        self._require_epoch(epoch)
        self._enter(State.ABORTING)
        try:
            async with asyncio.timeout(self.settings.abort_timeout):
                await self._abort()
        except TimeoutError as error:
            raise self._fail(
                AbortFailed(
                    f"the abort of epoch {epoch} of sink {self.sink_id!r} was not confirmed within "
                    f"{self.settings.abort_timeout:g} s: open the sink anew, which aborts it"
                )
            ) from error
        except SinkError as error:
            raise self._fail(error) from error
        except BaseException:
            self._fail(AbortFailed(f"the abort of epoch {epoch} was cut short; open the sink anew"))
            raise
        self.metrics.aborts += 1
        self.tracker.aborted(reason)
        self._end_epoch()

    async def close(self) -> None:
        """Aborts what is active, if that can be done, and lets go. Idempotent.

        After a cancellation or a crash inside it, what was active is aborted by the next `open`.
        """
        if self._state is State.CLOSED:
            return
        try:
            if self._state is State.ACTIVE and self._epoch is not None:
                await self.abort(self._epoch, "the sink was closed")
        except SinkError:
            pass  # the next `open` aborts it
        finally:
            try:
                await self._close()
            finally:
                self._enter(State.CLOSED)
                self._plan, self._epoch = None, None
                await self._source.close()

    # What a target does

    @abstractmethod
    async def _open(self, owner: Owner) -> Marker:
        """Checks target and settings, fences, cleans up, reads the marker. May be called after a failure.

        Hands the marker to `_check_before_fencing` as soon as it can be seen.
        """

    @abstractmethod
    async def _begin(self, place: Place) -> WriterPlan:
        """Begins the target's transaction."""

    @abstractmethod
    async def _commit(
        self, marker: Marker, receipts: list[Receipt], source_offsets: SourceOffsets | None
    ) -> None:
        """Commits rows and marker in one step, within `settings.commit_timeout`.

        With them the source's offsets, where they join the transaction: others are committed afterwards.
        Raises CommitFailed where it is certain that it did not, UnknownOutcome where it is not, FencedOut.
        """

    @abstractmethod
    async def _abort(self) -> None:
        """Ends the transaction without a trace, or raises AbortFailed or FencedOut."""

    @abstractmethod
    async def _close(self) -> None:
        """Lets go of connections, in any state."""

    # Markers

    def _check_before_fencing(self, seen: Marker) -> None:
        if self._query_id is not None:
            require_same_query(self.sink_id, seen, self._query_id)

    # States

    def _accept(self, epoch: int, receipts: Iterable[Receipt]) -> list[Receipt]:
        assert self._plan is not None
        accepted = check_receipts(self._plan.place, receipts)
        for hook in self.settings.before_commit:
            try:
                hook(epoch)
            except Exception as error:
                raise CommitFailed(
                    f"a before_commit hook vetoed epoch {epoch}: {error}", is_permanent=True
                ) from error
        return accepted

    def _committed(self, marker: Marker, receipts: list[Receipt], seconds: float) -> None:
        rows = sum(receipt.rows for receipt in receipts)
        size_bytes = sum(receipt.bytes for receipt in receipts)
        self.metrics.commits += 1
        self.metrics.rows += rows
        self.metrics.bytes += size_bytes
        self.metrics.dead_letters += sum(receipt.dead_letters for receipt in receipts)
        self.metrics.commit_latency.observe(seconds)
        self.tracker.committed(marker.epoch, rows, size_bytes)
        self._marker = marker
        self._end_epoch()

    def _end_epoch(self) -> None:
        self._plan, self._epoch = None, None
        self._enter(State.IDLE)

    def _require(self, state: State) -> None:
        if self._state is state:
            return
        if self._fenced is not None:
            raise self._fenced
        what = f"sink {self.sink_id!r}" if self.sink_id else "the sink"
        raise BeginFailed(f"{what} is {self._state.value}, and this needs it {state.value}")

    def _require_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise BeginFailed(f"sink {self.sink_id!r} has epoch {self._epoch} active, not {epoch}")

    def _enter(self, state: State) -> None:
        assert self._state in ALLOWED_FROM[state], f"{self._state} to {state}"
        self._state = state

    def _fail(self, error: SinkError) -> SinkError:
        self.metrics.failures += 1
        self.tracker.failed(str(error))
        if isinstance(error, FencedOut):
            self._fenced = error
        self._enter(State.FAILED)
        return error
