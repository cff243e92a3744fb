"""PostgreSQL's words for what SQL sinks do."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import pyarrow as pa

from semel.sinks.errors import InitFailed
from semel.sinks.postgres.session import connect
from semel.sinks.postgres.types import refuses, type_for
from semel.sinks.sql.columns import Column, Layout, TableColumn
from semel.sinks.sql.dialect import Dialect, SqlSession
from semel.sinks.sql.names import DEAD_LETTERS_TABLE, MERGE_TABLE, SINKS_TABLE, WRITER_COLUMN, TableName

# How long an owner may hold its transaction (and the sink's row) without a word: then the server ends it.
DEFAULT_IDLE_TIMEOUT_S: Final = 300.0
# A writer that should be gone may hold a lock on the stage.
CLEAR_LOCK_TIMEOUT_MS: Final = 200

# Ordinary and partitioned tables: others have no transactions of this server, or cannot be copied into.
WRITABLE_KINDS: Final = ("r", "p")

# Domains are described as what they are made of, since rows are sent so; enums (only) by a name in quotes.
_COLUMNS: Final = """
    SELECT a.attname::text,
           CASE WHEN t.typtype = 'e' THEN '"' || replace(n.nspname, '"', '""') || '"."'
                                           || replace(t.typname, '"', '""') || '"'
                ELSE format_type(t.oid, CASE WHEN d.typtype = 'd' THEN d.typtypmod ELSE a.atttypmod END) END,
           NOT (a.attnotnull OR d.typnotnull),
           a.atthasdef OR a.attidentity <> '' OR d.typdefault IS NOT NULL,
           a.attgenerated <> '' OR a.attidentity = 'a'
    FROM pg_attribute a
    JOIN pg_type d ON d.oid = a.atttypid
    JOIN pg_type t ON t.oid = CASE WHEN d.typtype = 'd' THEN d.typbasetype ELSE d.oid END
    JOIN pg_namespace n ON n.oid = t.typnamespace
    WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
"""
# One row a column of each unique index that ON CONFLICT can use.
_UNIQUE_KEYS: Final = """
    SELECT i.indexrelid::bigint, a.attname::text
    FROM pg_index i
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
    WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indimmediate AND i.indisvalid
      AND i.indpred IS NULL AND i.indexprs IS NULL
"""


@dataclass(slots=True, frozen=True)
class PostgresDialect(Dialect):
    """A database, by its connection string or URI."""

    dsn: str = field(repr=False)
    idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S

    boolean_type = "boolean"
    text_type = "text"

    async def connect(self, label: str) -> SqlSession:
        return await connect(self.dsn, label, self.idle_timeout_s)

    def quote(self, name: str) -> str:
        # Names stand in statements that have parameters, where a percent sign is doubled.
        return '"' + name.replace('"', '""').replace("%", "%%") + '"'

    # The catalogue, and types

    async def describe(self, session: SqlSession, table: TableName) -> list[TableColumn]:
        name = self._regclass(table)
        kinds = await session.fetch("SELECT relkind::text FROM pg_class WHERE oid = to_regclass(%s)", (name,))
        if kinds and kinds[0][0] not in WRITABLE_KINDS:
            raise InitFailed(f"{table} is not a table of this database (a view, or foreign): name a table")
        found = await session.fetch(_COLUMNS, (name,))
        return [
            TableColumn(str(column), str(type_name), bool(nullable), bool(has_default), bool(generated))
            for column, type_name, nullable, has_default, generated in found
        ]

    async def unique_keys(self, session: SqlSession, table: TableName) -> list[frozenset[str]]:
        keys: dict[int, set[str]] = {}
        for index, column in await session.fetch(_UNIQUE_KEYS, (self._regclass(table),)):
            keys.setdefault(cast(int, index), set()).add(str(column))
        return [frozenset(columns) for columns in keys.values()]

    def refuses(self, arrow_type: pa.DataType, type_name: str) -> str | None:
        return refuses(arrow_type, type_name)

    def type_for(self, arrow_type: pa.DataType) -> str:
        return type_for(arrow_type)

    # Tables of ours

    def create_bookkeeping(self) -> list[tuple[TableName, str]]:
        sinks, letters = TableName(None, SINKS_TABLE), TableName(None, DEAD_LETTERS_TABLE)
        return [
            (
                sinks,
                f"CREATE TABLE IF NOT EXISTS {self.quote_table(sinks)} (sink_id text PRIMARY KEY, "
                f"owner bigint NOT NULL, owner_info text NOT NULL, epoch bigint NOT NULL, "
                f"query_id text NOT NULL, offsets_digest text NOT NULL)",
            ),
            (
                letters,
                f"CREATE TABLE IF NOT EXISTS {self.quote_table(letters)} (sink_id text NOT NULL, "
                f"epoch bigint NOT NULL, row_text text NOT NULL, reason text NOT NULL, "
                f"at timestamptz NOT NULL DEFAULT now())",
            ),
        ]

    def create_target(self, table: TableName, columns: Sequence[TableColumn], keys: Sequence[str]) -> str:
        parts = [
            f"{self.quote(column.name)} {column.type_name}{'' if column.is_nullable else ' NOT NULL'}"
            for column in columns
        ]
        if keys:
            parts.append(f"PRIMARY KEY ({self.quote_names(keys)})")
        return f"CREATE TABLE IF NOT EXISTS {self.quote_table(table)} ({', '.join(parts)})"

    def create_stage(self, stage: TableName, columns: Sequence[Column], *, refuses_nulls: bool) -> str:
        # Not logged: it is as fast as a table can be, and what it costs is checked by the count of rows.
        return (
            f"CREATE UNLOGGED TABLE IF NOT EXISTS {self.quote_table(stage)} "
            f"({self._typed(columns, refuses_nulls=refuses_nulls)}, "
            f'{self.quote(WRITER_COLUMN)} text COLLATE "C") WITH (autovacuum_enabled = false)'
        )

    async def stages(self, session: SqlSession, prefix: str) -> list[TableName]:
        found = await session.fetch(
            "SELECT relname::text FROM pg_class WHERE relnamespace = current_schema()::regnamespace "
            "AND relkind = 'r' AND starts_with(relname::text, %s)",
            (prefix,),
        )
        return [TableName(None, str(name)) for (name,) in found]

    async def clear_stage(self, session: SqlSession, stage: TableName) -> None:
        name = self.quote_table(stage)
        if await session.fetch(f"SELECT 1 FROM {name} LIMIT 1"):
            await session.execute(f"SET LOCAL lock_timeout = {CLEAR_LOCK_TIMEOUT_MS}")
            await session.execute(f"TRUNCATE {name}")

    def create_merge_table(self, layout: Layout) -> str:
        return (
            f"CREATE TEMPORARY TABLE {self.quote(MERGE_TABLE)} ({self._typed(layout.staged)}) "
            f"ON COMMIT DELETE ROWS"
        )

    # What an epoch does

    def insert_sink(self) -> str:
        return (
            f"INSERT INTO {self.quote(SINKS_TABLE)} (sink_id, owner, owner_info, epoch, query_id, "
            f"offsets_digest) VALUES (%s, 0, '', -1, '', '') ON CONFLICT (sink_id) DO NOTHING"
        )

    def upsert(self, layout: Layout, winners: str) -> str:
        replaced = ", ".join(
            f"{self.quote(name)} = EXCLUDED.{self.quote(name)}"
            for name in layout.names
            if name not in layout.keys
        )
        return (
            f"INSERT INTO {self.quote_table(layout.table)} ({self.quote_names(layout.names)}) {winners} "
            f"ON CONFLICT ({self.quote_names(layout.keys)}) DO "
            f"{f'UPDATE SET {replaced}' if replaced else 'NOTHING'}"
        )

    def delete(self, layout: Layout, losers: str) -> str:
        same_key = " AND ".join(f"target.{self.quote(key)} = losers.{self.quote(key)}" for key in layout.keys)
        table = self.quote_table(layout.table)
        return f"DELETE FROM {table} AS target USING ({losers}) AS losers WHERE {same_key}"

    # Other sessions. A label, beside the number, tells whether the number was given to somebody else since.

    async def is_alive(self, session: SqlSession, session_id: int, label: str) -> bool:
        found = await session.fetch(
            "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND application_name = %s", (session_id, label)
        )
        return bool(found)

    async def waits_for(self, session: SqlSession, session_id: int) -> str:
        found = await session.fetch(
            "SELECT wait_event_type, wait_event, pg_blocking_pids(pid)::text FROM pg_stat_activity "
            "WHERE pid = %s AND wait_event IS NOT NULL",
            (session_id,),
        )
        for kind, event, blocking in found:
            if event == "SyncRep":
                return (
                    "a synchronous standby that does not confirm: bring it back, or take it out of "
                    "synchronous_standby_names"
                )
            if kind == "Lock":
                return f"a lock ({event!s}) of session {blocking!s}: end that session, or wait for it"
            return f"{kind!s}/{event!s} of pg_stat_activity"
        return ""

    async def end_session(self, session: SqlSession, session_id: int, label: str) -> None:
        await session.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid = %s AND application_name = %s AND pid <> pg_backend_pid()",
            (session_id, label),
        )

    async def end_writers(self, session: SqlSession, label_prefix: str) -> None:
        await session.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE starts_with(application_name, %s) AND pid <> pg_backend_pid()",
            (label_prefix,),
        )

    def _regclass(self, table: TableName) -> str:
        return self.quote_table(table).replace("%%", "%")

    def _typed(self, columns: Sequence[Column], *, refuses_nulls: bool = False) -> str:
        return ", ".join(
            f"{self.quote(column.name)} {column.type_name.replace('%', '%%')}"
            f"{' NOT NULL' if refuses_nulls and not column.is_nullable else ''}"
            for column in columns
        )
