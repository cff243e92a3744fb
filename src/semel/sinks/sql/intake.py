"""The intake of an epoch: what its writers bring into the one transaction, on the owner's connection.

Writers of strategy `direct` encode rows wherever they are, and the owner's connection loads them, one load at
a time. Rules:

- The transaction begins with the first rows: while a batch is computed nothing is locked.
- A task has one writer in an epoch, known by a random name of its own. Whoever comes second is refused.
- What was loaded must be covered by the receipts, writer by writer: otherwise the epoch is not committed.
- A load that fails spoils the epoch: the transaction may hold a part of it. Every later one is refused.
- A load may take long, and the server may not: it fails if for `write_timeout` no more of it is taken.
- Rows of another run, epoch or turn are refused and spoil nothing: they are a zombie's.

`Intake` holds the rules. How writers bring rows to it is said in `semel.sinks.sql.intake_service`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from semel.sinks.errors import CommitFailed, ConnectionLost, FencedOut, SinkError, WriteFailed
from semel.sinks.receipts import Attempt, Place, Receipt
from semel.sinks.sql.dialect import Form, Loaded, Part, SqlSession
from semel.sinks.sql.failures import Cause, SqlFailure, silence

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
            except SinkError as error:
                self.failure = error
                raise
            except Exception as error:
                self.failure = WriteFailed(str(error) or type(error).__name__)
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
