"""What the tests of SQL sinks share: the table `kept` of a real server, and what differs by database."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar

import psycopg
import pytest
from mariadb_server import MariaDBServer

from semel.sinks.mysql import MySQLSink
from semel.sinks.postgres import PostgresSink
from semel.sinks.receipts import Origin, Receipt
from semel.sinks.sql.sink import SqlSink
from semel.testing.postgres_server import PostgresServer

STRATEGIES = ("direct", "staged")
COLUMNS = "id bigint PRIMARY KEY, value text"
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
    # Who waits for somebody else's lock.
    WAITING: ClassVar[str]

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

    @abstractmethod
    def connect(self) -> Any:
        """Somebody else's connection, in a transaction."""

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

    async def until_somebody_waits(self) -> None:
        while self.query(self.WAITING) == [(0,)]:  # noqa: ASYNC110 - the server does not call
            await asyncio.sleep(0.2)  # InnoDB shows an old picture to who looks more often

    def count_by_trigger(self) -> None:
        """Another table counts the rows."""
        self.query("CREATE TABLE counted (number int)")
        self.query("INSERT INTO counted VALUES (0)")
        self._make_trigger("UPDATE counted SET number = number + 1;")

    @abstractmethod
    def _make_trigger(self, update: str) -> None: ...


class PostgresTable(Table):
    server: PostgresServer

    SERVER = "postgres"
    SINK = PostgresSink
    WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"

    def address(self, user: str | None = None, port: int | None = None) -> str:
        return self.server.dsn_of(user or "postgres", port)

    def connect(self) -> Any:
        return psycopg.connect(self.server.dsn)

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
    WAITING = "SELECT count(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"

    def address(self, user: str | None = None, port: int | None = None) -> str:
        return self.server.url(user, port=port)

    def connect(self) -> Any:
        connection = self.server.connect()
        connection.begin()
        return connection

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
