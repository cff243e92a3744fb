"""A connection to MySQL or MariaDB, by PyMySQL on a thread of its own, and what its errors mean."""

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final, TypeVar

import pymysql
from pymysql.constants import CLIENT

from semel.sinks.keepalive import expect_acknowledgement, keep_alive, reading_later
from semel.sinks.mysql.bulk_rows import BulkForm
from semel.sinks.mysql.connection import LoadingConnection
from semel.sinks.mysql.names import quote
from semel.sinks.mysql.text_rows import LinesForm, TuplesForm
from semel.sinks.sql.columns import Column
from semel.sinks.sql.dialect import Form, Loaded, Part, SqlSession, SqlValue
from semel.sinks.sql.failures import Cause, NotEndedYet, SqlFailure
from semel.sinks.sql.names import MERGE_TABLE, TableName

T = TypeVar("T")

DEFAULT_PORT: Final = 3306
CONNECT_TIMEOUT_S: Final = 10.0
# How long a connection that was cut may take to notice.
HANG_UP_TIMEOUT_S: Final = 1.0
# How much of an INSERT is sent at a time, written out or bound: the server waits from one to the next.
INSERT_BYTES: Final = 1024 * 1024
BULK_BYTES: Final = 4 * INSERT_BYTES
# How many statements a session keeps prepared; the oldest makes room.
MAX_PREPARED: Final = 8
NEED_REPREPARE: Final = 1615
# What is sent beside the statement's text and the rows, at most.
PACKET_OVERHEAD_BYTES: Final = 16
# The label of an owner is held as a named lock, by which others find the connection.
OWNER_LABEL_PREFIX: Final = "semel:"
WRITER_LABEL_PREFIX: Final = "semel-writer:"
WRITER_LOCKS: Final = 256
MAX_WRITER_LOCK_TRIES: Final = 16
LABEL_LOCK_TIMEOUT_S: Final = 5
# How long a writer may compute between two loads. If its machine is gone, the server's keep-alive is quicker.
WAIT_TIMEOUT_S: Final = 86_400
MIN_LOCK_TIMEOUT_S: Final = 1

# Errors in place of adjusted values, and zero is a value; nothing else that changes what is written.
SQL_MODE: Final = "STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION"

CAUSES: Final[Mapping[int, Cause]] = {
    **dict.fromkeys((0, 2002, 2003, 2006, 2013, 2014, 2055), Cause.LOST),  # the client's own
    **dict.fromkeys((1040, 1053, 1158, 1159, 1160, 1161, 1203, 1927, 4031), Cause.LOST),
    **dict.fromkeys((1205, 3572), Cause.LOCKED),
    **dict.fromkeys((1020, 1213), Cause.CONFLICT),
    **dict.fromkeys(
        (1048, 1062, 1136, 1153, 1172, 1261, 1262, 1263, 1264, 1265, 1292, 1364, 1366), Cause.ROW
    ),
    **dict.fromkeys((1367, 1406, 1411, 1451, 1526, 1586, 1644, 1690, 3140, 3819, 4025), Cause.ROW),
    **dict.fromkeys((1216, 1452), Cause.REFERENCE),
    **dict.fromkeys((1044, 1045, 1095, 1142, 1143, 1227, 1370, 1410, 1698), Cause.DENIED),
    **dict.fromkeys((1046, 1049, 1051, 1054, 1094, 1146), Cause.MISSING),
}


@dataclass(slots=True, frozen=True)
class Address:
    """Where the server is and as whom to go there. `options` are PyMySQL's, such as `ssl_ca`."""

    database: str
    host: str = "localhost"
    port: int = DEFAULT_PORT
    unix_socket: str | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    options: tuple[tuple[str, str | bool], ...] = ()


async def connect(
    address: Address, label: str, idle_timeout_s: float, *, local_infile: bool, bulk: bool
) -> "MySQLSession":
    thread = ThreadPoolExecutor(1, thread_name_prefix="semel mysql")
    line = Line()
    dialing = asyncio.get_running_loop().run_in_executor(thread, _dial, address, local_infile, bulk, line)
    try:
        connection, wire = await asyncio.shield(dialing)
    except asyncio.CancelledError:
        # The process would wait for the thread, and so for the server, before it ends.
        line.cut()
        dialing.add_done_callback(_hang_up_late)
        thread.shutdown(wait=False)
        await asyncio.wait({dialing}, timeout=HANG_UP_TIMEOUT_S)
        raise
    except (pymysql.Error, OSError) as error:
        thread.shutdown(wait=False)
        raise _failure(error, is_connecting=True) from error
    session = MySQLSession(connection, wire, thread, local_infile)
    try:
        await session.set_up(label, idle_timeout_s)
    except BaseException:
        await session.close()
        raise
    return session


class Line:
    """What is being dialed on another thread, and can be cut from this one at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wire: socket.socket | None = None
        self._is_cut = False

    def lead_through(self, wire: socket.socket) -> None:
        with self._lock:
            self._wire = wire
            if self._is_cut:
                _shut(wire)

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            if self._wire is not None:
                _shut(self._wire)


def _dial(
    address: Address, local_infile: bool, bulk: bool, line: Line
) -> tuple[LoadingConnection, socket.socket]:
    """The connection, and another handle on its socket, by which it can be cut from another thread."""
    if address.unix_socket is not None:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(CONNECT_TIMEOUT_S)
        raw.connect(address.unix_socket)
    else:
        raw = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
        keep_alive(raw)
        expect_acknowledgement(raw)
    wire = socket.socket(raw.family, raw.type, fileno=os.dup(raw.fileno()))
    line.lead_through(wire)
    try:
        connection = LoadingConnection(
            host=address.host,
            port=address.port,
            user=address.user,
            password=address.password,
            database=address.database,
            charset="utf8mb4",
            autocommit=True,
            local_infile=local_infile,
            bulk=bulk,
            # An UPDATE counts the rows that it found, also those that it left as they were.
            client_flag=CLIENT.FOUND_ROWS,
            sql_mode=SQL_MODE,
            defer_connect=True,
            read_timeout=CONNECT_TIMEOUT_S,
            write_timeout=CONNECT_TIMEOUT_S,
            **dict(address.options),
        )
        connection.connect(raw)
        connection.wait_without_limit()
    except BaseException:
        wire.close()
        raw.close()
        raise
    return connection, wire


class MySQLSession(SqlSession):
    """One connection, in autocommit between `begin` and `commit`."""

    def __init__(
        self,
        connection: LoadingConnection,
        wire: socket.socket,
        thread: ThreadPoolExecutor,
        local_infile: bool,
    ) -> None:
        self._connection = connection
        self._wire = wire
        self._thread = thread
        self._is_cut = False
        self._is_in_transaction = False
        self._is_merge_table_used = False
        self._wants_local_infile = local_infile
        self.loads_files = False
        """Whether rows may go by LOAD DATA LOCAL."""
        self._prepared: dict[str, int] = {}
        self.version = connection.get_server_info()
        self._insert_bytes = INSERT_BYTES
        self._max_packet_bytes = INSERT_BYTES
        self.session_id = connection.thread_id()

    async def set_up(self, label: str, idle_timeout_s: float) -> None:
        await self._call(self._set_up, label, idle_timeout_s)

    def _set_up(self, label: str, idle_timeout_s: float) -> None:
        # Read committed: moving rows out of the stage must not wait for writers that are still at it.
        self._execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE")
        self._execute(
            "SET SESSION time_zone = '+00:00', completion_type = 'NO_CHAIN', foreign_key_checks = 1"
        )
        self._limit_idleness(ceil(idle_timeout_s), is_owner=label.startswith(OWNER_LABEL_PREFIX))
        ((allowed, packet),) = self._fetch("SELECT @@local_infile, @@max_allowed_packet")
        self.loads_files = bool(allowed) and self._wants_local_infile
        self._max_packet_bytes = int(packet or INSERT_BYTES)
        self._insert_bytes = min(INSERT_BYTES, self._max_packet_bytes // 2)
        if label.startswith(OWNER_LABEL_PREFIX):
            self._hold_label(label)
        elif label.startswith(WRITER_LABEL_PREFIX):
            self._hold_writer_lock(label)

    def _limit_idleness(self, idle_timeout_s: int, *, is_owner: bool) -> None:
        """In a transaction it is `idle_timeout_s`, else longer; whatever the server has for others."""
        if is_mariadb(self.version):
            # The limit for transactions that have written, or have not, goes before that for both.
            self._execute(
                "SET SESSION wait_timeout = %s, idle_transaction_timeout = %s, "
                "idle_write_transaction_timeout = %s, idle_readonly_transaction_timeout = %s",
                (WAIT_TIMEOUT_S, idle_timeout_s, idle_timeout_s, idle_timeout_s),
            )
        else:
            # MySQL has one limit, in a transaction or not. An owner that loses its connection between epochs
            # makes another one.
            self._execute("SET SESSION wait_timeout = %s", (idle_timeout_s if is_owner else WAIT_TIMEOUT_S,))

    def _hold_label(self, label: str) -> None:
        """Others find this connection by its label, and end it by that alone: without it there is none.

        Nobody but this very owner can have the label: on a connection that was lost, and that the server may
        have to roll back for longer than it is waited for here.
        """
        if self._fetch("SELECT GET_LOCK(%s, 0)", (label,)) != [(1,)]:
            ((lost,),) = self._fetch("SELECT IS_USED_LOCK(%s)", (label,))
            if isinstance(lost, int):
                with contextlib.suppress(pymysql.Error):  # it may end by itself meanwhile
                    self._execute(f"KILL {lost}")
            if self._fetch("SELECT GET_LOCK(%s, %s)", (label, LABEL_LOCK_TIMEOUT_S)) != [(1,)]:
                raise NotEndedYet(
                    f"connection {lost!r} still has this owner's label, {label}, though it was given up: the "
                    f"server has not noticed, or is rolling back what was on it"
                )

    def _hold_writer_lock(self, label: str) -> None:
        """Writers are many: each takes one of the sink's locks. One that gets none is found by nobody."""
        first = secrets.randbelow(WRITER_LOCKS)
        for number in range(first, first + MAX_WRITER_LOCK_TRIES):
            if self._fetch("SELECT GET_LOCK(%s, 0)", (writer_lock(label, number % WRITER_LOCKS),)) == [(1,)]:
                return

    # The contract

    async def execute(self, statement: str, parameters: Sequence[SqlValue] = ()) -> int:
        return await self._call(self._execute, statement, parameters)

    async def fetch(self, statement: str, parameters: Sequence[SqlValue] = ()) -> list[tuple[SqlValue, ...]]:
        return await self._call(self._fetch, statement, parameters)

    def form(self, table: TableName, columns: tuple[Column, ...], stamp: str | None) -> Form:
        if self._connection.has_bulk:
            return BulkForm(table, columns, stamp, min(BULK_BYTES, self._max_packet_bytes // 2))
        if self.loads_files:
            return LinesForm(table, columns, stamp)
        return TuplesForm(table, columns, stamp, self._insert_bytes)

    async def load(self, form: Form, parts: Iterable[Part]) -> Loaded:
        return await self._call(self._load, form, parts)

    async def begin(self) -> None:
        await self._call(self._begin)

    async def commit(self) -> None:
        await self._call(self._end, "COMMIT")

    async def rollback(self) -> None:
        await self._call(self._end, "ROLLBACK")

    async def set_lock_timeout(self, seconds: float) -> None:
        timeout_s = max(MIN_LOCK_TIMEOUT_S, ceil(seconds))
        await self.execute(
            "SET SESSION innodb_lock_wait_timeout = %s, lock_wait_timeout = %s", (timeout_s, timeout_s)
        )

    async def close(self) -> None:
        # Said goodbye to or not, the server rolls back; a server that does not answer is not waited for.
        self._is_cut = True
        _shut(self._wire)
        self._wire.close()
        self._thread.submit(_close, self._connection)
        self._thread.shutdown(wait=False)

    # On the thread

    def _execute(self, statement: str, parameters: Sequence[SqlValue] = ()) -> int:
        with self._connection.cursor() as cursor:
            # Always with parameters: names are quoted for statements in which a percent sign is doubled.
            return int(cursor.execute(statement, tuple(parameters)))

    def _fetch(self, statement: str, parameters: Sequence[SqlValue] = ()) -> list[tuple[SqlValue, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, tuple(parameters))
            return list(cursor.fetchall())

    def _begin(self) -> None:
        if self._is_merge_table_used:
            self._execute(f"TRUNCATE TABLE {quote(MERGE_TABLE)}")
            self._is_merge_table_used = False
        self._execute("START TRANSACTION")
        self._is_in_transaction = True

    def _end(self, how: str) -> None:
        self._is_in_transaction = False
        self._execute(how)

    def _load(self, form: Form, parts: Iterable[Part]) -> Loaded:
        assert isinstance(form, BulkForm | LinesForm | TuplesForm)
        self._is_merge_table_used = self._is_merge_table_used or form.table.name == MERGE_TABLE
        with reading_later(self._wire):
            return self._send(form, parts) if self._is_in_transaction else self._send_alone(form, parts)

    def _send_alone(self, form: BulkForm | LinesForm | TuplesForm, parts: Iterable[Part]) -> Loaded:
        """In a transaction of its own: the server takes good rows and skips bad ones."""
        self._begin()
        try:
            loaded = self._send(form, parts)
        except BaseException:
            with contextlib.suppress(pymysql.Error, OSError):
                self._end("ROLLBACK")
            raise
        self._end("COMMIT")
        return loaded

    def _send(self, form: BulkForm | LinesForm | TuplesForm, parts: Iterable[Part]) -> Loaded:
        sent = Sent(parts)
        statement = form.statement
        if isinstance(form, LinesForm):
            taken = self._connection.load(statement.encode(), sent)
            self._refuse_warnings(taken, sent.rows)
            return Loaded(sent.rows, sent.bytes, taken)
        taken = 0
        for content in sent:
            self._refuse_oversize(len(statement.encode()) + len(content))
            if isinstance(form, BulkForm):
                taken += self._execute_bulk(statement, content)
            else:
                taken += int(self._connection.query(statement.encode() + content))
            self._refuse_warnings(taken, sent.rows)
        return Loaded(sent.rows, sent.bytes, taken)

    def _refuse_oversize(self, packet_bytes: int) -> None:
        """The server would hang up, which looks as if it were worth another try."""
        if packet_bytes + PACKET_OVERHEAD_BYTES > self._max_packet_bytes:
            raise SqlFailure(
                f"a row takes {packet_bytes} bytes, and the server's max_allowed_packet is "
                f"{self._max_packet_bytes}: raise that, or leave the row out",
                Cause.ROW,
            )

    def _execute_bulk(self, statement: str, content: memoryview) -> int:
        try:
            return self._connection.execute_bulk(self._prepare(statement), content)
        except pymysql.Error as error:
            if error.args[:1] != (NEED_REPREPARE,):
                raise
            # The table changes faster than the server prepares again by itself. Nothing was written.
            self._connection.close_statement(self._prepared.pop(statement))
            return self._connection.execute_bulk(self._prepare(statement), content)

    def _prepare(self, statement: str) -> int:
        """The server's number for it; prepared once, for as long as the connection lasts."""
        if (known := self._prepared.get(statement)) is not None:
            return known
        if len(self._prepared) == MAX_PREPARED:
            self._connection.close_statement(self._prepared.pop(next(iter(self._prepared))))
        number = self._prepared[statement] = self._connection.prepare(statement.encode())
        return number

    def _refuse_warnings(self, taken: int, sent: int) -> None:
        """A warning means that a row was changed or left out: to take that for success would lose rows."""
        # Their number comes with the answer: mostly there is nothing to ask for.
        warnings = self._connection.show_warnings() if self._connection.warning_count else ()
        if warnings:
            _, code, message = warnings[0]
            more = f", and {len(warnings) - 1} more" if len(warnings) > 1 else ""
            raise SqlFailure(
                f"{message} (error {code}{more}); {taken} of {sent} rows were taken", _cause_of_row(code)
            )

    # Threads

    async def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs the work on the connection's thread. A cancellation cuts the connection, and does not wait."""
        if self._is_cut:
            raise SqlFailure("the connection was cut by a cancellation", Cause.LOST)
        future = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        try:
            return await asyncio.shield(future)
        except (pymysql.Error, OSError) as error:
            raise _failure(error) from error
        except asyncio.CancelledError:
            self._is_cut = True
            _shut(self._wire)
            await asyncio.wait({future}, timeout=HANG_UP_TIMEOUT_S)
            if future.done() and not future.cancelled():
                future.exception()  # it is expected, and seen
            raise


class Sent:
    """Parts on their way, counted as they go."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = parts
        self.rows = 0
        self.bytes = 0

    def __iter__(self) -> Iterator[memoryview]:
        for part in self._parts:
            self.rows += part.rows
            self.bytes += len(part.content)
            yield part.content


def is_mariadb(version: str) -> bool:
    return "mariadb" in version.lower()


def writer_lock(label: str, number: int) -> str:
    """The name of one of the locks that the writers of a sink hold; `label` is, or begins, theirs."""
    kind, sink, *_ = label.split(":")
    return f"{kind}:{sink}:{number}"


def _cause_of_row(code: int) -> Cause:
    cause = CAUSES.get(code, Cause.ROW)
    return cause if cause in (Cause.LOCKED, Cause.CONFLICT, Cause.REFERENCE) else Cause.ROW


def _shut(wire: socket.socket) -> None:
    """Whoever waits at the socket, on any thread, is woken."""
    with contextlib.suppress(OSError):
        wire.shutdown(socket.SHUT_RDWR)


def _close(connection: LoadingConnection) -> None:
    with contextlib.suppress(pymysql.Error, OSError):
        connection.close()


def _hang_up_late(dialing: "asyncio.Future[tuple[LoadingConnection, socket.socket]]") -> None:
    if not dialing.cancelled() and dialing.exception() is None:
        connection, wire = dialing.result()
        wire.close()
        threading.Thread(target=_close, args=(connection,), daemon=True).start()


def _failure(error: Exception, *, is_connecting: bool = False) -> SqlFailure:
    code = error.args[0] if error.args and isinstance(error.args[0], int) else None
    if isinstance(error, OSError):
        return SqlFailure(f"the connection was lost: {error}", Cause.LOST)
    text = str(error.args[1]) if len(error.args) > 1 else str(error)
    unknown = Cause.LOST if is_connecting else Cause.OTHER
    cause = (
        unknown
        if code is None
        else CAUSES.get(code, unknown if code >= 2000 and code < 3000 else Cause.OTHER)
    )
    return SqlFailure(f"{text or 'the connection was lost'} (error {code})", cause)
