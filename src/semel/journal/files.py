"""The files of a journal directory: their names, their order, the spares, and how a new one comes into being.

`<base, 20 digits>-<generation, 10 digits>.journal` holds groups. Sorted by generation and then by base, files
are in the order in which they were made, and one rule says what counts: *each file voids everything at or
beyond its base in all files made before it*. A roll makes nothing void, since it begins where the last file
ended; a new generation that begins at D makes everything past D void, for good.

`<n>.spare` holds nothing: it is room, allocated in advance, for the next file. A new journal file is written
under the name of a spare, synced, renamed and its directory synced, so that a file that has its final name is
whole, and damage to its header is corruption, never an unfinished creation.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from semel.disk import Buffer, Disk, File, write_fully
from semel.errors import StorageError
from semel.journal.format import FILE_HEADER_BYTES, FileHeader, Seal, encode_file_header

MAX_SPARES = 2
"""One spare is the reserve for a full disk. A second is kept when an old file can be had for it: writing to
blocks that were written before is faster than to blocks that were only allocated."""

SMALL_FILE_BYTES = 1024 * 1024
"""The room asked for when there is none for a whole file, so that a full disk can still be recovered from."""

_JOURNAL_NAME = re.compile(r"(\d{20})-(\d{10})\.journal")
_SPARE_NAME = re.compile(r"(\d+)\.spare")


@dataclass(slots=True, frozen=True, order=True)
class JournalName:
    """What the name of a journal file says. They sort in the order in which the files were made."""

    generation: int
    base: int

    def __str__(self) -> str:
        return f"{self.base:020d}-{self.generation:010d}.journal"


@dataclass(slots=True, frozen=True)
class OldFile:
    """A journal file that is no longer written, and the position where what counts of it ends."""

    path: Path
    end: int


def journal_names(disk: Disk, directory: Path) -> list[JournalName]:
    """The journal files of a directory, in the order in which they were made."""
    names: list[JournalName] = []
    for name in disk.listdir(directory):
        match = _JOURNAL_NAME.fullmatch(name)
        if match is not None:
            names.append(JournalName(generation=int(match[2]), base=int(match[1])))
    names.sort()
    return names


class HeadFile:
    """The file that is being written: the newest of the chain."""

    __slots__ = ("base", "capacity_bytes", "file", "seal")

    def __init__(self, file: File, seal: Seal, base: int, capacity_bytes: int) -> None:
        self.file = file
        self.seal = seal
        self.base = base
        self.capacity_bytes = capacity_bytes

    @property
    def limit(self) -> int:
        """The position where the file is full."""
        return self.base + self.capacity_bytes - FILE_HEADER_BYTES

    def offset(self, position: int) -> int:
        """Where in the file a position lies."""
        return FILE_HEADER_BYTES + position - self.base


class Spares:
    """The room held in advance for journal files."""

    __slots__ = ("_directory", "_disk", "_file_bytes", "_paths")

    def __init__(self, disk: Disk, directory: Path, file_bytes: int) -> None:
        self._disk = disk
        self._directory = directory
        self._file_bytes = file_bytes
        # A spare may be a journal file whose change of name is not durable yet. If it were written to now, a
        # power failure could bring the old name back, with the new content.
        disk.fsync_dir(directory)
        self._paths = [
            directory / name for name in disk.listdir(directory) if _SPARE_NAME.fullmatch(name) is not None
        ]

    def __len__(self) -> int:
        return len(self._paths)

    def hold(self) -> None:
        """See to it that at least one spare is there; raise StorageError if the disk has no room for it."""
        if not self._paths:
            path = self._unused_path()
            file = self._allocated(self._disk.create(path), path, self._file_bytes)
            file.close()
            self._paths.append(path)

    def keep(self, path: Path) -> bool:
        """Turn a journal file that is no longer needed into a spare, if one is wanted and it will do."""
        if len(self._paths) >= MAX_SPARES or self._size_of(path) != self._file_bytes:
            return False
        spare = self._unused_path()
        self._disk.rename(path, spare)
        self._paths.append(spare)
        return True

    def take(self, size: int) -> tuple[File, int]:
        """A file with room for `size` bytes at least, whole size preferred, and how much it has room for.

        Its content is anything. It is no longer among the spares, though its name still is.
        """
        wanted = max(size, self._file_bytes)
        if self._paths:
            # The spare made last is an old journal file more often than not, and faster to write.
            path = self._paths.pop()
            return self._allocated(self._disk.open(path, writable=True), path, wanted), wanted
        path = self._unused_path()
        try:
            return self._allocated(self._disk.create(path), path, wanted), wanted
        except StorageError:
            smaller = max(size, SMALL_FILE_BYTES)
            if smaller >= wanted:
                raise
            return self._allocated(self._disk.create(path), path, smaller), smaller

    def _allocated(self, file: File, path: Path, size: int) -> File:
        try:
            file.allocate(size)
        except StorageError:
            file.close()
            self._disk.unlink(path)
            raise
        return file

    def _size_of(self, path: Path) -> int:
        file = self._disk.open(path)
        try:
            return file.size()
        finally:
            file.close()

    def _unused_path(self) -> Path:
        number = 0
        while self._disk.exists(self._directory / f"{number}.spare"):
            number += 1
        return self._directory / f"{number}.spare"


def create_journal_file(
    disk: Disk, directory: Path, spares: Spares, header: FileHeader, groups: Iterable[list[Buffer]], room: int
) -> HeadFile:
    """Make a journal file that begins with `groups`, with room for `room` bytes of groups at least.

    When this returns, the file and its name are durable, and what it voids is void. When it raises, nothing
    has changed that a reader of the journal could see.
    """
    file, capacity_bytes = spares.take(FILE_HEADER_BYTES + room)
    try:
        write_fully(file, [encode_file_header(header)], 0)
        offset = FILE_HEADER_BYTES
        for buffers in groups:
            offset += write_fully(file, buffers, offset)
        file.fdatasync()
    except StorageError:
        # The blocks may be bad: the next attempt must not meet them again.
        file.close()
        disk.unlink(file.path)
        raise
    file.close()
    path = directory / str(JournalName(header.seal.generation, header.base))
    disk.rename(file.path, path)
    disk.fsync_dir(directory)
    return HeadFile(disk.open(path, writable=True), header.seal, header.base, capacity_bytes)
