"""Which offsets of a partition are acknowledged: all below `low`, and runs of them above.

Offsets that hold no record for a reader (markers, aborted or compacted records) are added like acknowledged
ones, so that runs on both sides of them become one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class AckSet:
    """A set of offsets that grows; runs are half-open, apart from each other, and above `low`."""

    __slots__ = ("_ends", "_starts", "low")

    def __init__(self, low: int, runs: Iterable[tuple[int, int]] = ()) -> None:
        self.low = low
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in runs:
            self.add(start, end)

    def __contains__(self, offset: int) -> bool:
        if offset < self.low:
            return True
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def __len__(self) -> int:
        """How many runs there are above `low`."""
        return len(self._starts)

    def add(self, start: int, end: int) -> None:
        """Adds the offsets from `start` up to, but not including, `end`."""
        start = max(start, self.low)
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        if start == self.low:
            self.low = end
            self._starts[first:last] = []
            self._ends[first:last] = []
        else:
            self._starts[first:last] = [start]
            self._ends[first:last] = [end]

    def runs(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))

    def copy(self) -> "AckSet":
        copied = AckSet(self.low)
        copied._starts = self._starts.copy()
        copied._ends = self._ends.copy()
        return copied
