"""Producers are forgotten when they have been silent for long, and not because they write of old times."""

from __future__ import annotations

import pytest

from semel.broker.decision import Now
from semel.broker.topics import Catalog, Partition
from semel.server.idle_producers import QUIET_MS, IdleProducers
from semel.wire.batch import place_batch, read_header
from semel.wire.records import Record, build_batch

DAY_MS = 24 * 60 * 60 * 1000
YEAR_MS = 365 * DAY_MS
START_MS = 1_700_000_000_000


class Clock:
    def __init__(self) -> None:
        self.elapsed_ms = 0

    @property
    def now(self) -> Now:
        return Now(START_MS + self.elapsed_ms, self.elapsed_ms)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def partition() -> Partition:
    catalog = Catalog({})
    catalog.create("topic", bytes(16), 1, {})
    found = catalog.partition("topic", 0)
    assert found is not None
    return found


@pytest.fixture
def idle() -> IdleProducers:
    return IdleProducers(DAY_MS)


def write(
    partition: Partition, producer_id: int, time_ms: int, sequence: int = 0, *, transactional: bool = False
) -> None:
    batch = memoryview(
        build_batch(
            [Record(None, b"value", time_ms)],
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=sequence,
            transactional=transactional,
        )
    )
    place_batch(batch, partition.log.end_offset, 1)
    partition.log.append(read_header(batch))


def test_a_producer_that_was_silent_for_long_is_idle(
    partition: Partition, idle: IdleProducers, clock: Clock
) -> None:
    write(partition, 1, START_MS)
    assert idle.look(partition, clock.now) == []
    clock.elapsed_ms = DAY_MS
    assert idle.look(partition, clock.now) == []
    clock.elapsed_ms += QUIET_MS
    write(partition, 2, START_MS + clock.elapsed_ms)
    assert idle.look(partition, clock.now) == [1]


def test_a_producer_of_old_records_is_not_idle_while_it_writes(
    partition: Partition, idle: IdleProducers, clock: Clock
) -> None:
    for sequence in range(10):
        write(partition, 1, START_MS - YEAR_MS, sequence)
        assert idle.look(partition, clock.now) == [], "its next batch may be on its way a second time"
        clock.elapsed_ms += QUIET_MS
    assert idle.look(partition, clock.now) == [1]


def test_looking_often_makes_nobody_idle_sooner(
    partition: Partition, idle: IdleProducers, clock: Clock
) -> None:
    write(partition, 1, START_MS - YEAR_MS)
    idle.look(partition, clock.now)
    while clock.elapsed_ms < QUIET_MS - 1000:
        clock.elapsed_ms += 1000
        assert idle.look(partition, clock.now) == []


def test_a_short_limit_is_kept(partition: Partition, clock: Clock) -> None:
    idle = IdleProducers(100)
    write(partition, 1, START_MS)
    assert idle.look(partition, clock.now) == []
    clock.elapsed_ms = 101
    assert idle.look(partition, clock.now) == [1]


def test_an_open_transaction_is_never_forgotten(
    partition: Partition, idle: IdleProducers, clock: Clock
) -> None:
    write(partition, 1, START_MS, transactional=True)
    for _ in range(5):
        clock.elapsed_ms += DAY_MS
        assert idle.look(partition, clock.now) == []


def test_partitions_that_are_gone_leave_nothing_behind(
    partition: Partition, idle: IdleProducers, clock: Clock
) -> None:
    idle.look(partition, clock.now)
    idle.keep([partition])
    assert idle._looks
    idle.keep([])
    assert not idle._looks
