"""The SQL sinks against a bare load of the same rows and what else there is, on servers of their own.

    .venv/bin/python bench/sinks_sql.py                            PostgreSQL and MariaDB, about two minutes
    .venv/bin/python bench/sinks_sql.py --database postgres --shape wide --rounds 9

One epoch is 100,000 events of about 200 bytes. The bare load is the same load (binary COPY or array binding,
straight from Arrow) of the same rows in one transaction, without marker, fence or receipts: what the sink
adds to it is the price of exactly-once. Contenders take turns, round by round, so that all meet the same
noise; figures are medians, and the least of each, which a busy machine disturbed least. What Spark's own JDBC
writer does is in `bench/spark_sql.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import psycopg
import pyarrow as pa
from adbc_driver_postgresql import dbapi as adbc
from peak_memory import forget_peak, peak

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sinks"))

from mariadb_server import MariaDBServer, find_server

from semel.sinks.blocking import BlockingWriter
from semel.sinks.mysql import MySQLDialect, MySQLSink
from semel.sinks.mysql.sink import parse_url
from semel.sinks.postgres import PostgresDialect, PostgresSink
from semel.sinks.receipts import Receipt
from semel.sinks.settings import SinkSettings
from semel.sinks.sink import WriterPlan
from semel.sinks.sql.columns import Column
from semel.sinks.sql.dialect import Dialect, SqlSession
from semel.sinks.sql.names import TableName
from semel.sinks.sql.sink import SqlSink
from semel.testing.postgres_server import PostgresServer, find_binaries

EVENTS: Final = 100_000
SMALL_EVENTS: Final = 1_000
# As Spark hands rows to Python, by default.
ROWS_A_BATCH: Final = 10_000
WRITERS: Final = 2
WARMUP_ROUNDS: Final = 2
BARE: Final = "bare_load"

# What a process of a writer has made.
_own_batches: dict[int, list[pa.RecordBatch]] = {}


def narrow_events(count: int) -> pa.Table:
    """A key, an amount, a time and a payload, as events of a stream have them."""
    chance = np.random.default_rng(1)
    payloads = [f"{number:08d}" * 19 for number in range(count)]
    return pa.table(
        {
            "id": pa.array(np.arange(count, dtype=np.int64)),
            "customer": pa.array([f"customer-{number % 9973}" for number in range(count)]),
            "amount": pa.array(chance.random(count)),
            "at": pa.array(np.arange(count) * 1_000 + 1_700_000_000_000_000, pa.timestamp("us", "UTC")),
            "payload": pa.array(payloads),
        }
    )


def wide_events(count: int) -> pa.Table:
    """Two dozen numbers."""
    chance = np.random.default_rng(1)
    columns = {f"n{index}": pa.array(chance.integers(0, 1 << 40, count)) for index in range(14)}
    return pa.table({**columns, **{f"f{index}": pa.array(chance.random(count)) for index in range(10)}})


SHAPES: Final = {"narrow": narrow_events, "wide": wide_events}
SMALL: Final = "small"


class Server(Protocol):
    def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]: ...


class Database:
    """A server, how to reach it, and the sinks that take part."""

    name: str
    server: Server
    address: str
    dialect: Dialect
    sinks: dict[str, dict[str, Any]]

    def make_sink(self, table: str, **options: Any) -> SqlSink:
        raise NotImplementedError

    def settle(self) -> None:
        """Writes out what earlier rounds left, so that no contender pays for another."""

    async def row_by_row(self, table: str, events: pa.Table) -> None:
        """The way that everybody knows: rows as Python objects, given to the driver's `executemany`."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Postgres(Database):
    name = "PostgreSQL"
    sinks: Final = {
        "direct": {},
        "staged": {"strategy": "staged"},
        "staged_2": {"strategy": "staged"},
    }

    def __init__(self) -> None:
        binaries = find_binaries()
        assert binaries is not None, "PostgreSQL is not installed"
        self.server: PostgresServer = PostgresServer(binaries)
        self.server.start()
        self.address = self.server.dsn
        self.uri = f"postgresql://?{'&'.join(self.address.split())}"
        self.dialect = PostgresDialect(self.address)

    def make_sink(self, table: str, **options: Any) -> SqlSink:
        return PostgresSink(self.address, table, **options)

    def settle(self) -> None:
        self.server.query("CHECKPOINT")

    async def row_by_row(self, table: str, events: pa.Table) -> None:
        rows = list(zip(*(column.to_pylist() for column in events.columns), strict=True))
        marks = ", ".join(["%s"] * events.num_columns)
        connection = await psycopg.AsyncConnection.connect(self.address)
        async with connection, connection.cursor() as cursor:
            await cursor.executemany(f"INSERT INTO {table} VALUES ({marks})".encode(), rows)

    def close(self) -> None:
        self.server.close()


class MariaDB(Database):
    name = "MariaDB"
    sinks: Final = {
        "direct": {},
        "direct_load_data": {"bulk": False},
        "direct_insert": {"bulk": False, "local_infile": False},
        "staged": {"strategy": "staged"},
        "staged_2": {"strategy": "staged"},
    }

    def __init__(self) -> None:
        binary = find_server()
        assert binary is not None, "MariaDB is not installed"
        self.server: MariaDBServer = MariaDBServer(binary)
        self.server.start()
        self.server.empty()
        self.address = self.server.url()
        self.dialect = MySQLDialect(parse_url(self.address))

    def make_sink(self, table: str, **options: Any) -> SqlSink:
        return MySQLSink(self.address, table, **options)

    async def row_by_row(self, table: str, events: pa.Table) -> None:
        await asyncio.to_thread(self._execute_many, table, events)

    def _execute_many(self, table: str, events: pa.Table) -> None:
        rows = list(zip(*(column.to_pylist() for column in events.columns), strict=True))
        marks = ", ".join(["%s"] * events.num_columns)
        connection = self.server.connect()
        connection.autocommit(False)
        with connection.cursor() as cursor:
            cursor.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        connection.commit()
        connection.close()

    def close(self) -> None:
        self.server.close()


class Bench:
    """One table for each contender, and what was measured."""

    def __init__(self, database: Database, title: str, count: int, shape: str) -> None:
        self.database = database
        self.title = title
        self.shape = shape
        events = self.events = SHAPES[shape](count)
        self.batches = events.to_batches(max_chunksize=ROWS_A_BATCH)
        self.columns = tuple(
            Column(field.name, field.name, database.dialect.type_for(field.type)) for field in events.schema
        )
        self.samples: dict[str, list[float]] = {}
        self.epochs: dict[str, int] = {}

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def make_table(self, name: str) -> None:
        quote = self.database.dialect.quote
        columns = ", ".join(f"{quote(column.name)} {column.type_name}" for column in self.columns)
        self.database.server.query(f"DROP TABLE IF EXISTS {name}")
        self.database.server.query(f"CREATE TABLE {name} ({columns})")

    async def bare_load(self, session: SqlSession) -> None:
        started = time.perf_counter()
        await session.begin()
        form = session.form(TableName(None, BARE), self.columns, None)
        await session.load(form, form.parts(self.events))
        committing = time.perf_counter()
        await session.commit()
        self.add(BARE, time.perf_counter() - started)
        self.add(f"{BARE} commit", time.perf_counter() - committing)

    async def adbc_ingest(self, connection: adbc.Connection) -> None:
        """Arrow's own driver, for a second opinion on what a load can be."""
        started = time.perf_counter()
        with connection.cursor() as cursor:
            cursor.adbc_ingest("adbc", self.events, mode="append")
        connection.commit()
        self.add("adbc", time.perf_counter() - started)

    async def row_by_row(self) -> None:
        """With a tenth of the events, and ten times the time: it is slow."""
        events = self.events.slice(0, self.events.num_rows // 10)
        started = time.perf_counter()
        await self.database.row_by_row("executemany", events)
        self.add("executemany", (time.perf_counter() - started) * 10)

    async def epoch(
        self, sink: SqlSink, name: str, write: Callable[[WriterPlan], Awaitable[list[Receipt]]]
    ) -> None:
        epoch = self.epochs.get(name, 0)
        started = time.perf_counter()
        plan = await sink.begin(epoch)
        begun = time.perf_counter()
        assert plan is not None
        receipts = await write(plan)
        written = time.perf_counter()
        await sink.commit(epoch, receipts)
        committed = time.perf_counter()
        self.epochs[name] = epoch + 1
        self.add(name, committed - started)
        self.add(f"{name} begin", begun - started)
        self.add(f"{name} commit", committed - written)

    async def abort(self, sink: SqlSink, name: str) -> None:
        plan = await sink.begin(self.epochs[name])
        assert plan is not None
        await self.write(plan)
        started = time.perf_counter()
        await sink.abort(self.epochs[name])
        self.add(f"{name} abort", time.perf_counter() - started)

    async def write(self, plan: WriterPlan) -> list[Receipt]:
        writer = plan.writer(0)
        for batch in self.batches:
            await writer.write(batch)
        return [await writer.finish()]


def write_part(plan: WriterPlan, task: int, count: int, shape: str) -> Receipt:
    """In a process of its own, with rows of its own, made once."""
    if count not in _own_batches:
        _own_batches[count] = SHAPES[shape](count).to_batches(max_chunksize=ROWS_A_BATCH)
    with BlockingWriter(plan.writer(task, tasks=WRITERS)) as writer:
        for batch in _own_batches[count]:
            writer.write(batch)
        return writer.finish()


async def measure(bench: Bench, rounds: int) -> None:
    database = bench.database
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(WRITERS, mp_context=get_context("spawn")) as pool:

        async def write_in_processes(plan: WriterPlan) -> list[Receipt]:
            count = bench.events.num_rows // WRITERS
            return await asyncio.gather(
                *(
                    loop.run_in_executor(pool, write_part, plan, task, count, bench.shape)
                    for task in range(WRITERS)
                )
            )

        tables = [BARE, "adbc", *database.sinks]
        for name in tables:
            bench.make_table(name)
        sinks = {name: database.make_sink(name, **options) for name, options in database.sinks.items()}
        for name, sink in sinks.items():
            await sink.open(f"{name} {bench.title}")
        # All connections stay open: a new one is slow at first.
        session = await database.dialect.connect("bench")
        contenders: list[Callable[[], Awaitable[None]]] = [partial(bench.bare_load, session)]
        if isinstance(database, Postgres):
            contenders.append(partial(bench.adbc_ingest, adbc.connect(database.uri)))
        for name, sink in sinks.items():
            write = write_in_processes if name == "staged_2" else bench.write
            contenders.append(partial(bench.epoch, sink, name, write))
        chance = random.Random(1)
        for number in range(rounds + WARMUP_ROUNDS):
            if number == WARMUP_ROUNDS:
                bench.samples.clear()
            for name in tables:
                database.server.query(f"TRUNCATE TABLE {name}")
            database.settle()
            # In another order each time: who comes next pays for what a contender leaves to be done.
            for contend in chance.sample(contenders, len(contenders)):
                await contend()
            for name in ("direct", "staged"):
                await bench.abort(sinks[name], name)
        await session.close()
        for name, sink in sinks.items():
            count = database.server.query(f"SELECT count(*) FROM {name}")
            assert count == [(bench.events.num_rows,)], (name, count)
            await sink.close()


def show(bench: Bench) -> None:
    count = bench.events.num_rows
    size_bytes = bench.events.nbytes // count
    print(f"\n{bench.database.name}, {bench.title}: {count:,} events of {size_bytes} bytes an epoch\n")
    heads = "events/s", "of the bare load", "least of least", "epoch, ms", "least, ms"
    print(f"| | {' | '.join((*heads, 'begin, ms', 'commit, ms', 'abort, ms'))} |")
    print("|---|---|---|---|---|---|---|---|---|")
    bare_s, bare_least_s = bench.median(BARE), min(bench.samples[BARE])
    for name in (BARE, "adbc", *bench.database.sinks, "executemany"):
        if name not in bench.samples:
            continue
        epoch_s = bench.median(name)
        ratio = statistics.median(map(lambda bare, own: bare / own, bench.samples[BARE], bench.samples[name]))
        least_s = min(bench.samples[name])
        cells = [name, f"{count / epoch_s:,.0f}", f"{ratio:.2f}", f"{bare_least_s / least_s:.2f}"]
        cells += [f"{epoch_s * 1e3:.1f}", f"{least_s * 1e3:.1f}"]
        for what in ("begin", "commit", "abort"):
            key = f"{name} {what}"
            cells.append(f"{bench.median(key) * 1e3:.2f}" if key in bench.samples else "")
        print(f"| {' | '.join(cells)} |")
    added_ms = (bench.median("direct") - bare_s) * 1e3
    least_ms = (min(bench.samples["direct"]) - bare_least_s) * 1e3
    print(f"\nexactly-once costs {added_ms:.1f} ms an epoch (direct; by the least of each {least_ms:.1f} ms)")


async def measure_memory(name: str, address: str) -> float:
    """Bytes for each event that a writer holds, the event's own included, at the peak of an epoch.

    For a process of its own: memory that was used before and given back does not count. The events are made
    of numpy's arrays, which leave none.
    """
    kind = PostgresSink if name == Postgres.name else MySQLSink
    async with kind(address, "memory", settings=SinkSettings(max_buffered=EVENTS)) as sink:
        await sink.open("memory")
        for epoch, count in enumerate((EVENTS // 100, EVENTS)):
            before = forget_peak()
            plan = await sink.begin(epoch)
            assert plan is not None
            writer = plan.writer(0)
            for batch in wide_events(count).to_batches(max_chunksize=ROWS_A_BATCH):
                await writer.write(batch)
            await sink.commit(epoch, [await writer.finish()])
    return (peak() - before) / EVENTS


def measure_memory_elsewhere(database: Database) -> float:
    command = [sys.executable, __file__, "--memory", database.name, database.address]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


async def run(database: Database, shapes: list[str], rounds: int) -> None:
    for shape in shapes:
        is_small = shape == SMALL
        bench = Bench(database, shape, SMALL_EVENTS if is_small else EVENTS, "narrow" if is_small else shape)
        await measure(bench, rounds * 3 if is_small else rounds)
        if shape == "narrow":
            bench.make_table("executemany")
            await bench.row_by_row()
        show(bench)
    wide = Bench(database, "memory", EVENTS, "wide")
    wide.make_table("memory")
    used_bytes = measure_memory_elsewhere(database)
    print(f"\na buffered event of {wide.events.nbytes // EVENTS} bytes takes {used_bytes:.0f} bytes in all")


DATABASES: Final = {"postgres": Postgres, "mariadb": MariaDB}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shape", nargs="+", choices=(*SHAPES, SMALL), default=[*SHAPES, SMALL])
    parser.add_argument("--database", nargs="+", choices=tuple(DATABASES), default=list(DATABASES))
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory is not None:
        print(asyncio.run(measure_memory(*options.memory)))
        return
    for name in options.database:
        database = DATABASES[name]()
        try:
            asyncio.run(run(database, options.shape, options.rounds))
        finally:
            database.close()


if __name__ == "__main__":
    main()
