"""All partitions of one broker: the open files, and the writing that the journal's writer thread does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from semel.disk import Buffer, Disk, write_fully
from semel.storage.files import OpenFiles
from semel.storage.partition import PartitionStore, Placement
from semel.storage.segment import Segment
from semel.storage.settings import StorageSettings


class Store:
    """The segments of a broker, under one directory: `<topic id in hex>/<partition>/<base offset>.log`."""

    def __init__(self, disk: Disk, directory: Path, settings: StorageSettings | None = None) -> None:
        self.disk = disk
        self.directory = directory
        self.settings = settings or StorageSettings()
        self.files = OpenFiles(disk, self.settings.max_open_files)
        self._partitions: dict[tuple[bytes, int], PartitionStore] = {}
        self._predecessor: Store | None = None

    def partition(self, topic_id: bytes, partition: int) -> PartitionStore:
        key = (topic_id, partition)
        found = self._partitions.get(key)
        if found is None:
            found = self._partitions[key] = PartitionStore(self, topic_id, partition)
        return found

    def write(self, placements: Sequence[Placement]) -> None:
        """Write batches to their places, in the order in which they got them: one write for each segment.

        For the journal's writer thread. If it raises, the broker has to recover: some may be written.
        """
        runs: dict[Segment, list[Placement]] = {}
        for placement in placements:
            run = runs.get(placement.segment)
            if run is None:
                runs[placement.segment] = [placement]
            else:
                run.append(placement)
        for segment, run in runs.items():
            buffers: list[Buffer] = [placement.batch for placement in run]
            write_fully(self.files.get_or_create(segment).file, buffers, run[0].position)

    def rolls_before(self, topic_id: bytes, partition: int) -> tuple[frozenset[int], int]:
        """Where the store that this one replaces began its segments, and up to which offset that binds."""
        if self._predecessor is None:
            return frozenset(), 0
        before = self._predecessor.partition(topic_id, partition)
        return frozenset(segment.base_offset for segment in before.segments), before.revealed_offset

    def successor(self) -> Store:
        """A new store over the same files, to be restored while this one goes on serving readers."""
        store = Store(self.disk, self.directory, self.settings)
        store._predecessor = self
        return store
