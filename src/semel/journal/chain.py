"""Reading a journal: which bytes count, where they end, and whether damage is a torn tail or corruption.

The files of a directory, in the order in which they were made, form a chain: each one counts from its base up
to the least base of those made after it (`semel.journal.files` has the rule). Groups are read in order. Every
file but the last must be whole up to where the next begins, since that one was made after it was synced.

In the last file the groups end somewhere. Let P be the first position where there is no valid group. If there
is evidence that bytes beyond P were durable, P is *corrupt*, and opening the chain is refused. Evidence is a
later group header whose `durable` is beyond P, a file header whose `start` is, or what the caller knows
(`synced`). Without it, P is where an unfinished write was *torn*: what lies behind was never acknowledged.

What was read is not yet durable. After a kill, or after a failed fsync, the page cache shows bytes that may
not be on the disk, and a later fsync of the same file may say nothing. So the chain also says from where on
it must be copied (`copy_from`) before anything is built on it: `semel.journal.generation` does that.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from semel.disk import Disk, File
from semel.errors import CorruptionError
from semel.journal.files import JournalName, journal_names
from semel.journal.format import (
    FILE_HEADER_BYTES,
    GROUP_HEADER_BYTES,
    FileHeader,
    FileHeaderError,
    GroupHeader,
    body_is_whole,
    decode_entries,
    decode_file_header,
    decode_group_header,
)

CHUNK_BYTES = 1024 * 1024
"""How much is read at once; a group that is larger is read alone."""

BLOCK_BYTES = 4096
"""A failed write may spoil the whole block it touched, and with it the end of what was durable before."""


@dataclass(slots=True)
class Group:
    """A whole group. Its entries are views of what was read."""

    position: int
    end: int
    entries: list[memoryview]


@dataclass(slots=True, frozen=True)
class ChainFile:
    """A file of the chain, and the range of positions for which it counts. The last one has no end."""

    path: Path
    header: FileHeader
    end: int | None

    @property
    def base(self) -> int:
        return self.header.base


@dataclass(slots=True, frozen=True)
class Torn:
    """An unfinished write that was cut: where, and how many later groups of it were seen."""

    path: Path
    position: int
    later_groups: int


@dataclass(slots=True, frozen=True)
class Tail:
    """What the last file of a chain holds."""

    end: int
    claimed: int
    """Everything below was durable, by the evidence found; beyond `end` means corruption at `end`."""
    copy_from: int
    torn: Torn | None
    groups: int


def counting_ranges(names: list[JournalName]) -> list[tuple[JournalName, int | None]]:
    """The files, in the order in which they were made, and where what counts of each ends.

    The last has no end. One that ends at or below its base is void.
    """
    ranges: list[tuple[JournalName, int | None]] = []
    end: int | None = None
    for name in reversed(names):
        ranges.append((name, end))
        end = name.base if end is None else min(end, name.base)
    ranges.reverse()
    return ranges


def read_file_header(disk: Disk, path: Path, name: JournalName) -> FileHeader:
    """The header of a file, which must say the same as its name."""
    file = disk.open(path)
    try:
        header = decode_file_header(file.pread(FILE_HEADER_BYTES, 0))
        if header.seal.generation != name.generation or header.base != name.base:
            raise FileHeaderError("its header and its name disagree on generation and base")
    except FileHeaderError as error:
        raise CorruptionError(
            f"journal file {path} is damaged at position {name.base}: {error}; restore it from a backup, or "
            "give up what it holds with `semel journal repair --accept-loss`"
        ) from error
    finally:
        file.close()
    return header


def read_bodies(
    file: File, header: FileHeader, position: int, stop: int | None
) -> Iterator[tuple[GroupHeader, memoryview]]:
    """The valid groups of a file from `position` on, until `stop` or the first that is not valid."""
    seal = header.seal
    shift = FILE_HEADER_BYTES - header.base
    chunk = b""
    chunk_position = position
    while stop is None or position < stop:
        offset = position - chunk_position
        if offset + GROUP_HEADER_BYTES > len(chunk):
            chunk = file.pread(CHUNK_BYTES, position + shift)
            chunk_position = position
            offset = 0
        group = decode_group_header(seal, chunk, offset, position)
        if group is None:
            return
        if group.end - chunk_position > len(chunk):
            chunk = file.pread(max(CHUNK_BYTES, group.end - position), position + shift)
            chunk_position = position
            offset = 0
        body = memoryview(chunk)[offset + GROUP_HEADER_BYTES : group.end - chunk_position]
        if not body_is_whole(group, body):
            return
        yield group, body
        position = group.end


def scan_tail(file: File, header: FileHeader, *, limit: int | None, synced: int) -> Tail:
    """Read the last file of a chain to its end, or to `limit`, and weigh the evidence on how it ends."""
    end = header.base
    claimed = max(header.start, synced)
    groups = 0
    # The groups from the block of `claimed` on, as start positions.
    uncertain: deque[int] = deque()
    for group, _ in read_bodies(file, header, end, limit):
        groups += 1
        claimed = max(claimed, group.durable)
        uncertain.append(group.position)
        block = claimed - (claimed - header.base) % BLOCK_BYTES
        while len(uncertain) > 1 and uncertain[1] <= block:
            uncertain.popleft()
        end = group.end
    torn: Torn | None = None
    if limit is None or end < limit:
        seen, claim = _search_headers(file, header, end)
        claimed = max(claimed, claim)
        if seen:
            torn = Torn(file.path, end, seen)
    return Tail(end, claimed, uncertain[0] if uncertain else end, torn, groups)


def _search_headers(file: File, header: FileHeader, position: int) -> tuple[int, int]:
    """How many group headers lie at or behind a position, and the furthest durability that one claims."""
    seal = header.seal
    shift = FILE_HEADER_BYTES - header.base
    seen = 0
    claim = 0
    while True:
        chunk = file.pread(CHUNK_BYTES, position + shift)
        found = chunk.find(seal.mark_bytes)
        while found >= 0:
            group = decode_group_header(seal, chunk, found, position + found)
            if group is not None:
                seen += 1
                claim = max(claim, group.durable)
            found = chunk.find(seal.mark_bytes, found + 1)
        if len(chunk) < CHUNK_BYTES:
            return seen, claim
        # A header that straddles two chunks is seen whole in the second.
        position += CHUNK_BYTES - GROUP_HEADER_BYTES + 1


class Chain:
    """The part of a journal directory that counts. It is read-only and holds no files open."""

    __slots__ = (
        "_disk",
        "claimed",
        "copy_from",
        "directory",
        "end",
        "files",
        "generation",
        "start",
        "torn",
        "void_paths",
    )

    def __init__(
        self, disk: Disk, directory: Path, files: list[ChainFile], void_paths: list[Path], generation: int
    ) -> None:
        self._disk = disk
        self.directory = directory
        self.files = files
        self.void_paths = void_paths
        """Files of which nothing counts any more."""
        self.generation = generation
        """The highest that was ever given; 0 for an empty directory."""
        self.start = files[0].base if files else 0
        """The first position that can be read."""
        self.end = 0
        """The end of the last whole group."""
        self.claimed = 0
        """Everything below this was durable, by what the files say."""
        self.copy_from = 0
        """Groups from here on must be copied before anything is built on them."""
        self.torn: Torn | None = None
        """The unfinished write that was cut, if there was one."""

    @classmethod
    def open(cls, disk: Disk, directory: Path, *, limit: int | None = None, synced: int = 0) -> "Chain":
        """Find the files that count and where they end.

        After a failed write in this process, `limit` is the position beyond which nothing may be believed and
        `synced` the one below which everything is known to be durable. At a start neither is known.
        """
        chain = cls.of_files(disk, directory)
        if not chain.files:
            return chain
        last = chain.files[-1]
        file = disk.open(last.path)
        try:
            tail = scan_tail(file, last.header, limit=limit, synced=synced)
        finally:
            file.close()
        if tail.claimed > tail.end:
            raise damage(
                last,
                tail.end,
                f"everything below position {tail.claimed} was durable, but no valid group is here",
            )
        if limit is not None and tail.end > limit:
            raise damage(last, limit, "the last durable position is not the end of a group")
        chain.end = tail.end
        chain.claimed = tail.claimed
        chain.copy_from = tail.copy_from
        chain.torn = tail.torn
        return chain

    @classmethod
    def of_files(cls, disk: Disk, directory: Path) -> "Chain":
        """Find the files that count, without reading their groups: `end` and what follows from it stay 0."""
        names = journal_names(disk, directory)
        files: list[ChainFile] = []
        void_paths: list[Path] = []
        for name, end in counting_ranges(names):
            path = directory / str(name)
            if end is not None and name.base >= end:
                void_paths.append(path)
            else:
                files.append(ChainFile(path, read_file_header(disk, path, name), end))
        generation = max((name.generation for name in names), default=0)
        return cls(disk, directory, files, void_paths, generation)

    def groups(self, from_position: int) -> Iterator[Group]:
        """The groups from a position, which must be the beginning of one, to the end."""
        for group, body in self.bodies(from_position):
            entries = decode_entries(group, body)
            if entries is None:
                raise CorruptionError(
                    f"the group at journal position {group.position} has a valid checksum, but its entries "
                    "do not fill it; this is a bug in the Semel that wrote it, please report it"
                )
            yield Group(group.position, group.end, entries)

    def bodies(self, from_position: int) -> Iterator[tuple[GroupHeader, memoryview]]:
        """The groups from a position to the end, with their bodies not taken apart."""
        if not self.start <= from_position <= self.end:
            raise CorruptionError(
                f"the journal in {self.directory} holds positions {self.start} to {self.end}, but reading "
                f"must begin at {from_position}; files are missing: restore them from a backup"
            )
        for chain_file in self.files:
            end = self.end if chain_file.end is None else chain_file.end
            if from_position >= end:
                continue
            file = self._disk.open(chain_file.path)
            try:
                position = max(from_position, chain_file.base)
                for group, body in read_bodies(file, chain_file.header, position, end):
                    position = group.end
                    yield group, body
            finally:
                file.close()
            if position != end:
                raise damage(chain_file, position, f"no valid group, though the file counts up to {end}")

    def was_cut_below(self, position: int, generation: int) -> bool:
        """Whether a position that was reached in an older generation was made void by a later one."""
        return any(
            file.header.start < position for file in self.files if file.header.seal.generation > generation
        )


def damage(file: ChainFile, position: int, reason: str) -> CorruptionError:
    """The error that says where a journal is corrupt, and what can be done."""
    return CorruptionError(
        f"journal file {file.path} is damaged at position {position} (byte "
        f"{FILE_HEADER_BYTES + position - file.base} of the file): {reason}; see `semel journal check`, "
        "restore the file from a backup, or give up what lies behind: `semel journal repair --accept-loss`"
    )
