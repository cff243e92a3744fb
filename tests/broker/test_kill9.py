"""kill -9 at random moments: what was acknowledged is there once, in order, whatever the broker was doing.

Idempotent librdkafka producers send without pause while the broker is killed and started again. They are
never told; they retry. In the second test the settings are so small that at any moment a journal file is
being rolled or deleted, a snapshot taken, a segment rolled or flushed.
"""

from __future__ import annotations

import os
import random
import time

import pytest
from broker_process import BrokerProcess, StartBroker
from client_confluent import Confluent
from confluent_kafka import Message
from interop_cases import Record
from ledger import SteadyProducer, check_log, read_all

from row_checks import about_rows

ROUNDS = int(os.environ.get("TEST_KILL_ROUNDS", "50"))
SEED = int(os.environ.get("TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
LONGEST_LIFE_S = 0.6
MAX_JOURNAL_FILES = 8
CHECKPOINTS_TIMEOUT_S = 60.0
OS_ROUNDS = 4
"""Each of them a kill and a stop."""


def run_rounds(
    broker: BrokerProcess, producers: list[SteadyProducer], dice: random.Random, rounds: int
) -> None:
    for number in range(rounds):
        time.sleep(dice.random() * LONGEST_LIFE_S)
        assert broker.is_alive, f"the broker died by itself in round {number}"
        broker.restart()
        for producer in producers:
            assert not producer.failures, f"round {number}: {producer.failures[:3]}"


def check_all(
    broker: BrokerProcess, producers: list[SteadyProducer], topics: dict[str, int], *, complete: bool = True
) -> dict[tuple[str, int], list[Message]]:
    acknowledged = [dict(producer.acknowledged) for producer in producers]
    found = {}
    for topic, partitions in topics.items():
        for partition in range(partitions):
            reset = "error" if complete else "earliest"
            messages = read_all(broker.bootstrap, topic, partition, reset=reset)
            check_log(messages, producers, acknowledged, topic, partition, complete=complete)
            found[topic, partition] = messages
    return found


def start_producers(
    broker: BrokerProcess, topics: dict[str, int], count: int, value_bytes: int
) -> list[SteadyProducer]:
    codecs = ("none", "lz4", "zstd")
    return [
        SteadyProducer(
            broker.bootstrap, n, topics, seed=SEED, value_bytes=value_bytes, codec=codecs[n % len(codecs)]
        )
        for n in range(count)
    ]


def count_sent(producers: list[SteadyProducer]) -> int:
    return sum(sum(producer.sent.values()) for producer in producers)


def wait_until_old_journal_is_deleted(broker: BrokerProcess, admin: Confluent) -> None:
    """Two checkpoints after the load, whenever a busy machine comes to them; each takes some traffic."""
    admin.create_topic("more", 1)
    give_up = time.monotonic() + CHECKPOINTS_TIMEOUT_S
    while len(list((broker.directory / "journal").glob("*.journal"))) >= MAX_JOURNAL_FILES:
        assert time.monotonic() < give_up, "old journal files are not deleted"
        admin.produce("more", [Record(None, b"x" * (64 << 10), timestamp_ms=0)])


@pytest.mark.timeout(600)
def test_acknowledged_records_survive_kills_once_and_in_order(start_broker: StartBroker) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    broker = start_broker()
    topics = {"plain": 3}
    Confluent(broker.bootstrap).create_topic("plain", 3)
    producers = start_producers(broker, topics, 3, value_bytes=200)
    for _ in range(5):
        run_rounds(broker, producers, dice, ROUNDS // 5)
        check_all(broker, producers, topics)
    for producer in producers:
        producer.finish()
    found = check_all(broker, producers, topics)
    with about_rows():
        assert sum(map(len, found.values())) == count_sent(producers)
    assert broker.stop() == 0
    broker.start()
    with about_rows():
        assert sum(map(len, check_all(broker, producers, topics).values())) == count_sent(producers)


@pytest.mark.timeout(600)
def test_kills_amid_rolls_snapshots_flushes_and_deletions(start_broker: StartBroker) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    broker = start_broker(
        journal_file_bytes=1 << 20,
        snapshot_interval_bytes=64 << 10,
        flush_interval_bytes=256 << 10,
        log_segment_bytes=64 << 10,
        log_retention_check_interval_ms=100,
        log_cleaner_backoff_ms=100,
        storage_min_free_bytes=0,
    )
    kept = {"kept": 3}
    fading = {"short": 2, "compacted": 2}
    admin = Confluent(broker.bootstrap)
    admin.create_topic("kept", 3)
    admin.create_topic("short", 2, {"retention.bytes": str(256 << 10)})
    admin.create_topic("compacted", 2, {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"})
    producers = start_producers(broker, kept | fading, 3, value_bytes=6000)
    for _ in range(5):
        run_rounds(broker, producers, dice, ROUNDS // 5)
        check_all(broker, producers, kept)
        check_all(broker, producers, fading, complete=False)
    for producer in producers:
        producer.finish()
    found = check_all(broker, producers, kept)
    with about_rows():
        assert sum(map(len, found.values())) == sum(
            producer.sent["kept", partition] for producer in producers for partition in range(3)
        )
    fading_found = check_all(broker, producers, fading, complete=False)
    for producer in producers:
        for partition in range(2):
            assert_newest_of_every_key(producer, fading_found["compacted", partition], partition)
            assert_nothing_missing_since_the_start(producers, fading_found["short", partition], partition)
    wait_until_old_journal_is_deleted(broker, admin)


@pytest.mark.timeout(300)
def test_with_durability_os_neither_kills_nor_stops_lose_what_was_acknowledged(
    start_broker: StartBroker,
) -> None:
    """Without fsync a power failure may take records, but the death of the process may not."""
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    broker = start_broker(durability="os", log_segment_bytes=64 << 10, flush_interval_bytes=256 << 10)
    topics = {"cached": 3}
    Confluent(broker.bootstrap).create_topic("cached", 3)
    producers = start_producers(broker, topics, 3, value_bytes=2000)
    for _ in range(OS_ROUNDS):
        run_rounds(broker, producers, dice, 1)
        time.sleep(dice.random() * LONGEST_LIFE_S)
        assert broker.stop() == 0
        broker.start()
        check_all(broker, producers, topics)
    for producer in producers:
        producer.finish()
    found = check_all(broker, producers, topics)
    with about_rows():
        assert sum(map(len, found.values())) == count_sent(producers)


@about_rows()
def assert_newest_of_every_key(producer: SteadyProducer, messages: list[Message], partition: int) -> None:
    """Compaction may take any record but the last one of its key."""
    found = {message.offset() for message in messages}
    for offset in producer.newest_of_key("compacted", partition).values():
        assert offset in found, f"the newest record of a key, at {offset}, was compacted away"


@about_rows()
def assert_nothing_missing_since_the_start(
    producers: list[SteadyProducer], messages: list[Message], partition: int
) -> None:
    """Retention takes from the beginning only."""
    assert messages
    offsets = [message.offset() for message in messages]
    first = offsets[0]
    assert first is not None
    assert offsets == list(range(first, first + len(offsets)))
    for producer in producers:
        last = max(
            offset
            for (topic, index, _), offset in producer.acknowledged.items()
            if (topic, index) == ("short", partition)
        )
        assert last < first + len(offsets)
