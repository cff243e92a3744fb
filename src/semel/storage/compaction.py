"""Compaction: of the records with one key only the last stays.

It works on closed segments whose flush is recorded, below the last stable offset: every transaction that has
records there is decided, and recovery will not write there again. One compaction reads the part of the log
that has not been compacted, the *dirty* part, and notes the last offset of every key in it (`KeyMap`, of
limited size: what does not fit is left to the next compaction). Then it rewrites all segments from the first
one on, small neighbours into one, keeping of each batch

- the records whose key has no later record, as far as the keys were read;
- no record of an aborted transaction (nor does such a record replace another one);
- tombstones until their *delete horizon*: when compaction first meets one it writes the time at which it may
  go, `delete.retention.ms` from now, into the batch (KIP-534), so that readers have that long to see it;
- markers of transactions until a compaction meets no batch of theirs before them, and then to a horizon too;
- the batch itself, empty, if it is the last one of a producer, or the last one of all: its sequence and
  offsets are still wanted.

Offsets, producer ids, epochs and sequences never change. What cannot be read as records is kept as it is.

A group of segments is replaced in steps that can be cut anywhere:

    1. write and sync   <base>.cleaned                             a crash leaves a stray, which goes
    2. rename to        <base>-<end>.swap    sync the directory    from here on recovery goes on with step 3
    3. delete the old segments but the first, and all their indexes, sync the directory
    4. rename to        <base>.log           sync the directory    and write its index

Readers keep the old files open until `finish_compaction` has put the new segment in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

from semel.disk import Disk
from semel.errors import StorageError
from semel.log.partition import AbortedTransaction
from semel.storage.files import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SegmentFile,
    cleaned_name,
    log_name,
    offset_of,
    offsets_of_swap,
    swap_name,
)
from semel.storage.index import SegmentIndex
from semel.storage.jobs import DeleteJob
from semel.storage.segment import ScannedBatch, Segment, read_fully, scan
from semel.storage.settings import LogSettings
from semel.wire.batch import BatchHeader, InvalidBatch, read_header
from semel.wire.records import RecordSlice, read_end_marker, rebuild_batch, scan_records

if TYPE_CHECKING:
    from semel.storage.partition import PartitionStore

DIGEST_BYTES: Final = 16
"""Keys of this length or longer are known by a digest of it."""
KEY_BYTES: Final = 200
"""About what a key takes in the map."""
MAX_REPLACED_SEGMENTS: Final = 64
"""After so many replaced segments a run ends: their files stay open until `finish_compaction`."""
WRITE_BYTES: Final = 1024 * 1024
"""How much is written at once."""


class KeyMap:
    """The last offset of every key in a part of the log."""

    __slots__ = ("_limit", "_offsets", "end_offset")

    def __init__(self, limit_bytes: int, start_offset: int) -> None:
        self._limit = limit_bytes // KEY_BYTES
        self._offsets: dict[bytes, int] = {}
        self.end_offset = start_offset
        """The keys of all records below it have been noted."""

    def add(self, header: BatchHeader, records: Sequence[RecordSlice]) -> bool:
        """Note the keys of the next batch; False if there is no room for them."""
        if self._offsets and len(self._offsets) + len(records) > self._limit:
            return False
        for record in records:
            if record.key is not None:
                self._offsets[_digest(record.key)] = record.offset
        self.end_offset = header.last_offset + 1
        return True

    def is_last(self, key: bytes, offset: int) -> bool:
        """Whether no later record has this key, as far as the map goes."""
        return offset >= self._offsets.get(_digest(key), offset)


def _digest(key: bytes) -> bytes:
    return key if len(key) < DIGEST_BYTES else blake2b(key, digest_size=DIGEST_BYTES).digest()


class Transactions:
    """Follows the transactions of a partition from batch to batch: which are aborted, and which have data."""

    __slots__ = ("_aborted", "_next", "_pending", "_with_batches", "opened")

    def __init__(self, aborted: Sequence[AbortedTransaction]) -> None:
        self._pending = sorted(aborted, key=_first_offset)
        self._next = 0
        self._aborted: dict[int, AbortedTransaction] = {}
        self._with_batches: set[int] = set()
        """The producers whose transaction had a batch, since its beginning or the last marker."""
        self.opened: dict[int, int] = {}
        """First offsets of the transactions that are open here, by producer."""

    def is_aborted(self, batch: ScannedBatch) -> bool:
        """Whether the next batch, which is no marker, belongs to an aborted transaction."""
        if not batch.is_transactional:
            return False
        self._begin(batch)
        self._with_batches.add(batch.producer_id)
        self.opened.setdefault(batch.producer_id, batch.base_offset)
        return batch.producer_id in self._aborted

    def end(self, marker: ScannedBatch) -> tuple[bool, AbortedTransaction | None]:
        """The next batch is a marker: whether its transaction has no batch left, and what it aborted."""
        self._begin(marker)
        producer_id = marker.producer_id
        is_empty = producer_id not in self._with_batches
        self._with_batches.discard(producer_id)
        self.opened.pop(producer_id, None)
        aborted = self._aborted.pop(producer_id, None)
        return is_empty, aborted

    def _begin(self, batch: ScannedBatch) -> None:
        while self._next < len(self._pending) and self._pending[self._next].first_offset < batch.end_offset:
            aborted = self._pending[self._next]
            if aborted.last_offset >= batch.base_offset:
                self._aborted[aborted.producer_id] = aborted
            self._next += 1


def _first_offset(aborted: AbortedTransaction) -> int:
    return aborted.first_offset


class CleanedSegment:
    """A new file with what was kept of some segments."""

    __slots__ = ("_buffered", "_buffers", "_file", "_interval_bytes", "index", "is_changed")

    def __init__(self, file: SegmentFile, base_offset: int, interval_bytes: int) -> None:
        self._file = file
        self._interval_bytes = interval_bytes
        self._buffers: list[bytes | bytearray] = []
        self._buffered = 0
        self.index = SegmentIndex(base_offset)
        self.is_changed = False

    def add(self, stored: bytes | bytearray) -> None:
        header = read_header(stored)
        end_offset = header.last_offset + 1
        self.index.add(
            header.base_offset, end_offset, len(stored), header.max_timestamp, self._interval_bytes
        )
        self._buffers.append(stored)
        self._buffered += len(stored)
        if self._buffered >= WRITE_BYTES:
            self._write()

    def finish(self) -> None:
        self._write()
        self._file.fdatasync()

    def _write(self) -> None:
        if self._buffers:
            self._file.write(self._buffers, self.index.log_size - self._buffered)
            self._buffers = []
            self._buffered = 0


class Replacement:
    """What a compaction made of some segments."""

    __slots__ = ("index", "is_new_file", "segments")

    def __init__(self, segments: list[Segment], index: SegmentIndex, is_new_file: bool) -> None:
        self.segments = segments
        self.index = index
        self.is_new_file = is_new_file
        """False if there was nothing to change: the file is the old one."""


class CompactionJob:
    """One compaction of one partition, in one or more runs."""

    __slots__ = (
        "_aborted",
        "_groups",
        "_keys",
        "_last_batches",
        "_now_ms",
        "_range_end",
        "_segments",
        "_settings",
        "_start_offset",
        "_transactions",
        "cleanup",
        "has_failed",
        "is_broken",
        "is_running",
        "partition",
        "replacements",
    )

    def __init__(
        self,
        partition: PartitionStore,
        segments: list[Segment],
        start_offset: int,
        *,
        now_ms: int,
        settings: LogSettings,
        aborted: Sequence[AbortedTransaction],
        last_batches: Mapping[int, int],
    ) -> None:
        self.partition = partition
        self._segments = segments
        self._start_offset = start_offset
        self._now_ms = now_ms
        self._settings = settings
        self._aborted = aborted
        self._last_batches = last_batches
        self._transactions = Transactions(aborted)
        self._range_end = segments[-1].end_offset
        self._keys: KeyMap | None = None
        self._groups: list[list[Segment]] = []
        self.replacements: list[Replacement] = []
        """What was done on disk, and the loop does not know of yet."""
        self.is_running = False
        self.has_failed = False
        """A run has raised. What it was at has not changed, unless ..."""
        self.is_broken = False
        """... it was replacing files. The old ones can still be read; a recovery will go on with the new."""
        self.cleanup: DeleteJob | None = None
        """Deletions that had to wait for the end of this."""

    @property
    def end_offset(self) -> int:
        """Up to where the log is compacted when all is done."""
        return self._start_offset if self._keys is None else self._keys.end_offset

    @property
    def is_done(self) -> bool:
        return self._is_overtaken() or (self._keys is not None and not self._groups)

    def run(self) -> None:
        """Replace some segments. Raises StorageError if the disk fails; the partition goes on as it is."""
        self.is_running = True
        try:
            self._run()
        except StorageError:
            if not self._is_overtaken():
                self.has_failed = True
                raise
        finally:
            self.is_running = False

    def _run(self) -> None:
        if self.cleanup is not None:
            self.cleanup.run()
            return
        if self._keys is None:
            self._keys = self._read_keys()
            end_offset = self._keys.end_offset
            self._groups = self._grouped([s for s in self._segments if s.base_offset < end_offset])
        replaced = 0
        while self._groups and replaced < MAX_REPLACED_SEGMENTS and not self._is_overtaken():
            group = self._groups.pop(0)
            self._clean(group, self._keys)
            replaced += len(group)

    # Reading the keys.

    def _read_keys(self) -> KeyMap:
        keys = KeyMap(self.partition.store.settings.max_key_map_bytes, self._start_offset)
        transactions = Transactions(self._aborted)
        for segment in self._segments:
            if segment.end_offset <= self._start_offset:
                continue
            file = self.partition.store.files.get(segment)
            for batch in scan(file, 0, segment.size):
                if batch.is_control:
                    transactions.end(batch)
                elif transactions.is_aborted(batch) or batch.end_offset <= self._start_offset:
                    continue
                else:
                    stored = read_fully(file, batch.size, batch.position)
                    if not keys.add(read_header(stored), _records(stored) or []):
                        return keys
        keys.end_offset = self._range_end
        return keys

    def _grouped(self, segments: list[Segment]) -> list[list[Segment]]:
        """Neighbours that fit into one segment together."""
        groups: list[list[Segment]] = []
        size = 0
        for segment in segments:
            size += segment.size
            if not groups or size > self._settings.segment_bytes:
                groups.append([])
                size = segment.size
            groups[-1].append(segment)
        return groups

    # Rewriting.

    def _clean(self, group: list[Segment], keys: KeyMap) -> None:
        store = self.partition.store
        path = self.partition.directory / cleaned_name(group[0].base_offset)
        with store.names:
            if self._is_overtaken():
                return
            self._discard(path)
            file = SegmentFile(store.disk.create(path))
        cleaned = CleanedSegment(file, group[0].base_offset, self._settings.index_interval_bytes)
        try:
            for segment in group:
                source = store.files.get(segment)
                for batch in scan(source, 0, segment.size):
                    self._keep(batch, read_fully(source, batch.size, batch.position), keys, cleaned)
            self._settle(group, path, cleaned, keys)
        except StorageError:
            # The disk may be full: give back what this took.
            with store.names, suppress(StorageError):
                if not (self._is_overtaken() or self.is_broken):
                    self._discard(path)
            raise

    def _discard(self, path: Path) -> None:
        if self.partition.store.disk.exists(path):
            self.partition.store.disk.unlink(path)

    def _keep(self, batch: ScannedBatch, stored: bytes, keys: KeyMap, cleaned: CleanedSegment) -> None:
        """Write what stays of a batch."""
        kept: bytes | bytearray | None
        if batch.is_control:
            is_empty, aborted = self._transactions.end(batch)
            kept = self._marker(stored) if is_empty else stored
            if kept is None and batch.end_offset == self._range_end:
                kept = stored
            if kept is not None and aborted is not None:
                cleaned.index.add_aborted(aborted)
        elif self._transactions.is_aborted(batch):
            kept = self._rest(batch, stored, [], None)
        elif batch.base_offset >= keys.end_offset:
            kept = stored
        else:
            kept = self._data(batch, stored, keys)
        if kept is not stored:
            cleaned.is_changed = True
        if kept is not None:
            cleaned.add(kept)

    def _marker(self, stored: bytes) -> bytes | bytearray | None:
        """The marker of a transaction without batches, with a horizon; None if that has passed."""
        header = read_header(stored)
        horizon_ms = header.delete_horizon_ms
        if horizon_ms is None:
            records = _records(stored)
            if records is None or read_end_marker(stored) is None:
                return stored
            return rebuild_batch(header, records, delete_horizon_ms=self._new_horizon_ms())
        return stored if self._now_ms < horizon_ms else None

    def _data(self, batch: ScannedBatch, stored: bytes, keys: KeyMap) -> bytes | bytearray | None:
        records = _records(stored)
        if records is None:
            return stored
        header = read_header(stored)
        horizon_ms = header.delete_horizon_ms
        keeps_tombstones = horizon_ms is None or self._now_ms < horizon_ms
        kept = [
            record
            for record in records
            if record.key is not None
            and (keeps_tombstones or not record.is_tombstone)
            and keys.is_last(record.key, record.offset)
        ]
        new_horizon_ms: int | None = None
        if horizon_ms is None and any(record.is_tombstone for record in kept):
            new_horizon_ms = self._new_horizon_ms()
        if kept and new_horizon_ms is None and len(kept) == len(records):
            return stored
        return self._rest(batch, stored, kept, new_horizon_ms)

    def _rest(
        self, batch: ScannedBatch, stored: bytes, kept: list[RecordSlice], horizon_ms: int | None
    ) -> bytes | bytearray | None:
        """The batch with `kept` of its records; None if that is none and it is not wanted for itself."""
        if not kept:
            is_wanted = (
                self._last_batches.get(batch.producer_id) == batch.end_offset - 1
                or batch.end_offset == self._range_end
            )
            if not is_wanted:
                return None
        header = read_header(stored)
        if not kept and header.record_count == 0:
            return stored
        return rebuild_batch(header, kept, delete_horizon_ms=horizon_ms)

    def _new_horizon_ms(self) -> int:
        return self._now_ms + self._settings.delete_retention_ms

    # Replacing.

    def _is_overtaken(self) -> bool:
        """Whether the files are no longer ours to change."""
        store = self.partition.store
        return store.is_retired or store.is_dropped(self.partition)

    def _settle(self, group: list[Segment], path: Path, cleaned: CleanedSegment, keys: KeyMap) -> None:
        """Put the new file in the place of the old ones, unless it says the same as a single old one."""
        store = self.partition.store
        end_offset = group[-1].end_offset
        index = cleaned.index
        index.end_offset = end_offset
        index.is_cleaned = end_offset <= keys.end_offset
        is_needed = cleaned.is_changed or len(group) > 1
        if is_needed:
            cleaned.finish()
        block = index.encode_block(group[0].base_offset, self._transactions.opened)
        with store.names:
            if self._is_overtaken():
                return
            if is_needed:
                self._commit(group, path, block)
            else:
                store.disk.unlink(path)
                self._write_index(group[0], block)
        index.block_saved(block)
        self.replacements.append(Replacement(group, index, is_needed))

    def _commit(self, group: list[Segment], path: Path, block: bytes) -> None:
        store = self.partition.store
        base_offset, end_offset = group[0].base_offset, group[-1].end_offset
        for segment in group:
            store.files.pin(segment)
        self.is_broken = True
        directory = self.partition.directory
        swap = directory / swap_name(base_offset, end_offset)
        store.disk.rename(path, swap)
        store.disk.fsync_dir(directory)
        old = [path for segment in group for path in (segment.path, segment.index_path)]
        finish_swap(store.disk, directory, swap.name, [path.name for path in old if store.disk.exists(path)])
        self._write_index(group[0], block)
        self.is_broken = False

    def _write_index(self, segment: Segment, block: bytes) -> None:
        disk = self.partition.store.disk
        path = segment.index_path
        file = SegmentFile(disk.open(path, writable=True) if disk.exists(path) else disk.create(path))
        file.truncate(0)
        file.write([block], 0)


def finish_swap(disk: Disk, directory: Path, swap: str, names: Iterable[str]) -> None:
    """Let a finished compaction take the place of all of `names` that lie in its range."""
    base_offset, end_offset = offsets_of_swap(swap)
    for name in names:
        is_old = name.endswith((LOG_SUFFIX, INDEX_SUFFIX)) and base_offset <= offset_of(name) < end_offset
        if is_old and name != log_name(base_offset):
            disk.unlink(directory / name)
    disk.fsync_dir(directory)
    disk.rename(directory / swap, directory / log_name(base_offset))
    disk.fsync_dir(directory)


def _records(stored: bytes) -> list[RecordSlice] | None:
    """The records of a batch; None if it is not made of records, which is for its readers to find out."""
    try:
        return scan_records(stored)
    except InvalidBatch:
        return None
