"""What the pipelines of the crash matrix read and compute, and what must come out, whatever dies."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from pyspark.sql import functions as F  # noqa: N812 - as everyone does
from spark_cases import Row, create_topic

from row_checks import check_rows
from semel.client.cluster import Cluster
from semel.client.transactional_producer import TransactionalProducer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Content: TypeAlias = tuple[bytes | None, bytes | None]

BEGIN_MS: Final = 1_700_000_000_000
STEP_MS: Final = 1000
WINDOW_S: Final = 5
PAYS_AFTER_S: Final = 4
ORDERS: Final = 400
LAST_AFTER_MS: Final = 100 * ORDERS * STEP_MS
PARTITIONS: Final = {"orders": 3, "payments": 2, "numbers": 2}
# Small ones, so that a batch has committed and aborted records, and of every partition as many.
TRANSACTION_ROWS: Final = 24
ABORTED_ROWS: Final = 12
WATERMARK: Final = "10 seconds"
ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
STATE: Final = "spark.sql.streaming.stateStore"
# What a version of the state is in, in each format; 0 is the store that Spark has by itself.
STATE_FILES: Final = {
    0: re.compile(r"\d+\.(delta|snapshot)"),
    1: re.compile(r"\d+\.zip"),
    2: re.compile(r"\d+_[0-9a-f-]{36}\.(changelog|zip)"),
}
# Queries that remember every value in each of the formats, and give it once.
STATES: Final = {"state0": 0, "state": 1, "state2": 2}
STATE_SUFFIXES: Final = (".delta", ".snapshot", ".zip", ".changelog")


def feed(bootstrap: str) -> None:
    """Orders, payments and numbers, in transactions, every other of which is aborted."""
    for topic, partitions in PARTITIONS.items():
        create_topic(bootstrap, topic, partitions, retention_ms="-1")
    asyncio.run(_feed(bootstrap))


async def _feed(bootstrap: str) -> None:
    async with Cluster(bootstrap) as cluster, TransactionalProducer(cluster, "feeder") as producer:
        for start in range(0, ORDERS, TRANSACTION_ROWS):
            some = range(start, min(start + TRANSACTION_ROWS, ORDERS))
            await _send(producer, [row for i in some for row in (order(i), payment(i), number(i))])
            await producer.commit()
            await _send(producer, [aborted(topic, i) for topic in PARTITIONS for i in some[:ABORTED_ROWS]])
            await producer.abort()
        await _send(producer, [last(partition) for partition in range(PARTITIONS["numbers"])])
        await producer.commit()


async def _send(producer: TransactionalProducer, rows: Sequence[tuple[str, Row]]) -> None:
    await producer.begin()
    for topic, row in rows:
        await producer.send(
            topic, row.value, key=row.key, partition=row.partition, timestamp_ms=row.timestamp_ms
        )
    await producer.flush()


def row_of(topic: str, i: int, value: bytes, key: bytes | None, after_s: int = 0) -> tuple[str, Row]:
    """Number i of its topic. Partitions take turns: all of them are read at one pace, and none is late."""
    return topic, Row(
        value, key, partition=i % PARTITIONS[topic], timestamp_ms=BEGIN_MS + i * STEP_MS + after_s * 1000
    )


def order(i: int) -> tuple[str, Row]:
    return row_of("orders", i, b"order %d" % i, b"key %d" % i)


def payment(i: int) -> tuple[str, Row]:
    return row_of("payments", i, b"payment %d" % i, b"key %d" % i, PAYS_AFTER_S)


def number(i: int) -> tuple[str, Row]:
    return row_of("numbers", i, b"%d" % i, None)


def aborted(topic: str, i: int) -> tuple[str, Row]:
    return row_of(topic, i, b"999999", b"aborted")


def last(partition: int) -> tuple[str, Row]:
    """Far in the future: closes every window."""
    return "numbers", Row(b"0", b"end", partition=partition, timestamp_ms=BEGIN_MS + LAST_AFTER_MS)


# What is computed with state


def keep_state(spark: SparkSession, state_format: int) -> None:
    """In RocksDB: the first format writes whole files, the second one changes, and names files by run.

    Format 0 is that of Spark's own store: nothing is asked for.
    """
    if state_format == 0:
        return
    spark.conf.set(f"{STATE}.providerClass", ROCKSDB)
    spark.conf.set(f"{STATE}.checkpointFormatVersion", str(state_format))
    spark.conf.set(f"{STATE}.rocksdb.changelogCheckpointing.enabled", str(state_format == 2).lower())


def check_state(checkpoint: Path, state_format: int) -> None:
    """What `keep_state` has asked for is what there is."""
    files = [path for path in (checkpoint / "state").rglob("*.*") if path.suffix in STATE_SUFFIXES]
    kept = {path.name for path in files if not path.name.startswith(".")}
    assert kept, f"no state in {checkpoint}"
    assert all(STATE_FILES[state_format].fullmatch(name) for name in kept), (state_format, kept)


def windows(df: DataFrame) -> DataFrame:
    """How many records, and the sum of their values, in every 5 seconds."""
    counted = (
        df.withColumn("number", F.col("value").cast("string").cast("long"))
        .withWatermark("timestamp", WATERMARK)
        .groupBy(F.window("timestamp", f"{WINDOW_S} seconds"))
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


# What comes out


def expected_records() -> Counter[Content]:
    return Counter((b"key %d" % i, b"ORDER %d" % i) for i in range(ORDERS))


def expected_values() -> Counter[Content]:
    return Counter((None, b"ORDER %d" % i) for i in range(ORDERS))


def expected_join() -> Counter[Content]:
    return Counter((b"key %d" % i, b"order %d+payment %d" % (i, i)) for i in range(ORDERS))


def expected_windows() -> Counter[Content]:
    sums: dict[int, list[int]] = {}
    for i in range(ORDERS):
        start = (BEGIN_MS + i * STEP_MS) // 1000 // WINDOW_S * WINDOW_S
        sums.setdefault(start, []).append(i)
    return Counter(
        (str(start).encode(), json.dumps({"count": len(of), "sum": sum(of)}, separators=(",", ":")).encode())
        for start, of in sums.items()
    )


def expected_totals() -> Counter[Content]:
    """With `update`, that window is told of, too, which closes the others and which nothing closes."""
    start = (BEGIN_MS + LAST_AFTER_MS) // 1000 // WINDOW_S * WINDOW_S
    last = {"count": PARTITIONS["numbers"], "sum": 0}
    text = json.dumps(last, separators=(",", ":"))
    return expected_windows() + Counter([(str(start).encode(), text.encode())])


def expected(pipeline: str) -> Counter[Content]:
    if pipeline.startswith("unkeyed"):
        return expected_values()
    if "totals" in pipeline:
        return expected_totals()
    if "join" in pipeline:
        return expected_join()
    return expected_windows() if "windows" in pipeline else expected_records()


def check(pipeline: str, rows: Iterable[Content]) -> None:
    check_rows(rows, expected(pipeline), pipeline)
