"""Snapshots: the state in parts, so that replay need not begin at position 0.

A snapshot is one file, `<number, 20 digits>.snapshot`:

    header    magic 8s | version u32 | generation u32 | number u64 | crc32c u32
    part      stamp u64 | length u32 | crc32c u32 | bytes                       (any number of times)
    footer    magic 8s | part count u32 | horizon u64 | highest stamp u64
              | crc32c of the parts' checksums u32 | crc32c u32

All little-endian. A part's checksum covers stamp, length and bytes. A part is stamped with the journal
position up to which it includes every entry; the *horizon* is where replay must begin. The file is written
under another name, synced, renamed, and its directory synced: one that has its final name is complete, or
damaged.

Rules:

- It is finished only once the journal is synced beyond all its stamps, in the generation in which it was
  begun. Otherwise it could hold what a crash or a failed write then takes back. So its stamps are evidence,
  too: a journal that ends before them has lost files.
- The newest two are kept. If the newest is damaged the one before it is used, so the journal is deleted only
  below the *older* one's horizon: below 0 as long as there is only one.
- `snapshot.reserve` is room for the next snapshot, held in advance. A snapshot is written into it, so that on
  a full disk one can still be taken, and journal files be deleted.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct

from fastcrc import crc32

from semel.disk import Buffer, Disk, File, write_fully
from semel.errors import CorruptionError, StorageError
from semel.journal.chain import Chain

SNAPSHOTS_KEPT = 2

CHUNK_BYTES = 1024 * 1024
"""How much is gathered before it is written, and read at once."""

MIN_RESERVE_BYTES = 1024 * 1024

_MAGIC = b"SEMELSNP"
_END_MAGIC = b"SEMELEND"
_FORMAT_VERSION = 1
_HEADER = Struct("<8sIIQI")
_PART = Struct("<QII")
_PART_SIGNED = Struct("<QI")
_FOOTER = Struct("<8sIQQII")
_CRC = Struct("<I")

_SNAPSHOT_NAME = re.compile(r"(\d{20})\.snapshot")
_RESERVE_NAME = "snapshot.reserve"
_DAMAGED_SUFFIX = ".damaged"


class SnapshotDamagedError(Exception):
    """A snapshot file is not whole; the message says where."""


class Snapshot:
    """A whole snapshot. Its parts are read from the file each time they are asked for."""

    __slots__ = (
        "_disk",
        "_parts_crc",
        "generation",
        "highest_stamp",
        "horizon",
        "number",
        "part_count",
        "path",
        "size",
    )

    generation: int
    number: int
    part_count: int
    horizon: int
    highest_stamp: int

    def __init__(self, disk: Disk, path: Path) -> None:
        """Read what frames the parts, and check it; `verify` checks the parts."""
        self._disk = disk
        self.path = path
        file = disk.open(path)
        try:
            self.size = file.size()
            if self.size < _HEADER.size + _FOOTER.size:
                raise SnapshotDamagedError(f"{path} has {self.size} bytes, too few")
            header = file.pread(_HEADER.size, 0)
            footer = file.pread(_FOOTER.size, self.size - _FOOTER.size)
        finally:
            file.close()
        magic, version, self.generation, self.number, crc = _HEADER.unpack(header)
        if magic != _MAGIC or crc != crc32.iscsi(header[:-4]) or version != _FORMAT_VERSION:
            raise SnapshotDamagedError(f"{path} has a damaged header")
        magic, self.part_count, self.horizon, self.highest_stamp, self._parts_crc, crc = _FOOTER.unpack(
            footer
        )
        if magic != _END_MAGIC or crc != crc32.iscsi(footer[:-4]):
            raise SnapshotDamagedError(f"{path} has a damaged footer")

    def parts(self) -> Iterator[tuple[int, memoryview]]:
        """The parts in the order in which they were added, each with its stamp; raises on damage."""
        file = self._disk.open(self.path)
        try:
            yield from self._read_parts(file)
        finally:
            file.close()

    def verify(self) -> None:
        """Read everything, and raise SnapshotDamagedError if anything is wrong."""
        for _ in self.parts():
            pass

    def _read_parts(self, file: File) -> Iterator[tuple[int, memoryview]]:
        offset = _HEADER.size
        end = self.size - _FOOTER.size
        chunk = b""
        chunk_offset = offset
        parts_crc = 0
        count = 0
        while offset < end:
            if offset + _PART.size - chunk_offset > len(chunk):
                chunk = file.pread(CHUNK_BYTES, offset)
                chunk_offset = offset
            if offset + _PART.size > end:
                raise SnapshotDamagedError(f"{self.path} is damaged at byte {offset}")
            stamp, length, crc = _PART.unpack_from(chunk, offset - chunk_offset)
            part_end = offset + _PART.size + length
            if part_end > end:
                raise SnapshotDamagedError(f"{self.path} is damaged at byte {offset}")
            if part_end - chunk_offset > len(chunk):
                chunk = file.pread(max(CHUNK_BYTES, part_end - offset), offset)
                chunk_offset = offset
            body = memoryview(chunk)[offset + _PART.size - chunk_offset : part_end - chunk_offset]
            if crc32.iscsi(body, crc32.iscsi(_PART_SIGNED.pack(stamp, length))) != crc:
                raise SnapshotDamagedError(f"{self.path} is damaged at byte {offset}")
            parts_crc = crc32.iscsi(_CRC.pack(crc), parts_crc)
            count += 1
            yield stamp, body
            offset = part_end
        if count != self.part_count or parts_crc != self._parts_crc:
            raise SnapshotDamagedError(f"{self.path} does not hold the {self.part_count} parts it should")


class SnapshotWriter:
    """Writes one snapshot, part by part, into the reserve. It blocks on the disk: use a worker thread.

    After a StorageError, or when the journal fails, `abandon` it: nothing was changed that a reader sees.
    """

    __slots__ = (
        "_buffers",
        "_count",
        "_directory",
        "_disk",
        "_file",
        "_highest",
        "_number",
        "_offset",
        "_parts_crc",
        "_pending_bytes",
        "generation",
    )

    def __init__(self, disk: Disk, directory: Path, *, generation: int) -> None:
        self._disk = disk
        self._directory = directory
        self.generation = generation
        self._number = max(snapshot_numbers(disk, directory), default=0) + 1
        path = directory / _RESERVE_NAME
        self._file = disk.open(path, writable=True) if disk.exists(path) else disk.create(path)
        header = _HEADER.pack(_MAGIC, _FORMAT_VERSION, generation, self._number, 0)[:-4]
        self._buffers: list[Buffer] = [header, _CRC.pack(crc32.iscsi(header))]
        self._pending_bytes = _HEADER.size
        self._offset = 0
        self._count = 0
        self._highest = 0
        self._parts_crc = 0

    def add(self, stamp: int, buffers: Sequence[Buffer]) -> None:
        """Add a part that includes every entry below the journal position `stamp`."""
        length = sum(map(len, buffers))
        crc = crc32.iscsi(_PART_SIGNED.pack(stamp, length))
        for buffer in buffers:
            crc = crc32.iscsi(buffer, crc)
        self._buffers.append(_PART.pack(stamp, length, crc))
        self._buffers += buffers
        self._pending_bytes += _PART.size + length
        self._parts_crc = crc32.iscsi(_CRC.pack(crc), self._parts_crc)
        self._highest = max(self._highest, stamp)
        self._count += 1
        if self._pending_bytes >= CHUNK_BYTES:
            self._write()

    @property
    def highest_stamp(self) -> int:
        """The journal must be synced up to here before the snapshot is finished."""
        return self._highest

    def finish(self, horizon: int, *, generation: int, synced: int) -> int:
        """Make the snapshot durable, let go of the oldest, and say below which position no journal is needed.

        `generation` and `synced` are the journal's as of now: a snapshot that was begun before a failed write
        must not be finished after it, though the positions may have been reached again, with other groups.
        """
        if generation != self.generation or max(self._highest, horizon) > synced:
            raise ValueError(
                f"a snapshot of generation {self.generation} up to {max(self._highest, horizon)} cannot be "
                f"finished while the journal is synced up to {synced} in generation {generation}"
            )
        footer = _FOOTER.pack(_END_MAGIC, self._count, horizon, self._highest, self._parts_crc, 0)[:-4]
        self._buffers += (footer, _CRC.pack(crc32.iscsi(footer)))
        self._write()
        self._file.truncate(self._offset)
        self._file.fdatasync()
        self._file.close()
        self._disk.rename(self._directory / _RESERVE_NAME, snapshot_path(self._directory, self._number))
        self._disk.fsync_dir(self._directory)
        needed = self._prune()
        hold_reserve(self._disk, self._directory, 2 * self._offset)
        return needed

    def abandon(self) -> None:
        """Give up, and see to a new reserve: this one may lie on bad blocks."""
        self._file.close()
        path = self._directory / _RESERVE_NAME
        if self._disk.exists(path):
            self._disk.unlink(path)
        hold_reserve(self._disk, self._directory, self._offset)

    def _write(self) -> None:
        self._offset += write_fully(self._file, self._buffers, self._offset)
        self._buffers = []
        self._pending_bytes = 0

    def _prune(self) -> int:
        """Delete all but the newest two; the horizon of the older one, 0 if there is only one."""
        numbers = sorted(snapshot_numbers(self._disk, self._directory), reverse=True)
        for number in numbers[SNAPSHOTS_KEPT:]:
            self._disk.unlink(snapshot_path(self._directory, number))
        if len(numbers) < SNAPSHOTS_KEPT:
            return 0
        try:
            return Snapshot(self._disk, snapshot_path(self._directory, numbers[SNAPSHOTS_KEPT - 1])).horizon
        except SnapshotDamagedError:
            # Nothing is deleted on the word of a damaged file; the next snapshot pushes it out.
            return 0


def hold_reserve(disk: Disk, directory: Path, size: int) -> bool:
    """See to it that room for a snapshot of `size` bytes is held, and say whether it is."""
    path = directory / _RESERVE_NAME
    wanted = max(size, MIN_RESERVE_BYTES)
    try:
        file = disk.open(path, writable=True) if disk.exists(path) else disk.create(path)
        try:
            file.allocate(wanted)
        finally:
            file.close()
    except StorageError:
        return False
    return True


def snapshot_numbers(disk: Disk, directory: Path) -> list[int]:
    """The numbers of the snapshots in a directory, oldest first."""
    matches = (_SNAPSHOT_NAME.fullmatch(name) for name in disk.listdir(directory))
    return sorted(int(match[1]) for match in matches if match is not None)


def snapshot_path(directory: Path, number: int) -> Path:
    """Where the snapshot of a number lies."""
    return directory / f"{number:020d}.snapshot"


def load_newest(disk: Disk, directory: Path, chain: Chain) -> Snapshot | None:
    """The newest whole snapshot that the journal continues; None if the state is all in the journal.

    A damaged one is set aside under another name. CorruptionError if state is lost: if none can be used and
    the journal no longer begins at 0, or if the journal ends before a snapshot's stamps.
    """
    # A name that is found may be in the cache only, and files are deleted on the strength of it.
    disk.fsync_dir(directory)
    damaged: list[str] = []
    for number in reversed(snapshot_numbers(disk, directory)):
        path = snapshot_path(directory, number)
        try:
            snapshot = Snapshot(disk, path)
            snapshot.verify()
        except SnapshotDamagedError as error:
            damaged.append(str(error))
            disk.rename(path, directory / (path.name + _DAMAGED_SUFFIX))
            continue
        if chain.was_cut_below(snapshot.highest_stamp, snapshot.generation):
            damaged.append(f"{snapshot.path} includes what was later cut from the journal")
            disk.unlink(snapshot.path)
            continue
        _check_covered(snapshot, chain, damaged)
        return snapshot
    if chain.start > 0:
        raise CorruptionError(
            f"the journal in {directory} begins at position {chain.start}, and no snapshot has what came "
            f"before ({'; '.join(damaged) or 'none was found'}); restore the directory from a backup"
        )
    return None


def _check_covered(snapshot: Snapshot, chain: Chain, damaged: list[str]) -> None:
    if snapshot.highest_stamp > chain.end or snapshot.generation > chain.generation:
        raise CorruptionError(
            f"{snapshot.path} was taken when the journal was durable up to {snapshot.highest_stamp} in "
            f"generation {snapshot.generation}, but the journal ends at {chain.end} in generation "
            f"{chain.generation}: journal files are missing; restore them from a backup"
        )
    if snapshot.horizon < chain.start:
        raise CorruptionError(
            f"{snapshot.path} needs the journal from {snapshot.horizon} on, but it begins at {chain.start} "
            f"({'; '.join(damaged) or 'files are missing'}); restore the directory from a backup"
        )
