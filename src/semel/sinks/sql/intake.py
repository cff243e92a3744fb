"""The intake of an epoch: what its writers bring into the one transaction, on the owner's connection.

Writers of strategy `direct` encode rows wherever they are, and the owner's connection loads them, one load at
a time. Rules:

- The transaction begins with the first rows: while a batch is computed nothing is locked.
- A task has one writer in an epoch, known by a random name of its own. Whoever comes second is refused.
- What was loaded must be covered by the receipts, writer by writer: otherwise the epoch is not committed.
- A load that fails spoils the epoch: the transaction may hold a part of it. Every later one is refused.
- A load may take long, and the server may not: it fails if for `write_timeout` no more of it is taken.
- Rows of another run, epoch or turn are refused and spoil nothing: they are a zombie's.

`Intake` holds the rules. Writers in this process bring rows through `LocalIntake`; others send frames over a
socket (`IntakeService`, `RemoteIntake`): a header, then encoded rows, and an answer for each.
"""

import asyncio
import contextlib
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from semel.sinks.errors import CommitFailed, ConnectionLost, FencedOut, SinkError, WriteFailed
from semel.sinks.receipts import Attempt, Place, Receipt
from semel.sinks.service import Channel, HomeLoop, OwnerService, ServiceAddress, dial
from semel.sinks.sql.dialect import Form, Loaded, Part, SqlSession
from semel.sinks.sql.failures import Cause, SqlFailure, silence

# Rows and bytes that follow.
FRAME: Final = struct.Struct(">IQ")
MAX_FRAME_BYTES: Final = 1 << 31
# How many frames wait in the owner's memory for their turn; writers beyond that wait with their own.
MAX_FRAMES: Final = 8
# A frame that has begun is there by then, or its writer is not.
FRAME_TIMEOUT_S: Final = 60.0
# How many frames a writer sends ahead of the answers.
MAX_UNANSWERED: Final = 2

# Begins the epoch's transaction, if it is not begun, and gives the session that has it.
Begin: TypeAlias = Callable[[], Awaitable[SqlSession]]


class Intake:
    """What writers have brought into the present epoch. Belongs to the owner's loop."""

    def __init__(self, begin: Begin, write_timeout: float) -> None:
        self._begin = begin
        self._write_timeout = write_timeout
        self._place: Place | None = None
        self._form: Form | None = None
        self._turn = asyncio.Lock()
        # What the connection is at: a load, or a nudge.
        self._under_way: asyncio.Future[Any] | None = None
        self._loaded: dict[int, tuple[Attempt, int]] = {}
        self.failure: SinkError | None = None

    def open(self, place: Place, form: Form) -> None:
        """A new epoch: nothing is loaded."""
        self._place, self._form = place, form
        self._loaded, self.failure = {}, None

    async def load(self, attempt: Attempt, parts: Iterable[Part]) -> Loaded:
        """Waits for its turn, and for the server to have taken all of it."""
        async with self._turn:
            self._refuse_unless_first(attempt)
            assert self._form is not None
            # From here on the transaction may hold rows of this writer, whatever becomes of the load.
            _, rows = self._loaded.setdefault(attempt.task, (attempt, 0))
            loading = self._under_way = asyncio.ensure_future(self._load(self._form, parts))
            try:
                loaded = await self._result(loading)
            except Exception as error:
                self.failure = error if isinstance(error, SinkError) else WriteFailed(_reason(error))
                raise
            finally:
                self._under_way = None
            self._loaded[attempt.task] = (attempt, rows + loaded.rows)
            return loaded

    async def _result(self, loading: "asyncio.Future[Loaded]") -> Loaded:
        """Of a load that may be cut short by its owner, or be given up by who waits for it."""
        try:
            await asyncio.wait({loading})
        except asyncio.CancelledError:
            self.failure = _cut_short()
            loading.cancel()
            await asyncio.wait({loading})
            raise
        if loading.cancelled():
            raise _cut_short()
        return loading.result()

    async def _load(self, form: Form, parts: Iterable[Part]) -> Loaded:
        try:
            session = await self._begin()
            return await load_all(session, form, parts, self._write_timeout)
        except SqlFailure as failure:
            raise write_error(failure) from failure

    def _refuse_unless_first(self, attempt: Attempt) -> None:
        if attempt.place != self._place:
            raise WriteFailed(f"{attempt} is of {attempt.place}, which is over: its rows are not taken")
        if self.failure is not None:
            raise WriteFailed(f"the epoch is spoiled, and to be aborted: {self.failure}")
        first, _ = self._loaded.get(attempt.task, (attempt, 0))
        if first != attempt:
            raise WriteFailed(
                f"task {attempt.task} was tried twice (attempts {first.attempt} and {attempt.attempt}), and "
                "the first has written already. Abort the epoch and run it again"
            )

    async def nudge(self, session: SqlSession) -> None:
        """Says something to the server, between loads: it ends transactions that are silent for too long."""
        async with self._turn:
            if self._place is None or self.failure is not None:
                return
            asking = asyncio.wait_for(session.fetch("SELECT 1"), self._write_timeout)
            self._under_way = asyncio.ensure_future(asking)
            try:
                # Whether it is lost is for the next load, or the commit, to find out.
                await asyncio.gather(self._under_way, return_exceptions=True)
            finally:
                self._under_way = None

    async def close(self) -> None:
        """No more is taken. A load that is under way is waited for."""
        self._place = None
        async with self._turn:
            pass

    async def cut(self) -> None:
        """No more is taken. What is under way is cut short, with its connection."""
        self._place = None
        if self._under_way is not None:
            self._under_way.cancel()
        async with self._turn:
            pass

    def check_covered(self, receipts: Sequence[Receipt]) -> None:
        """Raises unless the receipts account for exactly what was loaded."""
        if isinstance(self.failure, FencedOut):
            raise self.failure
        if self.failure is not None:
            raise CommitFailed(
                f"{self.failure}. Nothing was committed; abort the epoch and run it again",
                is_permanent=isinstance(self.failure, WriteFailed) and self.failure.is_permanent,
            )
        loaded = {(task, attempt.attempt): rows for task, (attempt, rows) in self._loaded.items()}
        promised = {(receipt.task, receipt.attempt): receipt.rows for receipt in receipts if receipt.rows}
        if loaded != promised:
            raise CommitFailed(
                f"the transaction holds {sum(loaded.values())} rows and the receipts promise "
                f"{sum(promised.values())}, of {len(loaded)} and {len(promised)} writers: one was not "
                "finished, or a second attempt took its place. Abort the epoch and run it again"
            )


class IntakeWay(ABC):
    """A writer's way to the intake."""

    @abstractmethod
    async def load(self, attempt: Attempt, parts: Iterable[Part]) -> Loaded:
        """Hands rows over. What becomes of them is said by a later call, at the latest by `settle`."""

    @abstractmethod
    async def settle(self) -> None:
        """Returns when the server has taken all that was handed over; raises a SinkError otherwise."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go, also of rows that are on their way. Idempotent."""


class LocalIntake(IntakeWay):
    """For writers in the owner's process, in any of its threads: the connection is the owner's loop's."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._home = HomeLoop()

    async def load(self, attempt: Attempt, parts: Iterable[Part]) -> Loaded:
        return await self._home.run(self._intake.load(attempt, parts))

    async def settle(self) -> None:
        pass

    async def close(self) -> None:
        pass


class IntakeService(OwnerService):
    """The intake over TCP, for writers in other processes; it lives in the owner's loop."""

    def __init__(self, intake: Intake) -> None:
        super().__init__()
        self._intake = intake
        self._room = asyncio.Semaphore(MAX_FRAMES)

    async def _serve(self, fields: Mapping[str, Any], channel: Channel) -> None:
        attempt = Attempt.parse(fields)
        while True:
            rows, size_bytes = FRAME.unpack(await channel.receive(FRAME.size))
            if size_bytes > MAX_FRAME_BYTES:
                raise ValueError("a frame is larger than any row can be")
            async with self._room:
                async with asyncio.timeout(FRAME_TIMEOUT_S):
                    content = await channel.receive(size_bytes)
                answer = await self._answer(attempt, Part(rows, content))
            await channel.say(answer)

    async def _answer(self, attempt: Attempt, part: Part) -> dict[str, object]:
        try:
            await self._intake.load(attempt, [part])
        except Exception as error:  # whatever it is: who is not answered looks for the owner
            return _as_fields(error)
        return {}


class RemoteIntake(IntakeWay):
    """For writers in other processes: one connection for as long as the writer lives.

    Rows leave in the background: while the owner loads one frame, the writer makes the next.
    """

    def __init__(self, service: ServiceAddress) -> None:
        self._service = service
        self._channel: Channel | None = None
        self._sending: asyncio.Task[None] | None = None
        self._unanswered = 0

    async def load(self, attempt: Attempt, parts: Iterable[Part]) -> Loaded:
        rows = sent = 0
        for part in parts:
            with self._explained():
                if self._unanswered == MAX_UNANSWERED:
                    await self._hear_answer()
                await self._last_is_sent()
                if self._channel is None:
                    self._channel = await dial(self._service, attempt.fields())
            self._sending = asyncio.create_task(_send(self._channel, part))
            self._unanswered += 1
            rows += part.rows
            sent += len(part.content)
        return Loaded(rows, sent, rows)

    async def settle(self) -> None:
        with self._explained():
            while self._unanswered:
                await self._hear_answer()
            await self._last_is_sent()

    async def close(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def _last_is_sent(self) -> None:
        if self._sending is not None:
            await asyncio.wait({self._sending})
            self._sending.result()

    async def _hear_answer(self) -> None:
        assert self._channel is not None
        fields = await self._channel.hear()
        self._unanswered -= 1
        error = _from_fields(fields)
        if error is not None:
            raise error

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TimeoutError) as error:
            raise WriteFailed(
                f"rows could not be brought to the sink's owner at {self._service.address}: "
                f"{str(error) or type(error).__name__}. Is the owner alive, and can this machine reach it? "
                "`share(host)` says where it listens"
            ) from error


async def _send(channel: Channel, part: Part) -> None:
    try:
        await channel.send(FRAME.pack(part.rows, len(part.content)))
        await channel.send(part.content)
    except BaseException:
        channel.hang_up()  # there will be no answer to wait for
        raise


def _cut_short() -> WriteFailed:
    return WriteFailed("a load was cut short: the epoch is to be aborted")


class Taking:
    """Parts on their way to the server, and since when it has had nothing new of them."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = parts
        self.since = time.monotonic()

    def __iter__(self) -> Iterator[Part]:
        for part in self._parts:
            self.since = time.monotonic()
            yield part
        self.since = time.monotonic()


async def load_all(session: SqlSession, form: Form, parts: Iterable[Part], write_timeout: float) -> Loaded:
    """Loads them, and checks that the server took all that were sent.

    It may count more: MariaDB adds what triggers have changed to the rows of a bulk execution. A server that
    does not take the next part within `write_timeout`, or does not answer when it has all, is given up.
    """
    taking = Taking(parts)
    loading = asyncio.ensure_future(session.load(form, taking))
    try:
        while not loading.done():
            left = taking.since + write_timeout - time.monotonic()
            if left <= 0:
                raise silence(write_timeout)
            await asyncio.wait({loading}, timeout=left)
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    loaded = loading.result()
    if loaded.taken < loaded.rows:
        raise SqlFailure(
            f"{loaded.rows} rows were sent and {loaded.taken} were taken; a trigger may drop some",
            Cause.OTHER,
        )
    return loaded


def write_error(failure: SqlFailure) -> SinkError:
    """What a failed statement means for an epoch that is being written."""
    if failure.cause is Cause.LOST:
        return ConnectionLost(f"{failure}: the epoch is not committed; abort it and run it again")
    return WriteFailed(str(failure), is_permanent=failure.is_permanent)


# Errors on the way to a writer elsewhere: by class, since that says what its owner may do.

_LOST, _FENCED, _FAILED, _REFUSED = "lost", "fenced", "failed", "refused"
# So that it fits into a message, however its characters are written there.
MAX_REASON_CHARACTERS: Final = 4_000


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _as_fields(error: Exception) -> dict[str, object]:
    message = _reason(error)[:MAX_REASON_CHARACTERS]
    if isinstance(error, ConnectionLost):
        return {"kind": _LOST, "message": message}
    if isinstance(error, FencedOut):
        return {"kind": _FENCED, "message": message}
    is_permanent = isinstance(error, WriteFailed) and error.is_permanent
    return {"kind": _REFUSED if is_permanent else _FAILED, "message": message}


def _from_fields(fields: Mapping[str, Any]) -> SinkError | None:
    kind, message = fields.get("kind"), str(fields.get("message", ""))
    if kind is None:
        return None
    if kind == _LOST:
        return ConnectionLost(message)
    if kind == _FENCED:
        return FencedOut(message)
    return WriteFailed(message, is_permanent=kind == _REFUSED)
