"""Rounds in which several ways take turns, and their figures."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

F = TypeVar("F")


def take_turns(ways: Mapping[str, Callable[[], F]], rounds: int, warm_rounds: int) -> dict[str, list[F]]:
    """Runs every way once a round, and returns what each took in the rounds that are not to warm up."""
    results: dict[str, list[F]] = {name: [] for name in ways}
    for number in range(-warm_rounds, rounds):
        for name, run in ways.items():
            took = run()
            print(f"{number} {name}: {took}", file=sys.stderr, flush=True)
            if number >= 0:
                results[name].append(took)
    return results


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """The median, with the least and the most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}, {max(values):{form}})"


def times_as_fast(elapsed_s: Sequence[float], others_s: Sequence[float]) -> str:
    """How many times as fast as the others, round by round: what disturbs one disturbs its neighbour, too."""
    return spread([other / each for each, other in zip(elapsed_s, others_s, strict=True)], ".2f")
