"""The settings of a journal."""

from dataclasses import dataclass
from typing import Literal

Durability = Literal["fsync", "os"]
"""What must have happened before a group counts: `fdatasync`, or the write to the page cache alone."""


@dataclass(slots=True, frozen=True)
class JournalSettings:
    """How a journal is written."""

    durability: Durability = "fsync"
    file_bytes: int = 64 * 1024 * 1024
    """The size of a journal file; a larger group gets a file of its own size."""
    queue_bytes: int = 64 * 1024 * 1024
    """With more than this waiting for the disk, the journal counts as congested."""
