"""The writers of a SQL sink.

A *direct* writer brings its rows to the owner, whose connection loads them into the epoch's transaction. A
*staged* writer has a connection of its own and loads into the staging table; each row is stamped with its
run, epoch, task and attempt, so that rows of attempts that failed, ran twice or woke up late are there and
yet belong to no receipt.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from semel.errors import ConfigError
from semel.sinks.errors import SinkError, WriteFailed
from semel.sinks.joining import join
from semel.sinks.metrics import SinkMetrics
from semel.sinks.receipts import Attempt, Place, Receipt
from semel.sinks.service import ServiceAddress, require_shared
from semel.sinks.sink import Rows, Writer, WriterPlan
from semel.sinks.sql.columns import Column, Layout
from semel.sinks.sql.dialect import Dialect, Form, Loaded, SqlSession
from semel.sinks.sql.failures import OF_A_ROW, SqlFailure, answered_within, expecting_stages
from semel.sinks.sql.intake import load_all, write_error
from semel.sinks.sql.intake_service import IntakeWay, LocalIntake, RemoteIntake
from semel.sinks.sql.json_texts import row_text
from semel.sinks.sql.names import TableName
from semel.sinks.sql.rows import Shaper

MAX_ATTEMPT_CHARACTERS: Final = 160
MAX_STAMP_CHARACTERS: Final = 255
# Rows are also flushed when they are large, long before their number says so.
MAX_BUFFERED_BYTES: Final = 64 * 1024 * 1024


def stamp_of(place: Place, task: int, attempt: str) -> str:
    """What the rows of one attempt carry. No two attempts of any run have the same."""
    if len(attempt) > MAX_ATTEMPT_CHARACTERS:
        raise ConfigError(f"an attempt's name has at most {MAX_ATTEMPT_CHARACTERS} characters: {attempt!r}")
    return f"{place.run}/{place.epoch}.{place.turn}/{task}/{attempt}"


# Without a text: that would show the secret which lets writers in. Tests give plans another class.
@dataclass(eq=False, repr=False)
class SqlPlan(WriterPlan):
    """What writers of one epoch have in common, wherever their rows go first."""

    sink_id: str
    place: Place
    layout: Layout
    dialect: Dialect
    schema: pa.Schema | None
    metrics: SinkMetrics
    max_buffered: int


class BufferingWriter(Writer):
    """Gathers rows up to a limit, and loads them in bulk."""

    def __init__(self, plan: SqlPlan, task: int, attempt: str, max_buffered: int) -> None:
        self._rows_here = f"rows of sink {plan.sink_id!r} cannot be written to {plan.layout.table}"
        self._place = plan.place
        self._task = task
        self._attempt = attempt
        self._max_buffered = max_buffered
        self._shaper = Shaper(plan.layout, plan.dialect, plan.schema)
        self._metrics = plan.metrics
        self._buffered: list[pa.Table] = []
        self._buffered_rows = 0
        self._buffered_bytes = 0
        self._is_spoiled = False
        self.rows = 0
        self._bytes = 0

    async def write(self, rows: Rows) -> None:
        self._refuse_if_spoiled()
        try:
            with self._named():
                table = self._shaper.shape(rows)
            self._buffered.append(table)
            self._count(table.num_rows, table.nbytes)
            if self._buffered_rows >= self._max_buffered or self._buffered_bytes >= MAX_BUFFERED_BYTES:
                await self._flush()
        except BaseException:
            self._is_spoiled = True
            raise

    async def finish(self) -> Receipt:
        self._refuse_if_spoiled()
        self._is_spoiled = True  # it is used once
        await self._flush()
        with self._named():
            return await self._finished()

    async def cancel(self) -> None:
        self._is_spoiled = True
        self._empty()

    async def _flush(self) -> None:
        if not self._buffered_rows:
            return
        tables = join(self._buffered)
        self._empty()
        with self._named():
            for table in tables:
                await self._load(table)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What will never be written is told with its sink and table: there may be several."""
        try:
            yield
        except SqlFailure as failure:
            error = write_error(failure)
            raise self._with_names(error) or error from failure
        except WriteFailed as error:
            if (named := self._with_names(error)) is None:
                raise
            raise named from error

    def _with_names(self, error: SinkError) -> WriteFailed | None:
        if not isinstance(error, WriteFailed) or not error.is_permanent:
            return None
        return WriteFailed(f"{self._rows_here}: {error}", is_permanent=True)

    def _count_loaded(self, loaded: Loaded) -> None:
        self.rows += loaded.rows
        self._bytes += loaded.bytes

    def _count(self, rows: int, size_bytes: int) -> None:
        self._buffered_rows += rows
        self._buffered_bytes += size_bytes
        self._metrics.buffered_rows += rows

    def _empty(self) -> None:
        self._buffered = []
        self._count(-self._buffered_rows, -self._buffered_bytes)

    def _refuse_if_spoiled(self) -> None:
        if self._is_spoiled:
            raise WriteFailed("this writer has failed, or is finished: its epoch is to be aborted")

    @abstractmethod
    async def _load(self, table: pa.Table) -> None:
        """Sends rows to the server."""

    @abstractmethod
    async def _finished(self) -> Receipt:
        """The receipt, when all rows are there."""


@dataclass(eq=False, repr=False)
class DirectPlan(SqlPlan):
    """One epoch, for writers that bring their rows to its owner. It can be pickled if the sink is shared.

    `home` is the way to the intake in the owner's process, and stays there.
    """

    form: Form
    service: ServiceAddress | None
    home: LocalIntake | None

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> Writer:
        if self.home is not None:
            return DirectWriter(self, task, attempt, self.max_buffered, self.home)
        way = RemoteIntake(require_shared(self.service))
        return DirectWriter(self, task, attempt, min(self.max_buffered, self.form.frame_rows), way)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "service": require_shared(self.service), "home": None}


class DirectWriter(BufferingWriter):
    """Brings rows into the epoch's transaction: encodes them, and lets the owner's connection load them."""

    def __init__(self, plan: DirectPlan, task: int, attempt: str, max_buffered: int, way: IntakeWay) -> None:
        super().__init__(plan, task, attempt, max_buffered)
        self._me = Attempt.new(plan.place, task, attempt)
        self._form = plan.form
        self._way = way

    async def _load(self, table: pa.Table) -> None:
        self._count_loaded(await self._way.load(self._me, self._form.parts(table)))

    async def _finished(self) -> Receipt:
        await self._way.settle()
        await self._way.close()
        return Receipt(self._place, self._task, self._attempt, self.rows, self._bytes)

    async def cancel(self) -> None:
        await super().cancel()
        await self._way.close()


@dataclass(eq=False, repr=False)
class StagedPlan(SqlPlan):
    """All that a writer needs to stage its rows from any process.

    Where bad rows are an error there is no `dead_stage`.
    """

    stage: TableName
    dead_stage: TableName | None
    label: str
    write_timeout: float

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> Writer:
        return StagedWriter(self, task, attempt)


class StagedWriter(BufferingWriter):
    """One attempt at one task, with a connection of its own that is made when there are rows."""

    def __init__(self, plan: StagedPlan, task: int, attempt: str) -> None:
        super().__init__(plan, task, attempt, plan.max_buffered)
        self._dialect = plan.dialect
        self._label = plan.label
        self._write_timeout = plan.write_timeout
        self._stage = plan.stage
        self._columns = plan.layout.staged
        self._dead_stage = plan.dead_stage
        self._dead_letters = 0
        self._stamp = stamp_of(plan.place, task, attempt)
        self._session: SqlSession | None = None

    async def _load(self, table: pa.Table) -> None:
        if self._session is None:
            async with answered_within(self._write_timeout):
                self._session = await self._dialect.connect(self._label)
        with expecting_stages(self._stage, self._dead_stage):
            if self._dead_stage is None:
                await self._stage_rows(self._session, table)
            else:
                await self._stage_good_rows(self._session, table, self._dead_stage)

    async def _stage_rows(self, session: SqlSession, table: pa.Table) -> None:
        form = session.form(self._stage, self._columns, self._stamp)
        self._count_loaded(await load_all(session, form, form.parts(table), self._write_timeout))

    async def _stage_good_rows(self, session: SqlSession, table: pa.Table, dead_stage: TableName) -> None:
        """Halves what fails until the bad rows are alone: a load is a transaction, so nothing stays of it."""
        waiting = [table]
        while waiting:
            part = waiting.pop()
            try:
                await self._stage_rows(session, part)
            except SqlFailure as failure:
                if failure.cause not in OF_A_ROW:
                    raise
                if part.num_rows == 1:
                    await self._bury(session, part, failure.reason, dead_stage)
                else:
                    half = part.num_rows // 2
                    waiting += [part.slice(half), part.slice(0, half)]

    async def _bury(self, session: SqlSession, row: pa.Table, reason: str, dead_stage: TableName) -> None:
        letter = pa.table({"row_text": [row_text(row)], "reason": [reason]})
        form = session.form(dead_stage, dead_letter_columns(self._dialect), self._stamp)
        await load_all(session, form, form.parts(letter), self._write_timeout)
        self._dead_letters += 1

    async def _finished(self) -> Receipt:
        await self._let_go()
        parts = {str(self._stage): self.rows}
        return Receipt(
            self._place, self._task, self._attempt, self.rows, self._bytes, self._dead_letters, parts
        )

    async def cancel(self) -> None:
        await super().cancel()
        await self._let_go()

    async def _let_go(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def dead_letter_columns(dialect: Dialect) -> tuple[Column, ...]:
    return (
        Column("row_text", "row_text", dialect.text_type),
        Column("reason", "reason", dialect.text_type),
    )
