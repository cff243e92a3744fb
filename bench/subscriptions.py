"""Deliveries a second, with a transaction each: a subscription, and the same loop by hand on confluent-kafka.

    .venv/bin/python bench/subscriptions.py [--seconds 4] [--rounds 3] [--channels 1,50] [--batches 1,100]
                                            [--only semel|kafka]

The loop takes a record, publishes one of 100 bytes, and commits the record's offset and its output in one
transaction. By hand that is a consumer, a transactional producer and `send_offsets_to_transaction`, one pair
of them and one thread a channel. A subscription has 16 connections for all of its channels. Every channel
has a partition of its own. Times are from before the publish to after the commit. Both loops take turns,
round by round, and the median round of each is told, with the range of all, and with the median of what the
one took for each that the other took in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import brokers
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.producer import Producer as SemelProducer
from semel.subscriptions import Subscription, SubscriptionOptions
from semel.wire.records import Record

VALUE: Final = b"x" * 100
WARM_UP_S: Final = 2.0
READ_TIMEOUT_S: Final = 0.2
PATIENCE_S: Final = 10.0
# More than any loop takes in the time that it has, with a transaction each and in batches.
RECORDS_A_SECOND: Final = 6_000
BATCHED_RECORDS_A_SECOND: Final = 200_000
FILLED_AT_ONCE: Final = 1_000
KINDS: Final = ("subscription", "by hand")
BROKERS: Final[dict[str, Callable[[Path], brokers.BrokerUnderTest]]] = {
    "semel": lambda directory: brokers.semel(directory, "fsync"),
    "kafka": brokers.kafka,
}


class Figures(NamedTuple):
    deliveries_s: float
    p50_ms: float
    p99_ms: float
    client_cpu_us: float

    def __str__(self) -> str:
        return (
            f"{self.deliveries_s:7.0f}/s  p50 {self.p50_ms:6.1f} ms  p99 {self.p99_ms:6.1f} ms  "
            f"client CPU {self.client_cpu_us:5.0f} us each"
        )


class Meter:
    """Counts what is done between the end of the warm-up and the end of the run."""

    def __init__(self, seconds: float, records: int) -> None:
        self.begin = time.perf_counter() + WARM_UP_S
        self.end = self.begin + seconds
        self.times_ms: list[float] = []
        self.done = 0
        self._records = records
        self._taken = 0  # in the warm-up, too
        self._cpu_s = _cpu_s()
        self._is_warm = False
        self._lock = threading.Lock()

    def count(self, began: float, deliveries: int) -> bool:
        """One transaction is committed; False when time is up."""
        now = time.perf_counter()
        with self._lock:
            self._taken += deliveries
            if not self._is_warm and now >= self.begin:
                self._is_warm = True
                self._cpu_s = _cpu_s()
            if self.begin <= now < self.end:
                self.times_ms.append((now - began) * 1000)
                self.done += deliveries
        return now < self.end

    def figures(self) -> Figures:
        if self._taken > self._records * 9 // 10:
            sys.exit(f"{self._taken} of {self._records} records were taken: the loop ran dry, fill in more")
        cpu_us = (_cpu_s() - self._cpu_s) * 1_000_000
        ordered = sorted(self.times_ms) or [0.0]
        return Figures(
            self.done / (self.end - self.begin),
            ordered[len(ordered) // 2],
            ordered[len(ordered) * 99 // 100],
            cpu_us / max(self.done, 1),
        )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def records_for(batch: int, seconds: float) -> int:
    rate = BATCHED_RECORDS_A_SECOND if batch > 1 else RECORDS_A_SECOND
    return int(rate * (seconds + WARM_UP_S))


async def fill(bootstrap: str, topic: str, partitions: int, records: int) -> None:
    async with Cluster(bootstrap) as cluster:
        await Admin(cluster).create_topic(topic, partitions=partitions)
        await Admin(cluster).create_topic(f"{topic}-out", partitions=1)
        async with SemelProducer(cluster) as producer:
            for partition in range(partitions):
                left = records // partitions
                while left > 0:
                    many = [Record(None, VALUE) for _ in range(min(left, FILLED_AT_ONCE))]
                    await producer.send_many(topic, many, partition)
                    left -= len(many)


# By a subscription


async def subscribed(bootstrap: str, topic: str, channels: int, batch: int, seconds: float) -> Figures:
    options = SubscriptionOptions(max_in_flight=max(16, 2 * batch), batch_size=batch)
    async with Cluster(bootstrap) as cluster, Subscription(cluster, [topic], topic, options) as subscription:
        while len(subscription.partitions) < channels:  # noqa: ASYNC110 - it is no part of what is measured
            await asyncio.sleep(0.01)
        meter = Meter(seconds, records_for(batch, seconds))
        works = [work(subscription, f"{topic}-out", batch, meter) for _ in range(channels)]
        async with asyncio.timeout(WARM_UP_S + seconds + PATIENCE_S):
            await asyncio.gather(*works)
        return meter.figures()


async def work(subscription: Subscription, output: str, batch: int, meter: Meter) -> None:
    channel = subscription.channel()
    goes_on = True
    while goes_on:
        if batch == 1:
            delivery = await channel.take()
            began = time.perf_counter()
            async with delivery.transaction() as tx:
                await tx.publish(output, VALUE)
            goes_on = meter.count(began, 1)
        else:
            many = await channel.take_batch()
            began = time.perf_counter()
            async with many.transaction() as tx:
                await tx.publish_many(output, many.records)
            goes_on = meter.count(began, len(many))


# By hand


def by_hand(bootstrap: str, topic: str, channels: int, batch: int, seconds: float) -> Figures:
    pairs = [open_pair(bootstrap, topic, number) for number in range(channels)]
    meter = Meter(seconds, records_for(batch, seconds))
    threads = [
        threading.Thread(target=loop_by_hand, args=(*pair, f"{topic}-out", batch, meter)) for pair in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return meter.figures()


def open_pair(bootstrap: str, topic: str, number: int) -> tuple[Consumer, Producer]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"{topic}-by-hand",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "log_level": 3,
        }
    )
    # Without a rebalance, which fifty of these in one process would be busy with for long.
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING)])
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": f"{topic}-by-hand-{number}",
            "linger.ms": 0,
            "log_level": 3,
        }
    )
    producer.init_transactions()
    return consumer, producer


def loop_by_hand(consumer: Consumer, producer: Producer, output: str, batch: int, meter: Meter) -> None:
    goes_on = True
    while goes_on and time.perf_counter() < meter.end:
        messages = consumer.consume(batch, READ_TIMEOUT_S) if batch > 1 else [consumer.poll(READ_TIMEOUT_S)]
        messages = [message for message in messages if message is not None and message.error() is None]
        if not messages:
            continue
        began = time.perf_counter()
        producer.begin_transaction()
        for _ in messages:
            producer.produce(output, VALUE)
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata()
        )
        producer.commit_transaction()
        goes_on = meter.count(began, len(messages))


# The run


def measure(kind: str, bootstrap: str, channels: int, batch: int, seconds: float) -> None:
    """One load, in a process of its own so that its CPU time is its own."""
    topic = f"bench-{os.getpid()}-{kind.replace(' ', '-')}-{channels}-{batch}"
    asyncio.run(fill(bootstrap, topic, channels, records_for(batch, seconds)))
    if kind == "subscription":
        import uvloop

        figures = uvloop.run(subscribed(bootstrap, topic, channels, batch, seconds))
    else:
        figures = by_hand(bootstrap, topic, channels, batch, seconds)
    print(json.dumps(figures), flush=True)
    os._exit(0)  # consumers and producers by hand take long to say goodbye


def measure_all(bootstrap: str, shapes: list[tuple[int, int]], seconds: float, rounds: int) -> None:
    for channels, batch in shapes:
        found: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind in KINDS:
                found[kind].append(measured(kind, bootstrap, str(channels), str(batch), str(seconds)))
        ratios = sorted(
            ours.deliveries_s / theirs.deliveries_s for ours, theirs in zip(*found.values(), strict=True)
        )
        for kind in KINDS:
            tell(kind, channels, batch, sorted(found[kind]))
        print(f"  {'':28} of theirs     {ratios[rounds // 2]:7.2f}    ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def measured(*arguments: str) -> Figures:
    command = [sys.executable, __file__, "--load", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Figures(*json.loads(done.stdout))


def tell(kind: str, channels: int, batch: int, rounds: list[Figures]) -> None:
    what = f"{channels} channels" + (f", batches of {batch}" if batch > 1 else "")
    least, most = rounds[0].deliveries_s, rounds[-1].deliveries_s
    print(f"  {what:28} {kind:13} {rounds[len(rounds) // 2]}  ({least:.0f} to {most:.0f}/s)", flush=True)


def with_broker(
    make: Callable[[Path], brokers.BrokerUnderTest],
    shapes: list[tuple[int, int]],
    seconds: float,
    rounds: int,
) -> None:
    with tempfile.TemporaryDirectory(prefix="semel-bench-", dir=Path.cwd()) as directory:
        broker = make(Path(directory) / "broker")
        broker.start()
        try:
            print(broker.name, flush=True)
            measure_all(broker.bootstrap, shapes, seconds, rounds)
        finally:
            broker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--channels", default="1,50")
    parser.add_argument("--batches", default="1,100")
    parser.add_argument("--only", choices=sorted(BROKERS))
    parser.add_argument("--load", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load is not None:
        kind, bootstrap, count, batch, seconds = given.load
        measure(kind, bootstrap, int(count), int(batch), float(seconds))
    shapes = [
        (int(channels), int(batch))
        for channels in given.channels.split(",")
        for batch in given.batches.split(",")
    ]
    for name in BROKERS if given.only is None else (given.only,):
        with_broker(BROKERS[name], shapes, given.seconds, given.rounds)


if __name__ == "__main__":
    main()
