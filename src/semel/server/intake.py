"""What all connections share while they read: one scratch buffer, and one budget for requests in flight.

A request is charged from when room is made for it until its answer has been handed to the socket. When the
budget is spent, connections that want to read a further large request wait; nobody is cut off and nothing
is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

SCRATCH_BYTES: Final = 256 * 1024


class Intake:
    """The scratch buffer and the budget."""

    def __init__(self, max_frame_bytes: int, budget_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.used_bytes = 0
        self._budget_bytes = budget_bytes
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def has_room(self) -> bool:
        return self.used_bytes < self._budget_bytes

    def charge(self, size: int) -> None:
        self.used_bytes += size

    def refund(self, size: int) -> None:
        self.used_bytes -= size
        while self._waiting and self.has_room:
            self._waiting.popleft()()

    def wait_for_room(self, go_on: Callable[[], None]) -> None:
        self._waiting.append(go_on)
