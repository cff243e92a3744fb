"""The Kafka sink against confluent-kafka's transactional producer, on Semel and on Apache Kafka.

    .venv/bin/python bench/sinks.py                      both brokers, about two minutes
    .venv/bin/python bench/sinks.py --without-kafka --rounds 5

One epoch is 100,000 events of about 200 bytes, with keys, to four partitions. The two take turns, round by
round, so that both meet the same noise; figures are medians. `bench/sinks_sql.py` does the databases.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from brokers import BrokerUnderTest, kafka, semel
from confluent_kafka import Producer as ConfluentProducer
from peak_memory import forget_peak, peak

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.metadata import TopicPartition
from semel.client.producer import Producer, ProducerIdentity
from semel.sinks.kafka import KafkaSink
from semel.sinks.kafka.rows import RecordLayout, order_by_partition, read_rows
from semel.sinks.kafka.writer import CHUNK_ROWS
from semel.sinks.settings import SinkSettings
from semel.wire.columns import build_batches
from semel.wire.partitioner import partition_column

EVENTS: Final = 100_000
TOPIC: Final = "events"
PARTITIONS: Final = 4
# As Spark hands rows to Python, by default.
ROWS_A_BATCH: Final = 10_000
VALUE_BYTES: Final = (150, 230)
WARMUP_ROUNDS: Final = 2
MAX_BATCH_BYTES: Final = 1_000_000


@dataclass(slots=True)
class Samples:
    """Measurements by name, one a round."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])


def make_events() -> pa.RecordBatch:
    """Made of buffers: Python objects would leave memory behind that a measurement takes for its own."""
    dice = np.random.default_rng(1)
    offsets = np.zeros(EVENTS + 1, np.int32)
    np.cumsum(dice.integers(*VALUE_BYTES, EVENTS), out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(dice.bytes(int(offsets[-1])))]
    values = pa.Array.from_buffers(pa.binary(), EVENTS, buffers)
    keys = pa.array(np.char.mod("key-%08d", np.arange(EVENTS)), pa.string())
    return pa.record_batch({"key": keys, "value": values})


def batches_of(events: pa.RecordBatch) -> list[pa.RecordBatch]:
    return [events.slice(start, ROWS_A_BATCH) for start in range(0, EVENTS, ROWS_A_BATCH)]


async def sink_round(sink: KafkaSink, epoch: int, events: pa.RecordBatch, samples: Samples) -> None:
    """One epoch; then one that is aborted, and one that is empty."""
    cpu_began, began = time.process_time(), time.perf_counter()
    await sink.begin(epoch)
    begun = time.perf_counter()
    writer = sink.writer()
    for batch in batches_of(events):
        await writer.write(batch)
    receipt = await writer.finish()
    written = time.perf_counter()
    await sink.commit(epoch, [receipt])
    ended = time.perf_counter()
    samples.add("sink, s", ended - began)
    samples.add("sink, CPU s", time.process_time() - cpu_began)
    samples.add("begin, ms", (begun - began) * 1000)
    samples.add("commit, ms", (ended - written) * 1000)
    await sink.begin(epoch + 1)
    writer = sink.writer()
    await writer.write(events)
    await writer.finish()
    written = time.perf_counter()
    await sink.abort(epoch + 1)
    samples.add("abort, ms", (time.perf_counter() - written) * 1000)


def confluent_round(producer: ConfluentProducer, events: list[tuple[bytes, bytes]], samples: Samples) -> None:
    cpu_began, began = time.process_time(), time.perf_counter()
    producer.begin_transaction()
    for key, value in events:
        producer.produce(TOPIC, value, key)
    producer.flush()
    producer.commit_transaction()
    samples.add("confluent, s", time.perf_counter() - began)
    samples.add("confluent, CPU s", time.process_time() - cpu_began)


class PlainProducer(Producer):
    """A producer that takes encoded batches without a transaction."""

    async def identify(self) -> ProducerIdentity:
        self._identity = await self._cluster.retry(self._init_producer_id)
        return self._identity


async def plain_round(cluster: Cluster, events: pa.RecordBatch, samples: Samples) -> None:
    """The same encoding and sending, idempotent and without a transaction."""
    began = time.perf_counter()
    async with PlainProducer(cluster) as producer:
        identity = await producer.identify()
        for start in range(0, EVENTS, CHUNK_ROWS):
            piece = events.slice(start, CHUNK_ROWS)
            partitions = partition_column(read_rows(piece, RecordLayout()).keys, PARTITIONS)
            order, runs = order_by_partition(partitions)
            rows = read_rows(piece.take(pa.array(order)), RecordLayout())
            for partition, first, last in runs:
                run = rows.slice(first, last)
                where = TopicPartition(TOPIC, partition)
                await producer.wait_for_room()
                for batch in build_batches(
                    run.values,
                    run.keys,
                    run.timestamps,
                    max_batch_bytes=MAX_BATCH_BYTES,
                    producer_id=identity.producer_id,
                    producer_epoch=identity.producer_epoch,
                    base_sequence=producer.next_sequence(where),
                ):
                    producer.queue_encoded(where, batch)
                await asyncio.sleep(0)
        await producer.flush()
    samples.add("plain, s", time.perf_counter() - began)


async def measure_memory(bootstrap: str) -> float:
    """Bytes of memory for each buffered event, at the peak of an epoch that is flushed at its end only.

    For a process of its own: memory that was used before and given back does not count.
    """
    events = make_events()
    async with KafkaSink(bootstrap, TOPIC, settings=SinkSettings(max_buffered=EVENTS)) as sink:
        await sink.open("memory")
        for epoch, count in enumerate((EVENTS // 100, EVENTS)):
            before = forget_peak()
            await sink.begin(epoch)
            writer = sink.writer()
            for batch in batches_of(events.slice(0, count)):
                await writer.write(batch)
            await sink.commit(epoch, [await writer.finish()])
    return (peak() - before) / EVENTS


async def make_topic(bootstrap: str) -> None:
    async with Cluster(bootstrap) as cluster:
        await Admin(cluster).create_topic(TOPIC, partitions=PARTITIONS)


def measure_memory_elsewhere(bootstrap: str) -> float:
    command = [sys.executable, __file__, "--memory", bootstrap]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


async def measure(broker: BrokerUnderTest, rounds: int) -> dict[str, float]:
    events = make_events()
    keys = [key.encode() for key in events.column(0).to_pylist()]
    pairs = list(zip(keys, events.column(1).to_pylist(), strict=True))
    samples = Samples()
    async with Cluster(broker.bootstrap) as cluster:
        confluent = ConfluentProducer(
            {
                "bootstrap.servers": broker.bootstrap,
                "transactional.id": "confluent",
                "partitioner": "murmur2_random",
                "queue.buffering.max.messages": 2 * EVENTS,
                "log_level": 3,
            }
        )
        confluent.init_transactions()
        async with KafkaSink(broker.bootstrap, TOPIC) as sink:
            await sink.open("bench")
            for epoch in range(WARMUP_ROUNDS + rounds):
                counted = samples if epoch >= WARMUP_ROUNDS else Samples()
                await sink_round(sink, epoch, events, counted)
                confluent_round(confluent, pairs, counted)
                await plain_round(cluster, events, counted)
    sink_s = samples.median("sink, s")
    costs = zip(samples.values["sink, s"], samples.values["plain, s"], strict=True)
    return {
        "sink, events/s": EVENTS / sink_s,
        "confluent-kafka, events/s": EVENTS / samples.median("confluent, s"),
        "sink, events per CPU s": EVENTS / samples.median("sink, CPU s"),
        "confluent-kafka, events per CPU s": EVENTS / samples.median("confluent, CPU s"),
        "begin, ms": samples.median("begin, ms"),
        "commit, ms": samples.median("commit, ms"),
        "abort, ms": samples.median("abort, ms"),
        "exactly-once, ms an epoch": statistics.median(sink - plain for sink, plain in costs) * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--without-kafka", action="store_true")
    parser.add_argument("--memory", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory is not None:
        print(asyncio.run(measure_memory(options.memory)))
        return
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        brokers = [semel(Path(directory) / "fsync", "fsync"), semel(Path(directory) / "os", "os")]
        if not options.without_kafka:
            brokers.append(kafka(Path(directory) / "kafka"))
        for broker in brokers:
            broker.start()
            try:
                asyncio.run(make_topic(broker.bootstrap))
                memory_bytes = measure_memory_elsewhere(broker.bootstrap)
                figures = asyncio.run(measure(broker, options.rounds))
                results[broker.name] = {**figures, "memory per buffered event, bytes": memory_bytes}
            finally:
                broker.stop()
    print_results(results)


def print_results(results: dict[str, dict[str, float]]) -> None:
    print("| | " + " | ".join(results) + " |")
    print("|---|" + "---|" * len(results))
    for name in next(iter(results.values())):
        shown = [f"{figures[name]:,.{0 if figures[name] >= 100 else 2}f}" for figures in results.values()]
        print(f"| {name} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
