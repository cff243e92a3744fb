"""The jar-free reader on a real Spark and a real broker: every committed record, whatever lies between."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from broker_process import BrokerProcess
from pyspark.errors import PySparkException
from spark_cases import (
    LOCAL_CLUSTER,
    DriverProcess,
    Row,
    StartDriver,
    add_partitions,
    create_topic,
    delete_records,
    produce,
    produce_transaction,
)

import semel.spark
from row_checks import about_rows, check_rows
from semel.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

QUERY_TIMEOUT_S = 120


def values(frame: DataFrame) -> list[bytes]:
    return sorted(bytes(row.value) for row in frame.select("value").collect())


class Batches:
    """What a stream brought, batch by batch, collected on the driver."""

    def __init__(self) -> None:
        self.values: list[list[bytes]] = []

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        del self.values[batch_id:]
        self.values.append(values(frame))

    @property
    def all(self) -> list[bytes]:
        return sorted(value for batch in self.values for value in batch)


def run_until_caught_up(frame: DataFrame, checkpoint: Path, take: Callable[..., None]) -> None:
    query = (
        frame.writeStream.foreachBatch(take)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(QUERY_TIMEOUT_S), query.status
    finally:
        query.stop()


@contextmanager
def running(frame: DataFrame, checkpoint: Path, take: Callable[..., None]) -> Iterator[StreamingQuery]:
    """A query that goes on until the block is left."""
    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    query = writer.start()
    try:
        yield query
    finally:
        query.stop()


def numbered(first: int, last: int, **fields: Any) -> list[Row]:
    return [Row(b"%06d" % number, **fields) for number in range(first, last)]


def numbers(*ranges: tuple[int, int]) -> list[bytes]:
    return [b"%06d" % number for first, last in ranges for number in range(first, last)]


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


# What a row is


def test_every_field_of_a_record_becomes_a_column(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str
) -> None:
    create_topic(shared_broker.bootstrap, topic, partitions=2)
    moment_ms = 1_700_000_000_123
    headers = [("source", b"web"), ("source", b""), ("trace", None)]
    produce(
        shared_broker.bootstrap,
        topic,
        [
            Row(b"value", b"key", headers, 1, moment_ms),
            Row(None, None, (), 1, moment_ms),
            Row(b"", b"", (), 0, moment_ms),
        ],
    )
    frame = semel.spark.read_batch(spark, shared_broker.bootstrap, topic)
    rows = sorted(frame.collect(), key=lambda row: (row.partition, row.offset))
    with about_rows():
        assert [(row.partition, row.offset, row.key, row.value) for row in rows] == [
            (0, 0, b"", b""),
            (1, 0, b"key", b"value"),
            (1, 1, None, None),
        ]
        assert [(each.key, each.value) for each in rows[1].headers] == headers
    assert rows[0].headers is None
    assert {row.topic for row in rows} == {topic}
    assert {row.timestampType for row in rows} == {0}
    moment = datetime.fromtimestamp(moment_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    shown = frame.selectExpr("date_format(timestamp, 'yyyy-MM-dd HH:mm:ss.SSSSSS') AS shown").distinct()
    assert [row.shown for row in shown.collect()] == [moment]


def test_only_what_was_committed_is_read(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic)
    produce_transaction(bootstrap, topic, numbered(0, 10))
    produce_transaction(bootstrap, topic, numbered(10, 20), commit=False)
    produce(bootstrap, topic, numbered(20, 30))
    produce_transaction(bootstrap, topic, numbered(30, 40))
    produce_transaction(bootstrap, topic, numbered(40, 50), commit=False)
    check_rows(values(semel.spark.read_batch(spark, bootstrap, topic)), numbers((0, 10), (20, 40)))
    everything = semel.spark.read_batch(
        spark, bootstrap, topic, **{"kafka.isolation.level": "read_uncommitted"}
    )
    check_rows(values(everything), numbers((0, 50)))


def test_several_topics_are_read_together(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap
    others = [f"{topic}-{name}" for name in ("a", "b", "empty")]
    for name in others:
        create_topic(bootstrap, name, partitions=2)
    produce(bootstrap, others[0], numbered(0, 5))
    produce(bootstrap, others[1], numbered(5, 9))
    rows = semel.spark.read_batch(spark, bootstrap, others).collect()
    wanted = [(others[0], value) for value in numbers((0, 5))] + [
        (others[1], value) for value in numbers((5, 9))
    ]
    check_rows(((row.topic, bytes(row.value)) for row in rows), wanted)


def test_a_topic_without_records_is_an_empty_frame(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str
) -> None:
    create_topic(shared_broker.bootstrap, topic)
    assert semel.spark.read_batch(spark, shared_broker.bootstrap, topic).count() == 0


def test_a_batch_reads_between_the_offsets_that_were_given_in_as_many_tasks_as_asked_for(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic)
    produce(bootstrap, topic, numbered(0, 100))
    frame = semel.spark.read_batch(
        spark,
        bootstrap,
        topic,
        startingOffsets=json.dumps({topic: {"0": 13}}),
        endingOffsets=json.dumps({topic: {"0": 77}}),
        minPartitions=4,
    )
    check_rows(values(frame), numbers((13, 77)))
    assert frame.rdd.getNumPartitions() == 4


# Streams


def test_a_stream_reads_on_where_it_stopped(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic, partitions=2)
    produce_transaction(bootstrap, topic, numbered(0, 50))
    produce_transaction(bootstrap, topic, numbered(50, 60), commit=False)
    batches = Batches()
    run_until_caught_up(semel.spark.read(spark, bootstrap, topic), tmp_path / "ck", batches)
    check_rows(batches.all, numbers((0, 50)))
    produce_transaction(bootstrap, topic, numbered(60, 70))
    run_until_caught_up(semel.spark.read(spark, bootstrap, topic), tmp_path / "ck", batches)
    check_rows(batches.all, numbers((0, 50), (60, 70)))


def test_offsets_in_the_checkpoint_are_those_of_sparks_own_source(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic, partitions=2)
    produce(bootstrap, topic, numbered(0, 3, partition=1))
    run_until_caught_up(semel.spark.read(spark, bootstrap, topic), tmp_path / "ck", Batches())
    written = (tmp_path / "ck" / "offsets" / "0").read_text().splitlines()
    assert json.loads(written[-1]) == {topic: {"0": 0, "1": 3}}


def test_batches_are_no_larger_than_asked_for_and_come_to_the_end(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic, partitions=2)
    produce(bootstrap, topic, numbered(0, 40, partition=0) + numbered(40, 60, partition=1))
    batches = Batches()
    frame = semel.spark.read(spark, bootstrap, topic, maxOffsetsPerTrigger=25)
    run_until_caught_up(frame, tmp_path / "ck", batches)
    check_rows(batches.all, numbers((0, 60)))
    assert len(batches.values) == 3
    assert max(len(batch) for batch in batches.values) <= 25


def test_available_now_ends_at_what_was_there_when_it_began(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic)
    produce(bootstrap, topic, numbered(0, 20))
    batches = Batches()

    def take(frame: DataFrame, batch_id: int) -> None:
        batches(frame, batch_id)
        produce(bootstrap, topic, numbered(20 + batch_id, 21 + batch_id))

    run_until_caught_up(
        semel.spark.read(spark, bootstrap, topic, maxOffsetsPerTrigger=10), tmp_path / "ck", take
    )
    check_rows(batches.all, numbers((0, 20)))


def test_a_partition_that_is_added_later_is_read_from_its_beginning(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic)
    produce(bootstrap, topic, numbered(0, 5))
    batches = Batches()
    arrived = threading.Event()

    def take(frame: DataFrame, batch_id: int) -> None:
        batches(frame, batch_id)
        if len(batches.all) >= 10:
            arrived.set()

    stream = semel.spark.read(spark, bootstrap, topic).writeStream.foreachBatch(take)
    query = stream.option("checkpointLocation", str(tmp_path / "ck")).start()
    try:
        query.processAllAvailable()
        add_partitions(bootstrap, topic, 3)
        produce(bootstrap, topic, numbered(5, 10, partition=2))
        assert arrived.wait(QUERY_TIMEOUT_S), query.exception()
    finally:
        query.stop()
    check_rows(batches.all, numbers((0, 10)))


def test_a_stream_from_the_latest_loses_nothing_when_its_first_batch_is_run_again(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic)
    produce(bootstrap, topic, numbered(0, 5))
    batches = Batches()
    frame = semel.spark.read(spark, bootstrap, topic, startingOffsets="latest")
    run_until_caught_up(frame, tmp_path / "ck", batches)
    check_rows(batches.all, [])
    # What a driver that died in its first batch leaves behind: the batch's offsets, and no word of its end.
    shutil.rmtree(tmp_path / "ck" / "commits")
    produce(bootstrap, topic, numbered(5, 9))
    run_until_caught_up(frame, tmp_path / "ck", batches)
    check_rows(batches.all, numbers((5, 9)))


@pytest.mark.parametrize(
    ("starting", "already"),
    [("latest", []), ('{"TOPIC": {"0": -1, "1": -2}}', numbers((3, 5)))],
    ids=["latest", "one partition at the latest"],
)
def test_a_stream_from_the_latest_brings_every_row_in_its_first_life_and_in_the_next(
    spark: SparkSession,
    shared_broker: BrokerProcess,
    topic: str,
    tmp_path: Path,
    starting: str,
    already: list[bytes],
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic, partitions=2)
    produce(bootstrap, topic, numbered(0, 3, partition=0) + numbered(3, 5, partition=1))
    batches = Batches()
    frame = semel.spark.read(spark, bootstrap, topic, startingOffsets=starting.replace("TOPIC", topic))
    with running(frame, tmp_path / "ck", batches) as query:
        query.processAllAvailable()
        with about_rows():
            assert (batches.values[0], batches.all) == ([], already)
        for first in (10, 20):
            produce(bootstrap, topic, numbered(first, first + 10))
            query.processAllAvailable()
            check_rows(batches.all, already + numbers((10, first + 10)))
    produce(bootstrap, topic, numbered(30, 40))
    with running(frame, tmp_path / "ck", batches) as query:
        for last in (40, 50):
            query.processAllAvailable()
            check_rows(batches.all, already + numbers((10, last)))
            produce(bootstrap, topic, numbered(last, last + 10))
    run_until_caught_up(frame, tmp_path / "ck", batches)
    check_rows(batches.all, already + numbers((10, 60)))


def test_a_stream_from_the_latest_brings_every_row_after_its_first_batch_was_run_again(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    """Nothing came in before the driver was back: the second batch begins at its initial offsets, too."""
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic)
    produce(bootstrap, topic, numbered(0, 5))
    batches = Batches()
    frame = semel.spark.read(spark, bootstrap, topic, startingOffsets="latest")
    run_until_caught_up(frame, tmp_path / "ck", batches)
    shutil.rmtree(tmp_path / "ck" / "commits")
    with running(frame, tmp_path / "ck", batches) as query:
        query.processAllAvailable()
        with about_rows():
            assert batches.values == [[]]
        for first in (5, 10):
            produce(bootstrap, topic, numbered(first, first + 5))
            query.processAllAvailable()
    check_rows(batches.all, numbers((5, 15)))


def test_a_stream_from_a_log_that_was_cut_reads_every_row_once_when_its_first_batch_is_run_again(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic, partitions=2)
    produce(bootstrap, topic, numbered(0, 9))
    delete_records(bootstrap, {(topic, 0): 5})
    batches = Batches()
    frame = semel.spark.read(spark, bootstrap, topic)
    run_until_caught_up(frame, tmp_path / "ck", batches)
    with about_rows():
        assert batches.values == [[], numbers((5, 9))]
    # What a driver that died in its first batch leaves behind.
    for of_the_second in ("commits", "offsets/1", "offsets/.1.crc"):
        remove(tmp_path / "ck" / of_the_second)
    produce(bootstrap, topic, numbered(9, 12))
    run_until_caught_up(frame, tmp_path / "ck", batches)
    with about_rows():
        assert batches.values == [[], numbers((5, 12))]


def test_a_first_batch_whose_records_are_deleted_before_it_is_run_again_is_an_error_or_has_the_rest(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic)
    produce(bootstrap, topic, numbered(0, 9))
    batches = Batches()
    run_until_caught_up(semel.spark.read(spark, bootstrap, topic), tmp_path / "ck", batches)
    with about_rows():
        assert batches.values == [numbers((0, 9))]
    remove(tmp_path / "ck" / "commits")
    delete_records(bootstrap, {(topic, 0): 5})
    with pytest.raises(PySparkException, match="begins at offset 5 now, and the first batch of this query"):
        run_until_caught_up(semel.spark.read(spark, bootstrap, topic), tmp_path / "ck", batches)
    patient = semel.spark.read(spark, bootstrap, topic, failOnDataLoss=False)
    run_until_caught_up(patient, tmp_path / "ck", batches)
    with about_rows():
        assert batches.values == [numbers((5, 9))]


# Gaps and losses


def test_an_end_without_records_is_reached(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    """Markers and aborted records are all that lies at the end, and limits fall right among them."""
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic)
    produce_transaction(bootstrap, topic, numbered(0, 3))
    for _ in range(3):
        produce_transaction(bootstrap, topic, numbered(3, 10), commit=False)
    batches = Batches()
    frame = semel.spark.read(spark, bootstrap, topic, maxOffsetsPerTrigger=9)
    run_until_caught_up(frame, tmp_path / "ck", batches)
    check_rows(batches.all, numbers((0, 3)))


def test_records_that_are_gone_stop_a_query_unless_it_was_told_to_go_on(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic)
    produce(bootstrap, topic, numbered(0, 10))
    batches = Batches()
    run_until_caught_up(semel.spark.read(spark, bootstrap, topic), tmp_path / "ck", batches)
    produce(bootstrap, topic, numbered(10, 20))
    delete_records(bootstrap, {(topic, 0): 15})
    with pytest.raises(PySparkException, match=r"offsets 10 to 14 of .* are gone"):
        run_until_caught_up(semel.spark.read(spark, bootstrap, topic), tmp_path / "ck", batches)
    patient = semel.spark.read(spark, bootstrap, topic, failOnDataLoss=False)
    run_until_caught_up(patient, tmp_path / "ck", batches)
    check_rows(batches.all, numbers((0, 10), (15, 20)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"startingOffsets": "tomorrow"}, "are no offsets"),
        ({"startingOffset": "latest"}, "has no option"),
        ({"connector": "scala"}, "python, jvm or auto"),
    ],
)
def test_wrong_options_are_refused_at_once(
    spark: SparkSession, options: Mapping[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        semel.spark.read(spark, "localhost:9092", "orders", **options)


def test_a_topic_that_does_not_exist_is_named(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str
) -> None:
    with pytest.raises(PySparkException, match=f"topic '{topic}' cannot be used"):
        semel.spark.read_batch(spark, shared_broker.bootstrap, topic).count()


# Processes


CLUSTER_PROGRAM = """
import sys
from spark_cases import driver_session
import semel.spark

spark = driver_session()
bootstrap, topic, checkpoint, target = sys.argv[1:]
frame = semel.spark.read(spark, bootstrap, topic, maxOffsetsPerTrigger=300)
frame.selectExpr("CAST(value AS STRING) AS value").writeStream.format("text").option(
    "checkpointLocation", checkpoint).trigger(availableNow=True).start(target).awaitTermination()
"""


def test_executors_in_processes_of_their_own_read_too(
    shared_broker: BrokerProcess, topic: str, tmp_path: Path, start_driver: StartDriver
) -> None:
    bootstrap = shared_broker.bootstrap
    create_topic(bootstrap, topic, partitions=3)
    for part in range(3):
        produce_transaction(bootstrap, topic, numbered(part * 300, part * 300 + 300, partition=part))
    driver = start_driver(
        CLUSTER_PROGRAM, bootstrap, topic, tmp_path / "ck", tmp_path / "out", master=LOCAL_CLUSTER
    )
    driver.succeed()
    found = [line.encode() for file in (tmp_path / "out").glob("*.txt") for line in file.open()]
    check_rows((line.strip() for line in found), numbers((0, 900)))


LATEST_PROGRAM = """
import sys, time
from pathlib import Path
from spark_cases import driver_session
import semel.spark

bootstrap, topic, checkpoint, target, hangs_in = sys.argv[1:]

def take(frame, batch_id):
    rows = sorted(bytes(row.value) for row in frame.select("value").collect())
    if batch_id == int(hangs_in):
        print("in batch", batch_id)
        time.sleep(600)
    Path(target, f"{batch_id}.txt").write_bytes(b"".join(row + b"\\n" for row in rows))
    for row in rows:
        print("wrote", row)

frame = semel.spark.read(driver_session(), bootstrap, topic, startingOffsets="latest")
frame.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint).start().awaitTermination()
"""


def test_a_driver_that_is_killed_in_its_first_batches_from_the_latest_loses_and_repeats_nothing(
    shared_broker: BrokerProcess, topic: str, tmp_path: Path, start_driver: StartDriver
) -> None:
    bootstrap, target = shared_broker.bootstrap, tmp_path / "out"
    target.mkdir()
    create_topic(bootstrap, topic, partitions=2)
    produce(bootstrap, topic, numbered(0, 10))

    def start(hangs_in: int) -> DriverProcess:
        return start_driver(LATEST_PROGRAM, bootstrap, topic, tmp_path / "ck", target, hangs_in)

    driver = start(0)
    driver.wait_for("in batch 0")
    produce(bootstrap, topic, numbered(10, 20))
    driver.kill()
    driver = start(1)
    driver.wait_for("in batch 1")
    produce(bootstrap, topic, numbered(20, 30))
    driver.kill()
    driver = start(-1)
    driver.wait_for("wrote", count=20)
    produce(bootstrap, topic, numbered(30, 40))
    driver.wait_for("wrote", count=30)
    driver.kill()
    found = [line for file in target.iterdir() for line in file.read_bytes().split()]
    check_rows(found, numbers((10, 40)))
    check_rows((target / "0.txt").read_bytes().split(), [], "the first batch")


def test_a_broker_that_is_killed_and_comes_back_is_waited_for(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    create_topic(broker.bootstrap, topic, partitions=2)
    produce(broker.bootstrap, topic, numbered(0, 2_000))
    batches = Batches()
    restarted = threading.Event()

    def take(frame: DataFrame, batch_id: int) -> None:
        if batch_id == 1:
            broker.kill()
            restart = threading.Timer(2.0, broker.start)
            restart.start()
            batches(frame, batch_id)
            restart.join()
            restarted.set()
        else:
            batches(frame, batch_id)

    frame = semel.spark.read(spark, broker.bootstrap, topic, maxOffsetsPerTrigger=500)
    run_until_caught_up(frame, tmp_path / "ck", take)
    assert restarted.is_set()
    check_rows(batches.all, numbers((0, 2_000)))
