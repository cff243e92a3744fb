"""Pipelines that die where they are told to; what is left is carried on by the next life of the same program.

    python crashing.py BOOTSTRAP DIRECTORY PIPELINE…

Each pipeline reads its topics to their ends (`availableNow`), a few records a batch, and the program says
`done` when all have. TEST_DIE says who dies where: `keyed:before_end windows:after_end` holds the pipeline
`keyed` when it is about to send EndTxn for the second batch that it writes in this life, and `windows` when
that is done; once both are there, this process is killed with -9: by itself, and what is below it goes on
until it notices; or, with TEST_KILLED=1, by whoever started it, with all that is below it. The first batch is
what the life before left behind; TEST_DIE_IN=1 is for a life that has none before it, and dies in batch 0.
Each says where it was met: `keyed at before_end of batch 3 with 21 rows of 3 tasks`.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
from connector_jars import connector_jars
from crash_cases import joined, keep_state, windows
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone does
from spark_cases import driver_session

import semel.spark
from semel.client.metadata import TopicPartition
from semel.client.shared_transaction import SharedTransaction
from semel.sinks.kafka import KafkaSink
from semel.sinks.kafka.claims import ClaimBook
from semel.sinks.marker import Marker, Owner
from semel.sinks.mysql import MySQLSink
from semel.sinks.postgres import PostgresSink
from semel.sinks.receipts import NO_ORIGIN, Attempt, Origin, Place, Receipt
from semel.sinks.sink import TransactionalSink, Writer, WriterPlan
from semel.sinks.source_group import SourceOffsets
from semel.sinks.sql.dialect import Loaded, Part, SqlSession
from semel.sinks.sql.intake import Intake
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.sink_row import SinkRow
from semel.sinks.sql.writers import StagedPlan, StagedWriter

BATCH_RECORDS = int(os.environ.get("TEST_PER_BATCH", "40"))
# Longer than any life: a task that is held is ended by the death of its driver.
HOLD_S = 300.0
POLL_S = 0.02
# The batch of a life in which pipelines die.
LAST_BATCH = int(os.environ.get("TEST_DIE_IN", "2"))
# Each source has a Python of its own, to which Spark gives ten seconds: not all at a time. There is one place
# more than there are pipelines that are held in their recovery.
STARTING = threading.BoundedSemaphore(3)
INITIALIZING = "Initializing sources"
# Names of pipelines that read by Spark's own source.
BY_SPARK = "by_spark"


class Death:
    """Comes with -9 once everyone who is to die in this life has been met."""

    def __init__(self, where: str) -> None:
        self.steps = dict(each.split(":") for each in where.split())
        self._awaited = set(self.steps)
        self._meeting = threading.Lock()

    def meet(self, pipeline: str, said: str) -> NoReturn:
        with self._meeting:
            print(f"{pipeline} at {said}", flush=True)
            self._awaited.discard(pipeline)
            if not self._awaited:
                print("dying", flush=True)
                if "TEST_KILLED" not in os.environ:
                    os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(HOLD_S)
        raise AssertionError(f"{pipeline} outlived the others, who were not met: {self._awaited}")


DEATH = Death(os.environ.get("TEST_DIE", ""))


class Gate:
    """Where tasks, which are other processes, are held; the directory is the pipeline's own in this life."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / f"gate-{os.getpid()}"
        self.directory.mkdir(parents=True)

    def close(self) -> None:
        (self.directory / "closed").touch()

    def hold(self, rows: int) -> None:
        """In a task: if the gate is closed nobody passes, and the first to come tells with how many rows."""
        if (self.directory / "closed").exists():
            written = self.directory / f"{os.getpid()}.new"
            written.write_text(str(rows))
            written.rename(self.directory / "held")
            time.sleep(HOLD_S)

    def pass_through(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows as they come; at their end the task's state is written, and that of others may not be."""
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            yield batch
        self.hold(rows)

    def await_held(self) -> int:
        """In the driver: until a task is held; its rows."""
        while not (self.directory / "held").exists():
            time.sleep(POLL_S)
        return int((self.directory / "held").read_text())


class Fate:
    """Follows one pipeline through its batches, up to the step at which it is to die."""

    def __init__(self, pipeline: str, directory: Path) -> None:
        self._pipeline = pipeline
        self.step = DEATH.steps.get(pipeline, "")
        self._begun = 0
        self._batch = -1
        self._tasks = 0
        self._rows = 0
        self.gate = Gate(directory / "gates" / pipeline)

    def begun(self, batch: int) -> None:
        self._begun += 1
        self._batch, self._tasks, self._rows = batch, 0, 0
        self.at("before_begin")

    def written(self, receipts: list[Receipt]) -> None:
        self._tasks, self._rows = len(receipts), sum(receipt.rows for receipt in receipts)
        print(
            f"{self._pipeline} wrote batch {self._batch} with {self._rows} rows of {self._tasks} tasks",
            flush=True,
        )
        self.at("after_tasks")

    def at(self, step: str, rows: int | None = None) -> None:
        if step == self.step and self._begun >= LAST_BATCH:
            self._meet(self._rows if rows is None else rows)

    def recovers(self) -> None:
        if self.step == "in_recovery":
            self._meet(0)

    def skips(self, batch: int) -> None:
        """The batch is executed to nowhere, and held where a task has come to the end of its rows."""
        self._batch = batch
        print(f"{self._pipeline} skips batch {batch}", flush=True)
        if self.step == "in_skip":
            self.hold_tasks()

    def hold_tasks(self) -> None:
        self.gate.close()
        threading.Thread(target=lambda: self._meet(self.gate.await_held()), daemon=True).start()

    @property
    def holds_writers(self) -> bool:
        return self.step == "amid_tasks" and self._begun >= LAST_BATCH

    def _meet(self, rows: int) -> NoReturn:
        DEATH.meet(
            self._pipeline, f"{self.step} of batch {self._batch} with {rows} rows of {self._tasks} tasks"
        )


class MortalBook(ClaimBook):
    """Passes by while tasks write: one of them has written to a partition, and has given no receipt."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self._fate = fate

    def give(self, attempt: Attempt, where: TopicPartition, next_sequence: int) -> None:
        super().give(attempt, where, next_sequence)
        self._fate.at("amid_tasks", next_sequence)


class MortalSink(TransactionalSink):
    """A sink that passes by the steps at which the process may die: those of every target."""

    _fate: Fate

    async def begin(self, epoch: int, origin: Origin = NO_ORIGIN) -> WriterPlan | None:
        plan = await super().begin(epoch, origin)
        if plan is None:
            self._fate.skips(epoch)
        return plan

    async def _begin(self, place: Place) -> Any:
        self._fate.begun(place.epoch)
        return await super()._begin(place)

    async def _commit(
        self, marker: Marker, receipts: list[Receipt], source_offsets: SourceOffsets | None
    ) -> None:
        self._fate.written(receipts)
        await super()._commit(marker, receipts, source_offsets)


class MortalKafkaSink(MortalSink, KafkaSink):
    def __init__(self, fate: Fate, bootstrap: str, topic: str, key: str | None) -> None:
        super().__init__(bootstrap, topic, key=key)
        self._fate = fate
        self._book = MortalBook(fate)

    async def _sign(self, transaction: SharedTransaction, marker: Marker, owner: Owner) -> None:
        self._fate.recovers()
        await super()._sign(transaction, marker, owner)

    async def _put_marker(
        self, transaction: SharedTransaction, marker: Marker, source_offsets: SourceOffsets | None
    ) -> None:
        self._fate.at("before_marker")
        await super()._put_marker(transaction, marker, source_offsets)

    async def _end(self, transaction: SharedTransaction, epoch: int) -> None:
        self._fate.at("before_end")
        await super()._end(transaction, epoch)
        self._fate.at("after_end")


class MortalIntake(Intake):
    """Passes by while tasks write: one of them has brought rows into the transaction."""

    def __init__(self, sink: "MortalSqlSink") -> None:
        super().__init__(sink._begun, sink.settings.write_timeout)
        self._sink = sink

    async def load(self, attempt: Attempt, parts: Iterable[Part]) -> Loaded:
        loaded = await super().load(attempt, parts)
        self._sink._fate.at("amid_tasks", loaded.rows)
        return loaded


class HeldWriter(StagedWriter):
    """Stages its rows, and is held before it says so."""

    gate: Gate

    async def finish(self) -> Receipt:
        await self._flush()
        if self.rows:
            self.gate.hold(self.rows)
        return await super().finish()


class HeldPlan(StagedPlan):
    gate: Gate

    def writer(self, task: int, attempt: str = "0", *, tasks: int = 1) -> Writer:
        writer = super().writer(task, attempt, tasks=tasks)
        writer.__class__ = HeldWriter
        writer.gate = self.gate  # type: ignore[attr-defined]
        return writer


class MortalSqlSink(MortalSink, SqlSink):
    """The same steps in a database."""

    def _new_intake(self) -> Intake:
        return MortalIntake(self)

    def _staged_plan(self, place: Place) -> WriterPlan:
        plan = super()._staged_plan(place)
        if self._fate.holds_writers:
            plan.__class__ = HeldPlan
            plan.gate = self._fate.gate  # type: ignore[attr-defined]
            self._fate.hold_tasks()
        return plan

    async def _take(self, session: SqlSession, before: SinkRow) -> SinkRow:
        taken = await super()._take(session, before)
        self._fate.recovers()
        return taken

    async def _mark(self, session: SqlSession, marker: Marker) -> None:
        self._fate.at("before_marker")
        await super()._mark(session, marker)

    async def _send_commit(self, session: SqlSession, marker: Marker, deadline: float) -> None:
        self._fate.at("before_end")
        await super()._send_commit(session, marker, deadline)
        self._fate.at("after_end")


class MortalPostgresSink(MortalSqlSink, PostgresSink):
    def __init__(self, fate: Fate, table: str, strategy: str, **options: Any) -> None:
        super().__init__(os.environ["TEST_POSTGRES"], table, strategy=strategy, **options)
        self._fate = fate


class MortalMySQLSink(MortalSqlSink, MySQLSink):
    def __init__(self, fate: Fate, table: str, strategy: str, **options: Any) -> None:
        super().__init__(os.environ["TEST_MYSQL"], table, strategy=strategy, **options)
        self._fate = fate


# What pipelines compute


def records(df: DataFrame) -> DataFrame:
    """Record for record, with the value in upper case."""
    return df.select("key", F.upper(F.col("value").cast("string")).alias("value"))


def as_table(df: DataFrame) -> DataFrame:
    return df.select(F.col("key").cast("string").alias("id"), F.col("value").alias("content"))


class Pipeline:
    """What one pipeline is built from, and its way into the sink."""

    def __init__(self, spark: SparkSession, bootstrap: str, directory: Path, name: str) -> None:
        # A session of its own: settings of state differ, and pipelines start at the same time.
        self.spark = spark.newSession()
        self.bootstrap = bootstrap
        self.directory = directory
        self.name = name
        self.fate = Fate(name, directory)

    def read(self, topic: str) -> DataFrame:
        """By Spark's own source, where the name says so."""
        return semel.spark.read(
            self.spark,
            self.bootstrap,
            topic,
            connector="jvm" if self.name.startswith(BY_SPARK) else "python",
            maxOffsetsPerTrigger=BATCH_RECORDS,
        )

    def orders(self) -> DataFrame:
        return records(self.read("orders"))

    def windows(self, state_format: int) -> DataFrame:
        keep_state(self.spark, state_format)
        return self.held(windows(self.read("numbers")))

    def join(self, state_format: int = 2) -> DataFrame:
        keep_state(self.spark, state_format)
        return self.held(joined(self.read("orders"), self.read("payments")))

    def held(self, df: DataFrame) -> DataFrame:
        """With a gate behind the state, in the life that is to end where a batch is executed to nowhere."""
        if self.fate.step != "in_skip":
            return df
        return df.mapInArrow(self.fate.gate.pass_through, df.schema)

    def into_topic(self, df: DataFrame, key: str | None = "key") -> semel.spark.PipelineQuery:
        return self.start(df, MortalKafkaSink(self.fate, self.bootstrap, f"{self.name}-out", key))

    def into_postgres(self, df: DataFrame, strategy: str, **mode: Any) -> semel.spark.PipelineQuery:
        return self.start(as_table(df), MortalPostgresSink(self.fate, self.name, strategy, **mode))

    def into_mysql(self, df: DataFrame, strategy: str, **mode: Any) -> semel.spark.PipelineQuery:
        return self.start(as_table(df), MortalMySQLSink(self.fate, self.name, strategy, **mode))

    def into_both(self, df: DataFrame) -> semel.spark.PipelineQuery:
        """First into a topic, then into a table, whose steps are those of `<name>_table`."""
        topic = MortalKafkaSink(self.fate, self.bootstrap, f"{self.name}-out", "key")
        fate = Fate(f"{self.name}_table", self.directory)
        columns = {"key": "id", "value": "content"}
        table = MortalPostgresSink(fate, f"{self.name}_out", "direct", columns=columns)
        return self.start(df.withColumn("key", F.col("key").cast("string")), topic, table)

    def start(self, df: DataFrame, *sinks: TransactionalSink) -> semel.spark.PipelineQuery:
        pipeline = semel.spark.exactly_once(
            df,
            sinks,
            name=self.name,
            checkpoint=self.directory / "checkpoints" / self.name,
            output_mode="update" if "totals" in self.name else "append",
        )
        return pipeline.start(trigger="availableNow")


def recut(to: Pipeline) -> DataFrame:
    """With a shuffle into so many partitions, or into four, of which adaptive execution makes one."""
    partitions = os.environ.get("TEST_PARTITIONS", "")
    adaptive = "spark.sql.adaptive"
    to.spark.conf.set(f"{adaptive}.enabled", "true")
    to.spark.conf.set(f"{adaptive}.coalescePartitions.parallelismFirst", "false")
    to.spark.conf.set(f"{adaptive}.coalescePartitions.minPartitionSize", "1")
    to.spark.conf.set(f"{adaptive}.advisoryPartitionSizeInBytes", "1" if partitions else "64m")
    to.spark.conf.set("spark.sql.shuffle.partitions", partitions or "4")
    return to.orders().repartition("key")


# Rows that are brought up to date: totals while their windows last.
UPSERT: dict[str, Any] = {"mode": "upsert", "keys": ["id"]}

PIPELINES: dict[str, Callable[[Pipeline], semel.spark.PipelineQuery]] = {
    "keyed": lambda to: to.into_topic(to.orders()),
    "unkeyed": lambda to: to.into_topic(to.orders(), key=None),
    "recut": lambda to: to.into_topic(recut(to)),
    "unkeyed_recut": lambda to: to.into_topic(recut(to), key=None),
    "windows0": lambda to: to.into_topic(to.windows(state_format=0)),
    "windows": lambda to: to.into_topic(to.windows(state_format=1)),
    "windows2": lambda to: to.into_topic(to.windows(state_format=2)),
    "join0": lambda to: to.into_topic(to.join(state_format=0)),
    "join": lambda to: to.into_topic(to.join()),
    "by_spark_keyed": lambda to: to.into_topic(to.orders()),
    "by_spark_windows": lambda to: to.into_topic(to.windows(state_format=2)),
    "both": lambda to: to.into_both(to.orders()),
    "pg_orders": lambda to: to.into_postgres(to.orders(), "direct"),
    "pg_recut": lambda to: to.into_postgres(recut(to), "direct"),
    "pg_windows": lambda to: to.into_postgres(to.windows(state_format=1), "direct"),
    "pg_windows2": lambda to: to.into_postgres(to.windows(state_format=2), "direct"),
    "pg_totals": lambda to: to.into_postgres(to.windows(state_format=1), "direct", **UPSERT),
    "pg_join": lambda to: to.into_postgres(to.join(), "direct"),
    "pg_staged_orders": lambda to: to.into_postgres(to.orders(), "staged"),
    "pg_staged_recut": lambda to: to.into_postgres(recut(to), "staged"),
    "pg_staged_windows": lambda to: to.into_postgres(to.windows(state_format=2), "staged"),
    "pg_staged_totals": lambda to: to.into_postgres(to.windows(state_format=1), "staged", **UPSERT),
    "pg_staged_join": lambda to: to.into_postgres(to.join(), "staged"),
    "my_orders": lambda to: to.into_mysql(to.orders(), "direct"),
    "my_recut": lambda to: to.into_mysql(recut(to), "direct"),
    "my_windows": lambda to: to.into_mysql(to.windows(state_format=1), "direct"),
    "my_windows2": lambda to: to.into_mysql(to.windows(state_format=2), "direct"),
    "my_totals": lambda to: to.into_mysql(to.windows(state_format=2), "direct", **UPSERT),
    "my_join": lambda to: to.into_mysql(to.join(), "direct"),
    "my_staged_orders": lambda to: to.into_mysql(to.orders(), "staged"),
    "my_staged_recut": lambda to: to.into_mysql(recut(to), "staged"),
    "my_staged_windows": lambda to: to.into_mysql(to.windows(state_format=2), "staged"),
    "my_staged_totals": lambda to: to.into_mysql(to.windows(state_format=1), "staged", **UPSERT),
    "my_staged_join": lambda to: to.into_mysql(to.join(), "staged"),
}


def live(spark: SparkSession, bootstrap: str, directory: Path, name: str) -> None:
    with STARTING:
        query = PIPELINES[name](Pipeline(spark, bootstrap, directory, name))
        while query.isActive and query.query.status["message"] == INITIALIZING:
            time.sleep(POLL_S)
    query.awaitTermination()
    assert name not in DEATH.steps, f"{name} came to its end alive"


def live_or_end_all(*of: Any) -> None:
    """A pipeline that fails ends the program: others may be held, and would wait for it."""
    try:
        live(*of)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main(bootstrap: str, directory: str, *names: str) -> None:
    jars = connector_jars() if any(name.startswith(BY_SPARK) for name in names) else []
    spark = driver_session(jars=jars)
    lives = [
        threading.Thread(target=live_or_end_all, args=(spark, bootstrap, Path(directory), name))
        for name in names
    ]
    for each in lives:
        each.start()
    for each in lives:
        each.join()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
