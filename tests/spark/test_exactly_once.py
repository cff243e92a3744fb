"""`exactly_once` on a session that nothing kills: what is checked, written, skipped, and run again."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from broker_process import BrokerProcess
from click.testing import CliRunner
from kafka_process import KafkaProcess
from pipeline_cases import ROWS, Pipeline
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812 - as everyone does
from spark_cases import (
    Row,
    add_partitions,
    committed_records,
    create_topic,
    produce,
)

import semel.spark
from row_checks import about_rows, check_rows
from semel.cli.sink import command as sink_command
from semel.client.cluster import Cluster
from semel.client.group_offsets import fetch_offsets
from semel.client.metadata import TopicPartition
from semel.client.shared_transaction import SharedTransaction
from semel.errors import ConfigError, SemelError
from semel.sinks.errors import MarkerMismatch, WriteFailed
from semel.sinks.kafka import KafkaPlan, KafkaSink
from semel.sinks.marker import Marker
from semel.sinks.postgres import PostgresSink
from semel.sinks.receipts import Place, Receipt
from semel.sinks.source_group import SourceOffsets, source_group_of
from semel.testing.postgres_server import PostgresServer
from semel.wire.partitioner import partition_for_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from semel.spark.reader import Connector


OFFSET_LOG_VERSION: Final = "spark.sql.streaming.offsetLog.formatVersion"
ARROW_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"


@pytest.fixture
def pipeline(
    request: pytest.FixtureRequest, spark: SparkSession, topic: str, tmp_path: Path
) -> Iterator[Pipeline]:
    """On Semel, unless a test names other brokers."""
    broker: BrokerProcess | KafkaProcess = request.getfixturevalue(getattr(request, "param", "shared_broker"))
    yield Pipeline(spark, broker.bootstrap, topic, tmp_path)
    for query in spark.streams.active:
        query.stop()


# What is refused before anything is written


def refused(df: DataFrame, sink: Any, match: str, **arguments: Any) -> None:
    given = {"name": "p", "checkpoint": "/nowhere", **arguments}
    with pytest.raises(ConfigError, match=match):
        semel.spark.exactly_once(df, sink, **given)


def test_wrong_arguments_are_refused_before_anything_is_opened(pipeline: Pipeline) -> None:
    df, sink = pipeline.read(), pipeline.sink()
    refused(df, sink, "needs a name", name="")
    refused(df, sink, "needs a name", name=None)
    refused(df, sink, "needs a name", name="a/b")
    refused(df, sink, "needs checkpoint", checkpoint="")
    refused(df, sink, "output_mode", output_mode="overwrite")
    refused(df, [], "give a sink")
    refused(df, [sink, sink], "twice")
    refused(pipeline.spark.range(3), sink, "does not stream")
    refused(df.select("value"), sink, "no column 'key'.*key=None")
    refused(df.select("key", F.col("offset").alias("value")), sink, "'value' is of type bigint")
    refused(df, pipeline.sink(partition_column="topic"), "'topic' is of type string")
    refused(df, pipeline.sink(topic_column="nowhere"), "no column 'nowhere'")


@pytest.mark.parametrize("trigger", [{"continuous": "1 second"}, {"realTime": "5 minutes"}, {"never": True}])
def test_triggers_without_batches_are_refused(pipeline: Pipeline, trigger: dict[str, Any]) -> None:
    built = semel.spark.exactly_once(
        pipeline.read(), pipeline.sink(), name=pipeline.name, checkpoint=pipeline.checkpoint
    )
    with pytest.raises(ConfigError, match="trigger"):
        built.start(trigger)
    assert not pipeline.checkpoint.exists()


def test_what_spark_refuses_is_refused_before_a_sink_is_opened(pipeline: Pipeline) -> None:
    """Opening fences who has the sink: here, the pipeline that runs under this name."""
    pipeline.feed(0, 30)
    running = pipeline.start(trigger="100 milliseconds")
    with pytest.raises(ConfigError, match="runs in this session: stop it first"):
        pipeline.start()
    elsewhere = Pipeline.__new__(Pipeline)
    elsewhere.__dict__.update(pipeline.__dict__, spark=pipeline.spark.newSession())
    counted = elsewhere.read().groupBy("key").count().selectExpr("key", "string(count) AS value")
    with pytest.raises(AnalysisException, match="output mode: append"):
        elsewhere.start(df=counted)
    pipeline.feed(30, 60)
    running.processAllAvailable()
    running.stop()
    pipeline.check(60)


# Writing


def test_every_record_arrives_once_in_the_partition_of_its_key(pipeline: Pipeline) -> None:
    pipeline.feed(0, ROWS)
    query = pipeline.run()
    found = committed_records(pipeline.bootstrap, pipeline.target)
    expected = [(b"k%d" % i, b"v%d" % i, partition_for_key(b"k%d" % i, 4)) for i in range(ROWS)]
    check_rows(((record.key, record.value, partition) for partition, record in found), expected)
    assert query.attempts == 3


@pytest.mark.parametrize("offset_log", [1, 2])
def test_the_source_offsets_are_committed_for_tools_that_show_lag(
    pipeline: Pipeline, offset_log: int
) -> None:
    pipeline.feed(0, ROWS)
    pipeline.spark.conf.set(OFFSET_LOG_VERSION, str(offset_log))
    try:
        pipeline.run()
    finally:
        pipeline.spark.conf.unset(OFFSET_LOG_VERSION)
    assert (pipeline.checkpoint / "offsets" / "0").read_text().startswith(f"v{offset_log}\n")
    offsets = asyncio.run(_group_offsets(pipeline, source_group_of(pipeline.name), pipeline.source, 3))
    assert sum(offsets.values()) == ROWS


async def _group_offsets(pipeline: Pipeline, group: str, topic: str, partitions: int) -> dict[int, int]:
    wanted = [TopicPartition(topic, partition) for partition in range(partitions)]
    async with Cluster(pipeline.bootstrap) as cluster:
        found = await fetch_offsets(cluster, group, wanted)
    return {where.partition: committed.offset for where, committed in found.items()}


def test_rows_without_keys_are_written_by_as_many_tasks_as_there_are_partitions(pipeline: Pipeline) -> None:
    pipeline.feed(0, ROWS)
    df = pipeline.read(ROWS).repartition(7).select("value")
    query = pipeline.run(pipeline.sink(key=None), df)
    pipeline.check(ROWS)
    assert query.attempts == 1
    assert {partition for partition, _ in committed_records(pipeline.bootstrap, pipeline.target)} == {
        0,
        1,
        2,
        3,
    }


def test_records_of_one_key_keep_their_order_from_many_small_batches_of_arrow(pipeline: Pipeline) -> None:
    rows = [Row(b"v%d" % i, b"k%d" % (i % 5)) for i in range(ROWS)]
    produce(pipeline.bootstrap, pipeline.source, rows)
    pipeline.spark.conf.set(ARROW_ROWS, "7")
    try:
        pipeline.run(df=pipeline.read(ROWS))
    finally:
        pipeline.spark.conf.unset(ARROW_ROWS)
    by_key: dict[bytes | None, list[bytes | None]] = {}
    for _, record in committed_records(pipeline.bootstrap, pipeline.target):
        by_key.setdefault(record.key, []).append(record.value)
    with about_rows():
        assert by_key == {b"k%d" % key: [b"v%d" % i for i in range(key, ROWS, 5)] for key in range(5)}


def test_a_row_that_cannot_be_written_is_named_and_leaves_none(pipeline: Pipeline) -> None:
    pipeline.feed(0, ROWS)
    target = F.when(F.col("value") == b"v77", F.lit(-5))
    query = pipeline.start(pipeline.sink(partition_column="to"), pipeline.read().withColumn("to", target))
    with pytest.raises(WriteFailed, match=r"\(key 'k77'\) cannot be written.*partition -5"):
        query.awaitTermination()
    batches = query.sinks[0].metrics.commits
    assert query.attempts == batches + 1, "it would fail again, and was tried again"
    with about_rows():
        assert b"v77" not in pipeline.content()
    pipeline.run(pipeline.sink())
    pipeline.check(ROWS)


def test_a_partition_column_and_null_keys_find_their_partitions(pipeline: Pipeline) -> None:
    pipeline.feed(0, ROWS)
    number = F.substring(F.col("value").cast("string"), 2, 9).cast("int")
    df = pipeline.read(ROWS).select(
        "value",
        F.when(number % 2 == 0, F.col("key")).alias("key"),
        F.when(number % 3 == 0, F.lit(2)).alias("to"),
    )
    pipeline.run(pipeline.sink(partition_column="to"), df)
    pipeline.check(ROWS)
    for partition, record in committed_records(pipeline.bootstrap, pipeline.target):
        i = int((record.value or b"")[1:])
        if i % 3 == 0:
            assert partition == 2
        elif i % 2 == 0:
            assert partition == partition_for_key(b"k%d" % i, 4)


@pytest.mark.parametrize("pipeline", ["shared_broker", "kafka_broker"], indirect=True)
def test_partitions_that_are_added_to_the_output_lose_and_double_nothing(pipeline: Pipeline) -> None:
    pipeline.feed(0, ROWS)
    query = pipeline.start(trigger="100 milliseconds")
    query.processAllAvailable()
    add_partitions(pipeline.bootstrap, pipeline.target, 6)
    pipeline.feed(ROWS, 2 * ROWS)
    query.processAllAvailable()
    query.stop()
    pipeline.feed(2 * ROWS, 3 * ROWS)
    pipeline.run()
    pipeline.check(3 * ROWS)
    used = {partition for partition, _ in committed_records(pipeline.bootstrap, pipeline.target)}
    assert used == set(range(6))


def test_a_source_need_not_be_a_topic(pipeline: Pipeline, tmp_path: Path) -> None:
    """Files, whose names and not whose offsets are in the checkpoint; a batch is known again all the same."""

    def add_file(start: int, stop: int) -> None:
        numbers = pipeline.spark.range(start, stop, 1, 1)
        texts = [F.format_string(f"{name[0]}%d", "id").alias(name) for name in ("key", "value")]
        rows = numbers.select(*texts)
        rows.write.mode("append").parquet(str(tmp_path / "files"))

    def run() -> semel.spark.PipelineQuery:
        files = pipeline.spark.readStream.schema("key string, value string").option("maxFilesPerTrigger", "1")
        return pipeline.run(df=files.parquet(str(tmp_path / "files")))

    add_file(0, 30)
    add_file(30, 60)
    assert run().batches == 2
    assert pipeline.forget_last_commit() == 1
    add_file(60, 90)
    query = run()
    assert (query.skipped, query.rows) == (1, 30)
    pipeline.check(90)


def test_the_whole_result_takes_the_place_of_the_one_before(
    pipeline: Pipeline, postgres: PostgresServer
) -> None:
    """With `complete`, batch after batch."""
    postgres.query("CREATE TABLE totals (digit text PRIMARY KEY, count bigint)")

    def run() -> int:
        counted = pipeline.read(ROWS).groupBy(F.substring(F.col("key").cast("string"), 2, 1).alias("digit"))
        query = semel.spark.exactly_once(
            counted.count(),
            PostgresSink(postgres.dsn, "totals", mode="upsert", keys=["digit"]),
            name=pipeline.name,
            checkpoint=pipeline.checkpoint,
            output_mode="complete",
        ).start("availableNow")
        query.awaitTermination()
        return query.rows

    def check(stop: int) -> None:
        found = postgres.query("SELECT digit, count FROM totals")
        check_rows(map(tuple, found), list(Counter(str(i)[0] for i in range(stop)).items()))

    pipeline.feed(0, 5)
    assert run() == 5
    check(5)
    pipeline.feed(5, 30)
    assert run() == 10, "those that have not changed come again"
    check(30)


# Replays


def test_batch_0_is_skipped_like_any_other(pipeline: Pipeline) -> None:
    pipeline.feed(0, 30)
    pipeline.run()
    assert pipeline.forget_last_commit() == 0
    assert pipeline.run().skipped == 1
    pipeline.check(30)


def test_a_skipped_batch_of_a_stateful_query_is_executed_to_nowhere(pipeline: Pipeline) -> None:
    def counts() -> DataFrame:
        counted = pipeline.read().groupBy(F.substring("key", 1, 2).alias("key")).count()
        return counted.select("key", F.concat_ws("=", "key", "count").alias("value"))

    def run() -> semel.spark.PipelineQuery:
        query = semel.spark.exactly_once(
            counts(),
            pipeline.sink(),
            name=pipeline.name,
            checkpoint=pipeline.checkpoint,
            output_mode="update",
        ).start("availableNow")
        query.awaitTermination()
        return query

    pipeline.feed(0, ROWS)
    run()
    before = pipeline.content()
    pipeline.forget_last_commit()
    # Another number of shuffle partitions is not taken up by a query with state, and does no harm.
    pipeline.spark.conf.set("spark.sql.shuffle.partitions", "3")
    try:
        assert run().skipped == 1
        check_rows(pipeline.content(), before)
        pipeline.feed(0, ROWS)
        run()
    finally:
        pipeline.spark.conf.set("spark.sql.shuffle.partitions", "2")
    # A count only grows: one that is told twice was written twice, or counted from a state that was lost.
    told = pipeline.content()
    check_rows(told, set(told))
    of_key = Counter(b"k%d" % int(str(i)[:1]) for i in range(ROWS) for _ in range(2))
    last = {
        key: max(int(text.partition(b"=")[2]) for text in told if text and text.startswith(key + b"="))
        for key in of_key
    }
    check_rows(last.items(), of_key.items())


def test_a_replay_that_is_cut_differently_writes_the_same_rows(pipeline: Pipeline) -> None:
    """The first life fails after its tasks have written; the second has more partitions, and others."""
    pipeline.feed(0, ROWS)
    with pytest.raises(SemelError, match="not today"):
        pipeline.run(Vetoing(pipeline, batch_id=0), pipeline.read(ROWS).repartition(2))
    check_rows(pipeline.content(), [])
    pipeline.run(df=pipeline.read(ROWS).repartition(5, "value"))
    pipeline.check(ROWS)


class Vetoing(KafkaSink):
    """Fails for good when it is to commit a batch, after the tasks have written."""

    def __init__(self, pipeline: Pipeline, batch_id: int) -> None:
        super().__init__(pipeline.bootstrap, pipeline.target)
        self._vetoed = batch_id

    async def _commit(
        self, marker: Marker, receipts: list[Receipt], source_offsets: SourceOffsets | None
    ) -> None:
        if marker.epoch == self._vetoed:
            raise WriteFailed("not today", is_permanent=True)
        await super()._commit(marker, receipts, source_offsets)


# Moving over


@pytest.mark.parametrize("connector", ["python", "jvm"])
def test_a_query_of_sparks_own_sink_moves_over_with_its_checkpoint(
    pipeline: Pipeline, jvm_connector: None, connector: Connector
) -> None:
    """As docs/spark.md says: stop, adopt the last batch, start on the same checkpoint; with either source.

    Its state comes along: what it has seen before is no news to it.
    """

    def news(connector: Connector) -> DataFrame:
        read = semel.spark.read(
            pipeline.spark, pipeline.bootstrap, pipeline.source, connector=connector, maxOffsetsPerTrigger=50
        )
        return read.select("key", "value").dropDuplicates(["value"])

    pipeline.feed(0, ROWS)
    old = news("jvm").writeStream.format("kafka").option("topic", pipeline.target)
    old = old.option("kafka.bootstrap.servers", pipeline.bootstrap)
    old = old.option("checkpointLocation", str(pipeline.checkpoint)).trigger(availableNow=True)
    assert old.start().awaitTermination(120)
    pipeline.check(ROWS)
    pipeline.feed(0, 2 * ROWS)
    with pytest.raises(MarkerMismatch, match=r"no marker.*semel sink adopt"):
        pipeline.run(df=news(connector))
    pipeline.check(ROWS)

    adopt(pipeline, "--topic", pipeline.target, "--bootstrap", pipeline.bootstrap)
    query = pipeline.run(df=news(connector))
    assert query.skipped == 0
    pipeline.check(2 * ROWS)


def test_a_query_that_fills_a_table_by_itself_moves_over_with_its_checkpoint(
    pipeline: Pipeline,
    postgres: PostgresServer,
) -> None:
    postgres.query("CREATE TABLE arrived (value text)")

    def insert(batch: DataFrame, _: int) -> None:
        for row in batch.collect():
            postgres.query(f"INSERT INTO arrived VALUES ('{row.value}')")

    def check(stop: int) -> None:
        found = postgres.query("SELECT value FROM arrived")
        check_rows((value for (value,) in found), (f"v{i}" for i in range(stop)))

    pipeline.feed(0, ROWS)
    values = pipeline.read().select(F.col("value").cast("string"))
    old = values.writeStream.foreachBatch(insert).trigger(availableNow=True)
    assert old.option("checkpointLocation", str(pipeline.checkpoint)).start().awaitTermination(120)
    check(ROWS)
    adopt(pipeline, "--postgres", postgres.dsn)
    pipeline.feed(ROWS, 2 * ROWS)
    pipeline.run(PostgresSink(postgres.dsn, "arrived"), values)
    check(2 * ROWS)


def adopt(pipeline: Pipeline, *place: str) -> None:
    """What Spark has committed counts as written."""
    last = str(pipeline.last_commit())
    adopted = CliRunner().invoke(sink_command, ["adopt", pipeline.name, "--epoch", last, *place])
    assert adopted.exit_code == 0, adopted.output


# Failures


class Flaky(KafkaSink):
    """Fails to commit the first so many times, as after a lost connection."""

    def __init__(self, pipeline: Pipeline, failures: int) -> None:
        super().__init__(pipeline.bootstrap, pipeline.target)
        self.failures_left = failures
        self.places: list[Place] = []

    async def _begin(self, place: Place) -> KafkaPlan:
        self.places.append(place)
        return await super()._begin(place)

    async def _commit(
        self, marker: Marker, receipts: list[Receipt], source_offsets: SourceOffsets | None
    ) -> None:
        if self.failures_left:
            self.failures_left -= 1
            # What tasks have written is not covered by the receipts: the sink must refuse, and be run again.
            receipts = receipts[1:]
        await super()._commit(marker, receipts, source_offsets)


def test_a_spoiled_epoch_is_aborted_and_run_again(pipeline: Pipeline) -> None:
    pipeline.feed(0, ROWS)
    sink = Flaky(pipeline, failures=2)
    query = pipeline.run(sink)
    assert query.attempts == 5
    assert [place.epoch for place in sink.places] == [0, 0, 0, 1, 2]
    assert sink.metrics.aborts == 2
    pipeline.check(ROWS)


def test_an_error_of_user_code_is_raised_at_once_and_leaves_no_row(pipeline: Pipeline) -> None:
    pipeline.feed(0, ROWS)

    @F.udf("string")
    def strict(value: bytes) -> str:
        if value == b"v119":
            raise ValueError("119 is not allowed")
        return value.decode()

    df = pipeline.read(ROWS).select("key", strict("value").alias("value"))
    query = pipeline.start(df=df)
    with pytest.raises(Exception, match="119 is not allowed"):
        query.awaitTermination()
    assert query.attempts == 1
    check_rows(pipeline.content(), [])
    pipeline.run()
    pipeline.check(ROWS)


def test_a_stop_in_the_midst_of_a_batch_leaves_no_row(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.feed(0, ROWS)
    begun = tmp_path / "begun"

    @F.udf("binary")
    def slow(value: bytes) -> bytes:
        import time

        begun.touch()
        time.sleep(0.5)
        return value

    query = pipeline.start(df=pipeline.read(ROWS).select("key", slow("value").alias("value")))
    while not begun.exists():
        query.awaitTermination(0.05)
    query.stop()
    assert not query.isActive
    check_rows(pipeline.content(), [])
    pipeline.run()
    pipeline.check(ROWS)


class Slow(KafkaSink):
    """Takes long from its commit to its return."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline.bootstrap, pipeline.target)
        self.has_committed, self.may_return = threading.Event(), threading.Event()

    async def _end(self, transaction: SharedTransaction, epoch: int) -> None:
        await super()._end(transaction, epoch)
        self.has_committed.set()
        await asyncio.to_thread(self.may_return.wait)


def test_a_batch_in_whose_commit_the_query_was_stopped_is_not_written_again(pipeline: Pipeline) -> None:
    """Spark is interrupted, and may write its commit log before it notices, or not."""
    pipeline.feed(0, 30)
    sink = Slow(pipeline)
    query = pipeline.start(sink)
    stopping = threading.Thread(target=query.stop, daemon=True)
    try:
        assert sink.has_committed.wait(60)
        stopping.start()
        while query.isActive:
            query.awaitTermination(0.05)
    finally:
        sink.may_return.set()
    stopping.join(60)
    assert not stopping.is_alive()
    is_logged = (pipeline.checkpoint / "commits" / "0").exists()
    assert pipeline.run().skipped == (0 if is_logged else 1)
    pipeline.check(30)


# Several sinks


def test_several_sinks_get_the_same_rows_from_one_evaluation(pipeline: Pipeline) -> None:
    second = f"{pipeline.target}-2"
    create_topic(pipeline.bootstrap, second, 2)
    pipeline.feed(0, ROWS)
    evaluated = pipeline.spark.sparkContext.accumulator(0)

    @F.udf("binary")
    def counted(value: bytes) -> bytes:
        evaluated.add(1)
        return value

    df = pipeline.read().select("key", counted("value").alias("value"))
    query = pipeline.run([pipeline.sink(), KafkaSink(pipeline.bootstrap, second)], df)
    pipeline.check(ROWS)
    pipeline.check(ROWS, second)
    assert evaluated.value == ROWS
    assert (query.batches, query.rows) == (3, ROWS), "a row counts once, however many sinks it goes to"


def test_a_sink_that_leads_by_a_batch_waits_for_the_others(pipeline: Pipeline) -> None:
    second = f"{pipeline.target}-2"
    create_topic(pipeline.bootstrap, second, 2)
    pipeline.feed(0, ROWS)
    last = Vetoing(pipeline, batch_id=1)
    last.topic = second
    with pytest.raises(SemelError, match="not today"):
        pipeline.run([pipeline.sink(), last])
    first_has, second_has = pipeline.content(), pipeline.content(second)
    assert first_has > second_has, "the first sink has two batches, the second one"
    query = pipeline.run([pipeline.sink(), KafkaSink(pipeline.bootstrap, second)])
    assert query.sinks[0].metrics.skips == 1
    assert query.skipped == 0, "the second did not have it"
    assert query.batches == 2
    pipeline.check(ROWS)
    pipeline.check(ROWS, second)
