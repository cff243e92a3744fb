"""All partitions of one broker: the open files, and the writing that the journal's writer thread does."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from pathlib import Path
from threading import Lock
from typing import Final

from semel.disk import Buffer, Disk
from semel.storage.files import OpenFiles
from semel.storage.index import ResidentIndexes
from semel.storage.jobs import DropJob
from semel.storage.partition import PartitionStore, Placement
from semel.storage.segment import Segment
from semel.storage.settings import StorageSettings

TOPIC_NAME: Final = re.compile("[0-9a-f]{32}")
"""The directory of a topic. Other names under the store's directory are not ours."""


class Store:
    """The segments of a broker, under one directory: `<topic id in hex>/<partition>/<base offset>.log`."""

    def __init__(self, disk: Disk, directory: Path, settings: StorageSettings | None = None) -> None:
        self.disk = disk
        self.directory = directory
        self.settings = settings or StorageSettings()
        self.files = OpenFiles(disk, self.settings.max_open_files)
        self._partitions: dict[tuple[bytes, int], PartitionStore] = {}
        self._predecessor: Store | None = None
        self.indexes = ResidentIndexes(self.settings.max_index_bytes)
        self.names = Lock()
        """Held by whoever changes names of files, or the content of index files."""
        self.is_retired = False
        """Another store has taken over the files."""

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
            self.files.get_or_create(segment).write(buffers, run[0].position)

    def let_go(self, segment: Segment) -> None:
        """The segment is no longer part of the log. Whoever still reads it keeps its file."""
        segment.is_gone = True
        self.files.forget(segment)
        self.indexes.forget(segment)

    # Topics that are gone.

    def drop_topic(self, topic_id: bytes) -> DropJob:
        """Forget a topic, and say how to remove its files; for when its deletion is on disk."""
        for key in [key for key in self._partitions if key[0] == topic_id]:
            partition = self._partitions.pop(key)
            for segment in partition.segments:
                self.let_go(segment)
        return DropJob(self, [self.directory / topic_id.hex()])

    def is_dropped(self, partition: PartitionStore) -> bool:
        return self._partitions.get((partition.topic_id, partition.partition)) is not partition

    # One store after another.

    def rolls_before(self, topic_id: bytes, partition: int) -> tuple[frozenset[int], int]:
        """Where the store that this one replaces began its segments, and up to which offset that binds."""
        if self._predecessor is None:
            return frozenset(), 0
        before = self._predecessor.partition(topic_id, partition)
        return frozenset(segment.base_offset for segment in before.segments), before.revealed_offset

    def successor(self) -> Store:
        """A new store over the same files, to be restored while this one goes on serving readers."""
        with self.names:
            self.is_retired = True
        store = Store(self.disk, self.directory, self.settings)
        store._predecessor = self
        return store

    def finish_recovery(self, topic_ids: Container[bytes]) -> DropJob:
        """All partitions are restored and trimmed: the files of any topic but these may go."""
        self._predecessor = None
        names = self.disk.listdir(self.directory) if self.disk.exists(self.directory) else []
        strays = [
            name for name in names if TOPIC_NAME.fullmatch(name) and bytes.fromhex(name) not in topic_ids
        ]
        return DropJob(self, [self.directory / name for name in strays])
