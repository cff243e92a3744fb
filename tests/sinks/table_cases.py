"""What the tests of SQL sinks share: the table `kept` of a real server, and what differs by database."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, ClassVar

import psycopg
import pymysql
import pytest
from mariadb_server import MariaDBServer
from mysql_proxy import MySQLProxy
from postgres_proxy import PostgresProxy
from stopped import freeze

from semel.sinks.mysql import MySQLDialect, MySQLSink
from semel.sinks.mysql.session import WRITER_LOCKS, MySQLSession, writer_lock
from semel.sinks.mysql.sink import parse_url
from semel.sinks.postgres import PostgresDialect, PostgresSink
from semel.sinks.postgres.session import PostgresSession, another_handle
from semel.sinks.receipts import Origin, Receipt
from semel.sinks.sql.dialect import Dialect, SqlSession
from semel.sinks.sql.sink import SqlSink
from semel.testing.postgres_server import PostgresServer

WAITING_TIMEOUT_S = 30
STRATEGIES = ("direct", "staged")
COLUMNS = "id bigint PRIMARY KEY, value text"
# What a user has to be granted, by what the sink is told to do.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "append": ("INSERT", {}),
    "upsert": ("SELECT, INSERT, UPDATE", {"mode": "upsert", "keys": ["id"]}),
    "delete": ("SELECT, DELETE", {"mode": "delete", "keys": ["id"]}),
}
Row = dict[str, Any]


def rows(*ids: int, value: str = "v") -> list[Row]:
    return [{"id": number, "value": value} for number in ids]


async def write_all(sink: SqlSink, epoch: int, given: list[Row], **origin: str) -> list[Receipt]:
    plan = await sink.begin(epoch, Origin(**origin))
    assert plan is not None
    writer = plan.writer(0)
    await writer.write(given)
    return [await writer.finish()]


async def run_epoch(sink: SqlSink, epoch: int, given: list[Row], **origin: str) -> None:
    await sink.commit(epoch, await write_all(sink, epoch, given, **origin))


class Table(ABC):
    """The table `kept` of a real server."""

    SERVER: ClassVar[str]  # the fixture
    SINK: ClassVar[Callable[..., SqlSink]]
    PROXY: ClassVar[type[PostgresProxy | MySQLProxy]]
    NOWHERE: ClassVar[str]  # an address where nobody listens, with a password

    # What the server says of a key that is there already, a column that is missing, a value that does not fit
    # and a transaction that paused for too long; and what somebody gets whose connection it has ended.
    DUPLICATE: ClassVar[str]
    NO_COLUMN: ClassVar[str]
    TOO_LONG: ClassVar[str]
    PAUSED: ClassVar[str]
    ERROR: ClassVar[type[Exception]]

    SHORTEST_PAUSE_S: ClassVar[float]
    TAKES_NULS: ClassVar[bool]  # in text
    LOSES_STAGES: ClassVar[bool]  # in a crash
    LOCK_TABLE: ClassVar[str]
    WAITING: ClassVar[str]  # asks how many wait for somebody else's lock
    LOOK_EVERY_S: ClassVar[float]

    def __init__(self, server: Any, columns: str = COLUMNS) -> None:
        self.server = server
        server.query(f"CREATE TABLE kept ({columns})")

    def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self.server.query(statement, *parameters)  # type: ignore[no-any-return]

    def kept(self) -> list[tuple[Any, ...]]:
        return self.query("SELECT * FROM kept ORDER BY id")

    def ids(self) -> list[int]:
        return [row[0] for row in self.query("SELECT id FROM kept ORDER BY id")]

    @abstractmethod
    def address(self, user: str | None = None, port: int | None = None) -> str:
        """What a sink connects to."""

    def sink(self, **options: Any) -> SqlSink:
        return self.SINK(options.pop("address", self.address()), "kept", **options)

    @asynccontextmanager
    async def opened(self, sink_id: str = "s", **options: Any) -> AsyncIterator[SqlSink]:
        async with self.sink(**options) as sink:
            await sink.open(sink_id)
            yield sink

    @asynccontextmanager
    async def shared(self, **options: Any) -> AsyncIterator[SqlSink]:
        """Opened, and for writers elsewhere, too."""
        async with self.sink(**options) as sink:
            sink.share()
            await sink.open("s")
            yield sink

    @asynccontextmanager
    async def proxied(self, **options: Any) -> AsyncIterator[tuple[PostgresProxy | MySQLProxy, SqlSink]]:
        """Opened through a proxy that may lose a COMMIT."""
        async with (
            self.PROXY(self.server.port) as proxy,
            self.opened(address=self.address(port=proxy.port), **options) as sink,
        ):
            yield proxy, sink

    @abstractmethod
    def dialect(self) -> Dialect: ...

    def stages(self) -> list[str]:
        """The staging tables of all sinks."""
        named = "SELECT table_name FROM information_schema.tables WHERE LEFT(table_name, 11) = 'semel_stage'"
        return [name for (name,) in self.query(named)]

    def count_by_trigger(self) -> None:
        """Another table counts the rows."""
        self.query("CREATE TABLE counted (number int)")
        self.query("INSERT INTO counted VALUES (0)")
        self._make_trigger("UPDATE counted SET number = number + 1;")

    @abstractmethod
    def _make_trigger(self, update: str) -> None: ...

    # Others who use the server

    @abstractmethod
    def connect(self) -> Any:
        """Somebody else's connection, in a transaction."""

    @contextmanager
    def stubborn_transaction(self) -> Iterator[Any]:
        """Somebody else's, which the server does not choose to end a deadlock."""
        connection = self.connect()
        try:
            cursor = connection.cursor()
            self._outweigh(cursor)
            yield cursor
        finally:
            connection.close()

    @abstractmethod
    def _outweigh(self, cursor: Any) -> None: ...

    @abstractmethod
    def hanging_writer(self, sink: SqlSink) -> AbstractContextManager[Any]:
        """A writer of the sink's that is in the middle of a load, and stays there."""

    @contextmanager
    def locked_row(self, number: int) -> Iterator[None]:
        """Somebody else inserts a row of that key, and takes its time."""
        connection = self.connect()
        try:
            connection.cursor().execute("INSERT INTO kept VALUES (%s, 'mine')", (number,))
            yield
            connection.rollback()
        finally:
            connection.close()

    @contextmanager
    def locked_table(self, name: str) -> Iterator[None]:
        """Somebody else keeps everybody out of it."""
        connection = self.connect()
        try:
            connection.cursor().execute(self.LOCK_TABLE.format(name))
            yield
        finally:
            connection.close()

    async def until_somebody_waits(self, number: int = 1) -> None:
        """For another's lock, or so many of them do."""
        async with asyncio.timeout(WAITING_TIMEOUT_S):
            while self.query(self.WAITING)[0][0] < number:  # noqa: ASYNC110 - the server does not call
                await asyncio.sleep(self.LOOK_EVERY_S)

    # How long the server lets others be idle

    @abstractmethod
    def ending_idle_sessions(self) -> AbstractContextManager[None]:
        """The server ends connections, of those that begin from here on, when they are idle for a second."""

    async def until_it_ends_another(self) -> None:
        """Until the server has ended somebody else's connection, which is idle from now on."""
        connection = self.connect()
        try:
            waiting = asyncio.to_thread(select.select, [self._fileno(connection)], [], [], WAITING_TIMEOUT_S)
            assert (await waiting)[0], "the server ends nobody's connection"
        finally:
            connection.close()

    @abstractmethod
    def _fileno(self, connection: Any) -> int: ...

    # The sink's connections, and the server's processes

    @abstractmethod
    def has_owner(self, sink: SqlSink) -> bool:
        """Whether the server knows the connection of the sink's owner."""

    @abstractmethod
    def end_owner(self, sink: SqlSink) -> None: ...

    @abstractmethod
    def end_writers(self, sink: SqlSink) -> None: ...

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The server answers nobody."""
        pids = self._pids()
        for pid in pids:
            with suppress(ProcessLookupError):  # the process of a writer that was just leaving
                freeze(pid)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @abstractmethod
    def wire(self, session: SqlSession) -> socket.socket:
        """A handle on the socket of a sink's connection."""

    @abstractmethod
    def _pids(self) -> list[int]:
        """Of the processes that answer."""


class PostgresTable(Table):
    server: PostgresServer

    SERVER = "postgres"
    SINK = PostgresSink
    PROXY = PostgresProxy
    NOWHERE = "host=127.0.0.1 port=1 user=u password=secret-word dbname=d"
    DUPLICATE = r"\(id\)=\(1\) already exists.*kept_pkey"
    NO_COLUMN = 'column "value"'
    TOO_LONG = "too long"
    PAUSED = "idle-in-transaction"
    ERROR = psycopg.OperationalError
    SHORTEST_PAUSE_S = 0.2
    TAKES_NULS = False
    LOSES_STAGES = True
    LOCK_TABLE = "LOCK TABLE {} IN ACCESS EXCLUSIVE MODE"
    WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    LOOK_EVERY_S = 0.01  # who waits looks for a deadlock once, after 0.2 s: it has to be there by then

    def address(self, user: str | None = None, port: int | None = None) -> str:
        return self.server.dsn_of(user or "postgres", port)

    def connect(self) -> Any:
        return psycopg.connect(self.server.dsn)

    def dialect(self) -> Dialect:
        return PostgresDialect(self.server.dsn)

    def _outweigh(self, cursor: Any) -> None:
        cursor.execute("SET deadlock_timeout = '60s'")  # who finds the deadlock gives way

    @contextmanager
    def ending_idle_sessions(self) -> Iterator[None]:
        self.query("ALTER ROLE postgres SET idle_session_timeout = '1s'")
        try:
            yield
        finally:
            self.query("ALTER ROLE postgres RESET idle_session_timeout")

    def _fileno(self, connection: Any) -> int:
        fileno: int = connection.fileno()
        return fileno

    @contextmanager
    def hanging_writer(self, sink: SqlSink) -> Iterator[Any]:
        label = f"{sink._writers_prefix}gone:0"
        connection = psycopg.connect(self.server.dsn, application_name=label)
        try:
            cursor = connection.cursor()
            cursor.execute(f"INSERT INTO {sink._stage.rows.name} (id) VALUES (99)")
            yield cursor
        finally:
            connection.close()

    def has_owner(self, sink: SqlSink) -> bool:
        named = "SELECT 1 FROM pg_stat_activity WHERE starts_with(application_name, %s)"
        return bool(self.query(named, sink._connection.label))

    def end_owner(self, sink: SqlSink) -> None:
        self._end(sink._connection.label)

    def end_writers(self, sink: SqlSink) -> None:
        self._end(sink._writers_prefix)

    def _end(self, prefix: str) -> None:
        ended = self.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE starts_with(application_name, %s)",
            prefix,
        )
        assert ended, "there was no connection to end"

    def wire(self, session: SqlSession) -> socket.socket:
        assert isinstance(session, PostgresSession)
        return another_handle(session._connection.fileno())

    def _pids(self) -> list[int]:
        return self.server.processes()

    def _make_trigger(self, update: str) -> None:
        self.query(
            f"CREATE FUNCTION count_row() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN {update} RETURN NEW; END $$"
        )
        self.query("CREATE TRIGGER counts AFTER INSERT ON kept FOR EACH ROW EXECUTE FUNCTION count_row()")


class MariaDBTable(Table):
    server: MariaDBServer

    SERVER = "mariadb"
    SINK = MySQLSink
    PROXY = MySQLProxy
    NOWHERE = "mysql://u:secret-word@127.0.0.1:1/d"
    DUPLICATE = "Duplicate entry '1' for key 'PRIMARY'"
    NO_COLUMN = "Unknown column 'value'"
    TOO_LONG = "column 'value' at row 1"
    PAUSED = r"timed out in open transaction|gone away|[Ll]ost"
    ERROR = pymysql.Error
    SHORTEST_PAUSE_S = 1
    TAKES_NULS = True
    LOSES_STAGES = False
    LOCK_TABLE = "LOCK TABLES {} WRITE"
    WAITING = "SELECT count(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"
    LOOK_EVERY_S = 0.2  # that table is a picture that stays the same as long as someone looks more often

    def address(self, user: str | None = None, port: int | None = None) -> str:
        return self.server.url(user, port=port)

    def connect(self) -> Any:
        connection = self.server.connect()
        connection.begin()
        return connection

    def dialect(self) -> Dialect:
        return MySQLDialect(parse_url(self.server.url()))

    def _outweigh(self, cursor: Any) -> None:
        self.query("CREATE TABLE ballast (id int)")
        # The server gives up the transaction that has changed less.
        cursor.execute("INSERT INTO ballast SELECT seq FROM seq_1_to_5000")

    # It has one limit for those that have begun a transaction, and have written or not, and one for others.
    IDLE_LIMITS = ("wait_timeout", "idle_write_transaction_timeout", "idle_readonly_transaction_timeout")

    @contextmanager
    def ending_idle_sessions(self) -> Iterator[None]:
        (before,) = self.query(f"SELECT {', '.join(f'@@GLOBAL.{name}' for name in self.IDLE_LIMITS)}")
        try:
            for name in self.IDLE_LIMITS:
                self.query(f"SET GLOBAL {name} = 1")
            yield
        finally:
            for name, value in zip(self.IDLE_LIMITS, before, strict=True):
                self.query(f"SET GLOBAL {name} = {value}")

    def _fileno(self, connection: Any) -> int:
        fileno: int = connection._sock.fileno()
        return fileno

    @contextmanager
    def hanging_writer(self, sink: SqlSink) -> Iterator[Any]:
        connection = self.connect()
        try:
            cursor = connection.cursor()
            cursor.execute("SELECT GET_LOCK(%s, 0)", (writer_lock(f"{sink._writers_prefix}gone:0", 7),))
            cursor.execute(f"INSERT INTO {sink._stage.rows.name} (id) VALUES (99)")
            yield cursor
        finally:
            connection.close()

    def has_owner(self, sink: SqlSink) -> bool:
        return self._holders([sink._connection.label]) != []

    def end_owner(self, sink: SqlSink) -> None:
        self._end([sink._connection.label])

    def end_writers(self, sink: SqlSink) -> None:
        self._end([writer_lock(sink._writers_prefix, number) for number in range(WRITER_LOCKS)])

    def _holders(self, locks: list[str]) -> list[int]:
        """The sessions that hold them; every connection of a sink's holds one."""
        (found,) = self.query(f"SELECT {', '.join(['IS_USED_LOCK(%s)'] * len(locks))}", *locks)
        return [session_id for session_id in found if session_id is not None]

    def _end(self, locks: list[str]) -> None:
        holders = self._holders(locks)
        assert holders, "there was no connection to end"
        for session_id in holders:
            self.query(f"KILL {session_id}")

    def wire(self, session: SqlSession) -> socket.socket:
        assert isinstance(session, MySQLSession)
        return another_handle(session._wire.fileno())

    def _pids(self) -> list[int]:
        return [self.server.pid]

    def _make_trigger(self, update: str) -> None:
        self.query(f"CREATE TRIGGER counts AFTER INSERT ON kept FOR EACH ROW {update}")


KINDS: tuple[type[Table], ...] = (PostgresTable, MariaDBTable)
MakeTable = Callable[..., Table]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.SERVER)
def make_table(request: pytest.FixtureRequest) -> MakeTable:
    """Makes the table, of the columns that it is given, in PostgreSQL, then in MariaDB."""

    def make(columns: str = COLUMNS) -> Table:
        kind: type[Table] = request.param
        return kind(request.getfixturevalue(kind.SERVER), columns)

    return make


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    return make_table()
