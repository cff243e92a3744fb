"""What all connections share while they read: one scratch buffer, and one budget for requests in flight.

A request is charged from when room is made for it until its answer has been handed to the socket. When the
budget is spent, connections that have much under way, or want to read a large request, wait; nobody is cut
off and nothing is lost. One of them may go on nevertheless: otherwise requests that are all incomplete would
wait for each other for ever. So no more is held than the budget, one request, and a little of each
connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

SCRATCH_BYTES: Final = 256 * 1024


class Intake:
    """The scratch buffer and the budget."""

    __slots__ = ("_budget_bytes", "_favoured", "_waiting", "max_frame_bytes", "scratch", "used_bytes")

    def __init__(self, max_frame_bytes: int, budget_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.used_bytes = 0
        self._budget_bytes = budget_bytes
        self._favoured: object = None
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def has_plenty(self) -> bool:
        """Whether room may be made for a request before its bytes are there."""
        return 2 * self.used_bytes < self._budget_bytes

    def may_read(self, reader: object) -> bool:
        """Whether `reader` may read on. The first to ask when the budget is spent becomes the favoured."""
        if self.used_bytes < self._budget_bytes or self._favoured is reader:
            return True
        if self._favoured is None:
            self._favoured = reader
            return True
        return False

    def give_way(self, reader: object) -> None:
        """`reader` has read its request, or cannot read at the moment: another one may be favoured."""
        if self._favoured is reader:
            self._favoured = None
            self._wake()

    def charge(self, size: int) -> None:
        self.used_bytes += size

    def refund(self, size: int) -> None:
        self.used_bytes -= size
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        while self._waiting and (self.used_bytes < self._budget_bytes or self._favoured is None):
            self._waiting.popleft()()

    def wait_for_room(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` once when it is worth asking again."""
        self._waiting.append(go_on)
