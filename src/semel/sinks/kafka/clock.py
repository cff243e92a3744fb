"""How long the transaction of an epoch has been open: a broker ends one that takes too long.

It counts from the first partition or group that joins, and readers wait from then on. What goes before, such
as a shuffle, does not count.
"""

from collections.abc import Callable
from typing import Final

# Attempts at an epoch that may take longer than its transaction: each of them holds up readers for as long.
MAX_OVERLONG_ATTEMPTS: Final = 2


class TransactionClock:
    """Of the transactions of one sink, one after the other; `now` gives seconds that only grow."""

    def __init__(self, limit_s: float, now: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._now = now
        self._joined_at: float | None = None
        self._overlong_attempts = 0

    def begin(self) -> None:
        """A new transaction: nothing is in it."""
        self._joined_at = None

    def join(self) -> None:
        """Something is about to join. Only the first counts."""
        if self._joined_at is None:
            self._joined_at = self._now()

    def abort(self) -> None:
        """The attempt at the epoch was in vain."""
        self._overlong_attempts += self.is_over

    def commit(self) -> None:
        """The epoch is over, and its attempts with it."""
        self._overlong_attempts = 0

    @property
    def open_for_s(self) -> float:
        return 0.0 if self._joined_at is None else self._now() - self._joined_at

    @property
    def is_over(self) -> bool:
        """Whether the broker may have ended the transaction by now."""
        return self.open_for_s >= self._limit_s

    @property
    def may_begin(self) -> bool:
        """Whether another attempt may fit into its time, for all that is known."""
        return self._overlong_attempts < MAX_OVERLONG_ATTEMPTS
