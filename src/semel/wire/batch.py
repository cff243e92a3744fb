"""The record batch of Kafka's message format v2, seen from outside: header, checks, place in the log.

A batch is a header of 61 bytes and a body of records, perhaps compressed. The broker never opens the body: it
checks the header and the checksum, gives the batch its offsets, and stores the bytes as they came. The base
offset, the length and the leader epoch lie before the checksum and are not covered by it, so that placing a
batch is two small writes. What is inside the body is the business of `semel.wire.records`.

    base offset i64 | length i32 | leader epoch i32 | magic i8 | crc32c u32 | attributes i16
    last offset delta i32 | base timestamp i64 | max timestamp i64
    producer id i64 | producer epoch i16 | base sequence i32 | record count i32
"""

from collections.abc import Iterator
from struct import Struct
from typing import Final, TypeAlias

from fastcrc import crc32

from semel.errors import ProtocolError
from semel.wire.errors import ErrorCode

Buffer: TypeAlias = bytes | bytearray | memoryview
WritableBuffer: TypeAlias = bytearray | memoryview


MAGIC: Final = 2
HEADER_BYTES: Final = 61
# The length field counts what follows it: the base offset and the length itself are these bytes more.
PREFIX_BYTES: Final = 12
# Length, attributes, both deltas, key length, value length and header count take a byte each at least.
MIN_RECORD_BYTES: Final = 7
# What a reader will decompress one batch to, at most, unless it asks for another limit.
MAX_UNCOMPRESSED_BYTES: Final = 256 * 1024 * 1024
MAX_RECORDS: Final = MAX_UNCOMPRESSED_BYTES // MIN_RECORD_BYTES

NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
NO_TIMESTAMP: Final = -1
MAX_SEQUENCE: Final = 0x7FFFFFFF

CODEC_MASK: Final = 0x07
APPEND_TIME_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
# Set by compaction only: the base timestamp is then the time at which tombstones may go (KIP-534).
DELETE_HORIZON_BIT: Final = 0x40
MAX_CODEC: Final = 4
# What a producer may set; the other bits are the broker's or nobody's.
PRODUCER_ATTRIBUTES: Final = CODEC_MASK | TRANSACTIONAL_BIT

HEADER: Final = Struct(">qiibIhiqqqhii")
LENGTH: Final = Struct(">i")
EPOCH: Final = Struct(">i")
BASE_OFFSET: Final = Struct(">q")
CRC: Final = Struct(">I")
ATTRIBUTES: Final = Struct(">h")
TIMESTAMP: Final = Struct(">q")

LENGTH_AT: Final = 8
EPOCH_AT: Final = 12
MAGIC_AT: Final = 16
CRC_AT: Final = 17
ATTRIBUTES_AT: Final = 21
MAX_TIMESTAMP_AT: Final = 35
BASE_SEQUENCE_AT: Final = 53


class InvalidBatch(ProtocolError):  # noqa: N818 - a batch that is invalid, as Kafka's own names say it
    """A record batch that cannot be accepted or read; `code` is the protocol's error code to answer with."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class BatchHeader:
    """The fields of one batch. `size` is the whole batch in bytes, base offset and length included."""

    __slots__ = (
        "attributes",
        "base_offset",
        "base_sequence",
        "base_timestamp",
        "crc",
        "last_offset_delta",
        "leader_epoch",
        "max_timestamp",
        "producer_epoch",
        "producer_id",
        "record_count",
        "size",
    )

    def __init__(
        self,
        base_offset: int,
        size: int,
        leader_epoch: int,
        crc: int,
        attributes: int,
        last_offset_delta: int,
        base_timestamp: int,
        max_timestamp: int,
        producer_id: int,
        producer_epoch: int,
        base_sequence: int,
        record_count: int,
    ) -> None:
        self.base_offset = base_offset
        self.size = size
        self.leader_epoch = leader_epoch
        self.crc = crc
        self.attributes = attributes
        self.last_offset_delta = last_offset_delta
        self.base_timestamp = base_timestamp
        self.max_timestamp = max_timestamp
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.base_sequence = base_sequence
        self.record_count = record_count

    def __repr__(self) -> str:
        return (
            f"BatchHeader(base_offset={self.base_offset}, size={self.size}, "
            f"leader_epoch={self.leader_epoch}, crc={self.crc:#010x}, "
            f"attributes={self.attributes:#x}, last_offset_delta={self.last_offset_delta}, "
            f"base_timestamp={self.base_timestamp}, max_timestamp={self.max_timestamp}, "
            f"producer_id={self.producer_id}, producer_epoch={self.producer_epoch}, "
            f"base_sequence={self.base_sequence}, record_count={self.record_count})"
        )

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def is_transactional(self) -> bool:
        return self.attributes & TRANSACTIONAL_BIT != 0

    @property
    def is_control(self) -> bool:
        return self.attributes & CONTROL_BIT != 0

    @property
    def has_append_time(self) -> bool:
        """Whether every record has the time of its append, which is then `max_timestamp`."""
        return self.attributes & APPEND_TIME_BIT != 0

    @property
    def delete_horizon_ms(self) -> int | None:
        """When tombstones and markers in here may go; None until compaction has seen the batch (KIP-534)."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON_BIT else None

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def last_sequence(self) -> int:
        """The sequence of the last record; 0 follows 2^31 - 1."""
        if self.base_sequence < 0:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & MAX_SEQUENCE


def read_header(buf: Buffer, pos: int = 0) -> BatchHeader:
    """The header at `pos`. Magic and least length are checked, so `size` is safe to step by; no more is."""
    if len(buf) - pos < HEADER_BYTES:
        raise _short(buf, pos)
    (
        base_offset,
        length,
        leader_epoch,
        magic,
        crc,
        attributes,
        last_offset_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        record_count,
    ) = HEADER.unpack_from(buf, pos)
    if magic != MAGIC:
        raise _wrong_magic(magic)
    size = length + PREFIX_BYTES
    if size < HEADER_BYTES:
        raise InvalidBatch(ErrorCode.CORRUPT_MESSAGE, f"batch length {length} is less than a header")
    return BatchHeader(
        base_offset,
        size,
        leader_epoch,
        crc,
        attributes,
        last_offset_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        record_count,
    )


def check_batch(buf: Buffer) -> BatchHeader:
    """The header of the one batch that `buf` holds, if it is whole, undamaged and what a producer may send.

    For what a client produced. A stored batch may be a marker, or have been compacted: for that, `check_crc`.
    """
    header = read_header(buf)
    if header.size != len(buf):
        raise _wrong_size(header, len(buf))
    check_crc(buf, header)
    attributes = header.attributes
    if attributes & ~PRODUCER_ATTRIBUTES:
        raise _wrong_attributes(header)
    if attributes & CODEC_MASK > MAX_CODEC:
        raise InvalidBatch(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"compression type {header.codec} is unknown; use 0 to 4"
        )
    _check_count(header)
    if header.producer_id >= 0:
        if header.producer_epoch < 0 or header.base_sequence < 0:
            raise InvalidBatch(
                ErrorCode.INVALID_RECORD,
                f"producer {header.producer_id} sent epoch {header.producer_epoch} and base sequence "
                f"{header.base_sequence}; with a producer id neither may be negative",
            )
    elif header.producer_id != NO_PRODUCER_ID or attributes & TRANSACTIONAL_BIT:
        # Without a producer id the epoch and sequence mean nothing; some clients leave zeros there.
        raise InvalidBatch(
            ErrorCode.INVALID_RECORD,
            f"producer id {header.producer_id} is not a producer's; "
            "idempotent and transactional batches need one from InitProducerId, others -1",
        )
    return header


def check_crc(buf: Buffer, header: BatchHeader) -> None:
    """Raises unless the checksum of the one batch that `buf` holds is right."""
    actual = crc32.iscsi(memoryview(buf)[ATTRIBUTES_AT : header.size])
    if actual != header.crc:
        raise InvalidBatch(
            ErrorCode.CORRUPT_MESSAGE,
            f"batch checksum is {actual:#010x} where its header says {header.crc:#010x}; it was damaged",
        )


def place_batch(buf: WritableBuffer, base_offset: int, leader_epoch: int) -> None:
    """Gives the batch its place in the log. The checksum does not cover these fields and stays."""
    BASE_OFFSET.pack_into(buf, 0, base_offset)
    EPOCH.pack_into(buf, EPOCH_AT, leader_epoch)


def stamp_append_time(buf: WritableBuffer, now_ms: int) -> None:
    """Makes `now_ms` the timestamp of every record of the one batch that `buf` holds."""
    (attributes,) = ATTRIBUTES.unpack_from(buf, ATTRIBUTES_AT)
    ATTRIBUTES.pack_into(buf, ATTRIBUTES_AT, attributes | APPEND_TIME_BIT)
    TIMESTAMP.pack_into(buf, MAX_TIMESTAMP_AT, now_ms)
    write_crc(buf)


def write_crc(buf: WritableBuffer) -> None:
    """Computes and sets the checksum of the one batch that fills `buf`."""
    CRC.pack_into(buf, CRC_AT, crc32.iscsi(memoryview(buf)[ATTRIBUTES_AT:]))


def iter_batches(buf: Buffer) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Each whole batch in turn. Fetch may cut the last one anywhere: what is not whole is left out."""
    view = memoryview(buf)
    end = len(view)
    pos = 0
    while end - pos > MAGIC_AT:
        if view[pos + MAGIC_AT] != MAGIC:
            raise _wrong_magic(view[pos + MAGIC_AT])
        (length,) = LENGTH.unpack_from(view, pos + LENGTH_AT)
        if pos + length + PREFIX_BYTES > end:
            return
        header = read_header(view, pos)
        yield header, view[pos : pos + header.size]
        pos += header.size


def _check_count(header: BatchHeader) -> None:
    count = header.record_count
    if count < 1 or header.last_offset_delta != count - 1:
        raise InvalidBatch(
            ErrorCode.INVALID_RECORD,
            f"batch has {count} records and a last offset delta of {header.last_offset_delta}; "
            "a producer sends at least one record, at deltas 0 to count - 1",
        )
    # A count that no body can hold would make the log jump, and readers allocate for it.
    room = MAX_UNCOMPRESSED_BYTES if header.codec else header.size - HEADER_BYTES
    if count * MIN_RECORD_BYTES > room:
        raise InvalidBatch(
            ErrorCode.INVALID_RECORD, f"{count} records are claimed, more than can be in there"
        )


def _short(buf: Buffer, pos: int) -> InvalidBatch:
    left = len(buf) - pos
    if left > MAGIC_AT and buf[pos + MAGIC_AT] != MAGIC:
        return _wrong_magic(buf[pos + MAGIC_AT])
    return InvalidBatch(ErrorCode.CORRUPT_MESSAGE, f"a header takes {HEADER_BYTES} bytes and {left} are left")


def _wrong_magic(magic: int) -> InvalidBatch:
    if magic in (0, 1):
        return InvalidBatch(
            ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
            f"message format {magic} is too old; use a client that speaks format 2 (Kafka 0.11 or later)",
        )
    return InvalidBatch(ErrorCode.CORRUPT_MESSAGE, f"magic {magic} is not known, only {MAGIC}; it is damaged")


def _wrong_size(header: BatchHeader, given: int) -> InvalidBatch:
    if header.size > given:
        return InvalidBatch(ErrorCode.CORRUPT_MESSAGE, f"a batch of {header.size} bytes came with {given}")
    return InvalidBatch(
        ErrorCode.INVALID_RECORD,
        f"{given - header.size} bytes follow the batch; a partition takes exactly one batch a request",
    )


def _wrong_attributes(header: BatchHeader) -> InvalidBatch:
    if header.is_control:
        return InvalidBatch(ErrorCode.INVALID_RECORD, "only the broker writes control batches")
    if header.has_append_time:
        return InvalidBatch(ErrorCode.INVALID_TIMESTAMP, "only the broker sets append time; send create time")
    return InvalidBatch(
        ErrorCode.INVALID_RECORD, f"attributes {header.attributes:#x} have bits that no producer may set"
    )
