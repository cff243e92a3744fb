"""Recovery: the state and the segments from the snapshot and the journal, at a start and after a failed
write.

The order is that of `docs/design/journal.md`. Every entry is applied unless the stamp of its part covers
it. The batch of every append at or beyond the flushed end of its partition is written to its segment again.
All that was replayed is durable, so all of it is visible at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from semel.broker.core import Appended, Broker
from semel.broker.entries import (
    GROUP_ENTRIES,
    TRANSACTION_ENTRIES,
    Append,
    Entry,
    decode_discard,
    decode_entry,
)
from semel.broker.group_messages import GroupPart
from semel.broker.journal_messages import (
    CatalogPart,
    LogStartMoved,
    PartitionPart,
    PartitionsAdded,
    ProducersExpired,
    TopicCreated,
    TopicDeleted,
)
from semel.broker.topics import Partition, Topic
from semel.broker.transaction_messages import TransactionPart
from semel.disk import Disk
from semel.journal.chain import Group
from semel.journal.snapshot import Snapshot
from semel.server.parts import decode_part, flushed_in, load_catalog, load_partition
from semel.storage.partition import Flushed, Placement
from semel.storage.store import Store

WRITE_BYTES: Final = 4 * 1024 * 1024
WRITE_BATCHES: Final = 1000
"""How much of the journal, and how many batches, a replay reads before it writes to the segments."""


@dataclass(slots=True, frozen=True)
class Layout:
    """Where everything lies below the data directory."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def identity(self) -> Path:
        return self.root / "identity"

    def make(self, disk: Disk) -> None:
        for directory in (self.root, self.journal, self.snapshots, self.segments):
            disk.mkdir(directory)


class Replay:
    """Brings a fresh broker and store to where the journal ends."""

    def __init__(self, broker: Broker, store: Store) -> None:
        self._broker = broker
        self._store = store
        self._stamps: dict[tuple[bytes, int], int] = {}
        self._group_stamps: dict[str, int] = {}
        self._transaction_stamps: dict[str, int] = {}
        self._catalog_stamp = 0
        self._starts: dict[tuple[bytes, int], int] = {}
        self._deleted: set[bytes] = set()
        """Where logs will begin, and which topics will be gone, when all is replayed."""
        self._early: dict[tuple[bytes, int], PartitionPart] = {}
        """Parts of partitions that the catalog's part, stamped before them, does not know yet."""
        self.dirty: dict[Partition, int] = {}
        """Where in the journal the first batch lies that is not flushed."""
        self.entries = 0
        self._placements: list[Placement] = []
        """Batches that have their place in a segment and are not written yet."""
        self._written = 0
        """Where in the journal the first of them may lie: they keep in memory what was read from there on."""

    def foresee(self, group: Group) -> None:
        """Note what a group lets go of: of files below that, any may be missing, and none may be looked at.

        They are deleted as soon as the entry is on disk, and a crash may keep some of them and not others.
        """
        for stored in group.entries:
            entry = decode_discard(stored)
            if isinstance(entry, TopicDeleted):
                self._deleted.add(entry.topic_id)
            elif entry is not None:
                key = (entry.topic_id, entry.index)
                self._starts[key] = max(self._starts.get(key, 0), entry.log_start_offset)

    def load(self, snapshot: Snapshot) -> None:
        for stamp, stored in snapshot.parts():
            part = decode_part(stored)
            if isinstance(part, CatalogPart):
                self._catalog_stamp = stamp
                load_catalog(self._broker, part)
                continue
            if isinstance(part, GroupPart):
                self._group_stamps[part.group_id] = stamp
                self._broker.groups.load(part)
                continue
            if isinstance(part, TransactionPart):
                self._transaction_stamps[part.transactional_id] = stamp
                self._broker.transactions.load(part)
                continue
            key = (part.topic_id, part.index)
            self._stamps[key] = stamp
            self._early[key] = part
        for topic in self._broker.catalog:
            self._prepare(topic)

    def _prepare(self, topic: Topic) -> None:
        """Load what the snapshot knows of a topic's partitions; tell their segments what can be trusted."""
        for partition in topic.partitions:
            key = (topic.topic_id, partition.index)
            part = self._early.pop(key, None)
            flushed: Flushed | None = None
            if part is not None:
                load_partition(partition.log, part)
                flushed = flushed_in(part)
            if topic.topic_id not in self._deleted:
                # Without a flush every batch is still in the journal, from offset 0 on.
                start = (
                    0 if flushed is None else max(partition.log.log_start_offset, self._starts.get(key, 0))
                )
                self._store.partition(*key).restore(flushed, start)

    def replay(self, group: Group) -> None:
        for stored in group.entries:
            entry = decode_entry(stored)
            self.entries += 1
            if isinstance(entry, Append):
                self._append(entry, group)
            elif isinstance(entry, LogStartMoved | ProducersExpired):
                if group.end > self._stamps.get((entry.topic_id, entry.index), 0):
                    self._broker.apply(entry)
            elif isinstance(entry, GROUP_ENTRIES):
                if group.end > self._group_stamps.get(entry.group_id, 0):
                    self._broker.apply(entry)
            elif isinstance(entry, TRANSACTION_ENTRIES):
                if group.end > self._transaction_stamps.get(entry.transactional_id, 0):
                    self._broker.apply(entry)
            elif group.end > self._catalog_stamp:
                self._apply_to_catalog(entry)
        if group.end - self._written >= WRITE_BYTES or len(self._placements) >= WRITE_BATCHES:
            self._write()
            self._written = group.end

    def _write(self) -> None:
        """Write many batches at once: one by one they would take most of a start."""
        self._store.write(self._placements)
        for placement in self._placements:
            placement.segment.partition.reveal(placement.header.last_offset + 1)
        self._placements = []

    def _apply_to_catalog(self, entry: Entry) -> None:
        grown = self._broker.catalog.by_id.get(entry.topic_id) if isinstance(entry, PartitionsAdded) else None
        known = 0 if grown is None else len(grown.partitions)
        self._broker.apply(entry)
        if isinstance(entry, TopicCreated):
            self._prepare(self._broker.catalog.by_id[entry.topic_id])
        elif grown is not None:
            self._prepare_from(grown, known)

    def _prepare_from(self, topic: Topic, first: int) -> None:
        added = Topic(topic.name, topic.topic_id, topic.configs, topic.settings)
        added.partitions = topic.partitions[first:]
        self._prepare(added)

    def _append(self, entry: Append, group: Group) -> None:
        partition = self._broker.catalog.partition_by_id(entry.topic_id, entry.index)
        if partition is None:
            return
        aborted = None
        if group.end > self._stamps.get((entry.topic_id, entry.index), 0):
            effect = self._broker.apply(entry)
            assert isinstance(effect, Appended)
            aborted = effect.aborted
            if effect.ended_first_offset >= 0:
                partition.log.reveal_end(effect.ended_first_offset)
        if entry.topic_id in self._deleted:
            return
        view = self._store.partition(entry.topic_id, entry.index)
        if entry.header.base_offset >= view.end_offset:
            self.dirty.setdefault(partition, group.position)
            placement = view.append(
                entry.batch, entry.header, settings=partition.topic.settings.log, aborted=aborted
            )
            self._placements.append(placement)

    def finish(self) -> None:
        """All of it is durable: show it, and leave nothing behind in the segments that is not part of it."""
        self._write()
        self._broker.producer_ids.skip_given()
        by_id = self._broker.catalog.by_id
        self.dirty = {
            partition: first for partition, first in self.dirty.items() if partition.topic.topic_id in by_id
        }
        for topic in self._broker.catalog:
            for partition in topic.partitions:
                log = partition.log
                log.reveal(log.end_offset)
                log.reveal_start(log.log_start_offset)
                view = self._store.partition(topic.topic_id, partition.index)
                # First trim, which deletes by the names it found: some of them go with what lies below.
                view.trim(log.log_start_offset)
                view.delete_below(log.log_start_offset).run()
        self._store.finish_recovery({topic.topic_id for topic in self._broker.catalog}).run()
