"""The files of one partition: a chain of segments, appended to, read, flushed and deleted.

A batch goes through three steps, each on the thread that may do it:

    append   loop     the batch gets its place: a segment and a position. Nothing is written.
    write    writer   `Store.write` puts it there, after the journal has it.
    reveal   loop     it is durable: the segment and its index now count it, and readers may see it.

Which segment a batch goes to follows from the batches and the settings alone, not from a clock, so that a
recovery puts the same bytes in the same places. Recovery is `restore` (believe what was flushed), the same
three steps for what the journal has beyond that, then `trim` (cut and delete what is left over). Files are
overwritten first and cut last: readers of the state before a failed write still read them, and find the bytes
that they expect.

Everything here belongs to the loop, but for the jobs, whose `run` is for a worker thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from semel.errors import CorruptionError, StorageError
from semel.log.partition import AbortedTransaction
from semel.storage.compaction import CompactionJob, finish_swap
from semel.storage.files import LOG_SUFFIX, SWAP_SUFFIX, offset_of
from semel.storage.index import UNKNOWN, SegmentIndex
from semel.storage.jobs import DeleteJob, FlushedSegment, FlushJob
from semel.storage.loading import ended_by, load_index
from semel.storage.segment import Region, Segment, scan
from semel.storage.settings import LogSettings
from semel.storage.times import TimestampedOffset, first_at_or_after, newest
from semel.wire.batch import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader, Buffer

if TYPE_CHECKING:
    from semel.storage.store import Store

_base_offset = attrgetter("base_offset")


@dataclass(slots=True, frozen=True)
class Flushed:
    """What of a partition is on disk for certain: all segments before this one, and this one up to `size`."""

    segment_base: int
    size: int
    end_offset: int


class Placement:
    """A batch and its place."""

    __slots__ = ("aborted", "batch", "header", "interval_bytes", "position", "segment")

    def __init__(
        self,
        segment: Segment,
        position: int,
        batch: Buffer,
        header: BatchHeader,
        aborted: AbortedTransaction | None,
        interval_bytes: int,
    ) -> None:
        self.segment = segment
        self.position = position
        self.batch = batch
        self.header = header
        self.aborted = aborted
        self.interval_bytes = interval_bytes


class Recovery:
    """What a partition must remember between `restore` and `trim`."""

    __slots__ = ("flushed", "is_lost", "names", "rolls", "rolls_end")

    def __init__(
        self, flushed: Flushed | None, names: list[str], rolls: frozenset[int], rolls_end: int
    ) -> None:
        self.flushed = flushed
        self.names = names
        """What the directory held."""
        self.is_lost = False
        """Whether the file that was being appended to at the flush is missing or too short."""
        self.rolls = rolls
        """Where the store before this one began its segments, which its readers still use ..."""
        self.rolls_end = rolls_end
        """... for the offsets below this."""


class PartitionStore:
    """One partition. No directory and no file until the first append."""

    __slots__ = (
        "_compacted_offset",
        "_compaction",
        "_deferred_start",
        "_first_timestamp",
        "_flush",
        "_open_transactions",
        "_pending",
        "_planned_size",
        "_recorded",
        "_recovery",
        "end_offset",
        "flushed",
        "has_durable_directory",
        "partition",
        "revealed_offset",
        "segments",
        "store",
        "topic_id",
    )

    def __init__(self, store: Store, topic_id: bytes, partition: int) -> None:
        self.store = store
        self.topic_id = topic_id
        self.partition = partition
        self.segments: list[Segment] = []
        self.end_offset = 0
        """Where the next batch goes."""
        self.revealed_offset = 0
        """What lies below is written and may be read."""
        self.flushed: Flushed | None = None
        self.has_durable_directory = False
        self._pending: list[Placement] = []
        """The batches between `revealed_offset` and `end_offset`. Bounded by what the journal lets wait."""
        self._planned_size = 0
        self._first_timestamp = 0
        """Size and first timestamp of the last segment, pending batches included."""
        self._flush: FlushJob | None = None
        self._recorded: Flushed | None = None
        self._compaction: CompactionJob | None = None
        self._compacted_offset = 0
        """The part of the log below it is compacted; UNKNOWN if the indexes must be asked."""
        self._deferred_start = 0
        """What lies below it shall be deleted when the compaction is done."""
        self._open_transactions: dict[int, int] | None = {}
        """The first offsets of the transactions open at `revealed_offset`, by producer; None: not loaded."""
        self._recovery: Recovery | None = None

    def __repr__(self) -> str:
        return f"PartitionStore({self.topic_id.hex()}-{self.partition}, {self.segments})"

    @property
    def directory(self) -> Path:
        return self.store.directory / self.topic_id.hex() / str(self.partition)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    # Appending.

    def append(
        self,
        batch: Buffer,
        header: BatchHeader,
        *,
        settings: LogSettings,
        aborted: AbortedTransaction | None = None,
    ) -> Placement:
        """Give the next batch its place. `aborted` is what the batch, a marker, makes unreadable."""
        base_offset = header.base_offset
        if base_offset < self.end_offset:
            raise StorageError(
                f"batch at offset {base_offset} is below the end {self.end_offset} of {self.directory}; "
                "offsets only grow, so this is a fault of the broker: restart it to recover from the journal"
            )
        if self._open_transactions is None:
            self._load_end()
        size = len(batch)
        if not self.segments or self._must_roll(header, size, settings):
            self._roll(header)
        placement = Placement(
            self.segments[-1], self._planned_size, batch, header, aborted, settings.index_interval_bytes
        )
        self._planned_size += size
        self.end_offset = base_offset + header.last_offset_delta + 1
        self._pending.append(placement)
        return placement

    def _must_roll(self, header: BatchHeader, size: int, settings: LogSettings) -> bool:
        recovery = self._recovery
        if recovery is not None and header.base_offset < recovery.rolls_end:
            return header.base_offset in recovery.rolls
        if self._planned_size == 0:
            return False
        return (
            self._planned_size + size > settings.segment_bytes
            or header.max_timestamp - self._first_timestamp > settings.roll_ms
        )

    def _roll(self, header: BatchHeader) -> None:
        segment = Segment(self, header.base_offset)
        segment.index = SegmentIndex(header.base_offset)
        self.segments.append(segment)
        self._planned_size = 0
        self._first_timestamp = header.max_timestamp

    def reveal(self, end_offset: int) -> None:
        """What lies below `end_offset`, the end of a batch, is written and durable."""
        admitted = 0
        for placement in self._pending:
            header = placement.header
            if header.base_offset >= end_offset:
                break
            self._admit(placement, header)
            admitted += 1
        del self._pending[:admitted]
        self.revealed_offset = max(self.revealed_offset, end_offset)

    def _admit(self, placement: Placement, header: BatchHeader) -> None:
        segment = placement.segment
        index = segment.index
        assert index is not None
        base_offset = header.base_offset
        end_offset = base_offset + header.last_offset_delta + 1
        if placement.position == 0:
            self._close_before(segment)
        index.remember(base_offset, placement.position)
        index.add(base_offset, end_offset, header.size, header.max_timestamp, placement.interval_bytes)
        segment.size = index.log_size
        segment.end_offset = end_offset
        segment.max_timestamp = index.max_timestamp
        if header.attributes & TRANSACTIONAL_BIT:
            self._admit_transactional(segment, index, placement)

    def _admit_transactional(self, segment: Segment, index: SegmentIndex, placement: Placement) -> None:
        header = placement.header
        opened = self._open_transactions
        assert opened is not None
        if not header.attributes & CONTROL_BIT:
            opened.setdefault(header.producer_id, header.base_offset)
            return
        aborted = placement.aborted
        if aborted is None and self._recovery is not None:
            # The state that could tell was restored from a snapshot which already has this marker.
            aborted = ended_by(placement.batch, header.base_offset, header.producer_id, opened)
        opened.pop(header.producer_id, None)
        if aborted is not None:
            index.add_aborted(aborted)
            segment.aborted_from = min(segment.aborted_from, aborted.first_offset)

    def _close_before(self, segment: Segment) -> None:
        """The segment before `segment` is complete, now that a batch of `segment` is revealed."""
        for earlier in reversed(self.segments):
            if earlier.base_offset < segment.base_offset:
                if earlier.index is not None and self._open_transactions is not None:
                    earlier.index.close(self._open_transactions)
                return

    # Reading.

    def read(
        self, offset: int, max_bytes: int, end_offset: int, *, at_least_one: bool = True
    ) -> Region | None:
        """Bytes from the batch that holds `offset` up to the batch at `end_offset`; None if there are none.

        They are cut at `max_bytes`, perhaps within a batch; with `at_least_one` the first batch is whole.
        """
        end_offset = min(end_offset, self.revealed_offset)
        for i in range(self.segment_holding(offset), len(self.segments)):
            segment = self.segments[i]
            if segment.base_offset >= end_offset:
                return None
            position, batch_bytes = self.locate(i, offset)
            end = segment.size if end_offset >= segment.end_offset else self.locate(i, end_offset)[0]
            size = end - position
            if size <= 0:
                continue  # Compaction took all that was left here.
            if size > max_bytes:
                size = max(max_bytes, batch_bytes) if at_least_one else max_bytes
            if size <= 0:
                return None
            end_offset = min(end_offset, self.index_of(i).offset_after(position + size))
            return Region(self.store.files.get(segment), position, size, end_offset)
        return None

    def segment_holding(self, offset: int) -> int:
        """The place in `segments` of the one that holds `offset`, or the first one if it lies before that."""
        last = len(self.segments) - 1
        if last < 0 or offset >= self.segments[last].base_offset:
            return max(last, 0)
        return max(bisect_right(self.segments, offset, key=_base_offset) - 1, 0)

    def locate(self, i: int, offset: int) -> tuple[int, int]:
        """Position and size of the first batch in a segment that ends after `offset`; its end if none."""
        segment = self.segments[i]
        if offset >= segment.end_offset:
            return segment.size, 0
        index = self.index_of(i)
        place = index.recent_place(offset)
        if place is not None:
            return place
        file = self.store.files.get(segment)
        for batch in scan(file, index.floor(offset), segment.size):
            if batch.end_offset > offset:
                return batch.position, batch.size
        return segment.size, 0

    def offset_for_time(self, timestamp: int, start_offset: int, end_offset: int) -> TimestampedOffset | None:
        """The first record in the range that is not older than `timestamp`."""
        return first_at_or_after(self, timestamp, start_offset, min(end_offset, self.revealed_offset))

    def max_timestamp(self, start_offset: int, end_offset: int) -> TimestampedOffset | None:
        """The first record in the range that has the largest timestamp there."""
        return newest(self, start_offset, min(end_offset, self.revealed_offset))

    def aborted_in(self, start_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """The aborted transactions with records in the range, in the order in which they ended."""
        found: list[AbortedTransaction] = []
        for i in range(self.segment_holding(start_offset), len(self.segments)):
            segment = self.segments[i]
            if segment.aborted_from == UNKNOWN:
                load_index(self, i)
            if segment.aborted_from < end_offset and not self.index_of(i).collect_aborted(
                start_offset, end_offset, found
            ):
                break
        return found

    # Indexes that are not in memory.

    def index_of(self, i: int) -> SegmentIndex:
        """The index of a segment, loaded if need be."""
        segment = self.segments[i]
        index = segment.index
        if index is None:
            index = load_index(self, i)[0]
        if i + 1 < len(self.segments) and index.is_saved:
            self.store.indexes.use(segment, index)
        return index

    def _load_end(self) -> None:
        """Learn what appending needs to know of a partition that has been at rest."""
        if self.segments:
            index, self._open_transactions = load_index(self, len(self.segments) - 1)
            self._first_timestamp = index.first_timestamp
        else:
            self._open_transactions = {}

    # Flushing.

    def begin_flush(self) -> FlushJob | None:
        """The job that makes durable what is revealed now; None if that is done or under way."""
        flushed_offset = 0 if self.flushed is None else self.flushed.end_offset
        if self._flush is not None or flushed_offset == self.revealed_offset:
            return None
        if self._open_transactions is None:
            self._load_end()
        unflushed = [segment for segment in self.segments if segment.size and self._is_unflushed(segment)]
        reached = Flushed(self.revealed_offset, 0, self.revealed_offset)
        if unflushed:
            reached = Flushed(unflushed[-1].base_offset, unflushed[-1].size, self.revealed_offset)
        parts = [self._flush_part(segment) for segment in unflushed]
        has_new_names = any(not segment.is_durable_name for segment in unflushed)
        self._flush = FlushJob(self, reached, parts, has_new_names)
        return self._flush

    def _is_unflushed(self, segment: Segment) -> bool:
        flushed = self.flushed
        if flushed is None or segment.base_offset > flushed.segment_base:
            return True
        return segment.base_offset == flushed.segment_base and segment.size > flushed.size

    def _flush_part(self, segment: Segment) -> FlushedSegment:
        index = segment.index
        assert index is not None
        opened = self._open_transactions if index.open_at_end is None else index.open_at_end
        block = index.encode_block(segment.base_offset, opened or {})
        return FlushedSegment(segment, self.store.files.get(segment), block, index.file_bytes)

    def finish_flush(self, job: FlushJob) -> None:
        """The job has run without an error."""
        self._flush = None
        self.flushed = job.flushed
        self.has_durable_directory = self.has_durable_directory or job.has_new_names
        for part in job.parts:
            part.segment.is_durable_name = True
            if part.segment.index is not None:
                part.segment.index.block_saved(part.block)
        if self.flushed.end_offset == self.end_offset and self.segments:
            index = self.segments[-1].index
            if index is not None:
                index.forget_recent()

    # Retention.

    def retention_point(
        self, now_ms: int, *, retention_ms: int, retention_bytes: int, limit_offset: int
    ) -> int | None:
        """The offset below which whole segments may go by age or size; None if none may.

        `limit_offset` is as far as the log start may move. Age counts from the newest record of a segment. If
        all segments are too old, the last one goes too, as in Kafka.
        """
        point: int | None = None
        excess = self.size_bytes - retention_bytes if retention_bytes >= 0 else -1
        for i, segment in enumerate(self.segments):
            if segment.end_offset > limit_offset or self._has_pending(segment):
                break
            is_old = retention_ms >= 0 and now_ms - self._age_timestamp(i, now_ms) > retention_ms
            if not is_old and excess < segment.size:
                break
            excess -= segment.size
            point = segment.end_offset
        return point

    def _has_pending(self, segment: Segment) -> bool:
        return bool(self._pending) and segment.base_offset >= self._pending[0].segment.base_offset

    def _age_timestamp(self, i: int, now_ms: int) -> int:
        """When the newest record of a segment is from. Records without a time are as old as what follows."""
        for later in range(i, len(self.segments)):
            timestamp = self.max_timestamp_of(later)
            if timestamp >= 0:
                return timestamp
        return now_ms

    def max_timestamp_of(self, i: int) -> int:
        segment = self.segments[i]
        if segment.max_timestamp == UNKNOWN:
            load_index(self, i)
        return segment.max_timestamp

    def delete_below(self, log_start_offset: int) -> DeleteJob:
        """Let go of the segments that lie wholly below; for when that log start is on disk.

        While a compaction is under way that has to wait: `finish_compaction` will come back to it.
        """
        if self._compaction is not None:
            self._deferred_start = max(self._deferred_start, log_start_offset)
            return DeleteJob(self.store, [])
        return self._let_go_below(log_start_offset)

    def _let_go_below(self, log_start_offset: int) -> DeleteJob:
        count = 0
        for segment in self.segments:
            if segment.end_offset > log_start_offset or self._has_pending(segment):
                break
            count += 1
        gone = self.segments[:count]
        del self.segments[:count]
        for segment in gone:
            self.store.let_go(segment)
        return DeleteJob(self.store, gone)

    # Compaction.

    def flush_recorded(self, flushed: Flushed) -> None:
        """Recovery will never begin at an earlier flush of this partition than this one.

        Only below that may compaction work: a recovery that begins earlier would append to what it replaced.
        Mind that recovery may fall back to a snapshot before the newest.
        """
        self._recorded = flushed

    def begin_compaction(
        self, now_ms: int, settings: LogSettings, last_stable_offset: int, last_batches: Mapping[int, int]
    ) -> CompactionJob | None:
        """A compaction if there is enough to do, or the one that was begun and can go on.

        `last_batches` holds the last offset of the last batch of each producer that is still known.
        """
        if not settings.compacts:
            return None
        if self._compaction is not None:
            return self._unfinished_compaction(self._compaction)
        segments = self._compactable(now_ms, settings, last_stable_offset)
        start_offset = self._first_uncompacted()
        dirty = [segment for segment in segments if segment.end_offset > start_offset]
        if not dirty or not self._needs_compaction(now_ms, settings, segments, dirty):
            return None
        self._compaction = CompactionJob(
            self,
            segments,
            max(start_offset, segments[0].base_offset),
            now_ms=now_ms,
            settings=settings,
            aborted=self.aborted_in(segments[0].base_offset, segments[-1].end_offset),
            last_batches=dict(last_batches),
        )
        return self._compaction

    def _compactable(self, now_ms: int, settings: LogSettings, last_stable_offset: int) -> list[Segment]:
        """The closed segments from the first on that nothing can change any more."""
        if self._recorded is None:
            return []
        limit = min(last_stable_offset, self._recorded.segment_base)
        segments: list[Segment] = []
        for i, segment in enumerate(self.segments[:-1]):
            if segment.end_offset > limit:
                break
            lag_ms = settings.min_compaction_lag_ms
            if lag_ms > 0 and self.max_timestamp_of(i) > now_ms - lag_ms:
                break
            segments.append(segment)
        return segments

    def _first_uncompacted(self) -> int:
        if self._compacted_offset == UNKNOWN:
            self._compacted_offset = 0
            for i, segment in enumerate(self.segments[:-1]):
                if not self.index_of(i).is_cleaned:
                    break
                self._compacted_offset = segment.end_offset
        return self._compacted_offset

    def _needs_compaction(
        self, now_ms: int, settings: LogSettings, segments: list[Segment], dirty: list[Segment]
    ) -> bool:
        dirty_bytes = sum(segment.size for segment in dirty)
        if dirty_bytes > settings.min_cleanable_dirty_ratio * sum(segment.size for segment in segments):
            return True
        oldest_ms = self.index_of(self.segment_holding(dirty[0].base_offset)).first_timestamp
        return now_ms - oldest_ms > settings.max_compaction_lag_ms

    def _unfinished_compaction(self, job: CompactionJob) -> CompactionJob | None:
        if job.is_running or job.is_broken:
            return None
        if not job.has_failed:
            return job
        # The disk failed before anything was replaced: begin anew, next time.
        self._take_over(job)
        self._compaction = None
        return None

    def finish_compaction(self, job: CompactionJob) -> CompactionJob | None:
        """`run` has returned: put what it made in its place. The job again, if there is more to run."""
        self._take_over(job)
        if not job.is_done:
            return job
        self._compacted_offset = job.end_offset
        if self._deferred_start:
            job.cleanup = self._let_go_below(self._deferred_start)
            self._deferred_start = 0
            return job
        self._compaction = None
        return None

    def _take_over(self, job: CompactionJob) -> None:
        for replacement in job.replacements:
            self._replace(replacement.segments, replacement.index, replacement.is_new_file)
        job.replacements = []

    def _replace(self, replaced: list[Segment], index: SegmentIndex, is_new_file: bool) -> None:
        segment = replaced[0]
        if is_new_file:
            segment = Segment(self, replaced[0].base_offset)
            segment.end_offset = replaced[-1].end_offset
            segment.size = index.log_size
            segment.is_durable_name = True
            at = self.segments.index(replaced[0])
            self.segments[at : at + len(replaced)] = [segment]
            for old in replaced:
                self.store.let_go(old)
        else:
            self.store.indexes.forget(segment)
        segment.index = index
        segment.max_timestamp = index.max_timestamp
        segment.aborted_from = index.first_aborted()
        self.store.indexes.use(segment, index)

    # Recovery.

    def restore(self, flushed: Flushed | None, log_start_offset: int) -> None:
        """Begin again from what is certain to be on disk; the batches from `flushed.end_offset` on follow.

        What lies below `log_start_offset` may be there or not, and is not looked at.
        """
        disk = self.store.disk
        directory = self.directory
        names = disk.listdir(directory) if disk.exists(directory) else []
        swaps = [name for name in names if name.endswith(SWAP_SUFFIX)]
        for swap in swaps:
            finish_swap(disk, directory, swap, names)
        if swaps:
            names = disk.listdir(directory)
        rolls, rolls_end = self.store.rolls_before(self.topic_id, self.partition)
        self._recovery = Recovery(flushed, names, rolls, rolls_end)
        self.flushed = flushed
        if flushed is not None:
            self._compacted_offset = UNKNOWN
            self.has_durable_directory = True
            self.end_offset = self.revealed_offset = flushed.end_offset
            self._open_transactions = None
            self._restore_segments(self._recovery, flushed, log_start_offset)

    def _restore_segments(self, recovery: Recovery, flushed: Flushed, log_start_offset: int) -> None:
        bases = [offset_of(name) for name in recovery.names if name.endswith(LOG_SUFFIX)]
        closed = [base for base in bases if base < flushed.segment_base]
        for base, following in pairwise([*closed, flushed.segment_base]):
            if following > log_start_offset:
                segment = self._restored(base, following)
                segment.size = self._size_on_disk(segment)
                self.segments.append(segment)
        if flushed.size and flushed.end_offset > log_start_offset:
            last = self._restored(flushed.segment_base, flushed.end_offset)
            if last.path.name in recovery.names and self._size_on_disk(last) >= flushed.size:
                last.size = self._planned_size = flushed.size
                self.segments.append(last)
            else:
                recovery.is_lost = True

    def _restored(self, base_offset: int, end_offset: int) -> Segment:
        segment = Segment(self, base_offset)
        segment.end_offset = end_offset
        segment.max_timestamp = segment.aborted_from = UNKNOWN
        segment.is_durable_name = True
        return segment

    def _size_on_disk(self, segment: Segment) -> int:
        return self.store.files.get(segment).size()

    def trim(self, log_start_offset: int) -> None:
        """The end of recovery: check that all is there from `log_start_offset` on, cut what is too much."""
        recovery = self._recovery
        if recovery is None:
            return
        self._check_whole(recovery, log_start_offset)
        self._recovery = None
        kept: set[str] = set()
        for segment in self.segments:
            kept.add(segment.path.name)
            kept.add(segment.index_path.name)
            if recovery.flushed is None or segment.base_offset >= recovery.flushed.segment_base:
                file = self.store.files.get(segment)
                if file.size() > segment.size:
                    file.truncate(segment.size)
                    # If this segment gets no more bytes, no flush will look at it again.
                    file.fdatasync()
        for name in recovery.names:
            if name not in kept:
                self.store.disk.unlink(self.directory / name)

    def _check_whole(self, recovery: Recovery, log_start_offset: int) -> None:
        flushed = recovery.flushed
        if recovery.is_lost and flushed is not None and log_start_offset < flushed.end_offset:
            raise CorruptionError(
                f"{self.directory} should have a segment {flushed.segment_base} of at least {flushed.size} "
                "bytes, which is missing or shorter: it was flushed, so something else deleted or cut it; "
                "restore it, or delete the topic"
            )
        if self.segments and self.segments[0].base_offset > log_start_offset:
            raise CorruptionError(
                f"{self.directory} begins at offset {self.segments[0].base_offset} and should begin at "
                f"{log_start_offset}: something else deleted its segments; restore them, or delete the topic"
            )
