"""The index of one segment: where its batches lie, how late its records get, and what was aborted in it.

Sparse: one entry for the first batch of each `index.interval.bytes`. An entry holds the base offset of a
batch, its position in the file, and the largest timestamp of all batches *before* it. All three only grow, so
offsets and times are found by bisection. The newest batches of an active segment are also kept one by one,
since most readers are near the end.

The index file `<base>.index` is a run of blocks, one added by each flush:

    crc32c u32 | magic u32 | flags u32 | entries u32 | aborted u32 | open u32
    base offset | log from | log size | end offset | first timestamp | max timestamp      (i64 each)
    offsets of the entries | their positions | their timestamps                           (i64 each)
    aborted: producer id, first offset, last offset, last stable offset                   (i64 each)
    open: producer id, first offset                                                       (i64 each)

All little-endian. A block describes the bytes [log from, log size) of its segment and the transactions that
are open at its end. The checksum goes on from that of the block before. The file is a help and never a
promise: blocks are believed as far as they fit together and do not reach past the segment; the rest is read
from the segment itself, where everything in a block comes from.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from struct import Struct
from typing import Final, Protocol

from fastcrc import crc32

from semel.log.partition import AbortedTransaction

BLOCK: Final = Struct("<IIIIIIqqqqqq")
BLOCK_MAGIC: Final = 0x534D5849
CRC_BYTES: Final = 4
INT64_BYTES: Final = 8
ENTRY_FIELDS: Final = 3
ABORTED_FIELDS: Final = 4
OPEN_FIELDS: Final = 2
CLEANED_FLAG: Final = 1

OBJECT_BYTES: Final = 1024
"""About what an index takes in memory besides its numbers."""
RECENT_BATCHES: Final = 256
"""How many of the newest batches of a segment are kept one by one; half of that at least."""
NO_TIMESTAMP: Final = -1
UNKNOWN: Final = -2
"""As a timestamp or an offset of a segment: the index must be loaded to know it."""
NO_OFFSET: Final = 2**63 - 1
"""Larger than any offset: what the first offset is where there is none."""


class SegmentIndex:
    """What is known of a segment up to `log_size`, in memory."""

    __slots__ = (
        "aborted",
        "block_crc",
        "end_offset",
        "file_bytes",
        "first_timestamp",
        "is_cleaned",
        "log_size",
        "max_timestamp",
        "offsets",
        "open_at_end",
        "positions",
        "recent_offsets",
        "recent_positions",
        "saved_aborted",
        "saved_entries",
        "saved_size",
        "timestamps",
    )

    def __init__(self, base_offset: int) -> None:
        self.log_size = 0
        self.end_offset = base_offset
        self.first_timestamp = NO_TIMESTAMP
        """The largest timestamp in the first batch, from which `segment.ms` counts."""
        self.max_timestamp = NO_TIMESTAMP
        self.is_cleaned = False
        """Whether compaction wrote this segment."""
        self.offsets = array("q")
        self.positions = array("q")
        self.timestamps = array("q")
        self.recent_offsets = array("q")
        self.recent_positions = array("q")
        self.aborted = array("q")
        """Four numbers for each transaction aborted here, in the order of their markers."""
        self.open_at_end: dict[int, int] | None = None
        """First offsets by producer id of the transactions open at the end, once the segment is closed."""
        self.saved_entries = 0
        self.saved_aborted = 0
        self.saved_size = 0
        """The `log_size` of the last block in the file."""
        self.file_bytes = 0
        self.block_crc = 0

    @property
    def memory_bytes(self) -> int:
        return OBJECT_BYTES + INT64_BYTES * (ENTRY_FIELDS * len(self.offsets) + len(self.aborted))

    @property
    def is_saved(self) -> bool:
        """Whether all of it is in the index file."""
        return self.saved_size == self.log_size

    # Adding.

    def add(
        self, base_offset: int, end_offset: int, size: int, max_timestamp: int, interval_bytes: int
    ) -> None:
        """The next batch of the segment: its offsets, its size and its largest timestamp."""
        position = self.log_size
        if position == 0:
            self.first_timestamp = max_timestamp
        if not self.positions or position - self.positions[-1] >= interval_bytes:
            self.offsets.append(base_offset)
            self.positions.append(position)
            self.timestamps.append(self.max_timestamp)
        self.log_size = position + size
        self.end_offset = end_offset
        self.max_timestamp = max(self.max_timestamp, max_timestamp)

    def remember(self, base_offset: int, position: int) -> None:
        """Keep the place of one of the newest batches."""
        recent = self.recent_offsets
        recent.append(base_offset)
        self.recent_positions.append(position)
        if len(recent) > RECENT_BATCHES:
            del recent[: RECENT_BATCHES // 2]
            del self.recent_positions[: RECENT_BATCHES // 2]

    def close(self, open_transactions: dict[int, int]) -> None:
        """No batch follows; these transactions go on in the next segment."""
        self.open_at_end = dict(open_transactions)
        self.forget_recent()

    def forget_recent(self) -> None:
        """The segment is idle or closed: the sparse entries are enough."""
        self.recent_offsets = array("q")
        self.recent_positions = array("q")

    def add_aborted(self, aborted: AbortedTransaction) -> None:
        self.aborted.extend(
            (aborted.producer_id, aborted.first_offset, aborted.last_offset, aborted.last_stable_offset)
        )

    # Finding.

    def recent_place(self, offset: int) -> tuple[int, int] | None:
        """Position and size of the batch that holds `offset`, if it is one of the newest."""
        i = bisect_right(self.recent_offsets, offset) - 1
        if i < 0 or offset >= self.end_offset:
            return None
        position = self.recent_positions[i]
        following = self.recent_positions[i + 1] if i + 1 < len(self.recent_positions) else self.log_size
        return position, following - position

    def floor(self, offset: int) -> int:
        """The position of a batch from which a short scan finds the one that holds `offset`."""
        i = bisect_right(self.offsets, offset) - 1
        return self.positions[i] if i >= 0 else 0

    def time_floor(self, timestamp: int) -> int:
        """The position from which a scan finds the first batch with a timestamp of at least `timestamp`."""
        i = bisect_left(self.timestamps, timestamp) - 1
        return self.positions[i] if i >= 0 else 0

    def offset_after(self, position: int) -> int:
        """An offset that no batch before `position` reaches, at most an entry away from it."""
        i = bisect_left(self.positions, position)
        return self.offsets[i] if i < len(self.offsets) else self.end_offset

    def first_aborted(self) -> int:
        """The smallest first offset of the transactions aborted here."""
        return min(self.aborted[1::ABORTED_FIELDS], default=NO_OFFSET)

    def collect_aborted(self, start_offset: int, end_offset: int, found: list[AbortedTransaction]) -> bool:
        """Add the aborted transactions that overlap the range; False if later segments cannot have more."""
        entries = self.aborted
        for i in range(self._first_ended_at(start_offset), len(entries), ABORTED_FIELDS):
            if entries[i + 1] < end_offset:
                found.append(AbortedTransaction(entries[i], entries[i + 1], entries[i + 2], entries[i + 3]))
            if entries[i + 3] >= end_offset:
                return False
        return True

    def _first_ended_at(self, offset: int) -> int:
        """Where in `aborted` the first transaction is whose marker lies at or after `offset`."""
        low, high = 0, len(self.aborted) // ABORTED_FIELDS
        while low < high:
            middle = (low + high) // 2
            if self.aborted[middle * ABORTED_FIELDS + 2] < offset:
                low = middle + 1
            else:
                high = middle
        return low * ABORTED_FIELDS

    # The file.

    def encode_block(self, base_offset: int, open_transactions: dict[int, int]) -> bytes:
        """The block for all that no block holds yet."""
        entries = len(self.offsets) - self.saved_entries
        aborted = self.aborted[self.saved_aborted :]
        head = BLOCK.pack(
            0,
            BLOCK_MAGIC,
            CLEANED_FLAG if self.is_cleaned else 0,
            entries,
            len(aborted) // ABORTED_FIELDS,
            len(open_transactions),
            base_offset,
            self.saved_size,
            self.log_size,
            self.end_offset,
            self.first_timestamp,
            self.max_timestamp,
        )
        still_open = array("q")
        for producer_id, first_offset in open_transactions.items():
            still_open.extend((producer_id, first_offset))
        columns = (
            self.offsets[self.saved_entries :],
            self.positions[self.saved_entries :],
            self.timestamps[self.saved_entries :],
            aborted,
            still_open,
        )
        body = head[CRC_BYTES:] + b"".join(map(_to_bytes, columns))
        return crc32.iscsi(body, self.block_crc).to_bytes(CRC_BYTES, "little") + body

    def block_saved(self, block: bytes) -> None:
        """`block`, the latest that was encoded, is at the end of the index file."""
        _, _, _, entries, aborted, _, _, _, self.saved_size, _, _, _ = BLOCK.unpack_from(block)
        self.saved_entries += entries
        self.saved_aborted += aborted * ABORTED_FIELDS
        self.file_bytes += len(block)
        self.block_crc = int.from_bytes(block[:CRC_BYTES], "little")

    def load_blocks(self, stored: bytes, base_offset: int, log_size: int) -> dict[int, int] | None:
        """Take in the blocks of an index file as far as they are whole and reach no further than `log_size`.

        Returns the transactions open at the end of the last one, None if there is no block to believe.
        """
        open_transactions: dict[int, int] | None = None
        position = 0
        while len(stored) - position >= BLOCK.size:
            fields = BLOCK.unpack_from(stored, position)
            _, magic, _, entries, aborted, opened, base, log_from, size, _, _, _ = fields
            numbers = entries * ENTRY_FIELDS + aborted * ABORTED_FIELDS + opened * OPEN_FIELDS
            end = position + BLOCK.size + numbers * INT64_BYTES
            fits = magic == BLOCK_MAGIC and base == base_offset and log_from == self.log_size
            if not fits or size > log_size or end > len(stored):
                break
            block = stored[position:end]
            if crc32.iscsi(block[CRC_BYTES:], self.block_crc) != fields[0]:
                break
            open_transactions = self._load_block(block)
            position = end
        return open_transactions

    def _load_block(self, block: bytes) -> dict[int, int]:
        fields = BLOCK.unpack_from(block)
        _, _, flags, entries, aborted, _, _, _ = fields[:8]
        self.log_size, self.end_offset, self.first_timestamp, self.max_timestamp = fields[8:]
        self.is_cleaned = flags & CLEANED_FLAG != 0
        numbers = array("q")
        numbers.frombytes(block[BLOCK.size :])
        if sys.byteorder == "big":
            numbers.byteswap()
        self.offsets.extend(numbers[:entries])
        self.positions.extend(numbers[entries : 2 * entries])
        self.timestamps.extend(numbers[2 * entries : 3 * entries])
        aborted_at = entries * ENTRY_FIELDS
        open_at = aborted_at + aborted * ABORTED_FIELDS
        self.aborted.extend(numbers[aborted_at:open_at])
        self.block_saved(block)
        return {numbers[i]: numbers[i + 1] for i in range(open_at, len(numbers), OPEN_FIELDS)}


def _to_bytes(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


class HasIndex(Protocol):
    """A segment, as far as `ResidentIndexes` is concerned."""

    index: SegmentIndex | None


class ResidentIndexes:
    """The indexes of closed segments that are in memory; they can be read again from their files."""

    __slots__ = ("_bytes", "_limit_bytes", "_used")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._used: OrderedDict[HasIndex, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def use(self, segment: HasIndex, index: SegmentIndex) -> None:
        """The index of a closed segment was loaded or looked at; others may have to go for it."""
        if segment in self._used:
            self._used.move_to_end(segment)
            return
        size = index.memory_bytes
        self._used[segment] = size
        self._bytes += size
        while self._bytes > self._limit_bytes and len(self._used) > 1:
            oldest, size = self._used.popitem(last=False)
            self._bytes -= size
            oldest.index = None

    def forget(self, segment: HasIndex) -> None:
        """The segment is no longer part of the log."""
        self._bytes -= self._used.pop(segment, 0)
