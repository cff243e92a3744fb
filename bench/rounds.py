"""Figures of rounds that took turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """The median, with the least and the most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}, {max(values):{form}})"


def times_as_fast(elapsed_s: Sequence[float], others_s: Sequence[float]) -> str:
    """How many times as fast as the others, round by round: what disturbs one disturbs its neighbour, too."""
    return spread([other / each for each, other in zip(elapsed_s, others_s, strict=True)], ".2f")
