"""Pipelines that die where they are told to; what is left is carried on by the next life of the same program.

    python crashing.py BOOTSTRAP DIRECTORY PIPELINE…

Each pipeline reads its topics to their ends (`availableNow`), a few records a batch, and the program says
`done` when all have. TEST_DIE says who dies where: `keyed:before_end` kills this process with -9 when the
pipeline `keyed` is about to send EndTxn for the second batch that it writes in this life. The first one is
what the life before left behind.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone does
from spark_cases import driver_session

import semel.spark
from semel.client.cluster import Cluster
from semel.client.metadata import TopicPartition
from semel.client.shared_transaction import SharedTransaction
from semel.sinks.claims import ClaimBook
from semel.sinks.kafka import KafkaPlan, KafkaSink
from semel.sinks.marker import Marker, Owner
from semel.sinks.mysql import MySQLSink
from semel.sinks.postgres import PostgresSink
from semel.sinks.receipts import Attempt, Place, Receipt
from semel.sinks.sink import SourceOffsets, TransactionalSink, WriterPlan
from semel.sinks.sql.dialect import Loaded, Part, SqlSession
from semel.sinks.sql.intake import Intake
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.sink_row import SinkRow

BATCH_RECORDS = int(os.environ.get("TEST_PER_BATCH", "40"))
WATERMARK = "30 seconds"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
STATE = "spark.sql.streaming.stateStore"


def die() -> None:
    print("dying", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class Fate:
    """Counts the batches of one pipeline, and ends the process at the chosen step of the chosen one."""

    def __init__(self, pipeline: str) -> None:
        chosen, _, self._step = os.environ.get("TEST_DIE", "").partition(":")
        if chosen != pipeline:
            self._step = ""
        self._batch = int(os.environ.get("TEST_DIE_BATCH", "2"))
        self._begun = 0

    def begun(self) -> None:
        self._begun += 1

    def at(self, step: str) -> None:
        if step == self._step and (step == "in_recovery" or self._begun >= self._batch):
            die()


class MortalBook(ClaimBook):
    """Passes by while tasks write: one of them has written, and somebody asks for a partition."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self._fate = fate

    async def take(self, attempt: Attempt, where: TopicPartition, *, keeps: bool = False) -> int:
        if self._written:
            self._fate.at("amid_tasks")
        return await super().take(attempt, where, keeps=keeps)


class MortalKafkaSink(KafkaSink):
    """A sink that passes by the steps at which the process may die."""

    def __init__(self, fate: Fate, bootstrap: str, topic: str, key: str | None) -> None:
        super().__init__(bootstrap, topic, key=key)
        self._fate = fate

        self._book = MortalBook(fate)

    async def _sign(self, transaction: SharedTransaction, marker: Marker, owner: Owner) -> None:
        self._fate.at("in_recovery")
        await super()._sign(transaction, marker, owner)

    async def _begin(self, place: Place) -> KafkaPlan:
        self._fate.begun()
        self._fate.at("before_begin")
        return await super()._begin(place)

    async def _commit(
        self, marker: Marker, receipts: list[Receipt], source_offsets: SourceOffsets | None
    ) -> None:
        self._fate.at("after_tasks")
        await super()._commit(marker, receipts, source_offsets)

    async def _stage(
        self, transaction: SharedTransaction, marker: Marker, source_offsets: SourceOffsets | None
    ) -> Cluster | None:
        self._fate.at("before_marker")
        return await super()._stage(transaction, marker, source_offsets)

    async def _end(self, transaction: SharedTransaction, epoch: int) -> None:
        self._fate.at("before_end")
        await super()._end(transaction, epoch)
        self._fate.at("after_end")


class MortalIntake(Intake):
    """Passes by while tasks write: one of them has brought rows into the transaction."""

    def __init__(self, sink: "MortalSqlSink") -> None:
        super().__init__(sink._begun)
        self._sink = sink

    async def load(self, attempt: Attempt, parts: Iterable[Part]) -> Loaded:
        loaded = await super().load(attempt, parts)
        self._sink._fate.at("amid_tasks")
        return loaded


class MortalSqlSink(SqlSink):
    """The same steps in a database."""

    _fate: Fate

    def _new_intake(self) -> Intake:
        return MortalIntake(self)

    async def _take(self, session: SqlSession, before: SinkRow) -> SinkRow:
        taken = await super()._take(session, before)
        self._fate.at("in_recovery")
        return taken

    async def _begin(self, place: Place) -> WriterPlan:
        self._fate.begun()
        self._fate.at("before_begin")
        return await super()._begin(place)

    async def _commit(
        self, marker: Marker, receipts: list[Receipt], source_offsets: SourceOffsets | None
    ) -> None:
        self._fate.at("after_tasks")
        await super()._commit(marker, receipts, source_offsets)

    async def _mark(self, session: SqlSession, marker: Marker) -> None:
        self._fate.at("before_marker")
        await super()._mark(session, marker)

    async def _send_commit(self, session: SqlSession, marker: Marker, deadline: float) -> None:
        self._fate.at("before_end")
        await super()._send_commit(session, marker, deadline)
        self._fate.at("after_end")


class MortalPostgresSink(MortalSqlSink, PostgresSink):
    def __init__(self, fate: Fate, table: str, strategy: str | None = None) -> None:
        super().__init__(os.environ["TEST_POSTGRES"], table, strategy=strategy)
        self._fate = fate


class MortalMySQLSink(MortalSqlSink, MySQLSink):
    def __init__(self, fate: Fate, table: str, strategy: str | None = None) -> None:
        super().__init__(os.environ["TEST_MYSQL"], table, strategy=strategy)
        self._fate = fate


def read(spark: SparkSession, bootstrap: str, topic: str, per_batch: int = BATCH_RECORDS) -> DataFrame:
    return semel.spark.read(spark, bootstrap, topic, maxOffsetsPerTrigger=per_batch)


def records(df: DataFrame) -> DataFrame:
    """Record for record, with the value in upper case."""
    return df.select("key", F.upper(F.col("value").cast("string")).alias("value"))


def windows(df: DataFrame) -> DataFrame:
    """How many records, and the sum of their values, in every 5 seconds."""
    counted = (
        df.withColumn("number", F.col("value").cast("string").cast("long"))
        .withWatermark("timestamp", WATERMARK)
        .groupBy(F.window("timestamp", "5 seconds"))
        .agg(F.count("*").alias("count"), F.sum("number").alias("sum"))
    )
    start = F.col("window.start").cast("long").cast("string")
    return counted.select(start.alias("key"), F.to_json(F.struct("count", "sum")).alias("value"))


def joined(orders: DataFrame, payments: DataFrame) -> DataFrame:
    """Orders with their payments, by key."""
    left = orders.select(
        F.col("key").alias("order_key"), F.col("value").alias("order"), F.col("timestamp").alias("ordered")
    ).withWatermark("ordered", WATERMARK)
    right = payments.select(
        F.col("key").alias("payment_key"), F.col("value").alias("payment"), F.col("timestamp").alias("paid")
    ).withWatermark("paid", WATERMARK)
    within = "order_key = payment_key AND paid BETWEEN ordered AND ordered + INTERVAL 20 SECONDS"
    both = left.join(right, F.expr(within))
    value = F.concat_ws("+", F.col("order").cast("string"), F.col("payment").cast("string"))
    return both.select(F.col("order_key").alias("key"), value.alias("value"))


class Setting:
    """What a pipeline is built from."""

    def __init__(self, spark: SparkSession, bootstrap: str, directory: Path) -> None:
        self.spark = spark
        self.bootstrap = bootstrap
        self.directory = directory

    def start(self, name: str, df: DataFrame, sink: TransactionalSink) -> semel.spark.PipelineQuery:
        pipeline = semel.spark.exactly_once(df, sink, name=name, checkpoint=self.directory / name)
        return pipeline.start(trigger="availableNow")

    def sink(self, name: str, key: str | None = "key") -> MortalKafkaSink:
        return MortalKafkaSink(Fate(name), self.bootstrap, f"{name}-out", key)


def start_keyed(to: Setting) -> semel.spark.PipelineQuery:
    return to.start("keyed", records(read(to.spark, to.bootstrap, "orders")), to.sink("keyed"))


def start_unkeyed(to: Setting) -> semel.spark.PipelineQuery:
    return to.start("unkeyed", records(read(to.spark, to.bootstrap, "orders")), to.sink("unkeyed", None))


def start_table(to: Setting) -> semel.spark.PipelineQuery:
    """Into a table, from the same topic."""
    return to.start("table", table_rows(to), MortalPostgresSink(Fate("table"), "orders"))


def start_mysql_table(to: Setting) -> semel.spark.PipelineQuery:
    return to.start("mysql", table_rows(to), MortalMySQLSink(Fate("mysql"), "orders"))


def table_rows(to: Setting) -> DataFrame:
    df = records(read(to.spark, to.bootstrap, "orders"))
    return df.select(F.col("key").cast("string").alias("id"), F.col("value").alias("content"))


def start_totals(to: Setting) -> semel.spark.PipelineQuery:
    """Windows into a table, by way of a stage."""
    to.spark.conf.set(f"{STATE}.providerClass", ROCKSDB)
    sink = MortalPostgresSink(Fate("totals"), "totals", "staged")
    return to.start("totals", windows(read_numbers(to)), sink)


def start_mysql_totals(to: Setting) -> semel.spark.PipelineQuery:
    to.spark.conf.set(f"{STATE}.providerClass", ROCKSDB)
    sink = MortalMySQLSink(Fate("mysql_totals"), "totals", "staged")
    return to.start("mysql_totals", windows(read_numbers(to)), sink)


def read_numbers(to: Setting) -> DataFrame:
    return read(to.spark, to.bootstrap, "numbers", BATCH_RECORDS // 2)


def start_windows(to: Setting) -> semel.spark.PipelineQuery:
    to.spark.conf.set(f"{STATE}.providerClass", ROCKSDB)
    to.spark.conf.set(f"{STATE}.checkpointFormatVersion", "1")
    return to.start("windows", windows(read_numbers(to)), to.sink("windows"))


def start_windows2(to: Setting) -> semel.spark.PipelineQuery:
    """The same with the other format of state."""
    to.spark.conf.set(f"{STATE}.providerClass", ROCKSDB)
    to.spark.conf.set(f"{STATE}.checkpointFormatVersion", "2")
    to.spark.conf.set(f"{STATE}.rocksdb.changelogCheckpointing.enabled", "true")
    return to.start("windows2", windows(read_numbers(to)), to.sink("windows2"))


def start_join(to: Setting) -> semel.spark.PipelineQuery:
    to.spark.conf.set(f"{STATE}.providerClass", ROCKSDB)
    to.spark.conf.set(f"{STATE}.checkpointFormatVersion", "2")
    both = joined(read(to.spark, to.bootstrap, "orders"), read(to.spark, to.bootstrap, "payments"))
    return to.start("join", both, to.sink("join"))


PIPELINES: dict[str, Callable[[Setting], semel.spark.PipelineQuery]] = {
    "keyed": start_keyed,
    "unkeyed": start_unkeyed,
    "windows": start_windows,
    "windows2": start_windows2,
    "join": start_join,
    "table": start_table,
    "totals": start_totals,
    "mysql": start_mysql_table,
    "mysql_totals": start_mysql_totals,
}


def main(bootstrap: str, directory: str, *names: str) -> None:
    settings = {"spark.sql.shuffle.partitions": os.environ.get("TEST_SHUFFLE_PARTITIONS", "2")}
    spark = driver_session(settings=settings)
    setting = Setting(spark, bootstrap, Path(directory))
    running = [PIPELINES[name](setting) for name in names]
    print("running", flush=True)
    for query in running:
        query.awaitTermination()
        print(f"{query.name}: wrote {query.attempts}, skipped {query.skipped}", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
