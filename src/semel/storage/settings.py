"""The settings that storage obeys: those of a topic, and those of the whole store."""

from __future__ import annotations

from dataclasses import dataclass

from semel.log.settings import COMPACT, DELETE, LogSettings

__all__ = ["COMPACT", "DELETE", "LogSettings", "StorageSettings"]


@dataclass(slots=True, frozen=True)
class StorageSettings:
    """The limits of a store as a whole."""

    max_open_files: int = 500
    """Segment files kept open for the next read or write. Files in use now are not counted."""
    max_index_bytes: int = 64 * 1024 * 1024
    """Memory for the indexes of closed segments; the least recently used are dropped and read again."""
    max_key_map_bytes: int = 128 * 1024 * 1024
    """Memory for the keys of one compaction; what does not fit is left to the next one."""
