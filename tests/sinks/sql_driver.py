"""A program that runs epochs into a SQL sink, and dies or falls asleep where it is told to.

`sql_driver ADDRESS STRATEGY EPOCHS STEP kill|stop`: the address is a DSN of PostgreSQL's or a URL of MySQL's;
the step is one of STEPS, in the last epoch; or of WRITER_STEPS, and then the first writer of that epoch is a
process of its own, to which it happens. It says `at STEP` before it happens, and in the end `done`, or the
class and the message of what went wrong.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from semel.sinks.blocking import BlockingWriter
from semel.sinks.errors import CommitFailed, ConnectionLost, FencedOut, SinkError, WriteFailed
from semel.sinks.mysql import MySQLDialect
from semel.sinks.mysql.sink import parse_url
from semel.sinks.postgres import PostgresDialect
from semel.sinks.receipts import Origin, Receipt
from semel.sinks.settings import SinkSettings
from semel.sinks.sink import WriterPlan
from semel.sinks.sql.columns import Column
from semel.sinks.sql.dialect import Dialect, Form, Loaded, Part, SqlSession, SqlValue
from semel.sinks.sql.names import TableName
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.target import Strategy, make_target

SINK_ID = "driven"
TASKS = 2
ROWS_A_TASK = 20
STEPS = (
    "before the fence",
    "after the fence",
    "opened",
    "begun",
    "half written",
    "finished",
    "row locked",
    "rows moved",
    "marker written",
    "commit answered",
    "committed",
)
WRITER_STEPS = ("writer connected", "writer half written", "writer finished")
# How a statement begins that moves staged rows into the table, in either database.
MOVES = ('INSERT INTO "kept"', "INSERT INTO `kept`")
MAX_TRIES = 3


class Stopper:
    """Where and how to stop: once, and in the last epoch if the step is of an epoch."""

    def __init__(self, step: str, how: str) -> None:
        self.step = step
        self.how = how
        self.is_armed = False

    def reach(self, step: str) -> None:
        if step == self.step and self.is_armed:
            print("at", step, flush=True)
            self.step = ""
            os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)


class StepSession(SqlSession):
    """A session that stops at steps that only statements show."""

    def __init__(self, session: SqlSession, stopper: Stopper) -> None:
        self._session = session
        self._stopper = stopper
        self.session_id = session.session_id
        self._is_marked = False

    async def execute(self, statement: str, parameters: Sequence[SqlValue] = ()) -> int:
        is_take = "SET owner = %s" in statement
        if is_take:
            self._stopper.reach("before the fence")
        changed = await self._session.execute(statement, parameters)
        if is_take:
            self._stopper.reach("after the fence")
        if statement.startswith(MOVES):
            self._stopper.reach("rows moved")
        if "SET epoch" in statement:
            self._is_marked = True
            self._stopper.reach("marker written")
        return changed

    async def fetch(self, statement: str, parameters: Sequence[SqlValue] = ()) -> list[tuple[SqlValue, ...]]:
        found = await self._session.fetch(statement, parameters)
        if "FOR UPDATE" in statement:
            self._stopper.reach("row locked")
        return found

    def form(self, table: TableName, columns: tuple[Column, ...], stamp: str | None) -> Form:
        return self._session.form(table, columns, stamp)

    async def load(self, form: Form, parts: Iterable[Part]) -> Loaded:
        return await self._session.load(form, parts)

    async def begin(self) -> None:
        await self._session.begin()

    async def commit(self) -> None:
        await self._session.commit()
        if self._is_marked:
            self._is_marked = False  # later ones are not of an epoch
            self._stopper.reach("commit answered")

    async def rollback(self) -> None:
        await self._session.rollback()

    async def set_lock_timeout(self, seconds: float) -> None:
        await self._session.set_lock_timeout(seconds)

    async def close(self) -> None:
        await self._session.close()


@dataclass(slots=True, frozen=True)
class PostgresStepDialect(PostgresDialect):
    """Makes sessions that stop; in other processes, to which it is sent without its stopper, they do not."""

    stopper: Stopper | None = None

    async def connect(self, label: str) -> SqlSession:
        session = await PostgresDialect.connect(self, label)
        return session if self.stopper is None else StepSession(session, self.stopper)

    def __reduce__(self) -> tuple[Any, ...]:
        return PostgresDialect, (self.dsn, self.idle_timeout_s)


@dataclass(slots=True, frozen=True)
class MySQLStepDialect(MySQLDialect):
    """Makes sessions that stop; in other processes, to which it is sent without its stopper, they do not."""

    stopper: Stopper | None = None

    async def connect(self, label: str) -> SqlSession:
        session = await MySQLDialect.connect(self, label)
        return session if self.stopper is None else StepSession(session, self.stopper)

    def __reduce__(self) -> tuple[Any, ...]:
        return MySQLDialect, (self.address, self.idle_timeout_s, self.local_infile, self.bulk)


def make_dialect(address: str, stopper: Stopper | None) -> Dialect:
    if address.startswith("mysql://"):
        return MySQLStepDialect(parse_url(address), stopper=stopper)
    return PostgresStepDialect(address, stopper=stopper)


def rows_of(epoch: int, task: int) -> list[dict[str, object]]:
    first = (epoch * TASKS + task) * ROWS_A_TASK
    return [{"id": first + number, "value": f"{epoch}/{task}"} for number in range(ROWS_A_TASK)]


def expected(epochs: int) -> list[tuple[Any, ...]]:
    return [
        tuple(row.values())
        for epoch in range(epochs)
        for task in range(TASKS)
        for row in rows_of(epoch, task)
    ]


def origin_of(epoch: int) -> Origin:
    return Origin("driver", str(epoch))


def make_sink(address: str, strategy: str, stopper: Stopper | None = None) -> SqlSink:
    target = make_target(
        "kept", mode="append", keys=(), order_by=None, change_column=None, columns=None, schema=None,
        create_table=False,
    )  # fmt: skip
    # So few that rows are on the server when the program stops half way.
    settings = SinkSettings(max_buffered=ROWS_A_TASK // 2)
    sink = SqlSink(make_dialect(address, stopper), target, Strategy(strategy), settings)
    sink.share()
    return sink


async def run_epochs(sink: SqlSink, epochs: int, stopper: Stopper) -> None:
    """From the one after the last that is committed; the way in which every driver recovers."""
    last = await sink.open(SINK_ID)
    stopper.is_armed = stopper.is_armed or stopper.step in STEPS[:3]
    stopper.reach("opened")
    for epoch in range(-1 if last is None else last, epochs):
        if epoch < 0:
            continue
        stopper.is_armed = epoch == epochs - 1
        for attempt in range(MAX_TRIES):
            try:
                await run_epoch(sink, epoch, stopper)
                break
            except (WriteFailed, CommitFailed, ConnectionLost) as error:
                print("again:", error, flush=True)
                assert attempt < MAX_TRIES - 1, error
                await sink.abort(epoch, str(error))


async def run_epoch(sink: SqlSink, epoch: int, stopper: Stopper) -> None:
    plan = await sink.begin(epoch, origin_of(epoch))
    if plan is None:
        return
    stopper.reach("begun")
    receipts = await write_tasks(plan, epoch, stopper)
    stopper.reach("finished")
    await sink.commit(epoch, receipts)
    stopper.reach("committed")


async def write_tasks(plan: WriterPlan, epoch: int, stopper: Stopper) -> list[Receipt]:
    """Each task with a plan that has been pickled; one whose process dies gives no receipt."""
    receipts = []
    for task in range(TASKS):
        if stopper.step in WRITER_STEPS and stopper.is_armed:
            step, stopper.step = stopper.step, ""
            # In a thread: with `direct`, what it writes goes through this loop.
            await asyncio.to_thread(write_in_process, plan, epoch, task, step, stopper.how)
        writer = pickle.loads(pickle.dumps(plan)).writer(task, str(os.getpid()), tasks=TASKS)
        await writer.write(rows_of(epoch, task))
        stopper.reach("half written")
        receipts.append(await writer.finish())
    return receipts


def write_in_process(plan: WriterPlan, epoch: int, task: int, step: str, how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, "--writer", str(epoch), str(task), step, how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(pickle.dumps(plan))
    process.stdin.close()
    if how == "stop":
        # It sleeps, and the epoch is run again, as a scheduler does that gives up on a task.
        print("sleeping", process.pid, process.stdout.readline().decode().strip(), flush=True)
        raise WriteFailed("the first writer has fallen asleep")
    raise WriteFailed(f"writer {task} died with {process.wait()}")


def write_task(epoch: int, task: int, stopper: Stopper) -> None:
    stopper.is_armed = True
    plan: WriterPlan = pickle.load(sys.stdin.buffer)
    writer = BlockingWriter(plan.writer(task, str(os.getpid()), tasks=TASKS))
    stopper.reach("writer connected")
    rows = rows_of(epoch, task)
    writer.write(rows[: ROWS_A_TASK // 2])
    stopper.reach("writer half written")
    writer.write(rows[ROWS_A_TASK // 2 :])
    writer.finish()
    stopper.reach("writer finished")


async def main(address: str, strategy: str, epochs: int, stopper: Stopper) -> int:
    stopper.is_armed = stopper.step in STEPS[:3]
    try:
        async with make_sink(address, strategy, stopper) as sink:
            await run_epochs(sink, epochs, stopper)
    except SinkError as error:
        print(type(error).__name__, error, flush=True)
        return 3 if isinstance(error, FencedOut) else 4
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--writer":
        write_task(int(sys.argv[2]), int(sys.argv[3]), Stopper(sys.argv[4], sys.argv[5]))
    else:
        step, how = (*sys.argv[4:], "", "kill")[:2]
        sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Stopper(step, how))))
