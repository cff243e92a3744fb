"""Time, handed to whatever needs it, so that a test can hand in its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for timestamps, monotonic time for waiting: the former may jump, the latter does not."""

    def wall_ms(self) -> int: ...

    def monotonic_ms(self) -> int: ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
