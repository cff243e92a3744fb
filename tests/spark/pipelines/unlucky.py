"""Pipelines on executors in other processes, for which everything goes wrong that can, one after the other.

    python unlucky.py BOOTSTRAP DIRECTORY

Run it on `local-cluster`: tasks are retried, executors can be killed, and Spark speculates. For each
misfortune there is a topic `out-<misfortune>`, or such a table in the PostgreSQL of TEST_POSTGRES; the
program says how often its one batch was tried.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone does
from spark_cases import driver_session

import semel.spark
from semel.sinks.kafka import KafkaPlan, KafkaSink, KafkaWriter
from semel.sinks.postgres import PostgresSink
from semel.sinks.receipts import Attempt, Place, Receipt
from semel.sinks.sink import TransactionalSink, Writer, WriterPlan
from semel.sinks.sql.writers import DirectPlan, DirectWriter

GATE_TIMEOUT_S = 60.0
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


async def pass_gate(gate: Path, writer: Attempt) -> None:
    """Who has written everything waits before it says so: task 0 at the gate, others for the misfortune."""
    (gate / f"waiting-{writer.task}-{writer.writer}").touch()
    give_up = time.monotonic() + GATE_TIMEOUT_S
    awaited = gate / ("open" if writer.task == 0 else "struck")
    while not awaited.exists() and time.monotonic() < give_up:  # noqa: ASYNC110 - a file
        await asyncio.sleep(0.05)


class GatedWriter(KafkaWriter):
    gate = Path()

    async def finish(self) -> Receipt:
        await self._send_gathered()
        await self._flush()
        await pass_gate(self.gate, self._claimant)
        return await super().finish()


class GatedPlan(KafkaPlan):
    """A plan whose writers wait."""

    gate = Path()

    def __reduce__(self) -> tuple[object, ...]:
        return make_gated, (super().__reduce__()[1], self.gate)

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> KafkaWriter:
        writer = super().writer(task, attempt, tasks=tasks)
        writer.__class__ = GatedWriter
        writer.gate = self.gate  # type: ignore[attr-defined]
        return writer


def make_gated(parts: tuple[object, ...], gate: Path) -> GatedPlan:
    plan = GatedPlan(*parts)  # type: ignore[arg-type]
    plan.gate = gate
    return plan


class GatedSink(KafkaSink):
    """A sink whose writers wait at the gate in this directory."""

    def __init__(self, bootstrap: str, topic: str, gate: Path) -> None:
        super().__init__(bootstrap, topic)
        self._gate = gate
        self._attempts = 0

    async def _begin(self, place: Place) -> KafkaPlan:
        self._attempts += 1
        if self._attempts > 1:
            (self._gate / "open").touch()
        plan = await super()._begin(place)
        plan.__class__ = GatedPlan
        plan.gate = self._gate  # type: ignore[attr-defined]
        return plan


class GatedDirectWriter(DirectWriter):
    gate = Path()

    async def finish(self) -> Receipt:
        await self._flush()
        await pass_gate(self.gate, self._me)
        return await super().finish()


class GatedDirectPlan(DirectPlan):
    gate = Path()

    def __reduce__(self) -> tuple[object, ...]:
        return make_gated_direct, (super().__reduce__()[1], self.gate)

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> Writer:
        writer = super().writer(task, attempt, tasks=tasks)
        writer.__class__ = GatedDirectWriter
        writer.gate = self.gate  # type: ignore[attr-defined]
        return writer


def make_gated_direct(parts: tuple[object, ...], gate: Path) -> GatedDirectPlan:
    plan = GatedDirectPlan(*parts)  # type: ignore[arg-type]
    plan.gate = gate
    return plan


class GatedTable(PostgresSink):
    """A table whose writers wait at the gate, with their rows in the transaction."""

    def __init__(self, table: str, gate: Path) -> None:
        super().__init__(os.environ["TEST_POSTGRES"], table)
        self._gate = gate

    async def _begin(self, place: Place) -> WriterPlan:
        plan = await super()._begin(place)
        plan.__class__ = GatedDirectPlan
        plan.gate = self._gate  # type: ignore[attr-defined]
        return plan


def fails_once(directory: Path, value: str) -> Callable[[bytes], bytes]:
    """User code that raises at this value, the first time."""

    def pass_on(given: bytes) -> bytes:
        failed = directory / "failed"
        if given == value.encode() and not failed.exists():
            failed.touch()
            raise ValueError(f"{value} is unlucky")
        return given

    return pass_on


def slow_once(directory: Path) -> Callable[[bytes], bytes]:
    """User code that takes long in the first attempt of one task, and only there."""

    def pass_on(given: bytes) -> bytes:
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 0 and context.attemptNumber() == 0 and not (directory / "slow").exists():
            (directory / "slow").touch()
            time.sleep(20)
        return given

    return pass_on


class Misfortunes:
    """Each runs the same input to a topic of its own."""

    def __init__(self, spark: SparkSession, bootstrap: str, directory: Path) -> None:
        self.spark = spark
        self.bootstrap = bootstrap
        self.directory = directory

    def place(self, name: str) -> Path:
        place = self.directory / name
        place.mkdir(parents=True)
        return place

    def run(
        self, name: str, df: DataFrame, sink: TransactionalSink, misfortune: Callable[[], None] | None = None
    ) -> None:
        checkpoint = self.directory / "checkpoints" / name
        pipeline = semel.spark.exactly_once(df, sink, name=name, checkpoint=checkpoint, output_mode="update")
        query = pipeline.start("availableNow")
        if misfortune is not None:
            threading.Thread(target=misfortune, daemon=True).start()
        query.awaitTermination()
        print(f"{name}: tried {query.attempts}", flush=True)

    def orders(self) -> DataFrame:
        return semel.spark.read(self.spark, self.bootstrap, "orders")

    def user_code_fails(self, name: str, value: str) -> None:
        """In the stage of the writers, after some rows were sent: without keys there is no shuffle."""
        code = F.udf(fails_once(self.place(name), value), "binary")
        sink = KafkaSink(self.bootstrap, f"out-{name}", key=None)
        self.run(name, self.orders().select(code("value").alias("value")), sink)

    def speculation(self) -> None:
        code = F.udf(slow_once(self.place("speculation")), "binary")
        sink = KafkaSink(self.bootstrap, "out-speculation", key=None)
        self.run("speculation", self.orders().select(code("value").alias("value")), sink)

    # The same into a table, where rows go through the driver into one transaction.

    def table_code_fails(self, name: str, value: str) -> None:
        code = F.udf(fails_once(self.place(name), value), "binary")
        self.run(name, self.orders().select(code("value").alias("value")), table(name))

    def table_speculation(self, name: str) -> None:
        code = F.udf(slow_once(self.place(name)), "binary")
        self.run(name, self.orders().select(code("value").alias("value")), table(name))

    def table_executor_dies(self, name: str) -> None:
        gate = self.place(name)
        sink = GatedTable(f"out-{name}", gate)
        self.run(name, self.orders().select("value"), sink, lambda: self.kill_an_executor(gate))

    def executor_dies(self, name: str, df: DataFrame) -> None:
        gate = self.place(name)
        self.run(name, df, self.gated(name, gate), lambda: self.kill_an_executor(gate))

    def shuffle_is_lost(self, name: str, df: DataFrame) -> None:
        gate = self.place(name)
        self.run(name, df, self.gated(name, gate), lambda: self.lose_shuffle_files(gate))

    def counts(self) -> DataFrame:
        """How often each tenth of the orders was seen, by a query with state."""
        counted = self.orders().groupBy(F.substring("key", -1, 1).alias("key")).count()
        return counted.select("key", F.concat_ws("=", "key", "count").alias("value"))

    def gated(self, name: str, gate: Path) -> GatedSink:
        return GatedSink(self.bootstrap, f"out-{name}", gate)

    def kill_an_executor(self, gate: Path) -> None:
        await_writer(gate)
        os.kill(executor_pids()[0], signal.SIGKILL)
        (gate / "struck").touch()
        (gate / "open").touch()

    def lose_shuffle_files(self, gate: Path) -> None:
        """Task 0 has its rows, and goes on; those that begin now find no files, and the stage is retried."""
        await_writer(gate)
        files = list(Path(os.environ["SPARK_LOCAL_DIRS"]).rglob("shuffle_*.data"))
        assert files, "there are no shuffle files to lose"
        for file in files:
            file.unlink()
        (gate / "struck").touch()


def table(name: str) -> PostgresSink:
    return PostgresSink(os.environ["TEST_POSTGRES"], f"out-{name}")


def executor_pids() -> list[int]:
    """The processes of Spark's executors below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if EXECUTOR in process.cmdline():
                found.append(process.pid)
    return found


def await_writer(gate: Path) -> None:
    """Until the writer of task 0 waits at the gate."""
    give_up = time.monotonic() + GATE_TIMEOUT_S
    while not list(gate.glob("waiting-0-*")) and time.monotonic() < give_up:
        time.sleep(0.05)


def main(bootstrap: str, directory: str) -> None:
    local_dirs = Path(directory) / "local"
    local_dirs.mkdir(parents=True)
    os.environ["SPARK_LOCAL_DIRS"] = str(local_dirs)
    settings = {
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.speculation": "true",
        "spark.speculation.interval": "200ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "3s",
        # A lost file is noticed at once.
        "spark.shuffle.io.maxRetries": "0",
        # More writers than cores: some begin when others have ended.
        "spark.default.parallelism": "4",
        "spark.sql.shuffle.partitions": "4",
    }
    spark = driver_session(settings=settings)
    misfortunes = Misfortunes(spark, bootstrap, Path(directory))
    misfortunes.user_code_fails("first-row", "v0")
    misfortunes.user_code_fails("last-row", "v239")
    misfortunes.shuffle_is_lost("shuffle", misfortunes.orders().repartition(4, "key"))
    misfortunes.shuffle_is_lost("shuffle-state", misfortunes.counts())
    misfortunes.speculation()
    misfortunes.executor_dies("executor", misfortunes.orders())
    misfortunes.executor_dies("executor-state", misfortunes.counts())
    misfortunes.table_code_fails("table-first-row", "v0")
    misfortunes.table_code_fails("table-last-row", "v239")
    misfortunes.table_speculation("table-speculation")
    misfortunes.table_executor_dies("table-executor")
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
