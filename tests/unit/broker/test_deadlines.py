"""Claims about deadlines: each comes once, at its last set time, earliest first."""

import random

from semel.broker.deadlines import Deadlines


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


def test_deadlines_that_are_set_again_and_cancelled_leave_nothing_behind() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for turn in range(20):
        for key in range(10_000):
            deadlines.set(key, 1_000_000 + turn)
    assert len(deadlines._heap) <= 64 + 2 * 10_000
    for key in range(10_000):
        deadlines.cancel(key)
    deadlines.set(0, 1_000_000)
    assert len(deadlines._heap) == 1


def test_deadlines_behave_like_a_dictionary_of_times() -> None:
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
                at = now + rng.randrange(50)
                deadlines.set(key, at)
                model[key] = at
            case 2:
                deadlines.cancel(key)
                model.pop(key, None)
            case _:
                now += rng.randrange(10)
                due = deadlines.due(now)
                assert sorted(due) == sorted(key for key, at in model.items() if at <= now)
                assert [model[key] for key in due] == sorted(model[key] for key in due)
                model = {key: at for key, at in model.items() if at > now}
        assert len(deadlines) == len(model)
