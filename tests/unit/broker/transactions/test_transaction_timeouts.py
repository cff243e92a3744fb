"""What time does to transactions, under a virtual clock."""

from __future__ import annotations

import logging

import pytest
from coordinator_cases import (
    NONE,
    OTHER_TOPIC,
    TIMEOUT_MS,
    Bench,
    Producer,
    exhausted,
    opened,
    started,
    write,
)

from semel.broker.core import Limits
from semel.broker.transactions.state import State
from semel.broker.transactions.timeouts import ABORTS_PER_TICK

EXPIRATION_MS = 7 * 24 * 60 * 60 * 1000
HOUR_MS = 3_600_000


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("version", (4, 5))
def test_a_transaction_open_too_long_is_aborted_and_its_producer_fenced(
    bench: Bench, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    producer = opened(bench, version=version)
    write(producer, version, 1, OTHER_TOPIC)
    bench.advance(TIMEOUT_MS - 1)
    assert bench.state_of("app") is State.ONGOING
    groups = len(bench.groups)
    with caplog.at_level(logging.WARNING):
        bench.advance(1)
    assert "'app'" in caplog.text
    assert len(bench.groups) == groups + 1
    assert bench.state_of("app") is State.COMPLETE_ABORT
    assert bench.transaction("app").epoch == producer.epoch + 1
    for topic, index in (("orders", 0), (OTHER_TOPIC, 1)):
        (marker,) = bench.markers(topic, index)
        assert (marker.commit, marker.producer_epoch) == (False, producer.epoch + 1)
        assert bench.last_stable_offset(topic, index) == 2


def test_the_clock_runs_from_the_first_partition_and_nothing_renews_it(bench: Bench) -> None:
    producer = started(bench)
    bench.advance(10 * TIMEOUT_MS)
    write(producer)
    for _ in range(3):
        bench.advance(TIMEOUT_MS // 4)
        write(producer)
        producer.commit_offset(1)
    assert bench.state_of("app") is State.ONGOING
    bench.advance(TIMEOUT_MS // 4)
    assert bench.state_of("app") is State.COMPLETE_ABORT


def test_a_group_starts_the_clock_too(bench: Bench) -> None:
    producer = started(bench)
    producer.add_group()
    bench.advance(TIMEOUT_MS)
    assert bench.state_of("app") is State.COMPLETE_ABORT


@pytest.mark.parametrize("version", (4, 5))
def test_the_next_transaction_has_all_of_its_time(bench: Bench, version: int) -> None:
    producer = opened(bench, version=version)
    bench.advance(TIMEOUT_MS - 1)
    assert producer.end(True, version).error_code == NONE
    write(producer, version)
    bench.advance(TIMEOUT_MS - 1)
    assert bench.state_of("app") is State.ONGOING
    assert producer.end(True, version).error_code == NONE
    bench.advance(TIMEOUT_MS)
    assert bench.state_of("app") is State.COMPLETE_COMMIT


def test_the_transaction_after_a_fencing_has_all_of_its_time(bench: Bench) -> None:
    opened(bench)
    bench.advance(TIMEOUT_MS - 1)
    new = started(bench, transaction_timeout_ms=2 * TIMEOUT_MS)
    write(new)
    bench.advance(2 * TIMEOUT_MS - 1)
    assert bench.state_of("app") is State.ONGOING
    bench.advance(1)
    assert bench.state_of("app") is State.COMPLETE_ABORT


def test_many_that_come_due_together_share_partitions(bench: Bench) -> None:
    producers = [opened(bench, f"app-{n}") for n in range(50)]
    bench.advance(TIMEOUT_MS)
    assert all(bench.state_of(producer.transactional_id) is State.COMPLETE_ABORT for producer in producers)
    log = bench.partition().log
    assert (log.end_offset, log.last_stable_offset) == (100, 100)


def test_more_than_a_tick_may_abort_wait_for_the_next(bench: Bench) -> None:
    producers = [opened(bench, f"app-{n}") for n in range(ABORTS_PER_TICK + 1)]
    bench.advance(TIMEOUT_MS)
    states = [bench.state_of(producer.transactional_id) for producer in producers]
    assert states.count(State.COMPLETE_ABORT) == ABORTS_PER_TICK
    bench.tick()
    assert bench.state_of(producers[-1].transactional_id) is State.COMPLETE_ABORT


@pytest.mark.parametrize("by_snapshot", (False, True))
def test_after_a_restart_the_rest_of_the_time_runs(bench: Bench, by_snapshot: bool) -> None:
    opened(bench)
    bench.advance(TIMEOUT_MS - 1000)
    bench.monotonic_ms = 5  # A new process, a new monotonic clock.
    bench.restart_from_snapshot() if by_snapshot else bench.restart()
    bench.advance(999)
    assert bench.state_of("app") is State.ONGOING
    bench.advance(1)
    assert bench.state_of("app") is State.COMPLETE_ABORT


def test_time_that_ran_out_while_the_broker_was_down_is_noticed_at_once(bench: Bench) -> None:
    opened(bench)
    bench.wall_ms += HOUR_MS
    bench.restart()
    bench.tick()
    assert bench.state_of("app") is State.COMPLETE_ABORT


def test_a_clock_set_back_never_gives_more_than_the_whole_time(bench: Bench) -> None:
    opened(bench)
    bench.wall_ms -= 24 * HOUR_MS
    bench.restart()
    bench.advance(TIMEOUT_MS - 1)
    assert bench.state_of("app") is State.ONGOING
    bench.advance(1)
    assert bench.state_of("app") is State.COMPLETE_ABORT


@pytest.mark.parametrize("jump_ms", (-24 * HOUR_MS, 24 * HOUR_MS))
def test_a_jump_of_the_wall_clock_ends_nothing_while_the_broker_runs(bench: Bench, jump_ms: int) -> None:
    opened(bench)
    bench.wall_ms += jump_ms
    bench.tick()
    bench.advance(TIMEOUT_MS - 1)
    assert bench.state_of("app") is State.ONGOING
    bench.advance(1)
    assert bench.state_of("app") is State.COMPLETE_ABORT


def test_the_timeout_at_the_last_epoch_rolls_to_a_new_producer_id(bench: Bench) -> None:
    producer = exhausted(bench)
    write(producer)
    bench.advance(TIMEOUT_MS)
    transaction = bench.transaction("app")
    assert transaction.producer_id != producer.producer_id and transaction.epoch == 0
    assert bench.markers()[-1].producer_epoch == 32_767
    assert producer.end(False).error_code == NONE
    assert producer.identity == (transaction.producer_id, 0)
    write(producer)
    assert producer.commit() == NONE


def test_idle_ids_are_forgotten_and_open_ones_never(bench: Bench) -> None:
    idle, ended = started(bench, "idle"), opened(bench, "ended")
    ended.commit()
    bench.limits = Limits(two_phase_commit=True)
    bench.restart()
    prepared = Producer(bench, "prepared")
    assert prepared.init(6, enable_2pc=True).error_code == NONE
    write(prepared)
    bench.wall_ms += EXPIRATION_MS
    bench.forget_idle()
    assert set(bench.broker.transactions.by_id) == {"idle", "ended", "prepared"}
    bench.wall_ms += 1
    bench.forget_idle()
    assert set(bench.broker.transactions.by_id) == {"prepared"}
    assert set(bench.broker.transactions.by_producer_id) == {prepared.producer_id}
    bench.restart()
    assert set(bench.broker.transactions.by_id) == {"prepared"}
    assert idle.init(named=True).error_code == NONE


def test_use_keeps_an_id_alive(bench: Bench) -> None:
    producer = started(bench)
    for _ in range(4):
        bench.wall_ms += EXPIRATION_MS // 2
        write(producer)
        assert producer.commit() == NONE
        bench.forget_idle()
    assert "app" in bench.broker.transactions.by_id
