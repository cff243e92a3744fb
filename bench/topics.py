"""Many topics, and one topic of many partitions: creation, starts with them, metadata, memory.

.venv/bin/python bench/topics.py [--topics 5000] [--partitions 2000] [--without-kafka]

Every partition gets one record, so that a start has something to look at. A start is over when the metadata
names a leader for every partition.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from brokers import BrokerUnderTest, kafka, semel

from semel.client.cluster import Cluster
from semel.client.connection import Connection, ConnectionOptions
from semel.client.errors import check
from semel.errors import RetriableError, SemelError
from semel.wire.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from semel.wire.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

TOPICS_PER_REQUEST: Final = 500
PARTITIONS_PER_PRODUCE: Final = 500
NAMED_VERSION: Final = 9
"""Metadata and Produce with names, not ids, of topics."""
ALL_ASKED: Final = 50
"""Requests for the metadata of everything ..."""
ONE_ASKED: Final = 500
"""... and of one topic."""
READY_TIMEOUT_S: Final = 300.0
REQUEST_TIMEOUT_MS: Final = 300_000
POLL_S: Final = 0.02

Names = list[tuple[str, int]]
"""Topics, and how many partitions each has."""
Places = list[tuple[str, int]]
"""Partitions."""


@dataclass(slots=True)
class Figures:
    """What was measured of one broker with one set of topics."""

    rows: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, text: str) -> None:
        self.rows[what] = text
        print(f"    {what}: {text}", flush=True)


def dial(bootstrap: str) -> Cluster:
    return Cluster(bootstrap, ConnectionOptions(request_timeout_ms=REQUEST_TIMEOUT_MS))


async def create(bootstrap: str, topics: Names) -> None:
    async with dial(bootstrap) as cluster:
        connection = await cluster.controller()
        for first in range(0, len(topics), TOPICS_PER_REQUEST):
            wanted = [
                CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
                for name, partitions in topics[first : first + TOPICS_PER_REQUEST]
            ]
            request = CreateTopicsRequest(topics=wanted, timeout_ms=REQUEST_TIMEOUT_MS)
            answer = await connection.request(request, CreateTopicsResponse)
            for created in answer.topics:
                check(created.error_code, created.name)


async def write_one_record_each(bootstrap: str, topics: Names) -> None:
    """Again where the broker is not ready: Kafka names leaders before they know of it."""
    left = [(name, index) for name, partitions in topics for index in range(partitions)]
    async with dial(bootstrap) as cluster:
        connection = await cluster.any_connection()
        while left:
            some, left = left[:PARTITIONS_PER_PRODUCE], left[PARTITIONS_PER_PRODUCE:]
            refused = await _write(connection, some)
            if refused:
                await asyncio.sleep(POLL_S)
            left += refused


async def _write(connection: Connection, places: Places) -> Places:
    """Write to all of them at once; those that shall be tried again."""
    by_topic: dict[str, TopicProduceData] = {}
    for name, index in places:
        batch = build_batch([Record(None, b"x" * 100, time.time_ns() // 1_000_000)])
        topic = by_topic.setdefault(name, TopicProduceData(name=name, partition_data=[]))
        topic.partition_data.append(PartitionProduceData(index, batch))
    request = ProduceRequest(None, -1, REQUEST_TIMEOUT_MS, list(by_topic.values()))
    answer = await connection.request(request, ProduceResponse, max_version=NAMED_VERSION)
    refused = []
    for written in answer.responses:
        for part in written.partition_responses:
            try:
                check(part.error_code, f"{written.name}-{part.index}")
            except RetriableError:
                refused.append((written.name, part.index))
    return refused


async def led_partitions(connection: Connection, topics: Names) -> int:
    answer = await connection.request(
        MetadataRequest(topics=None), MetadataResponse, max_version=NAMED_VERSION
    )
    ours = {name for name, _ in topics}
    return sum(
        part.leader_id >= 0 and not part.error_code
        for topic in answer.topics
        if topic.name in ours
        for part in topic.partitions
    )


async def wait_until_all_are_led(bootstrap: str, topics: Names) -> None:
    give_up = time.perf_counter() + READY_TIMEOUT_S
    count = sum(partitions for _, partitions in topics)
    while True:
        try:
            async with dial(bootstrap) as cluster:
                if await led_partitions(await cluster.any_connection(), topics) == count:
                    return
        except SemelError:
            pass
        if time.perf_counter() > give_up:
            raise TimeoutError(f"not all of {count} partitions had a leader after {READY_TIMEOUT_S:.0f} s")
        await asyncio.sleep(POLL_S)


async def metadata_latency(bootstrap: str, name: str) -> tuple[str, str]:
    """Of everything, and of one topic."""
    async with dial(bootstrap) as cluster:
        connection = await cluster.any_connection()
        everything = MetadataRequest(topics=None)
        one = MetadataRequest(topics=[MetadataRequestTopic(name=name)])
        return (
            await _latency(connection, everything, ALL_ASKED),
            await _latency(connection, one, ONE_ASKED),
        )


async def _latency(connection: Connection, request: MetadataRequest, count: int) -> str:
    """p50 and p99 in milliseconds. The answer is not decoded: that would be most of what is measured."""
    times_ms = []
    for _ in range(count):
        began = time.perf_counter()
        await connection.request(request, Undecoded, max_version=NAMED_VERSION)
        times_ms.append((time.perf_counter() - began) * 1000)
    times_ms.sort()
    return f"{times_ms[count // 2]:.1f}, {times_ms[count * 99 // 100]:.1f} ms"


class Undecoded:
    """An answer that is left as it came."""

    @staticmethod
    def decode(buf: memoryview, pos: int, version: int) -> tuple[Undecoded, int]:
        return Undecoded(), len(buf)


def measure(broker: BrokerUnderTest, topics: Names) -> Figures:
    figures = Figures()
    broker.start()
    figures.add("idle", f"{broker.rss_mb():.0f} MB")
    began, cpu_before_s = time.perf_counter(), broker.cpu_s()
    asyncio.run(create(broker.bootstrap, topics))
    asyncio.run(wait_until_all_are_led(broker.bootstrap, topics))
    elapsed_s, cpu_s = time.perf_counter() - began, broker.cpu_s() - cpu_before_s
    figures.add("created; broker CPU", f"{elapsed_s:.1f} s; {cpu_s:.1f} s")
    began = time.perf_counter()
    asyncio.run(write_one_record_each(broker.bootstrap, topics))
    figures.add("one record in each partition", f"{time.perf_counter() - began:.1f} s")
    everything, one = asyncio.run(metadata_latency(broker.bootstrap, topics[0][0]))
    figures.add("metadata of everything, p50, p99", everything)
    figures.add("metadata of one topic, p50, p99", one)
    figures.add("resident", f"{broker.rss_mb():.0f} MB")
    endings: tuple[tuple[str, Callable[[], None]], ...] = (("SIGTERM", broker.stop), ("SIGKILL", broker.kill))
    for signal, end in endings:
        end()
        began = time.perf_counter()
        broker.launch()
        asyncio.run(wait_until_all_are_led(broker.bootstrap, topics))
        elapsed_s = time.perf_counter() - began
        figures.add(f"start after {signal}; broker CPU", f"{elapsed_s:.1f} s; {broker.cpu_s():.1f} s")
        figures.add(f"resident after {signal}", f"{broker.rss_mb():.0f} MB")
    return figures


def table(columns: dict[str, Figures]) -> str:
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for what in next(iter(columns.values())).rows:
        lines.append("| " + " | ".join([what, *(column.rows[what] for column in columns.values())]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--topics", type=int, default=5000)
    parser.add_argument("--partitions", type=int, default=2000)
    parser.add_argument("--without-kafka", action="store_true")
    options = parser.parse_args()
    shapes: dict[str, Names] = {
        f"{options.topics} topics of 1 partition": [(f"topic-{n:05}", 1) for n in range(options.topics)],
        f"1 topic of {options.partitions} partitions": [("wide", options.partitions)],
    }
    for shape, topics in shapes.items():
        columns: dict[str, Figures] = {}
        with tempfile.TemporaryDirectory(prefix="semel-bench-", dir=Path.cwd()) as scratch:
            brokers = [semel(Path(scratch) / "semel", "fsync")]
            if not options.without_kafka:
                brokers.append(kafka(Path(scratch) / "kafka"))
            for broker in brokers:
                print(f"{broker.name}, {shape}", flush=True)
                try:
                    columns[broker.name] = measure(broker, topics)
                finally:
                    broker.kill()
        print(f"\n{shape}:\n\n{table(columns)}\n", flush=True)


if __name__ == "__main__":
    main()
