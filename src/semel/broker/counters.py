"""What the core counts as it decides. Not state: a restart begins at zero, and nothing is decided by it."""

from __future__ import annotations


class Counters:
    """Things that leave no entry in the journal, and that an operator wants to know of."""

    __slots__ = ("asked_again", "duplicates", "fenced", "timed_out")

    def __init__(self) -> None:
        self.asked_again = 0
        """Requests of version 1 that came by an older connection of their producer, and must come again."""
        self.duplicates = 0
        """Batches that came again and were answered with the offset they had."""
        self.fenced = 0
        """Requests of producers that another instance has replaced."""
        self.timed_out = 0
        """Transactions that were aborted because their time was over."""
