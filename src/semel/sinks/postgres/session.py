"""A connection to PostgreSQL, by psycopg, and what its errors mean."""

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow

from semel.errors import ConfigError
from semel.sinks import keepalive
from semel.sinks.postgres.binary_copy import HEADER, TRAILER, CopyForm
from semel.sinks.sql.columns import Column
from semel.sinks.sql.dialect import Form, Loaded, Part, SqlSession, SqlValue
from semel.sinks.sql.failures import Cause, SqlFailure
from semel.sinks.sql.names import TableName

# A peer that is gone is noticed in half a minute. What the DSN says comes first.
CONNECTION_DEFAULTS: Final[Mapping[str, str]] = {
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": str(keepalive.IDLE_S),
    "keepalives_interval": str(keepalive.INTERVAL_S),
    "keepalives_count": str(keepalive.COUNT),
    "tcp_user_timeout": str(keepalive.ACKNOWLEDGED_WITHIN_MS),
}
# What COPY is sent is UTF-8, whatever the DSN says.
CLIENT_ENCODING: Final = "utf8"
# A commit that the server may forget cannot decide anything. What waits for longer is kept, and `off` is not
# taken over later either, when the server's configuration is read again.
COMMIT_DURABLY: Final = (
    "SELECT set_config('synchronous_commit', "
    "coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)"
)
# The first with a limit for sessions that are idle outside a transaction.
IDLE_SESSIONS_VERSION: Final = 140000
# How much is handed to the connection at a time: less wakes the loop too often, more fills its buffer.
SEND_BYTES: Final = 256 * 1024
# How long a connection that was cut may take to notice.
HANG_UP_TIMEOUT_S: Final = 1.0

T = TypeVar("T")

CAUSES_BY_STATE: Final[Mapping[str, Cause]] = {
    "25P03": Cause.LOST,  # idle in a transaction for too long: the session was ended
    "25P04": Cause.LOST,  # in a transaction for too long (PostgreSQL 17)
    "53300": Cause.LOST,  # too many connections
    "57P01": Cause.LOST,
    "57P02": Cause.LOST,
    "57P03": Cause.LOST,
    "57P05": Cause.LOST,
    "55P03": Cause.LOCKED,
    "40001": Cause.CONFLICT,
    "40P01": Cause.CONFLICT,
    "23503": Cause.REFERENCE,
    "21000": Cause.ROW,
    "42804": Cause.ROW,
    "P0001": Cause.ROW,  # a trigger raised
    "42501": Cause.DENIED,
    "3D000": Cause.MISSING,
    "3F000": Cause.MISSING,
    "42P01": Cause.MISSING,
    "42703": Cause.MISSING,
    "42704": Cause.MISSING,
}
CAUSES_BY_CLASS: Final[Mapping[str, Cause]] = {
    "08": Cause.LOST,
    "22": Cause.ROW,
    "23": Cause.ROW,
    "28": Cause.DENIED,
}
# libpq gives no SQLSTATE to a connection that was refused, only these words. A server that says them in
# another language is taken for one that is away.
REFUSALS: Final[Mapping[re.Pattern[str], Cause]] = {
    re.compile(r'database ".*" does not exist'): Cause.MISSING,
    re.compile(r'role ".*" (does not exist|is not permitted to log in)'): Cause.DENIED,
    re.compile(r"authentication failed|no password supplied"): Cause.DENIED,
    re.compile(r"no pg_hba\.conf entry|pg_hba\.conf rejects connection"): Cause.DENIED,
    re.compile(r"permission denied for database"): Cause.DENIED,
}
# How psycopg lists what each address has said, if there are several.
ATTEMPT: Final = re.compile(r"^- (host: .*?, port: .*?), hostaddr: .*?: ", re.MULTILINE)


async def open_connection(
    dsn: str, defaults: Mapping[str, str], overrides: Mapping[str, str]
) -> AsyncConnection[TupleRow]:
    """In autocommit; what the DSN says goes before `defaults`, and `overrides` before that.

    Raises ConfigError of a DSN that cannot be read, SqlFailure where nobody is let in.
    """
    try:
        settings = {**CONNECTION_DEFAULTS, **defaults, **conninfo_to_dict(dsn), **overrides}
        return await AsyncConnection.connect(make_conninfo("", **settings), autocommit=True)
    except psycopg.ProgrammingError:
        # What libpq says of it may have a part of the password in it.
        raise ConfigError(
            "the connection string for PostgreSQL cannot be read: mend it. A setting has another name or "
            "value, or one with spaces in it is not in quotes"
        ) from None
    except psycopg.Error as error:
        raise _failure(error, is_connecting=True) from error


async def connect(dsn: str, label: str, idle_timeout_s: float) -> "PostgresSession":
    overrides = {"application_name": label, "client_encoding": CLIENT_ENCODING}
    connection = await open_connection(dsn, {}, overrides)
    session = PostgresSession(connection)
    try:
        if connection.info.server_version >= IDLE_SESSIONS_VERSION:
            # Writers compute between two loads for as long as it takes. Without a transaction they keep
            # nobody waiting, and a client that is gone is noticed by the server's own keep-alive.
            await session.fetch("SELECT set_config('idle_session_timeout', '0', false)")
        await session.fetch(
            "SELECT set_config('idle_in_transaction_session_timeout', %s, false)", (f"{idle_timeout_s:g}s",)
        )
        await session.fetch(COMMIT_DURABLY)
    except BaseException:
        await session.close()
        raise
    return session


class PostgresSession(SqlSession):
    """One connection, in autocommit between `begin` and `commit`."""

    def __init__(self, connection: AsyncConnection[tuple[SqlValue, ...]]) -> None:
        self._connection = connection
        self._is_cut = False
        self.session_id = connection.info.backend_pid

    async def execute(self, statement: str, parameters: Sequence[SqlValue] = ()) -> int:
        return (await self._run(statement, parameters)).rowcount

    async def fetch(self, statement: str, parameters: Sequence[SqlValue] = ()) -> list[tuple[SqlValue, ...]]:
        return await (await self._run(statement, parameters)).fetchall()

    def form(self, table: TableName, columns: tuple[Column, ...], stamp: str | None) -> CopyForm:
        return CopyForm(table, columns, stamp)

    async def load(self, form: Form, parts: Iterable[Part]) -> Loaded:
        assert isinstance(form, CopyForm)
        return await self._guarded(self._load(form, parts))

    async def _load(self, form: CopyForm, parts: Iterable[Part]) -> Loaded:
        with another_handle(self._connection.fileno()) as wire, keepalive.reading_later(wire):
            return await self._copy(form, parts)

    async def _copy(self, form: CopyForm, parts: Iterable[Part]) -> Loaded:
        table = form.table
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(
            sql.Identifier(*(name for name in (table.schema, table.name) if name is not None)),
            sql.SQL(", ").join(sql.Identifier(name) for name in form.names),
        )
        rows = sent = 0
        async with self._connection.cursor() as cursor:
            async with cursor.copy(statement) as copy:
                await copy.write(HEADER)
                for part in parts:
                    rows += part.rows
                    sent += len(part.content)
                    for start in range(0, len(part.content), SEND_BYTES):
                        await copy.write(part.content[start : start + SEND_BYTES])
                await copy.write(TRAILER)
            return Loaded(rows, sent, cursor.rowcount)

    async def begin(self) -> None:
        await self._run("BEGIN")

    async def commit(self) -> None:
        ended = (await self._run("COMMIT")).statusmessage
        if ended != "COMMIT":
            # A transaction that has failed ends so, without an error.
            raise SqlFailure(f"the server answered COMMIT with {ended}", Cause.OTHER)

    async def rollback(self) -> None:
        await self._run("ROLLBACK")

    async def set_lock_timeout(self, seconds: float) -> None:
        await self._run("SELECT set_config('lock_timeout', %s, false)", (f"{round(seconds * 1000)}ms",))

    async def close(self) -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            await self._connection.close()

    async def _run(
        self, statement: str, parameters: Sequence[SqlValue] = ()
    ) -> AsyncCursor[tuple[SqlValue, ...]]:
        # Always with parameters: names are quoted for statements in which a percent sign is doubled.
        return await self._guarded(self._connection.execute(statement.encode(), parameters))

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work in a task of its own, so that a cancellation does not wait for the server.

        psycopg would ask the server to cancel the query and wait for the answer, of a server that perhaps
        does not answer any more. Here the connection is cut, and fit for nothing after that.
        """
        if self._is_cut:
            work.close()
            raise SqlFailure("the connection was cut by a cancellation", Cause.LOST)
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except psycopg.Error as error:
            raise _failure(error) from error
        except asyncio.CancelledError:
            self._is_cut = True
            self._hang_up()
            await asyncio.wait({task}, timeout=HANG_UP_TIMEOUT_S)
            if task.done() and not task.cancelled():
                task.exception()  # it is expected, and seen
            raise

    def _hang_up(self) -> None:
        with contextlib.suppress(psycopg.Error):  # it is closed
            hang_up(self._connection.fileno())


def hang_up(fileno: int) -> None:
    """Shuts the connection down under psycopg, which then finds it at its end."""
    with contextlib.suppress(OSError), another_handle(fileno) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def another_handle(fileno: int) -> socket.socket:
    """On the socket of a connection, which stays open when this is closed."""
    return socket.socket(fileno=os.dup(fileno))


def _failure(error: psycopg.Error, *, is_connecting: bool = False) -> SqlFailure:
    state = error.sqlstate or ""
    cause = CAUSES_BY_STATE.get(state) or CAUSES_BY_CLASS.get(state[:2])
    if cause is None:
        cause = _cause_without_state(error, is_connecting) if not state else Cause.OTHER
    return SqlFailure(_message(error), cause)


def _cause_without_state(error: psycopg.Error, is_connecting: bool) -> Cause:
    if is_connecting and (refusal := _refusal(str(error))) is not None:
        return refusal
    is_broken = error.pgconn is not None and error.pgconn.status != psycopg.pq.ConnStatus.OK
    if is_connecting or is_broken or isinstance(error, psycopg.OperationalError):
        return Cause.LOST
    return Cause.ROW if isinstance(error, psycopg.DataError) else Cause.OTHER


def _refusal(said: str) -> Cause | None:
    """Why no server of the DSN will ever let this user in; None if one of them may, once it is back.

    A server has one answer at all of its addresses, also at those where nobody listens.
    """
    first, *attempts = ATTEMPT.split(said)
    if not attempts:
        return _refusal_of_one(first)
    by_server: dict[str, Cause | None] = {}
    for server, answer in zip(attempts[::2], attempts[1::2], strict=True):
        by_server[server] = by_server.get(server) or _refusal_of_one(answer)
    refusals = list(by_server.values())
    return None if None in refusals else refusals[-1]


def _refusal_of_one(said: str) -> Cause | None:
    return next((cause for words, cause in REFUSALS.items() if words.search(said)), None)


def _message(error: psycopg.Error) -> str:
    """What the server said, with the row, column and constraint where it named them."""
    said = error.diag
    if said.message_primary is None:
        return str(error).strip().replace("\n", " ")
    parts = [said.message_primary]
    if said.message_detail:
        parts.append(said.message_detail)
    if said.constraint_name:
        parts.append(f"constraint {said.constraint_name}")
    elif said.column_name:
        parts.append(f"column {said.column_name}")
    parts += [line for line in (said.context or "").splitlines() if line.startswith("COPY")]
    return f"{'; '.join(parts)} (SQLSTATE {said.sqlstate})"
