"""The reader in Python and Spark's own Kafka source give the same rows, from Semel and from Apache Kafka.

So this is also the claim that Spark's Kafka source, a stock Java client underneath, reads from Semel.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from broker_process import BrokerProcess
from spark_cases import Row, alter_topic, committed_records, create_topic, produce, produce_transaction

import semel.spark
from row_checks import about_rows, check_rows
from semel.spark.reader import Connector, has_jvm_connector

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("jvm_connector")

CONNECTORS: tuple[Connector, ...] = ("python", "jvm")
COLUMNS = ("partition", "offset", "key", "value", "topic", "timestampType", "headers")
COMPACTION_TIMEOUT_S = 90
KEYS = 7


@pytest.fixture(scope="session")
def compacting_broker(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A broker that looks for work to compact all the time."""
    settings = {
        "log.cleaner.backoff.ms": "50",
        "snapshot.interval.bytes": "4000",
        "flush.interval.bytes": "4000",
    }
    process = BrokerProcess(tmp_path_factory.mktemp("compacting") / "broker", settings).start()
    yield process
    process.kill()


@pytest.fixture(params=["semel", "kafka"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    name = "compacting_broker" if request.param == "semel" else "kafka_broker"
    found: str = request.getfixturevalue(name).bootstrap
    return found


def write_history(bootstrap: str, topic: str) -> None:
    """Transactions that commit, abort and interleave with plain records, over and over the same keys."""
    for turn in range(12):
        rows = [
            Row(b"%d-%d" % (turn, i), b"key-%d" % (i % KEYS), [("turn", b"%d" % turn)] if i % 3 else ())
            for i in range(20)
        ]
        if turn % 4 == 3:
            produce(bootstrap, topic, rows)
        else:
            produce_transaction(bootstrap, topic, rows, commit=turn % 4 != 1)
        if turn % 5 == 0:
            produce_transaction(bootstrap, topic, [Row(None, b"key-%d" % (turn % KEYS))])
    produce_transaction(bootstrap, topic, rows, commit=False)


def rows_of(frame: DataFrame) -> list[tuple[object, ...]]:
    chosen = frame.selectExpr(*COLUMNS, "unix_micros(timestamp) AS moment")
    return sorted(
        (
            tuple(
                bytes(field) if isinstance(field, bytearray) else _plain(name, field)
                for name, field in zip((*COLUMNS, "moment"), row, strict=True)
            )
            for row in chosen.collect()
        ),
        key=str,
    )


def _plain(name: str, field: object) -> object:
    if name != "headers" or field is None:
        return field
    return [(each.key, each.value) for each in field]  # type: ignore[attr-defined]


def as_stream(spark: SparkSession, frame: DataFrame, checkpoint: Path, name: str) -> DataFrame:
    """What a stream brings, in a table of the session."""
    writer = frame.writeStream.format("memory").queryName(name).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    assert query.awaitTermination(120)
    return spark.table(name)


def assert_same_rows(spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path) -> int:
    batches = [
        rows_of(semel.spark.read_batch(spark, bootstrap, topic, connector=each)) for each in CONNECTORS
    ]
    with about_rows():
        assert batches[0] == batches[1]
    streams = [
        rows_of(
            as_stream(
                spark,
                semel.spark.read(spark, bootstrap, topic, connector=each, maxOffsetsPerTrigger=60),
                tmp_path / each,
                f"{each}_{topic.replace('-', '_')}",
            )
        )
        for each in CONNECTORS
    ]
    with about_rows():
        assert streams == batches
    own = ((partition, record.offset) for partition, record in committed_records(bootstrap, topic))
    check_rows(((row[0], row[1]) for row in batches[0]), own)
    return len(batches[0])


def test_both_see_the_same_columns(spark: SparkSession, shared_broker: BrokerProcess, topic: str) -> None:
    assert has_jvm_connector(spark)
    create_topic(shared_broker.bootstrap, topic)
    for includes in (True, False):
        schemas = [
            semel.spark.read_batch(
                spark, shared_broker.bootstrap, topic, connector=each, includeHeaders=includes
            ).schema
            for each in CONNECTORS
        ]
        assert schemas[0] == schemas[1]


def test_both_see_the_same_rows_among_aborted_transactions_and_markers(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    create_topic(bootstrap, topic, partitions=2)
    write_history(bootstrap, topic)
    rows = assert_same_rows(spark, bootstrap, topic, tmp_path)
    with about_rows():
        assert rows == 12 * 20 - 3 * 20 + 3


def test_both_see_the_same_rows_across_what_compaction_took_away(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    create_topic(
        bootstrap,
        topic,
        cleanup_policy="compact",
        min_cleanable_dirty_ratio="0",
        segment_ms="100",
    )
    write_history(bootstrap, topic)
    written = len(committed_records(bootstrap, topic))
    give_up = time.monotonic() + COMPACTION_TIMEOUT_S
    # Only closed segments are compacted: every record closes the one before it, once that is old enough.
    while len(left := committed_records(bootstrap, topic)) > written // 2:
        assert time.monotonic() < give_up, f"{len(left)} of {written} are left"
        time.sleep(0.2)
        produce(bootstrap, topic, [Row(b"last", b"key-0")])
    alter_topic(bootstrap, topic, cleanup_policy="delete")
    while (seen := committed_records(bootstrap, topic)) != left:
        # What was being compacted when that was asked for comes to its end.
        assert time.monotonic() < give_up
        left = seen
        time.sleep(2)
    offsets = [record.offset for _, record in left]
    assert max(offsets) - min(offsets) >= len(offsets)
    rows = assert_same_rows(spark, bootstrap, topic, tmp_path)
    with about_rows():
        assert rows == len(left)


def test_auto_takes_sparks_own_where_it_is_there(
    spark: SparkSession, shared_broker: BrokerProcess, topic: str
) -> None:
    create_topic(shared_broker.bootstrap, topic)
    chosen: tuple[tuple[Connector, bool], ...] = (("auto", True), ("jvm", True), ("python", False))
    for connector, is_jvm in chosen:
        frame = semel.spark.read_batch(spark, shared_broker.bootstrap, topic, connector=connector)
        plan = frame._jdf.queryExecution().analyzed().toString()  # type: ignore[operator]
        assert ("kafka" in plan.lower()) is is_jvm, plan
