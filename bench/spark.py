"""Exactly-once beside at-least-once: Spark pipelines through Semel's sinks and through Spark's own.

    .venv/bin/python bench/spark.py                       2 million records of 200 bytes, topic to topic
    .venv/bin/python bench/spark.py --brokers semel       on one of the two brokers
    .venv/bin/python bench/spark.py --small-batches 1000  the fixed cost of a batch

Each round runs every way once, warm, one after the other, on one session; `availableNow`, one batch. CPU is
that of the driver with all processes below it and of the broker: what to trust on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import brokers
from cpu_meter import CpuMeter
from rounds import spread, take_turns, times_as_fast
from spark_reader import PARTITIONS, TOPIC, connector_jars, feed, why_no_connector

from semel.client.admin import READ_COMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.consumer import Consumer, ConsumerOptions
from semel.sinks import KafkaSink
from semel.spark import exactly_once, read
from semel.spark.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from semel.spark import PipelineQuery
    from semel.spark.reader import Connector

OUT_PARTITIONS: Final = 4
TIMEOUT_S: Final = 900
READ: Final = ConsumerOptions(isolation_level=READ_COMMITTED, partition_max_bytes=16 * 1024 * 1024)


class Way(NamedTuple):
    """A way to get records from a topic to another."""

    name: str
    connector: Connector
    is_exactly_once: bool
    has_keys: bool


WAYS: Final = (
    Way("Spark's own, at-least-once", "jvm", False, False),
    Way("exactly_once, Spark's source", "jvm", True, False),
    Way("exactly_once", "python", True, False),
    Way("Spark's own, at-least-once, keys", "jvm", False, True),
    Way("exactly_once, Spark's source, keys", "jvm", True, True),
    Way("exactly_once, keys", "python", True, True),
)


class Figures(NamedTuple):
    """What one run took."""

    elapsed_s: float
    cpu_s: float
    batch_ms: list[float]

    def __str__(self) -> str:
        return f"{self.elapsed_s:.1f} s, {self.cpu_s:.1f} CPU s"


class Bench:
    """A session, a broker with a full topic, and places for outputs and checkpoints."""

    def __init__(
        self, spark: SparkSession, broker: brokers.BrokerUnderTest, scratch: Path, meter: CpuMeter
    ) -> None:
        self.spark = spark
        self.broker = broker
        self.scratch = scratch
        self.meter = meter

    def run(self, way: Way, records: int, per_batch: int | None) -> Figures:
        """Moves the whole topic once, to a topic of its own."""
        target = f"out-{uuid.uuid4().hex[:8]}"
        asyncio.run(create(self.broker.bootstrap, target))
        began, before = time.perf_counter(), self.meter.total_s()
        query = self.start(way, target, per_batch)
        assert query.awaitTermination(TIMEOUT_S)
        elapsed_s = time.perf_counter() - began
        figures = Figures(elapsed_s, self.meter.total_s() - before, batch_times_ms(query))
        asyncio.run(check_and_delete(self.broker.bootstrap, target, records))
        return figures

    def start(self, way: Way, target: str, per_batch: int | None) -> PipelineQuery | StreamingQuery:
        bootstrap = self.broker.bootstrap
        options = {} if per_batch is None else {"maxOffsetsPerTrigger": per_batch}
        frame = read(self.spark, bootstrap, TOPIC, connector=way.connector, **options)
        frame = frame.select("key", "value") if way.has_keys else frame.select("value")
        checkpoint = self.scratch / target
        if way.is_exactly_once:
            sink = KafkaSink(bootstrap, target, key="key" if way.has_keys else None)
            return exactly_once(frame, sink, name=target, checkpoint=checkpoint).start("availableNow")
        writer = frame.writeStream.format("kafka").option("kafka.bootstrap.servers", bootstrap)
        writer = writer.option("topic", target).option("checkpointLocation", str(checkpoint))
        return writer.trigger(availableNow=True).start()


def batch_times_ms(query: PipelineQuery | StreamingQuery) -> list[float]:
    """How long each of the batches took."""
    spark_query = getattr(query, "query", query)
    return [
        float(each["durationMs"]["triggerExecution"])
        for each in spark_query.recentProgress
        if each["numInputRows"]
    ]


async def create(bootstrap: str, topic: str) -> None:
    async with Cluster(bootstrap) as cluster:
        await Admin(cluster).create_topic(topic, partitions=OUT_PARTITIONS, replication_factor=1)


async def check_and_delete(bootstrap: str, topic: str, records: int) -> None:
    """A figure counts only if as many records are committed as were to be."""
    async with Cluster(bootstrap) as cluster, Consumer(cluster, READ) as consumer:
        await consumer.assign(await consumer.partitions_of(topic))
        ends = await consumer.end_offsets()
        found = 0
        while any(consumer.position(where) < end for where, end in ends.items()):
            found += sum(batch.header.record_count for batch in await consumer.poll(timeout_ms=100))
        assert found == records, f"{found} records came out, and not {records}"
        await Admin(cluster).delete_topics([topic])


def report(broker: str, results: dict[Way, list[Figures]], records: int) -> None:
    """With how many times as fast as Spark's own each way is."""
    print(
        f"\n{broker:<36}{'k rows/s (least, most)':>24}{'k rows per CPU s':>18}{'batch ms p50':>14}"
        f"{'times as fast':>22}"
    )
    own = {way.has_keys: rounds for way, rounds in results.items() if not way.is_exactly_once}
    for way, rounds in results.items():
        rates = [records / each.elapsed_s / 1000 for each in rounds]
        per_cpu = statistics.median(records / each.cpu_s / 1000 for each in rounds)
        batches = statistics.median([ms for each in rounds for ms in each.batch_ms] or [0])
        others = own.get(way.has_keys, rounds)
        faster = times_as_fast([each.elapsed_s for each in rounds], [each.elapsed_s for each in others])
        print(f"{way.name:<36}{spread(rates):>24}{per_cpu:>18,.0f}{batches:>14,.0f}{faster:>22}")


def on_broker(
    name: str, given: argparse.Namespace, spark: SparkSession, ways: list[Way]
) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as scratch:
        directory = Path(scratch) / name
        broker = brokers.semel(directory, "os") if name == "semel" else brokers.kafka(directory)
        broker.start()
        try:
            small = given.small_batches
            records = small * given.small_records if small else given.records
            asyncio.run(feed(broker.bootstrap, records, given.record_bytes, False, 1_000_000))
            per_batch = given.small_records if small else None
            with CpuMeter() as meter:
                bench = Bench(spark, broker, Path(scratch), meter)
                turns = {way.name: partial(bench.run, way, records, per_batch) for way in ways}
                results = take_turns(turns, given.rounds, given.warm_rounds)
        finally:
            broker.stop()
    report(name, {way: results[way.name] for way in ways}, records)
    return {way: [each._asdict() for each in rounds] for way, rounds in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--brokers", nargs="+", choices=("semel", "kafka"), default=["semel", "kafka"])
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--record-bytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-rounds", type=int, default=1, help="before those that count")
    parser.add_argument("--small-batches", type=int, default=0, help="so many batches, to see what one costs")
    parser.add_argument("--small-records", type=int, default=100, help="records of a small batch")
    parser.add_argument("--only", default="", help="ways whose names match this pattern")
    parser.add_argument("--json", type=Path, help="write all figures there")
    given = parser.parse_args()
    if (missing := why_no_connector()) is not None:
        sys.exit(f"there is nothing to compare with: {missing}")
    ways = [way for way in WAYS if re.search(given.only, way.name)]
    assert PARTITIONS <= OUT_PARTITIONS
    # Spark tells how long its last batches took, a hundred of them unless it is told to keep more.
    kept = {"spark.sql.streaming.numRecentProgressUpdates": str(max(given.small_batches, 100))}
    spark = local_session(
        "bench", driver_memory="2g", jars=connector_jars(), settings=kept, log_level="ERROR"
    )
    figures = {name: on_broker(name, given, spark, ways) for name in given.brokers}
    if given.json is not None:
        small = given.small_batches * given.small_records
        found = {"records": small or given.records, "brokers": figures}
        given.json.write_text(json.dumps(found, indent=1))
    spark.stop()


if __name__ == "__main__":
    main()
