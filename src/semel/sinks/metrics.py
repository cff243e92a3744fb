"""What a sink counts."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

# Upper bounds of the buckets of latencies, in seconds; the last bucket has none.
LATENCY_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Latency:
    """A histogram: how many there were in each bucket, and their sum."""

    total_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))

    def observe(self, seconds: float) -> None:
        self.total_s += seconds
        self.buckets[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1

    @property
    def count(self) -> int:
        return sum(self.buckets)


@dataclass(slots=True)
class SinkMetrics:
    """Counted since this sink was made."""

    commits: int = 0
    skips: int = 0
    aborts: int = 0
    failures: int = 0
    rows: int = 0
    bytes: int = 0
    dead_letters: int = 0
    buffered_rows: int = 0
    commit_latency: Latency = field(default_factory=Latency)
