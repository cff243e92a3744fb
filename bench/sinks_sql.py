"""The PostgreSQL sink against a bare COPY and psycopg's executemany, on a server of its own.

    .venv/bin/python bench/sinks_sql.py                  about a minute
    .venv/bin/python bench/sinks_sql.py --rounds 9 --shape wide

One epoch is 100,000 events of about 200 bytes. The bare COPY is the same load (binary, straight from Arrow)
of the same rows in one transaction, without marker, fence or receipts: what the sink adds to it is the price
of exactly-once. Contenders take turns, round by round, so that all meet the same noise; figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final

import numpy as np
import psycopg
import pyarrow as pa

from semel.sinks.blocking import BlockingWriter
from semel.sinks.postgres import PostgresDialect, PostgresSink
from semel.sinks.receipts import Receipt
from semel.sinks.sink import WriterPlan
from semel.sinks.sql.columns import Column
from semel.sinks.sql.names import TableName
from semel.testing.postgres_server import PostgresServer, find_binaries

EVENTS: Final = 100_000
SMALL_EVENTS: Final = 1_000
# As Spark hands rows to Python, by default.
ROWS_A_BATCH: Final = 10_000
WRITERS: Final = 2
WARMUP_ROUNDS: Final = 2

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


class Bench:
    """One server, one table for each contender, and what was measured."""

    def __init__(
        self, server: PostgresServer, title: str, count: int, make: Callable[[int], pa.Table]
    ) -> None:
        self.server = server
        self.title = title
        self.make = make
        events = self.events = make(count)
        self.batches = events.to_batches(max_chunksize=ROWS_A_BATCH)
        self.dialect = PostgresDialect(server.dsn)
        self.columns = tuple(
            Column(field.name, field.name, self.dialect.type_for(field.type)) for field in events.schema
        )
        self.samples: dict[str, list[float]] = {}
        self.epochs: dict[str, int] = {}

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def make_table(self, name: str) -> None:
        columns = ", ".join(f'"{column.name}" {column.type_name}' for column in self.columns)
        self.server.query(f'DROP TABLE IF EXISTS "{name}"')
        self.server.query(f'CREATE TABLE "{name}" ({columns})')

    async def bare_copy(self) -> None:
        session = await self.dialect.connect("bench")
        started = time.perf_counter()
        await session.begin()
        await session.load(TableName(None, "bare_copy"), self.columns, self.events, None)
        committing = time.perf_counter()
        await session.commit()
        self.add("bare_copy", time.perf_counter() - started)
        self.add("bare_copy commit", time.perf_counter() - committing)
        await session.close()

    async def executemany(self) -> None:
        rows = list(zip(*(column.to_pylist() for column in self.events.columns), strict=True))
        marks = ", ".join(["%s"] * len(self.columns))
        async with await psycopg.AsyncConnection.connect(self.server.dsn) as connection:
            started = time.perf_counter()
            async with connection.cursor() as cursor:
                await cursor.executemany(f"INSERT INTO executemany VALUES ({marks})".encode(), rows)
            await connection.commit()
            self.add("executemany", time.perf_counter() - started)

    async def epoch(
        self, sink: PostgresSink, name: str, write: Callable[[WriterPlan], Awaitable[list[Receipt]]]
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

    async def abort(self, sink: PostgresSink, name: str) -> None:
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


def write_part(plan: WriterPlan, task: int, count: int, make: Callable[[int], pa.Table]) -> Receipt:
    """In a process of its own, with rows of its own, made once."""
    if count not in _own_batches:
        _own_batches[count] = make(count).to_batches(max_chunksize=ROWS_A_BATCH)
    with BlockingWriter(plan.writer(task, tasks=WRITERS)) as writer:
        for batch in _own_batches[count]:
            writer.write(batch)
        return writer.finish()


async def measure(bench: Bench, rounds: int) -> None:
    names = ("bare_copy", "direct", "staged", "staged_2")
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(WRITERS, mp_context=get_context("spawn")) as pool:

        async def write_in_processes(plan: WriterPlan) -> list[Receipt]:
            count = bench.events.num_rows // WRITERS
            return await asyncio.gather(
                *(
                    loop.run_in_executor(pool, write_part, plan, task, count, bench.make)
                    for task in range(WRITERS)
                )
            )

        for name in names:
            bench.make_table(name)
        sinks = {
            name: PostgresSink(bench.server.dsn, name, strategy=name.split("_")[0]) for name in names[1:]
        }
        for name, sink in sinks.items():
            await sink.open(f"{name} {bench.title}")
        for number in range(rounds + WARMUP_ROUNDS):
            if number == WARMUP_ROUNDS:
                bench.samples.clear()
            for name in names:
                bench.server.query(f"TRUNCATE {name}")
            bench.server.query("CHECKPOINT")
            await bench.bare_copy()
            await bench.epoch(sinks["direct"], "direct", bench.write)
            await bench.epoch(sinks["staged"], "staged", bench.write)
            await bench.epoch(sinks["staged_2"], "staged_2", write_in_processes)
            for name in ("direct", "staged"):
                await bench.abort(sinks[name], name)
        for name, sink in sinks.items():
            count = bench.server.query(f"SELECT count(*) FROM {name}")
            assert count == [(bench.events.num_rows,)], (name, count)
            await sink.close()


async def measure_executemany(bench: Bench) -> None:
    bench.make_table("executemany")
    await bench.executemany()


def show(bench: Bench) -> None:
    count = bench.events.num_rows
    print(f"\n{bench.title}: {count:,} events of {bench.events.nbytes // count} bytes an epoch (medians)\n")
    print(" " * 12 + "events/s".rjust(10) + "of COPY".rjust(9) + "epoch ms".rjust(10), end="")
    print("begin ms".rjust(11) + "commit ms".rjust(11) + "abort ms".rjust(11))
    bare_s = bench.median("bare_copy")
    for name in ("bare_copy", "direct", "staged", "staged_2", "executemany"):
        if name not in bench.samples:
            continue
        epoch_s = bench.median(name)
        cells = [
            f"{name:12}",
            f"{count / epoch_s:10,.0f}",
            f"{bare_s / epoch_s:9.2f}",
            f"{epoch_s * 1e3:10.1f}",
        ]
        for what in ("begin", "commit", "abort"):
            key = f"{name} {what}"
            cells.append(f"{bench.median(key) * 1e3:11.2f}" if key in bench.samples else "-".rjust(11))
        print("".join(cells))
    added_ms = (bench.median("direct") - bare_s) * 1e3
    print(f"\nexactly-once costs {added_ms:.1f} ms an epoch (direct, against the bare COPY)")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shape", choices=("narrow", "wide", "both"), default="both")
    options = parser.parse_args()
    binaries = find_binaries()
    assert binaries is not None, "PostgreSQL is not installed"
    server = PostgresServer(binaries)
    try:
        server.start()
        for shape, make in (("narrow", narrow_events), ("wide", wide_events)):
            if options.shape not in (shape, "both"):
                continue
            bench = Bench(server, shape, EVENTS, make)
            await measure(bench, options.rounds)
            if shape == "narrow":
                await measure_executemany(bench)
            show(bench)
        small = Bench(server, "small epochs", SMALL_EVENTS, narrow_events)
        await measure(small, options.rounds * 3)
        show(small)
        table = narrow_events(EVENTS)
        print(f"\na buffered event takes {table.nbytes / EVENTS:.0f} bytes")
    finally:
        server.close()


if __name__ == "__main__":
    asyncio.run(main())
