"""Watching the room on the disk: appends are refused before it is full, so that deleting still works.

Time alone is no measure: a fast producer fills a small disk between two looks. So the broker also looks again
whenever an eighth of the floor has been appended. A look costs two microseconds.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from semel.disk import Disk
from semel.errors import StorageError

log = logging.getLogger(__name__)

LOOKS_PER_FLOOR: Final = 8


class SpaceGuard:
    """Says whether appends must be refused."""

    __slots__ = ("_directory", "_disk", "_floor_bytes", "_looked_at", "_step_bytes", "is_short")

    def __init__(self, disk: Disk, directory: Path, floor_bytes: int) -> None:
        self._disk = disk
        self._directory = directory
        self._floor_bytes = floor_bytes
        self._step_bytes = floor_bytes // LOOKS_PER_FLOOR
        self._looked_at = 0
        self.is_short = False

    def refuses(self, journal_end: int) -> bool:
        """Whether there is no room for an append; `journal_end` says how much came since the last look."""
        if abs(journal_end - self._looked_at) > self._step_bytes:
            self.look(journal_end)
        return self.is_short

    def look(self, journal_end: int) -> None:
        self._looked_at = journal_end
        try:
            free_bytes = self._disk.free_bytes(self._directory)
        except StorageError as error:
            log.warning("cannot tell how much of the disk is free: %s", error)
            return
        is_short = free_bytes < self._floor_bytes
        if is_short and not self.is_short:
            log.error(
                "only %d bytes of the disk are free, less than storage.min.free.bytes: appends are refused; "
                "delete topics or shorten their retention, or enlarge the disk",
                free_bytes,
            )
        elif self.is_short and not is_short:
            log.info("there is room on the disk again: appends are taken")
        self.is_short = is_short
