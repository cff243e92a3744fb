"""Claims about deadlines: each comes once, at its last set time, slot by slot."""

import random

import pytest

from semel.broker.deadlines import SLOT_MS, Deadlines


def test_a_moved_deadline_comes_at_its_new_time_only() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 10)
    deadlines.set("a", 20)
    assert deadlines.due(15) == []
    assert deadlines.due(20) == ["a"]
    assert deadlines.due(100) == []


def test_a_cancelled_deadline_never_comes() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 10)
    deadlines.cancel("a")
    assert "a" not in deadlines
    assert deadlines.due(10) == []


def test_no_more_come_than_are_asked_for_and_the_rest_comes_next() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for key in range(5):
        deadlines.set(key, key)
    assert deadlines.due(3, at_most=3) == [0, 1, 2]
    assert deadlines.due(3, at_most=3) == [3]


def test_a_deadline_that_is_set_for_the_past_comes_next() -> None:
    deadlines: Deadlines[str] = Deadlines()
    assert deadlines.due(100 * SLOT_MS) == []
    deadlines.set("a", 7 * SLOT_MS)
    assert deadlines.due(100 * SLOT_MS) == ["a"]


def test_what_was_left_over_is_not_overtaken_by_what_comes_later() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for key in range(10):
        deadlines.set(key, key * SLOT_MS)
    assert deadlines.due(9 * SLOT_MS, at_most=2) == [0, 1]
    deadlines.set(0, 20 * SLOT_MS)
    assert deadlines.due(20 * SLOT_MS, at_most=3) == [2, 3, 4]
    assert deadlines.due(20 * SLOT_MS) == [5, 6, 7, 8, 9, 0]


def test_deadlines_that_are_set_again_and_cancelled_leave_nothing_behind() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for turn in range(20):
        for key in range(10_000):
            deadlines.set(key, 1_000_000 + turn * SLOT_MS)
    assert len(deadlines._slots) == 1
    for key in range(10_000):
        deadlines.cancel(key)
    assert not deadlines._slots


@pytest.mark.parametrize("stride_ms", (10, 40 * SLOT_MS), ids=("turned often", "left standing"))
def test_deadlines_behave_like_a_dictionary_of_times(stride_ms: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, int] = {}
    now = 0
    for _ in range(5000):
        key = rng.randrange(20)
        match rng.randrange(4):
            case 0 | 1:
                at = now + rng.randrange(5 * SLOT_MS)
                deadlines.set(key, at)
                model[key] = at
            case 2:
                deadlines.cancel(key)
                model.pop(key, None)
            case _:
                now += rng.randrange(stride_ms)
                due = deadlines.due(now)
                assert sorted(due) == sorted(key for key, at in model.items() if at <= now)
                slots = [model[key] // SLOT_MS for key in due]
                assert slots == sorted(slots)
                model = {key: at for key, at in model.items() if at > now}
        assert len(deadlines) == len(model)
