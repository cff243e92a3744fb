"""How a journal file and its groups lie on disk. No I/O here: buffers in, buffers out.

A journal file is one block of header and then groups, back to back, up to its capacity:

    file header    magic 8s | version u32 | generation u32 | base u64 | start u64 | salt u64 | crc32c u32,
                   padded with zeros to a block
    group          mark u32 | header crc32c u32 | body crc32c u32 | generation u32 | body length u32
                   | entry count u32 | position u64 | durable u64 | body
    body           entry count times (length u32, bytes)

All little-endian. A group at `position` lies at the file offset `FILE_HEADER_BYTES + position - base`. Below
`start` lie copies of groups of earlier generations, at or above it the file's own.

A group's header has a checksum of its own, because a header that can be believed is evidence ("everything
below `durable` was synced before this was written") even if its body was torn.

The *salt* is random and new for each generation. Its low half is the mark that every group begins with, its
high half seeds the header's checksum. Record bytes come from clients, and a client that could write something
that parses as a group header could make a torn tail look like corruption; without the salt it cannot. For the
same reason old bytes in a reused file never parse: salt, generation and position would all have to fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct, error

from fastcrc import crc32

from semel.disk import Buffer
from semel.errors import ConfigError

FILE_MAGIC = b"SEMELJNL"
FORMAT_VERSION = 1
FILE_HEADER_BYTES = 4096
"""One block, so that groups begin on a page of their own and the header is written alone."""

MAX_GROUP_BYTES = 256 * 1024 * 1024
"""The largest group, header included: well above the largest request a listener accepts."""

MAX_GENERATION = 2**31 - 1
"""Generations are the leader epochs that clients see, which are int32."""

INLINE_BYTES = 2048
"""Buffers up to this size are copied next to their neighbours; larger ones go to the disk by reference."""

_FILE_HEADER = Struct("<8sIIQQQI")
_GROUP_HEADER = Struct("<IIIIIIQQ")
_LENGTH = Struct("<I")

GROUP_HEADER_BYTES = _GROUP_HEADER.size
_CRC_FROM = 8  # a group header's checksum covers what follows it
_MASK_32 = 0xFFFFFFFF


class Seal:
    """What the groups of one generation have in common, and no other bytes have."""

    __slots__ = ("crc_seed", "generation", "mark", "mark_bytes", "salt")

    def __init__(self, generation: int, salt: int) -> None:
        self.generation = generation
        self.salt = salt
        # Never zero: untouched blocks of a preallocated file must not look like marks.
        self.mark = (salt & _MASK_32) | 1
        self.mark_bytes = _LENGTH.pack(self.mark)
        self.crc_seed = (salt >> 32) & _MASK_32


@dataclass(slots=True)
class GroupHeader:
    """The fields of a valid group header, named as on disk. Not frozen: one is made for every group."""

    position: int
    durable: int
    body_length: int
    body_crc: int
    entry_count: int

    @property
    def end(self) -> int:
        return self.position + GROUP_HEADER_BYTES + self.body_length


@dataclass(slots=True, frozen=True)
class FileHeader:
    """What the first block of a file says."""

    seal: Seal
    base: int
    start: int


class FileHeaderError(Exception):
    """The first block of a file is not a journal file header; the message says why."""


def encode_file_header(header: FileHeader) -> bytes:
    """The first block of a file."""
    seal = header.seal
    fields = _FILE_HEADER.pack(
        FILE_MAGIC, FORMAT_VERSION, seal.generation, header.base, header.start, seal.salt, 0
    )[:-4]
    return (fields + _LENGTH.pack(crc32.iscsi(fields))).ljust(FILE_HEADER_BYTES, b"\0")


def decode_file_header(block: bytes) -> FileHeader:
    """Read and check the first block of a file."""
    if len(block) < _FILE_HEADER.size:
        raise FileHeaderError(f"it has {len(block)} bytes where a header has {_FILE_HEADER.size}")
    magic, version, generation, base, start, salt, crc = _FILE_HEADER.unpack_from(block)
    if magic != FILE_MAGIC:
        raise FileHeaderError("it does not begin with the journal's magic")
    if crc != crc32.iscsi(block[: _FILE_HEADER.size - 4]):
        raise FileHeaderError("the header's checksum is wrong")
    if version != FORMAT_VERSION:
        raise FileHeaderError(f"it has format {version}, this Semel reads format {FORMAT_VERSION}")
    return FileHeader(Seal(generation, salt), base, start)


def encode_group(
    seal: Seal, position: int, durable: int, entries: Sequence[Sequence[Buffer]]
) -> tuple[list[Buffer], int]:
    """The buffers of a group, in order, and their size. Large buffers of the entries are used as they are.

    Each entry is given as buffers to be joined. They must not change until the group is written.
    """
    first = piece = bytearray(GROUP_HEADER_BYTES)
    buffers: list[Buffer] = [first]
    for entry in entries:
        length = 0
        for buffer in entry:
            length += len(buffer)
        piece += _LENGTH.pack(length)
        for buffer in entry:
            if len(buffer) <= INLINE_BYTES:
                piece += buffer
            else:
                buffers.append(buffer)
                piece = bytearray()
                buffers.append(piece)
    body_crc = crc32.iscsi(memoryview(first)[GROUP_HEADER_BYTES:])
    size = len(first)
    for i in range(1, len(buffers)):
        body_crc = crc32.iscsi(buffers[i], body_crc)
        size += len(buffers[i])
    if size > MAX_GROUP_BYTES:
        raise ConfigError(
            f"one request would write {size} bytes to the journal, where {MAX_GROUP_BYTES} is the most; "
            "send it in smaller parts or lower the largest request size of the listener"
        )
    _put_group_header(first, seal, position, durable, size - GROUP_HEADER_BYTES, body_crc, len(entries))
    return buffers, size


def encode_group_header(seal: Seal, header: GroupHeader) -> bytearray:
    """A group header under `seal`: for a new group, or for a group that is copied to a new generation."""
    encoded = bytearray(GROUP_HEADER_BYTES)
    _put_group_header(
        encoded,
        seal,
        header.position,
        header.durable,
        header.body_length,
        header.body_crc,
        header.entry_count,
    )
    return encoded


def _put_group_header(
    out: bytearray,
    seal: Seal,
    position: int,
    durable: int,
    body_length: int,
    body_crc: int,
    entry_count: int,
) -> None:
    """Write a group header at the beginning of `out`."""
    _GROUP_HEADER.pack_into(
        out, 0, seal.mark, 0, body_crc, seal.generation, body_length, entry_count, position, durable
    )
    _LENGTH.pack_into(out, 4, crc32.iscsi(out[_CRC_FROM:GROUP_HEADER_BYTES], seal.crc_seed))


def decode_group_header(seal: Seal, buffer: Buffer, offset: int, position: int) -> GroupHeader | None:
    """The group header at `offset`, or None if no group of this generation begins there at `position`."""
    end = offset + GROUP_HEADER_BYTES
    if end > len(buffer):
        return None
    mark, crc, body_crc, generation, body_length, entry_count, own_position, durable = (
        _GROUP_HEADER.unpack_from(buffer, offset)
    )
    if mark != seal.mark or own_position != position or generation != seal.generation:
        return None
    if crc != crc32.iscsi(memoryview(buffer)[offset + _CRC_FROM : end], seal.crc_seed):
        return None
    if durable > position or body_length > MAX_GROUP_BYTES:
        return None
    return GroupHeader(position, durable, body_length, body_crc, entry_count)


def body_is_whole(header: GroupHeader, body: memoryview) -> bool:
    """Whether these are the bytes that the header was made for."""
    return len(body) == header.body_length and crc32.iscsi(body) == header.body_crc


def decode_entries(header: GroupHeader, body: memoryview) -> list[memoryview] | None:
    """The entries of a whole body, as views of it, or None if they do not fill it exactly."""
    entries: list[memoryview] = []
    offset = 0
    try:
        for _ in range(header.entry_count):
            start = offset + 4
            offset = start + _LENGTH.unpack_from(body, offset)[0]
            entries.append(body[start:offset])
    except error:
        return None
    return entries if offset == len(body) else None
