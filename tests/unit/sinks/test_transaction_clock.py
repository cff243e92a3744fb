"""How long a transaction has been open, on a clock that the test moves."""

from __future__ import annotations

import pytest

from semel.sinks.kafka.clock import MAX_OVERLONG_ATTEMPTS, TransactionClock

LIMIT_S = 10.0


class Clock(TransactionClock):
    def __init__(self) -> None:
        super().__init__(LIMIT_S, lambda: self.now_s)
        self.now_s = 100.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


def attempt(clock: Clock, seconds: float) -> None:
    """In vain."""
    clock.begin()
    clock.join()
    clock.now_s += seconds
    clock.abort()


def test_time_counts_from_what_joins_first(clock: Clock) -> None:
    clock.begin()
    clock.now_s += 2 * LIMIT_S
    assert (clock.open_for_s, clock.is_over) == (0.0, False), "nothing is in it"
    clock.join()
    clock.now_s += LIMIT_S - 1
    clock.join()
    assert (clock.open_for_s, clock.is_over) == (LIMIT_S - 1, False)
    clock.now_s += 1
    assert clock.is_over
    clock.begin()
    assert not clock.is_over


def test_too_many_attempts_that_take_too_long_are_enough(clock: Clock) -> None:
    for _ in range(MAX_OVERLONG_ATTEMPTS):
        assert clock.may_begin
        attempt(clock, LIMIT_S - 1)
        attempt(clock, LIMIT_S)
    assert not clock.may_begin


def test_a_commit_begins_the_count_anew(clock: Clock) -> None:
    for _ in range(MAX_OVERLONG_ATTEMPTS):
        attempt(clock, LIMIT_S)
        clock.commit()
    assert clock.may_begin
