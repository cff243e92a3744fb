"""What the benchmarks of Spark say of rounds."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "bench"))
from rounds import take_turns, times_as_fast


def test_ways_take_turns_and_rounds_to_warm_up_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    turns: list[str] = []

    def ours() -> int:
        turns.append("ours")
        return len(turns)

    def others() -> int:
        turns.append("others")
        return len(turns)

    assert take_turns({"ours": ours, "others": others}, 2, 1) == {"ours": [3, 5], "others": [4, 6]}
    assert turns == ["ours", "others"] * 3
    assert capsys.readouterr().err.splitlines()[0] == "-1 ours: 1"


def test_how_many_times_as_fast_is_told_by_each_round_and_its_neighbour() -> None:
    assert times_as_fast([1.0, 2.0, 10.0], [2.0, 6.0, 10.0]) == "2.00 (1.00, 3.00)"
