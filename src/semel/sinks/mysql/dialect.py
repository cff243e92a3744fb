"""MySQL's and MariaDB's words for what SQL sinks do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa

from semel.sinks.errors import InitFailed
from semel.sinks.mysql.names import quote
from semel.sinks.mysql.session import WRITER_LOCKS, Address, MySQLSession, connect, is_mariadb, writer_lock
from semel.sinks.mysql.types import OUR_TEXT, TEXTS, key_type, parse_type, refuses, type_for
from semel.sinks.sql.columns import Column, Layout, TableColumn
from semel.sinks.sql.dialect import Dialect, SqlSession, SqlValue
from semel.sinks.sql.failures import Cause, SqlFailure
from semel.sinks.sql.names import (
    DEAD_LETTERS_TABLE,
    MERGE_TABLE,
    SINKS_TABLE,
    WRITER_COLUMN,
    TableName,
)
from semel.sinks.sql.writers import MAX_STAMP_CHARACTERS

# How long an owner may hold its transaction (and the sink's row) without a word: then MariaDB ends it.
DEFAULT_IDLE_TIMEOUT_S: Final = 300.0
# A writer that should be gone may hold a lock on the stage. The server counts in seconds.
CLEAR_LOCK_TIMEOUT_S: Final = 1
# A stage with more rows is truncated: that makes a new file, which the next epoch would have to grow again.
MAX_DELETED_ROWS: Final = 20_000
# The first versions with what is used here: window functions, and user locks that can be held in numbers.
MIN_MYSQL: Final = (8, 0)
MIN_MARIADB: Final = (10, 5)

_COLUMNS: Final = """
    SELECT c.COLUMN_NAME, c.COLUMN_TYPE, c.IS_NULLABLE, c.COLUMN_DEFAULT, c.EXTRA, c.CHARACTER_SET_NAME,
           c.COLLATION_NAME
    FROM information_schema.COLUMNS AS c
    WHERE c.TABLE_SCHEMA = COALESCE(%s, DATABASE()) AND c.TABLE_NAME = %s ORDER BY c.ORDINAL_POSITION
"""
# MariaDB's JSON is text with a check.
_JSON_CHECKS: Final = """
    SELECT CHECK_CLAUSE FROM information_schema.CHECK_CONSTRAINTS
    WHERE CONSTRAINT_SCHEMA = COALESCE(%s, DATABASE()) AND TABLE_NAME = %s
"""
_UNIQUE_KEYS: Final = """
    SELECT INDEX_NAME, COLUMN_NAME, SUB_PART FROM information_schema.STATISTICS
    WHERE TABLE_SCHEMA = COALESCE(%s, DATABASE()) AND TABLE_NAME = %s AND NON_UNIQUE = 0
    ORDER BY INDEX_NAME, SEQ_IN_INDEX
"""
# Calls of it never give the same.
_DISTINCT_DEFAULT: Final = "uuid()"
_GENERATED: Final = ("VIRTUAL GENERATED", "STORED GENERATED", "PERSISTENT GENERATED")


class KeyPart(NamedTuple):
    """A column of a unique key, or so many characters of its beginning, or (without one) an expression."""

    column: str | None
    prefix: int | None

    @property
    def is_whole(self) -> bool:
        return self.column is not None and self.prefix is None

    def __str__(self) -> str:
        if self.column is None:
            return "an expression"
        return self.column if self.prefix is None else f"{self.column}({self.prefix})"


@dataclass(slots=True, frozen=True)
class MySQLDialect(Dialect):
    """A database. Rows go by array binding, LOAD DATA or multi-row INSERT: the first that the server has.

    Without `bulk` or `local_infile` it is as if the server did not have the first, or the second.
    """

    address: Address
    idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S
    local_infile: bool = True
    bulk: bool = True

    boolean_type = "tinyint(1)"
    text_type = OUR_TEXT

    async def connect(self, label: str) -> SqlSession:
        session = await connect(
            self.address, label, self.idle_timeout_s, local_infile=self.local_infile, bulk=self.bulk
        )
        try:
            _check_version(session)
        except BaseException:
            await session.close()
            raise
        return session

    def quote(self, name: str) -> str:
        # Names stand in statements that have parameters, where a percent sign is doubled.
        return quote(name).replace("%", "%%")

    # The catalogue, and types

    async def describe(self, session: SqlSession, table: TableName) -> list[TableColumn]:
        place = (table.schema, table.name)
        found = await session.fetch(
            "SELECT TABLE_TYPE, ENGINE FROM information_schema.TABLES "
            "WHERE TABLE_SCHEMA = COALESCE(%s, DATABASE()) AND TABLE_NAME = %s",
            place,
        )
        for kind, engine in [(str(kind), str(engine)) for kind, engine in found]:
            if kind != "BASE TABLE" or engine.lower() != "innodb":
                raise InitFailed(
                    f"{table} has no transactions ({kind}, engine {engine}): name a table with ENGINE=InnoDB"
                )
        json_columns = await self._json_columns(session, table)
        return [
            _table_column([None if cell is None else str(cell) for cell in row], json_columns)
            for row in await session.fetch(_COLUMNS, place)
        ]

    async def _json_columns(self, session: SqlSession, table: TableName) -> frozenset[str]:
        if not await _is_on_mariadb(session):
            return frozenset()  # MySQL has a type of that name
        clauses = await session.fetch(_JSON_CHECKS, (table.schema, table.name))
        texts = [str(clause) for (clause,) in clauses]
        return frozenset(
            text[12:-2] for text in texts if text.startswith("json_valid(`") and text.endswith("`)")
        )

    async def unique_keys(self, session: SqlSession, table: TableName) -> list[frozenset[str]]:
        keys = await self._unique_keys(session, table)
        return [_columns(key) for key in keys if all(part.is_whole for part in key)]

    async def other_keys(self, session: SqlSession, layout: Layout) -> list[str]:
        """The unique keys, in words, in which rows might meet that differ in `layout.keys`.

        They cannot where a column that is left out gets null, or a value of its own, in every row.
        """
        distinct = await self._distinct_columns(session, layout.table) - set(layout.names)
        own = frozenset(layout.keys)
        return [
            ", ".join(str(part) for part in key)
            for key in await self._unique_keys(session, layout.table)
            if not (_columns(key) == own and all(part.is_whole for part in key))
            and not any(part.is_whole and part.column in distinct for part in key)
        ]

    async def _unique_keys(self, session: SqlSession, table: TableName) -> list[list[KeyPart]]:
        keys: dict[str, list[KeyPart]] = {}
        for index, column, prefix in await session.fetch(_UNIQUE_KEYS, (table.schema, table.name)):
            part = KeyPart(None if column is None else str(column), None if prefix is None else int(prefix))
            keys.setdefault(str(index), []).append(part)
        return list(keys.values())

    async def _distinct_columns(self, session: SqlSession, table: TableName) -> frozenset[str]:
        """Those that get null or a value of their own in every row that leaves them out."""
        on_mariadb = await _is_on_mariadb(session)
        return frozenset(
            str(row[0])
            for row in await session.fetch(_COLUMNS, (table.schema, table.name))
            if _is_distinct(row, on_mariadb=on_mariadb)
        )

    def refuses(self, arrow_type: pa.DataType, type_name: str) -> str | None:
        return refuses(arrow_type, type_name)

    def type_for(self, arrow_type: pa.DataType) -> str:
        return type_for(arrow_type)

    # Tables of ours

    def create_bookkeeping(self) -> list[tuple[TableName, str]]:
        sinks, letters = TableName(None, SINKS_TABLE), TableName(None, DEAD_LETTERS_TABLE)
        name = "varchar(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
        text = f"{OUR_TEXT} NOT NULL"
        return [
            (
                sinks,
                f"CREATE TABLE IF NOT EXISTS {self.quote_table(sinks)} (sink_id {name} PRIMARY KEY, "
                f"owner bigint NOT NULL, owner_info {text}, epoch bigint NOT NULL, query_id {text}, "
                f"offsets_digest {text}) ENGINE=InnoDB",
            ),
            (
                letters,
                f"CREATE TABLE IF NOT EXISTS {self.quote_table(letters)} (sink_id {name}, "
                f"epoch bigint NOT NULL, row_text {text}, reason {text}, "
                f"at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)) ENGINE=InnoDB",
            ),
        ]

    def create_target(self, table: TableName, columns: Sequence[TableColumn], keys: Sequence[str]) -> str:
        parts = [
            f"{self.quote(column.name)} "
            f"{key_type(column.type_name) if column.name in keys else column.type_name} "
            f"{'NULL' if column.is_nullable else 'NOT NULL'}"
            for column in columns
        ]
        if keys:
            parts.append(f"PRIMARY KEY ({self.quote_names(keys)})")
        return f"CREATE TABLE IF NOT EXISTS {self.quote_table(table)} ({', '.join(parts)}) ENGINE=InnoDB"

    def create_stage(self, stage: TableName, columns: Sequence[Column], *, refuses_nulls: bool) -> str:
        writer = f"varchar({MAX_STAMP_CHARACTERS}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        return (
            f"CREATE TABLE IF NOT EXISTS {self.quote_table(stage)} "
            f"({self._typed(columns, refuses_nulls=refuses_nulls)}, "
            f"{self.quote(WRITER_COLUMN)} {writer}) ENGINE=InnoDB"
        )

    async def stages(self, session: SqlSession, prefix: str) -> list[TableName]:
        found = await session.fetch(
            "SELECT TABLE_NAME FROM information_schema.TABLES "
            "WHERE TABLE_SCHEMA = DATABASE() AND LEFT(TABLE_NAME, %s) = %s",
            (len(prefix), prefix),
        )
        return [TableName(None, str(name)) for (name,) in found]

    async def clear_stage(self, session: SqlSession, stage: TableName) -> None:
        name = self.quote_table(stage)
        ((rows,),) = await session.fetch(
            f"SELECT COUNT(*) FROM (SELECT 1 FROM {name} LIMIT {MAX_DELETED_ROWS + 1}) AS counted"
        )
        if not rows:
            return
        is_large = rows == MAX_DELETED_ROWS + 1
        (timeouts,) = await session.fetch("SELECT @@lock_wait_timeout, @@innodb_lock_wait_timeout")
        set_timeouts = "SET SESSION lock_wait_timeout = %s, innodb_lock_wait_timeout = %s"
        await session.execute(set_timeouts, (CLEAR_LOCK_TIMEOUT_S, CLEAR_LOCK_TIMEOUT_S))
        try:
            # TRUNCATE commits, and gives the sink's row free, in the same statement. A successor that took it
            # in that moment, and had rows here, would miss them by their number, and write them again.
            await session.execute(f"TRUNCATE TABLE {name}" if is_large else f"DELETE FROM {name}")
        finally:
            await session.execute(set_timeouts, timeouts)

    def create_merge_table(self, layout: Layout) -> str:
        # The session empties it before the next transaction.
        return (
            f"CREATE TEMPORARY TABLE IF NOT EXISTS {self.quote(MERGE_TABLE)} ({self._typed(layout.staged)}) "
            f"ENGINE=InnoDB"
        )

    # What an epoch does

    def insert_sink(self) -> str:
        # Looks first, without a lock: the row may be locked by an owner that is about to be ended.
        sinks = self.quote(SINKS_TABLE)
        return (
            f"INSERT IGNORE INTO {sinks} (sink_id, owner, owner_info, epoch, query_id, offsets_digest) "
            f"SELECT wanted.sink_id, 0, '', -1, '', '' FROM "
            f"(SELECT CAST(%s AS CHAR(200)) COLLATE utf8mb4_bin AS sink_id) AS wanted "
            f"WHERE NOT EXISTS (SELECT 1 FROM {sinks} AS known WHERE known.sink_id = wanted.sink_id)"
        )

    def upsert(self, layout: Layout, winners: str) -> str:
        replaced = [name for name in layout.names if name not in layout.keys]
        if replaced:
            changes = ", ".join(f"{self.quote(name)} = VALUES({self.quote(name)})" for name in replaced)
        else:
            key = self.quote(layout.keys[0])
            changes = f"{key} = {self.quote_table(layout.table)}.{key}"
        return (
            f"INSERT INTO {self.quote_table(layout.table)} ({self.quote_names(layout.names)}) {winners} "
            f"ON DUPLICATE KEY UPDATE {changes}"
        )

    def delete(self, layout: Layout, losers: str) -> str:
        same_key = " AND ".join(f"target.{self.quote(key)} = losers.{self.quote(key)}" for key in layout.keys)
        table = self.quote_table(layout.table)
        return f"DELETE target FROM {table} AS target JOIN ({losers}) AS losers ON {same_key}"

    # Other sessions. An owner holds its label as a named lock, a writer one of some; so they are found again.

    async def is_alive(self, session: SqlSession, session_id: int, label: str) -> bool:
        return await session.fetch("SELECT IS_USED_LOCK(%s)", (label,)) == [(session_id,)]

    async def waits_for(self, session: SqlSession, session_id: int) -> str:
        found = await session.fetch(
            "SELECT STATE FROM information_schema.PROCESSLIST WHERE ID = %s AND STATE <> ''", (session_id,)
        )
        states = [f"what it calls {state!r}: SHOW PROCESSLIST shows who else is there" for (state,) in found]
        return "".join(states)

    async def end_session(self, session: SqlSession, session_id: int, label: str) -> None:
        if session_id != session.session_id and await self.is_alive(session, session_id, label):
            await _kill(session, session_id)

    async def end_writers(self, session: SqlSession, label_prefix: str) -> None:
        names = [writer_lock(label_prefix, number) for number in range(WRITER_LOCKS)]
        asked = ", ".join(["IS_USED_LOCK(%s)"] * len(names))
        for holders in await session.fetch(f"SELECT {asked}", names):
            for session_id in {holder for holder in holders if isinstance(holder, int)}:
                await _kill(session, session_id)

    def _typed(self, columns: Sequence[Column], *, refuses_nulls: bool = False) -> str:
        return ", ".join(
            f"{self.quote(column.name)} {column.type_name.replace('%', '%%')} "
            f"{'NOT NULL' if refuses_nulls and not column.is_nullable else 'NULL'}"
            for column in columns
        )


async def _is_on_mariadb(session: SqlSession) -> bool:
    return is_mariadb(str((await session.fetch("SELECT VERSION()"))[0][0]))


def _columns(key: Sequence[KeyPart]) -> frozenset[str]:
    return frozenset(part.column for part in key if part.column is not None)


def _is_distinct(cells: Sequence[SqlValue], *, on_mariadb: bool) -> bool:
    _, _, nullable, default, extra, *_ = cells
    extras = str(extra or "").upper()
    if any(word in extras for word in _GENERATED):
        return False
    if "AUTO_INCREMENT" in extras:
        return True
    if default is None or (on_mariadb and default == "NULL"):
        return nullable == "YES"
    # MariaDB puts what is no expression in quotes, and MySQL says what is one.
    is_expression = on_mariadb or "DEFAULT_GENERATED" in extras
    return is_expression and default == _DISTINCT_DEFAULT


def _table_column(cells: list[str | None], json_columns: frozenset[str]) -> TableColumn:
    name, type_name, nullable, default, extra, charset, collation = cells
    assert name is not None and type_name is not None
    extras = (extra or "").upper()
    if name in json_columns:
        type_name = "json"
    elif charset is not None and parse_type(type_name).name in TEXTS:
        type_name = f"{type_name} CHARACTER SET {charset} COLLATE {collation}"
    # MariaDB says NULL for a column that has no default but null.
    has_default = (default is not None and default != "NULL") or "AUTO_INCREMENT" in extras
    is_generated = any(word in extras for word in _GENERATED)
    return TableColumn(name, type_name, nullable == "YES", has_default or "INVISIBLE" in extras, is_generated)


async def _kill(session: SqlSession, session_id: int) -> None:
    try:
        await session.execute("KILL %s", (session_id,))
    except SqlFailure as failure:
        if failure.cause is not Cause.MISSING:  # it has ended by itself meanwhile
            raise


def _check_version(session: MySQLSession) -> None:
    text = session.version.split("-MariaDB")[0].removeprefix("5.5.5-")
    numbers = tuple(int(part) for part in text.split("-")[0].split(".")[:2] if part.isdecimal())
    least = MIN_MARIADB if is_mariadb(session.version) else MIN_MYSQL
    if numbers < least:
        raise InitFailed(
            f"the server is {session.version}: this sink needs MySQL {MIN_MYSQL[0]}.{MIN_MYSQL[1]} or "
            f"MariaDB {MIN_MARIADB[0]}.{MIN_MARIADB[1]}, or later"
        )
