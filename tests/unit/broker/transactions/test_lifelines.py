"""Transactions that end with their connection: which of them are aborted when it is gone."""

from __future__ import annotations

import pytest
from coordinator_cases import ABORTABLE, NONE, Bench, Producer, opened, started, write

from semel.broker.core import Limits
from semel.broker.transactions.lifeline import Lifeline
from semel.broker.transactions.state import State


@pytest.fixture
def bench() -> Bench:
    return Bench()


def held(bench: Bench, producer: Producer, version: int = 5) -> Lifeline:
    """A lifeline by which the producer has written its first batch."""
    lifeline = Lifeline()
    if version < 5:
        producer.add(version=3)
    else:
        write(producer, version)
    lifeline.hold(bench.broker, bench.last_decision.entries)
    if version < 5:
        write(producer, version)
    return lifeline


def cut(bench: Bench, lifeline: Lifeline) -> None:
    for decision in lifeline.abort_held(bench.broker, bench.now):
        bench.submit(decision)


@pytest.mark.parametrize("version", (4, 5))
def test_what_is_open_is_aborted_and_its_epoch_raised(bench: Bench, version: int) -> None:
    producer = started(bench)
    epoch = producer.epoch
    cut(bench, held(bench, producer, version))
    assert bench.state_of("app") is State.COMPLETE_ABORT
    assert bench.transaction("app").epoch == epoch + 1
    (marker,) = bench.markers()
    assert not marker.commit
    assert bench.last_stable_offset() == 2
    assert producer.end(version=version).error_code != NONE


def test_a_client_that_lives_on_may_abort_and_begin_another(bench: Bench) -> None:
    producer = started(bench)
    cut(bench, held(bench, producer))
    assert producer.end(commit=True).error_code == ABORTABLE
    assert producer.end(commit=False).error_code == NONE
    write(producer)
    assert producer.end(commit=True).error_code == NONE


def test_what_is_committed_stays(bench: Bench) -> None:
    producer = started(bench)
    lifeline = held(bench, producer)
    assert producer.end().error_code == NONE
    groups = len(bench.groups)
    cut(bench, lifeline)
    assert len(bench.groups) == groups
    assert bench.state_of("app") is State.COMPLETE_COMMIT


def test_a_later_transaction_by_another_connection_is_not_touched(bench: Bench) -> None:
    producer = started(bench)
    lifeline = held(bench, producer)
    assert producer.end().error_code == NONE
    write(producer)
    cut(bench, lifeline)
    assert bench.state_of("app") is State.ONGOING


def test_whoever_took_the_id_over_is_not_touched(bench: Bench) -> None:
    lifeline = held(bench, started(bench))
    opened(bench)
    cut(bench, lifeline)
    assert bench.state_of("app") is State.ONGOING


def test_a_prepared_transaction_waits_for_its_decision() -> None:
    bench = Bench(Limits(two_phase_commit=True))
    producer = Producer(bench)
    producer.init(6, enable_2pc=True)
    cut(bench, held(bench, producer))
    assert bench.state_of("app") is State.ONGOING


def test_its_deadline_is_gone_with_it(bench: Bench) -> None:
    producer = started(bench)
    cut(bench, held(bench, producer))
    groups = len(bench.groups)
    bench.advance(10 * 60_000)
    assert len(bench.groups) == groups
