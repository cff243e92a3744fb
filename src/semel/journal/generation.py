"""Beginning a generation: how a journal goes on after a start or after a failed write.

The new generation's first file does three things at once, by one rename:

- It proves that the generation, which is the leader epoch that clients see, was given: never again.
- It makes void whatever the older files hold beyond the end that was found.
- It holds copies of the groups that may be in the page cache only, and of those that share a block with bytes
  whose write may have failed. Copies, since an fsync of the old file proves nothing after one that failed.

Before the rename nothing has changed; after it (and the fsync of the directory) everything that the chain
showed is durable. A crash in between leaves a spare with something in it, which nobody reads.
"""

from collections.abc import Iterator
from pathlib import Path

from semel.disk import Buffer, Disk
from semel.errors import StorageError
from semel.journal.chain import Chain
from semel.journal.files import HeadFile, OldFile, Spares, create_journal_file
from semel.journal.format import (
    FILE_HEADER_BYTES,
    MAX_GENERATION,
    FileHeader,
    GroupHeader,
    Seal,
    encode_group_header,
)
from semel.journal.settings import JournalSettings


class Generation:
    """A generation that has begun: what a `JournalWriter` goes on from."""

    __slots__ = ("chain", "head", "number", "older", "spares")

    def __init__(self, head: HeadFile, chain: Chain, older: list[OldFile], spares: Spares) -> None:
        self.number = head.seal.generation
        self.head = head
        self.chain = chain
        """What there is to read, up to where the generation's own groups begin. All of it is durable."""
        self.older = older
        """The files before the head that still count, oldest first."""
        self.spares = spares


def begin_generation(
    disk: Disk, directory: Path, chain: Chain, settings: JournalSettings, *, salt: int, above: int = 0
) -> Generation:
    """Continue a journal at the end of `chain`, in the next generation.

    `salt` is 64 random bits. `above` is a generation known from elsewhere (a snapshot), to be exceeded too.
    From here on the journal is read through the chain of the result: the files of the old one have changed.
    """
    number = max(chain.generation, above) + 1
    if number > MAX_GENERATION:
        raise StorageError(
            f"the journal in {directory} has used up its {MAX_GENERATION} generations; "
            "copy its topics to a new broker"
        )
    seal = Seal(number, salt)
    base = chain.copy_from
    spares = Spares(disk, directory, settings.file_bytes)
    header = FileHeader(seal, base, chain.end)
    head = create_journal_file(disk, directory, spares, header, _copies(chain, seal), chain.end - base)
    older = _retire(disk, chain, base)
    return Generation(head, Chain.open(disk, directory, limit=chain.end, synced=chain.end), older, spares)


def _copies(chain: Chain, seal: Seal) -> Iterator[list[Buffer]]:
    for group, body in chain.bodies(chain.copy_from):
        # The file is seen only once all of it is durable, so each copy may claim all that precedes it.
        copy = GroupHeader(
            group.position, group.position, group.body_length, group.body_crc, group.entry_count
        )
        yield [encode_group_header(seal, copy), body]


def _retire(disk: Disk, chain: Chain, base: int) -> list[OldFile]:
    """Give back the room of what the new file made void, and say which older files still count."""
    older: list[OldFile] = []
    for file in chain.files:
        if file.base >= base:
            disk.unlink(file.path)
            continue
        end = base if file.end is None else min(file.end, base)
        older.append(OldFile(file.path, end))
        if end == base:
            # Otherwise a broker that restarts often would fill the disk with files that are almost empty.
            _shorten(disk, file.path, FILE_HEADER_BYTES + end - file.base)
    for path in chain.void_paths:
        disk.unlink(path)
    return older


def _shorten(disk: Disk, path: Path, size: int) -> None:
    file = disk.open(path, writable=True)
    try:
        if file.size() > size:
            file.truncate(size)
    finally:
        file.close()
