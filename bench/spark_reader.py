"""Reading a topic into Spark: the reader in Python beside Spark's own Kafka source, warm and interleaved.

    .venv/bin/python bench/spark_reader.py                    2 million records of 200 bytes, from Semel
    .venv/bin/python bench/spark_reader.py --broker kafka     from Apache Kafka
    .venv/bin/python bench/spark_reader.py --batch-kb 16      as the Java producer's defaults make batches

Each round reads the whole topic with the one and then the other: as a batch, and as a stream that ends with
what is there. Keys and values go through Spark to nowhere. CPU is that of the driver and of all processes
below it, and is what to trust on a busy machine; the broker's is counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import brokers
import numpy as np
from cpu_meter import CpuMeter
from rounds import spread, take_turns, times_as_fast

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "spark"))

from connector_jars import connector_jars, why_no_connector

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.metadata import TopicPartition
from semel.client.partition_writer import SharedWriter
from semel.client.shared_transaction import SharedTransaction
from semel.spark.reader import Connector, read, read_batch
from semel.spark.session import local_session
from semel.wire.columns import BinaryColumn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC: Final = "records"
PARTITIONS: Final = 2
CHUNK_RECORDS: Final = 50_000
KEY_BYTES: Final = 10
STREAM_TIMEOUT_S: Final = 600
# For the JVM.
WARM_ROUNDS: Final = 1


class Figures(NamedTuple):
    """What one reading took."""

    elapsed_s: float
    spark_cpu_s: float
    broker_cpu_s: float


async def feed(bootstrap: str, records: int, record_bytes: int, spread: bool, batch_bytes: int) -> None:
    """Fills the topic in committed transactions, half of the records into each partition."""
    chance = np.random.default_rng(1)
    least, most = (record_bytes // 2, record_bytes * 3 // 2) if spread else (record_bytes, record_bytes)
    async with Cluster(bootstrap) as cluster:
        await Admin(cluster).create_topic(TOPIC, partitions=PARTITIONS, replication_factor=1)
        where = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
        async with SharedTransaction(cluster, "feeder") as owner:
            for fed in range(0, records, CHUNK_RECORDS * PARTITIONS):
                some = min(CHUNK_RECORDS, (records - fed) // PARTITIONS)
                await owner.begin()
                await owner.add_partitions(where)
                async with SharedWriter(owner.handle()) as writer:
                    for partition in range(PARTITIONS):
                        values = _column(chance.integers(least, most, some, endpoint=True))
                        keys = _column(np.full(some, KEY_BYTES))
                        target = writer.partition(TOPIC, partition)
                        await target.write_columns(values, keys, max_batch_bytes=batch_bytes)
                    await writer.flush()
                await owner.commit()


def _column(lengths: np.ndarray) -> BinaryColumn:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return BinaryColumn(np.random.default_rng(2).bytes(int(offsets[-1])), offsets)


def run(
    spark: SparkSession, broker: brokers.BrokerUnderTest, meter: CpuMeter, kind: str, connector: Connector
) -> Figures:
    """Reads the whole topic once."""
    began, all_before, broker_before = time.perf_counter(), meter.total_s(), broker.cpu_s()
    if kind == "batch":
        frame = read_batch(spark, broker.bootstrap, TOPIC, connector=connector)
        frame.select("key", "value").write.format("noop").mode("overwrite").save()
    else:
        frame = read(spark, broker.bootstrap, TOPIC, connector=connector)
        with tempfile.TemporaryDirectory(prefix="semel-bench-") as checkpoint:
            writer = frame.select("key", "value").writeStream.format("noop").trigger(availableNow=True)
            query = writer.option("checkpointLocation", checkpoint).start()
            assert query.awaitTermination(STREAM_TIMEOUT_S)
    elapsed_s = time.perf_counter() - began
    broker_s = broker.cpu_s() - broker_before
    return Figures(elapsed_s, meter.total_s() - all_before - broker_s, broker_s)


def report(results: dict[str, list[Figures]], records: int) -> None:
    """With how many times as fast as Spark's own source each is."""
    print(
        f"{'':<24}{'k rows/s (least, most)':>28}{'k rows per CPU s of Spark':>28}{'broker CPU s':>14}"
        f"{'times as fast':>22}"
    )
    for way, rounds in results.items():
        rates = [records / each.elapsed_s / 1000 for each in rounds]
        per_cpu = statistics.median(records / each.spark_cpu_s / 1000 for each in rounds)
        broker = statistics.median(each.broker_cpu_s for each in rounds)
        others = results.get(way.replace("python", "jvm"), rounds)
        faster = times_as_fast([each.elapsed_s for each in rounds], [each.elapsed_s for each in others])
        print(f"{way:<24}{spread(rates):>28}{per_cpu:>28,.0f}{broker:>14.2f}{faster:>22}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--broker", choices=("semel", "kafka"), default="semel")
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--record-bytes", type=int, default=200)
    parser.add_argument("--spread", action="store_true", help="lengths from half to one and a half of that")
    parser.add_argument("--batch-kb", type=int, default=1000, help="size of the record batches")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=("python", "jvm"))
    parser.add_argument("--json", type=Path, help="write all figures there")
    given = parser.parse_args()
    connectors: list[Connector] = [given.only] if given.only else ["python", "jvm"]
    if (missing := why_no_connector()) is not None:
        sys.exit(f"there is nothing to compare with: {missing}")
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as scratch:
        directory = Path(scratch) / given.broker
        broker = brokers.semel(directory, "os") if given.broker == "semel" else brokers.kafka(directory)
        broker.start()
        try:
            records = given.records
            asyncio.run(
                feed(broker.bootstrap, records, given.record_bytes, given.spread, given.batch_kb * 1000)
            )
            print(f"{records:,} records are in {broker.name}", file=sys.stderr, flush=True)
            spark = local_session("reader", master="local[2]", jars=connector_jars(), log_level="ERROR")
            with CpuMeter() as meter:
                turns = {
                    f"{kind}, {connector}": partial(run, spark, broker, meter, kind, connector)
                    for kind in ("batch", "stream")
                    for connector in connectors
                }
                results = take_turns(turns, given.rounds, WARM_ROUNDS)
            spark.stop()
            report(results, records)
            if given.json is not None:
                ways = {way: [each._asdict() for each in rounds] for way, rounds in results.items()}
                given.json.write_text(json.dumps({"records": records, "ways": ways}))
        finally:
            broker.stop()


if __name__ == "__main__":
    main()
