"""Pipelines on executors in other processes, for which everything goes wrong that can, one after the other.

    python unlucky.py BOOTSTRAP DIRECTORY NAME…

Run it on `local-cluster`, where tasks are retried and executors can be killed; to speculate, Spark needs
executors on several hosts. A name is that of a target, of a misfortune and, if it has one, of a query with
state, as in `keyed-executor-join`. `topic` and `keyed` are at BOOTSTRAP, without and with keys, `kafka` is at
TEST_KAFKA, `table` and `staged` are in the PostgreSQL of TEST_POSTGRES, `mysql` and `mysql_staged` at
TEST_MYSQL. Each goes to a topic or a table of its own, `out_keyed_executor_join`; the program says how often
a batch was tried in vain, and how many rows of the task that was struck were in the target. It fails if
nothing went wrong.
"""

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from crash_cases import joined, keep_state, windows
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone does
from spark_cases import driver_session

import semel.spark
from semel.sinks.kafka import KafkaPlan, KafkaSink, KafkaWriter
from semel.sinks.mysql import MySQLSink
from semel.sinks.postgres import PostgresSink
from semel.sinks.receipts import Place, Receipt
from semel.sinks.settings import SinkSettings
from semel.sinks.sink import TransactionalSink, Writer, WriterPlan
from semel.sinks.sql.writers import DirectPlan, DirectWriter, StagedPlan, StagedWriter

INPUT = "unlucky_orders"
# Batches before the one that is struck count, on a machine that is busy.
GATE_TIMEOUT_S = 120.0
POLL_S = 0.05
# Longer than Spark waits before it makes a copy, and than the copy waits for its original.
SLOW_S = 20.0
# Longer than a copy needs to end that waits for nobody, and shorter than it is to wait.
BRIEF_S = 1.0
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
# So few at a time, from one Python to the next and from there to the target, that rows which come before one
# that fails are there when it does.
FEW_ROWS = 2
FEW_BYTES = 512
# So many times that the first are not kept by what buffers there are on the way.
FEW_BATCHES = 4
# With state, batches are of so many records: the one that is struck has others before it and after it.
BATCH_RECORDS = 450
STRUCK_BATCH = 1
# More than there are cores: some begin when others have ended.
WRITERS = 4
TOPICS = ("topic", "keyed", "kafka")

PassOn = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


# Writers that tell what is in the target, and wait with everything written, where there is a gate


def tell(gate: Path, task: int, rows: int) -> None:
    """So many rows of the task are in the target, acknowledged and not committed."""
    told = gate / f"written-{task}-{os.getpid()}.new"
    told.write_text(str(rows))
    told.rename(gate / f"written-{task}")


def forget_told(gate: Path) -> None:
    """What was told of batches before, which are committed, or of an attempt that was aborted."""
    for told in gate.glob("written-*"):
        told.unlink(missing_ok=True)


async def pass_gate(gate: Path, task: int) -> None:
    """Who has written everything waits before it says so: task 0 at the gate, others for the misfortune."""
    if not (gate / "gate").exists() or not (gate / "due").exists():
        return
    (gate / f"waiting-{task}-{os.getpid()}-{secrets.token_hex(4)}").touch()
    give_up = time.monotonic() + GATE_TIMEOUT_S
    awaited = gate / ("open" if task == 0 else "struck")
    while not awaited.exists():
        assert time.monotonic() < give_up, f"{awaited} did not come in {GATE_TIMEOUT_S:g} s"
        await asyncio.sleep(POLL_S)


class GatedKafkaWriter(KafkaWriter):
    gate: Path

    async def _flush(self) -> None:
        await super()._flush()
        tell(self.gate, self._claimant.task, self._rows_taken)

    async def finish(self) -> Receipt:
        await self._send_gathered()
        await self._flush()
        await pass_gate(self.gate, self._claimant.task)
        return await super().finish()


class GatedDirectWriter(DirectWriter):
    gate: Path

    async def _flush(self) -> None:
        await super()._flush()
        await self._way.settle()
        tell(self.gate, self._task, self.rows)

    async def finish(self) -> Receipt:
        await self._flush()
        await pass_gate(self.gate, self._task)
        return await super().finish()


class GatedStagedWriter(StagedWriter):
    gate: Path

    async def _flush(self) -> None:
        await super()._flush()
        tell(self.gate, self._task, self.rows)

    async def finish(self) -> Receipt:
        await self._flush()
        await pass_gate(self.gate, self._task)
        return await super().finish()


class GatedPlan(WriterPlan):
    """A plan whose writers tell, and wait."""

    writer_kind: type[Writer]
    gate: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return make_gated, (type(self), self.gate, *super().__reduce__())

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> Writer:
        writer = super().writer(task, attempt, tasks=tasks)  # type: ignore[safe-super]
        writer.__class__ = self.writer_kind
        writer.gate = self.gate  # type: ignore[attr-defined]
        return writer


def make_gated(
    kind: type[GatedPlan],
    gate: Path,
    make: Callable[..., Any],
    parts: tuple[Any, ...],
    *state: dict[str, Any],
) -> GatedPlan:
    plan = make(*parts)
    for fields in state:
        plan.__dict__.update(fields)
    plan.__class__, plan.gate = kind, gate
    return plan


class GatedKafkaPlan(GatedPlan, KafkaPlan):
    writer_kind = GatedKafkaWriter


class GatedDirectPlan(GatedPlan, DirectPlan):
    writer_kind = GatedDirectWriter


class GatedStagedPlan(GatedPlan, StagedPlan):
    writer_kind = GatedStagedWriter


GATED: dict[type[WriterPlan], type[GatedPlan]] = {
    KafkaPlan: GatedKafkaPlan,
    DirectPlan: GatedDirectPlan,
    StagedPlan: GatedStagedPlan,
}


class GatedSink(TransactionalSink):
    """A sink that says when the batch comes in which something is to go wrong, and when it comes again."""

    gate: Path
    struck_batch: int
    _attempts = 0

    async def _begin(self, place: Place) -> Any:
        plan: Any = await super()._begin(place)  # type: ignore[safe-super]
        if place.epoch == self.struck_batch:
            self._attempts += 1
            forget_told(self.gate)
            (self.gate / "due").touch()
        if self._attempts > 1:
            (self.gate / "open").touch()
        plan.__class__, plan.gate = GATED[type(plan)], self.gate
        return plan


class GatedKafkaSink(GatedSink, KafkaSink):
    pass


class GatedPostgresSink(GatedSink, PostgresSink):
    pass


class GatedMySQLSink(GatedSink, MySQLSink):
    pass


def await_writer(gate: Path) -> int:
    """Until a writer of task 0 waits at the gate; the process that it is in."""
    give_up = time.monotonic() + GATE_TIMEOUT_S
    while not (waiting := list(gate.glob("waiting-0-*"))):
        assert time.monotonic() < give_up, f"no writer came to {gate} in {GATE_TIMEOUT_S:g} s"
        time.sleep(POLL_S)
    return int(waiting[0].name.split("-")[2])


# Misfortunes


def strikes(place: Path) -> bool:
    """In a task: whether it is to be struck. It is due, and no other task was."""
    if not (place / "due").exists():
        return False
    try:
        (place / "strikes").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def fails_at_first_row(place: Path) -> PassOn:
    """User code that raises at the first row of a task, once."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows and strikes(place):
                (place / "struck").touch()
                raise ValueError("the first row is unlucky")
            yield batch

    return pass_on


def fails_at_last_row(place: Path) -> PassOn:
    """User code that raises at the last rows of a task, once, when rows before them are in the target."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held_back: list[pa.RecordBatch] = []
        passed = 0
        for batch in batches:
            yield from held_back
            passed += len(held_back)
            held_back = [batch]
        if passed >= FEW_BATCHES and strikes(place):
            (place / "struck").write_text(str(await_rows(place)))
            raise ValueError("the last row is unlucky")
        yield from held_back

    return pass_on


def await_rows(place: Path) -> int:
    """In a task: until rows of it are in the target; how many."""
    context = TaskContext.get()
    assert context is not None
    give_up = time.monotonic() + GATE_TIMEOUT_S
    while not (rows := told_rows(place, context.partitionId())):
        assert time.monotonic() < give_up, f"no row of {place} came to its target in {GATE_TIMEOUT_S:g} s"
        time.sleep(POLL_S)
    return rows


def told_rows(place: Path, task: int) -> int:
    told = place / f"written-{task}"
    return int(told.read_text()) if told.exists() else 0


def slow_once(place: Path) -> PassOn:
    """User code that takes long in the first attempt of one task, when rows of it are in the target."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        slow = place / f"slow-{context.partitionId()}"
        if context.attemptNumber() > 0 and slow.exists():
            slow.rename(place / "struck")  # this is the copy
        for number, batch in enumerate(batches):
            if number == FEW_BATCHES and context.attemptNumber() == 0 and strikes(place):
                (place / "slow").write_text(str(await_rows(place)))
                (place / "slow").rename(slow)
                time.sleep(SLOW_S)
            yield batch

    return pass_on


def slow_until_copied(place: Path) -> PassOn:
    """User code that holds the first attempt of one task until a copy has read all rows, and not for long."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        slow = place / f"slow-{context.partitionId()}"
        for number, batch in enumerate(batches):
            if number == FEW_BATCHES and context.attemptNumber() == 0 and strikes(place):
                (place / "slow").write_text(str(await_rows(place)))
                (place / "slow").rename(slow)
                await_copy(place)
                time.sleep(BRIEF_S)
            yield batch
        if context.attemptNumber() > 0 and slow.exists():
            slow.rename(place / "struck")  # this is the copy

    return pass_on


def await_copy(place: Path) -> None:
    give_up = time.monotonic() + GATE_TIMEOUT_S
    while not (place / "struck").exists():
        assert time.monotonic() < give_up, f"no copy of the slow task of {place} in {GATE_TIMEOUT_S:g} s"
        time.sleep(POLL_S)


def kill_an_executor(gate: Path) -> None:
    """The one in which task 0 has written everything."""
    worker = psutil.Process(await_writer(gate))
    executor = next(process for process in worker.parents() if EXECUTOR in process.cmdline())
    os.kill(executor.pid, signal.SIGKILL)
    (gate / "struck").write_text(str(told_rows(gate, 0)))
    (gate / "open").touch()


def lose_shuffle_files(gate: Path) -> None:
    """Task 0 has its rows, and goes on; those that begin now find no files, and the stage is retried.

    Where a second writer of task 0 gets as far as the first, which is there still, both go on.
    """
    await_writer(gate)
    files = list(Path(os.environ["SPARK_LOCAL_DIRS"]).rglob("shuffle_*.data"))
    assert files, "there are no shuffle files to lose"
    for file in files:
        file.unlink()
    (gate / "struck").write_text(str(told_rows(gate, 0)))
    give_up = time.monotonic() + GATE_TIMEOUT_S
    while len(list(gate.glob("waiting-0-*"))) < 2 and not (gate / "open").exists():
        assert time.monotonic() < give_up, f"nobody came again to {gate} in {GATE_TIMEOUT_S:g} s"
        time.sleep(POLL_S)
    (gate / "open").touch()


# What rows pass through, or what happens while they are written.
IN_CODE: dict[str, Callable[[Path], PassOn]] = {
    "first_row": fails_at_first_row,
    "last_row": fails_at_last_row,
    "speculation": slow_once,
    "patience": slow_until_copied,
}
TO_WRITERS: dict[str, Callable[[Path], None]] = {
    "executor": kill_an_executor,
    "shuffle": lose_shuffle_files,
}


class Misfortunes:
    """Each runs the same input to a target of its own."""

    def __init__(self, spark: SparkSession, bootstrap: str, directory: Path) -> None:
        self.spark = spark
        self.bootstrap = bootstrap
        self.directory = directory

    def run(self, name: str) -> None:
        target, misfortune, *state = name.split("-")
        place = self.directory / name
        place.mkdir(parents=True)
        df = self.stateful(*state) if state else self.orders(is_shuffled=misfortune == "shuffle")
        if target not in ("keyed", "kafka"):
            df = df.select(F.col("value").cast("binary"))
        if misfortune in IN_CODE:
            # In the stage of the writers, so that rows may have been sent when the code fails.
            df = df.mapInArrow(IN_CODE[misfortune](place), df.schema)
        sink = self.sink(target, f"out_{name}".replace("-", "_"))
        sink.gate, sink.struck_batch = place, STRUCK_BATCH if state else 0
        in_vain = self.run_to_end(name, df, sink, TO_WRITERS.get(misfortune), place)
        assert (place / "struck").exists(), f"{name} did not come to pass"
        rows = int((place / "struck").read_text() or 0)
        print(f"{name}: {in_vain} in vain, struck with {rows} rows", flush=True)

    def run_to_end(
        self, name: str, df: DataFrame, sink: GatedSink, strike: Callable[[Path], None] | None, place: Path
    ) -> int:
        checkpoint = self.directory / "checkpoints" / name
        pipeline = semel.spark.exactly_once(df, sink, name=name, checkpoint=checkpoint)
        if strike is not None:
            (place / "gate").touch()
        query = pipeline.start("availableNow")
        with ThreadPoolExecutor(1) as striking:
            struck = striking.submit(strike or (lambda _: None), place)
            try:
                query.awaitTermination()
            finally:
                struck.result()
        return query.attempts - query.batches

    def orders(self, *, is_shuffled: bool) -> DataFrame:
        orders = semel.spark.read(self.spark, self.bootstrap, INPUT).select("key", "value")
        return orders.repartition(WRITERS, "key") if is_shuffled else orders

    def stateful(self, query: str) -> DataFrame:
        """`windows` in the first format of state, `windows2` or `join` in the second."""
        keep_state(self.spark, 1 if query == "windows" else 2)
        if query == "join":
            return joined(self.read("orders"), self.read("payments"))
        return windows(self.read("numbers"))

    def read(self, topic: str) -> DataFrame:
        return semel.spark.read(self.spark, self.bootstrap, topic, maxOffsetsPerTrigger=BATCH_RECORDS)

    def sink(self, target: str, name: str) -> GatedSink:
        settings = SinkSettings(max_buffered=FEW_ROWS)
        if target in TOPICS:
            bootstrap = os.environ["TEST_KAFKA"] if target == "kafka" else self.bootstrap
            key = None if target == "topic" else "key"
            return GatedKafkaSink(bootstrap, name, key=key, settings=settings)
        strategy = "staged" if "staged" in target else "direct"
        if target.startswith("mysql"):
            return GatedMySQLSink(os.environ["TEST_MYSQL"], name, strategy=strategy, settings=settings)
        return GatedPostgresSink(os.environ["TEST_POSTGRES"], name, strategy=strategy, settings=settings)


def main(bootstrap: str, directory: str, *names: str) -> None:
    local_dirs = Path(directory) / "local"
    local_dirs.mkdir(parents=True)
    os.environ["SPARK_LOCAL_DIRS"] = str(local_dirs)
    settings = {
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(FEW_ROWS),
        "spark.buffer.size": str(FEW_BYTES),
        "spark.speculation": "true",
        "spark.speculation.interval": "200ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "3s",
        # A lost file is noticed at once.
        "spark.shuffle.io.maxRetries": "0",
        "spark.default.parallelism": str(WRITERS),
        "spark.sql.shuffle.partitions": str(WRITERS),
    }
    misfortunes = Misfortunes(driver_session(settings=settings), bootstrap, Path(directory))
    for name in names:
        misfortunes.run(name)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
