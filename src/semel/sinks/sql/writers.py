"""The writers of a SQL sink.

A *direct* writer loads into the owner's open transaction. A *staged* writer has a connection of its own and
loads into the staging table; each row is stamped with its run, epoch, task and attempt, so that rows of
attempts that failed, ran twice or woke up late are there and yet belong to no receipt.
"""

import json
from typing import Final

import pyarrow as pa

from semel.errors import ConfigError
from semel.sinks.errors import ConnectionLost, SinkError, WriteFailed
from semel.sinks.receipts import Place, Receipt
from semel.sinks.settings import OnBadRow, SinkSettings
from semel.sinks.sink import Rows, Writer, WriterPlan
from semel.sinks.sql.columns import Column, Layout
from semel.sinks.sql.dialect import Dialect, SqlSession
from semel.sinks.sql.failures import Cause, SqlFailure
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


class BufferingWriter(Writer):
    """Gathers rows up to a limit, and loads them in bulk."""

    def __init__(
        self, place: Place, task: int, attempt: str, settings_max_buffered: int, shaper: Shaper
    ) -> None:
        self._place = place
        self._task = task
        self._attempt = attempt
        self._max_buffered = settings_max_buffered
        self._shaper = shaper
        self._buffered: list[pa.Table] = []
        self._buffered_rows = 0
        self._buffered_bytes = 0
        self._rows = 0
        self._bytes = 0

    async def write(self, rows: Rows) -> None:
        table = self._shaper.shape(rows)
        self._buffered.append(table)
        self._buffered_rows += table.num_rows
        self._buffered_bytes += table.nbytes
        if self._buffered_rows >= self._max_buffered or self._buffered_bytes >= MAX_BUFFERED_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        if not self._buffered_rows:
            return
        table = pa.concat_tables(self._buffered, promote_options="permissive")
        self._buffered, self._buffered_rows, self._buffered_bytes = [], 0, 0
        try:
            await self._load(table)
        except SqlFailure as failure:
            raise write_error(failure) from failure

    async def _load(self, table: pa.Table) -> None:
        raise NotImplementedError


class DirectWriter(BufferingWriter):
    """The one writer of an epoch, on the owner's connection and in its transaction."""

    def __init__(
        self, place: Place, task: int, attempt: str, max_buffered: int, shaper: Shaper,
        session: SqlSession, table: TableName, columns: tuple[Column, ...],
    ) -> None:  # fmt: skip
        super().__init__(place, task, attempt, max_buffered, shaper)
        self._session = session
        self._table = table
        self._columns = columns

    async def _load(self, table: pa.Table) -> None:
        loaded = await self._session.load(self._table, self._columns, table, None)
        if loaded.rows != table.num_rows:
            raise SqlFailure(f"{table.num_rows} rows were sent and {loaded.rows} taken", Cause.OTHER)
        self._rows += loaded.rows
        self._bytes += loaded.bytes

    async def finish(self) -> Receipt:
        await self._flush()
        return Receipt(self._place, self._task, self._attempt, self._rows, self._bytes)

    async def cancel(self) -> None:
        self._buffered, self._buffered_rows, self._buffered_bytes = [], 0, 0


class DirectPlan(WriterPlan):
    """Stays in the owner's process, since its writer uses the owner's connection."""

    def __init__(
        self, place: Place, layout: Layout, dialect: Dialect, settings: SinkSettings,
        schema: pa.Schema | None, session: SqlSession, table: TableName,
    ) -> None:  # fmt: skip
        self.place = place
        self._layout = layout
        self._dialect = dialect
        self._settings = settings
        self._schema = schema
        self._session = session
        self._table = table
        self._given = False

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> Writer:
        if tasks != 1:
            raise ConfigError(
                f"strategy 'direct' has one writer, and this is one of {tasks}: use strategy 'staged'"
            )
        if self._given:
            raise WriteFailed(
                "the epoch has had its one writer (strategy 'direct'): abort it and begin it again"
            )
        self._given = True
        shaper = Shaper(self._layout, self._dialect, self._schema)
        return DirectWriter(
            self.place, task, attempt, self._settings.max_buffered, shaper, self._session, self._table,
            self._layout.staged,
        )  # fmt: skip

    def __reduce__(self) -> tuple[object, ...]:
        raise ConfigError(
            "the plan of strategy 'direct' cannot be sent to another process, since its writer uses the "
            "owner's connection: use strategy 'staged'"
        )


class StagedPlan(WriterPlan):
    """All that a writer needs to stage its rows from any process."""

    def __init__(
        self, place: Place, layout: Layout, dialect: Dialect, settings: SinkSettings,
        schema: pa.Schema | None, stage: TableName, dead_stage: TableName, label: str,
    ) -> None:  # fmt: skip
        self.place = place
        self._layout = layout
        self._dialect = dialect
        self._max_buffered = settings.max_buffered
        self._on_bad_row = settings.on_bad_row
        self._schema = schema
        self._stage = stage
        self._dead_stage = dead_stage
        self._label = label

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> Writer:
        shaper = Shaper(self._layout, self._dialect, self._schema)
        return StagedWriter(
            self.place, task, attempt, self._max_buffered, shaper, self._dialect, self._label, self._stage,
            self._layout.staged, self._dead_stage if self._on_bad_row is OnBadRow.DEAD_LETTER else None,
        )  # fmt: skip


class StagedWriter(BufferingWriter):
    """One attempt at one task, with a connection of its own that is made when there are rows."""

    def __init__(
        self, place: Place, task: int, attempt: str, max_buffered: int, shaper: Shaper, dialect: Dialect,
        label: str, stage: TableName, columns: tuple[Column, ...], dead_stage: TableName | None,
    ) -> None:  # fmt: skip
        super().__init__(place, task, attempt, max_buffered, shaper)
        self._dialect = dialect
        self._label = label
        self._stage = stage
        self._columns = columns
        self._dead_stage = dead_stage
        self._dead_letters = 0
        self._stamp = stamp_of(place, task, attempt)
        self._session: SqlSession | None = None

    async def _load(self, table: pa.Table) -> None:
        if self._session is None:
            self._session = await self._dialect.connect(self._label)
        if self._dead_stage is None:
            await self._stage_rows(self._session, table)
        else:
            await self._stage_good_rows(self._session, table, self._dead_stage)

    async def _stage_rows(self, session: SqlSession, table: pa.Table) -> None:
        loaded = await session.load(self._stage, self._columns, table, self._stamp)
        if loaded.rows != table.num_rows:
            raise SqlFailure(f"{table.num_rows} rows were sent and {loaded.rows} taken", Cause.OTHER)
        self._rows += loaded.rows
        self._bytes += loaded.bytes

    async def _stage_good_rows(self, session: SqlSession, table: pa.Table, dead_stage: TableName) -> None:
        """Halves what fails until the bad rows are alone: a load is a transaction, so nothing stays of it."""
        waiting = [table]
        while waiting:
            part = waiting.pop()
            try:
                await self._stage_rows(session, part)
            except SqlFailure as failure:
                if failure.cause is not Cause.ROW:
                    raise
                if part.num_rows == 1:
                    await self._bury(session, part, str(failure), dead_stage)
                else:
                    half = part.num_rows // 2
                    waiting += [part.slice(half), part.slice(0, half)]

    async def _bury(self, session: SqlSession, row: pa.Table, reason: str, dead_stage: TableName) -> None:
        text = json.dumps(row.to_pylist()[0], default=str)
        columns = dead_letter_columns(self._dialect)
        letter = pa.table({"row_text": [text], "reason": [reason]})
        await session.load(dead_stage, columns, letter, self._stamp)
        self._dead_letters += 1

    async def finish(self) -> Receipt:
        await self._flush()
        await self._let_go()
        return Receipt(
            self._place, self._task, self._attempt, self._rows, self._bytes, self._dead_letters,
            {str(self._stage): self._rows},
        )  # fmt: skip

    async def cancel(self) -> None:
        self._buffered, self._buffered_rows, self._buffered_bytes = [], 0, 0
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


def write_error(failure: SqlFailure) -> SinkError:
    """What a failed statement means for an epoch that is being written."""
    if failure.cause is Cause.LOST:
        return ConnectionLost(f"{failure}: the epoch is not committed; abort it and run it again")
    return WriteFailed(str(failure), is_permanent=failure.is_permanent)
