"""Claims about enforcing quotas: what is saved up may be used at once, and what is owed is waited for."""

from semel.server.quotas import SAVED_S, Meter


def test_a_client_may_use_what_it_has_saved_at_once() -> None:
    meter = Meter(100, 0)
    assert meter.charge(100 * SAVED_S, 100, 0) == 0


def test_what_goes_beyond_is_waited_for_in_full() -> None:
    meter = Meter(100, 0)
    assert meter.charge(100 * SAVED_S + 250, 100, 0) == 2_500
    assert meter.charge(0, 100, 1_000) == 1_500
    assert meter.charge(0, 100, 2_500) == 0


def test_nobody_saves_up_for_longer_than_the_window() -> None:
    meter = Meter(100, 0)
    assert meter.charge(100 * SAVED_S, 100, 0) == 0
    assert meter.charge(100 * SAVED_S + 1, 100, 3_600_000) == 10


def test_the_rate_holds_over_time() -> None:
    meter, now_ms, used = Meter(1_000, 0), 0, 0
    while now_ms < 600_000:
        used += 700
        now_ms += 1 + meter.charge(700, 1_000, now_ms)
    assert 600_000 <= used <= 600_000 + 1_000 * SAVED_S + 700


def test_what_is_not_saved_up_is_not_used_at_all() -> None:
    meter = Meter(100, 0)
    assert meter.afford(100 * SAVED_S, 100, 0) == 0
    assert meter.afford(250, 100, 0) == 2_500
    assert meter.afford(250, 100, 2_499) == 1, "the wait did not cost anything, and was not long enough"
    assert meter.afford(250, 100, 2_500) == 0
    assert meter.afford(1, 100, 2_500) == 10


def test_more_than_can_be_saved_is_used_by_whoever_has_saved_all() -> None:
    meter, much = Meter(100, 0), 100 * SAVED_S * 3
    assert meter.afford(1, 100, 0) == 0
    wait_ms = meter.afford(much, 100, 0)
    assert wait_ms == 10
    assert meter.afford(much, 100, wait_ms) == 0
    assert meter.afford(1, 100, wait_ms) == 20_010, "and then it is owed"


def test_a_new_limit_counts_at_once() -> None:
    meter = Meter(1_000, 0)
    assert meter.charge(5_000, 10, 0) == (5_000 - 10 * SAVED_S) * 100
