"""What is inside a record batch: reading and writing records, markers, and what compaction rewrites.

Reading trusts nothing. Lengths, counts and deltas are checked against the bytes there are before anything is
allocated for them, and every way in which a body can be wrong raises `InvalidBatch`. The checksum is not
checked here: `semel.wire.batch.check_crc` does that, once, where the bytes came in.

A record, all numbers zigzag varints but the attributes:

    length | attributes i8 | timestamp delta | offset delta | key length | key | value length | value
    header count | (key length | key | value length | value) ...

Deltas are from the base of the batch and a length of -1 is null. Offset deltas grow, with gaps where
compaction took records out.

Control batches hold one record that no consumer sees. The key of an end marker is (version 0, type: 0 abort,
1 commit) and its value (version 0, epoch of the transaction coordinator).
"""

from collections.abc import Sequence
from struct import Struct
from typing import Final, Generic, TypeAlias, TypeVar

from semel.wire.batch import (
    APPEND_TIME_BIT,
    CODEC_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_UNCOMPRESSED_BYTES,
    MIN_RECORD_BYTES,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    PREFIX_BYTES,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    InvalidBatch,
    read_header,
    write_crc,
)
from semel.wire.compression import Codec, compress, decompress
from semel.wire.errors import ErrorCode

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]

NO_OFFSET: Final = -1
NO_LEADER_EPOCH: Final = -1
MIN_INT64: Final = -(2**63)
MAX_INT64: Final = 2**63 - 1
VARINT_MAX_BYTES: Final = 5
VARLONG_MAX_BYTES: Final = 10
# A header's key length, and a null value's, take a byte each at least.
MIN_HEADER_BYTES: Final = 2
# Most deltas and lengths are small: their encodings are looked up.
SMALL_VARINTS: Final = 8 * 1024
MAX_SMALL: Final = SMALL_VARINTS - 1

NO_ATTRIBUTES: Final = b"\x00"
NO_HEADERS: Final = b"\x00"
NULL: Final = b"\x01"
NULL_LENGTH: Final = NULL[0]
NO_HEADER_COUNT: Final = NO_HEADERS[0]
# Header keys are text in every API and bytes on the wire: what is not UTF-8 must still survive compaction.
HEADER_KEY_ERRORS: Final = "surrogateescape"

ABORT: Final = 0
COMMIT: Final = 1
MARKER_KEY: Final = Struct(">hh")
MARKER_VALUE: Final = Struct(">hi")
# A whole marker batch: its header, and its one record with the lengths filled in.
MARKER: Final = Struct(HEADER.format + "BBBBBhhBhiB")
MARKER_RECORD_LENGTH: Final = 16 << 1
MARKER_KEY_LENGTH: Final = MARKER_KEY.size << 1
MARKER_VALUE_LENGTH: Final = MARKER_VALUE.size << 1


class Record:
    """One record. `offset` is the broker's to give: what is to be produced has none yet."""

    __slots__ = ("headers", "key", "offset", "timestamp", "value")

    def __init__(
        self,
        key: bytes | None,
        value: bytes | None,
        timestamp: int = NO_TIMESTAMP,
        headers: Headers = (),
        offset: int = NO_OFFSET,
    ) -> None:
        self.key = key
        self.value = value
        self.timestamp = timestamp
        self.headers = headers
        self.offset = offset

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return (
            self.offset == other.offset
            and self.timestamp == other.timestamp
            and self.key == other.key
            and self.value == other.value
            and list(self.headers) == list(other.headers)
        )

    def __hash__(self) -> int:
        return hash((self.offset, self.timestamp, self.key, self.value))

    def __repr__(self) -> str:
        return (
            f"Record(key={self.key!r}, value={self.value!r}, timestamp={self.timestamp}, "
            f"headers={self.headers!r}, offset={self.offset})"
        )


R = TypeVar("R", bound=Record)


class RecordSlice:
    """One record as compaction sees it: what decides whether it stays, and its bytes if it does.

    `timestamp` is the producer's, also where append time hides it. `rest` is everything from the offset delta
    on, and is valid as it is for as long as the base offset stays.
    """

    __slots__ = ("is_tombstone", "key", "offset", "rest", "timestamp")

    def __init__(
        self, offset: int, timestamp: int, key: bytes | None, is_tombstone: bool, rest: memoryview
    ) -> None:
        self.offset = offset
        self.timestamp = timestamp
        self.key = key
        self.is_tombstone = is_tombstone
        self.rest = rest


class EndMarker:
    """The end of one transaction in one partition."""

    __slots__ = ("commit", "coordinator_epoch", "producer_epoch", "producer_id")

    def __init__(self, commit: bool, producer_id: int, producer_epoch: int, coordinator_epoch: int) -> None:
        self.commit = commit
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.coordinator_epoch = coordinator_epoch


def encode_varint(value: int) -> bytes:
    """The zigzag varint of `value`; 32 and 64 bits have the same bytes where the value fits in both."""
    if -1 <= value < MAX_SMALL:
        return _SMALL[value + 1]
    return _encode_varint(value)


def _encode_varint(value: int) -> bytes:
    rest = value << 1 if value >= 0 else (-value << 1) - 1
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


_SMALL: Final = tuple(_encode_varint(value) for value in range(-1, MAX_SMALL))


def read_varint(buf: Buffer, pos: int) -> tuple[int, int]:
    """The 32 bit zigzag varint at `pos` and the position after it. IndexError if the buffer ends within."""
    byte = buf[pos]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), pos + 1
    second = buf[pos + 1]
    if second < 0x80:
        return ((byte & 0x7F) >> 1 | second << 6) ^ -(byte & 1), pos + 2
    return _read_long(buf, pos, VARINT_MAX_BYTES, 32)


def read_varlong(buf: Buffer, pos: int) -> tuple[int, int]:
    """The 64 bit zigzag varint at `pos` and the position after it. IndexError if the buffer ends within."""
    byte = buf[pos]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), pos + 1
    second = buf[pos + 1]
    if second < 0x80:
        return ((byte & 0x7F) >> 1 | second << 6) ^ -(byte & 1), pos + 2
    return _read_long(buf, pos, VARLONG_MAX_BYTES, 64)


def _read_long(buf: Buffer, pos: int, max_bytes: int, bits: int) -> tuple[int, int]:
    raw = 0
    for i in range(max_bytes):
        byte = buf[pos + i]
        raw |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if raw >> bits:
                break
            return (raw >> 1) ^ -(raw & 1), pos + i + 1
    raise malformed(f"a number at byte {pos} does not fit in {bits} bits")


def malformed(why: str) -> InvalidBatch:
    """The refusal of a body that is not what its header says."""
    return InvalidBatch(ErrorCode.INVALID_RECORD, f"the batch cannot be read: {why}")


class RecordCursor:
    """Steps through the records of a body. After `advance`, `pos` is at the key length of the next one."""

    __slots__ = (
        "base_timestamp",
        "body",
        "end",
        "last_offset_delta",
        "offset_delta",
        "pos",
        "rest_at",
        "timestamp",
    )

    def __init__(self, header: BatchHeader, body: bytes) -> None:
        self.body = body
        self.base_timestamp = header.base_timestamp
        self.last_offset_delta = header.last_offset_delta
        self.offset_delta = -1
        self.timestamp = NO_TIMESTAMP
        self.rest_at = 0
        self.pos = 0
        self.end = 0

    def advance(self) -> None:
        """From the end of one record to the key of the next; the deltas are read and checked."""
        body = self.body
        length, start = read_varint(body, self.end)
        end = start + length
        if length < 0 or end > len(body):
            raise malformed(f"a record of {length} bytes at byte {start} does not fit in {len(body)}")
        timestamp_delta, rest_at = read_varlong(body, start + 1)
        offset_delta, self.pos = read_varint(body, rest_at)
        if not self.offset_delta < offset_delta <= self.last_offset_delta:
            raise malformed(
                f"offset delta {offset_delta} follows {self.offset_delta}; "
                f"they must grow, up to {self.last_offset_delta}"
            )
        timestamp = self.base_timestamp + timestamp_delta
        if not MIN_INT64 <= timestamp <= MAX_INT64:
            raise malformed(f"timestamp delta {timestamp_delta} from {self.base_timestamp} overflows")
        self.offset_delta = offset_delta
        self.timestamp = timestamp
        self.rest_at = rest_at
        self.end = end

    def read_bytes(self) -> bytes | None:
        length, start = read_varint(self.body, self.pos)
        if length < 0:
            if length != -1:
                raise malformed(f"a length of {length} at byte {self.pos}")
            self.pos = start
            return None
        self.pos = start + length
        if self.pos > self.end:
            raise malformed(f"a field of {length} bytes at byte {start} reaches past its record")
        return self.body[start : self.pos]

    def read_headers(self) -> Headers:
        count, self.pos = read_varint(self.body, self.pos)
        if count == 0:
            return ()
        if not 0 < count * MIN_HEADER_BYTES <= self.end - self.pos:
            raise malformed(f"{count} headers do not fit in the record at byte {self.pos}")
        headers: list[tuple[str, bytes | None]] = []
        for _ in range(count):
            key = self.read_bytes()
            if key is None:
                raise malformed(f"a header at byte {self.pos} has no key")
            headers.append((key.decode("utf-8", HEADER_KEY_ERRORS), self.read_bytes()))
        return headers

    def finish_record(self) -> None:
        if self.pos != self.end:
            raise malformed(f"a record ends at byte {self.pos} where its length says {self.end}")

    def finish(self) -> None:
        if self.end != len(self.body):
            raise malformed(f"{len(self.body) - self.end} bytes follow the last record")


def read_body(batch: Buffer, header: BatchHeader, limit_bytes: int = MAX_UNCOMPRESSED_BYTES) -> bytes:
    """The records of `batch`, decompressed, if they are within the limit and can be as many as claimed."""
    return bytes(unpack_body(batch, header, limit_bytes))


def unpack_body(batch: Buffer, header: BatchHeader, limit_bytes: int = MAX_UNCOMPRESSED_BYTES) -> Buffer:
    """The same, and where nothing is compressed a part of `batch` itself."""
    if header.size > len(batch):
        raise malformed(f"it has {len(batch)} of its {header.size} bytes")
    packed = memoryview(batch)[HEADER_BYTES : header.size]
    body = decompress(header.codec, packed, limit_bytes)
    if not 0 <= header.record_count * MIN_RECORD_BYTES <= len(body):
        raise malformed(f"{len(body)} bytes cannot be {header.record_count} records")
    return body


class RecordReader(Generic[R]):
    """Reads the one batch that `batch` begins with, a few records at a time.

    What is not needed yet stays bytes: a record is an object that the garbage collector looks at again and
    again. It does what `RecordCursor` does, in one loop, since every record that a client reads passes here:
    small numbers, as nearly all of them are, take no call. Whoever has more to say about each record gives a
    class of its own, made like `Record`, instead of holding two objects for each.
    """

    __slots__ = ("_body", "_header", "_offset_delta", "_pos", "_record_type", "left")

    def __init__(
        self, batch: Buffer, record_type: type[R], limit_bytes: int = MAX_UNCOMPRESSED_BYTES
    ) -> None:
        header = read_header(batch)
        self._header = header
        self._record_type = record_type
        self._body = read_body(batch, header, limit_bytes)
        self.left = header.record_count  # to be read
        self._offset_delta = -1
        self._pos = 0

    def read(self, limit: int) -> list[R]:
        """The next records, at most so many; none when all were read. Raises `InvalidBatch`."""
        count = min(limit, self.left)
        try:
            records = self._read(count)
        except IndexError as error:
            raise malformed("a record reaches past its end") from error
        if self._header.has_append_time:
            for record in records:
                record.timestamp = self._header.max_timestamp
        self.left -= count
        if not self.left and self._pos != len(self._body):
            raise malformed(f"{len(self._body) - self._pos} bytes follow the last record")
        return records

    def _read(self, count: int) -> list[R]:
        body, pos, offset_delta = self._body, self._pos, self._offset_delta
        base_offset, last_offset_delta = self._header.base_offset, self._header.last_offset_delta
        base_timestamp = self._header.base_timestamp
        record_type = self._record_type
        records: list[R] = []
        for _ in range(count):
            byte, second = body[pos], body[pos + 1]
            if byte >= 0x80 > second and not byte & 1:
                length = (byte & 0x7F) >> 1 | second << 6
                pos += 2
            else:
                length, pos = read_varint(body, pos)
            end = pos + length
            if length < 0 or end > len(body):
                raise malformed(f"a record of {length} bytes at byte {pos} does not fit in {len(body)}")
            byte = body[pos + 1]
            if byte < 0x80:
                timestamp = base_timestamp + ((byte >> 1) ^ -(byte & 1))
                pos += 2
            else:
                timestamp_delta, pos = read_varlong(body, pos + 1)
                timestamp = base_timestamp + timestamp_delta
            if not MIN_INT64 <= timestamp <= MAX_INT64:
                raise malformed(f"timestamp {timestamp} overflows")
            previous = offset_delta
            byte, second = body[pos], body[pos + 1]
            if byte < 0x80:
                offset_delta = (byte >> 1) ^ -(byte & 1)
                pos += 1
            elif second < 0x80:
                offset_delta = ((byte & 0x7F) >> 1 | second << 6) ^ -(byte & 1)
                pos += 2
            else:
                offset_delta, pos = read_varint(body, pos)
            if not previous < offset_delta <= last_offset_delta:
                raise malformed(
                    f"offset delta {offset_delta} follows {previous}; "
                    f"they must grow, up to {last_offset_delta}"
                )
            key: bytes | None = None
            if body[pos] == NULL_LENGTH:
                pos += 1
            else:
                key, pos = _read_bytes(body, pos, end)
            value, pos = _read_bytes(body, pos, end)
            headers: Headers = ()
            if body[pos] == NO_HEADER_COUNT:
                pos += 1
            else:
                headers, pos = _read_headers(body, pos, end)
            if pos != end:
                raise malformed(f"a record ends at byte {pos} where its length says {end}")
            records.append(record_type(key, value, timestamp, headers, base_offset + offset_delta))
        self._pos, self._offset_delta = pos, offset_delta
        return records


def _read_bytes(body: bytes, pos: int, end: int) -> tuple[bytes | None, int]:
    """The field at `pos`, and the position after it, which is not past the record's `end`."""
    byte = body[pos]
    if byte < 0x80:
        length = (byte >> 1) ^ -(byte & 1)
        start = pos + 1
    elif (second := body[pos + 1]) < 0x80:
        length = ((byte & 0x7F) >> 1 | second << 6) ^ -(byte & 1)
        start = pos + 2
    else:
        length, start = read_varint(body, pos)
    if length < 0:
        if length != -1:
            raise malformed(f"a length of {length} at byte {pos}")
        return None, start
    after = start + length
    if after > end:
        raise malformed(f"a field of {length} bytes at byte {start} reaches past its record")
    return body[start:after], after


def _read_headers(body: bytes, pos: int, end: int) -> tuple[Headers, int]:
    count, pos = read_varint(body, pos)
    if not 0 <= count * MIN_HEADER_BYTES <= end - pos:
        raise malformed(f"{count} headers do not fit in the record at byte {pos}")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        key, pos = _read_bytes(body, pos, end)
        if key is None:
            raise malformed(f"a header at byte {pos} has no key")
        value, pos = _read_bytes(body, pos, end)
        headers.append((key.decode("utf-8", HEADER_KEY_ERRORS), value))
    return headers, pos


def read_records(batch: Buffer, limit_bytes: int = MAX_UNCOMPRESSED_BYTES) -> list[Record]:
    """Every record of the one batch that `batch` begins with; of a control batch, the control records."""
    reader = RecordReader(batch, Record, limit_bytes)
    return reader.read(reader.left)


def scan_records(batch: Buffer, limit_bytes: int = MAX_UNCOMPRESSED_BYTES) -> list[RecordSlice]:
    """The same records for compaction: keys are read, values and headers are not looked into."""
    header = read_header(batch)
    cursor = RecordCursor(header, read_body(batch, header, limit_bytes))
    body = memoryview(cursor.body)
    base_offset = header.base_offset
    slices: list[RecordSlice] = []
    try:
        for _ in range(header.record_count):
            cursor.advance()
            key = cursor.read_bytes()
            value_length, _ = read_varint(cursor.body, cursor.pos)
            rest = body[cursor.rest_at : cursor.end]
            offset = base_offset + cursor.offset_delta
            slices.append(RecordSlice(offset, cursor.timestamp, key, value_length < 0, rest))
    except IndexError as error:
        raise malformed("a record reaches past its end") from error
    cursor.finish()
    return slices


def max_timestamp_offset(batch: Buffer, limit_bytes: int = MAX_UNCOMPRESSED_BYTES) -> tuple[int, int] | None:
    """Offset and timestamp of the first record with the largest timestamp; None if there is no record."""
    newest: tuple[int, int] | None = None
    for offset, timestamp in _read_times(batch, limit_bytes):
        if newest is None or timestamp > newest[1]:
            newest = (offset, timestamp)
    return newest


def first_offset_at_or_after(
    batch: Buffer, timestamp: int, limit_bytes: int = MAX_UNCOMPRESSED_BYTES
) -> tuple[int, int] | None:
    """Offset and timestamp of the first record that is not older than `timestamp`; None if all are."""
    for time in _read_times(batch, limit_bytes):
        if time[1] >= timestamp:
            return time
    return None


def _read_times(batch: Buffer, limit_bytes: int) -> list[tuple[int, int]]:
    """Offset and timestamp of every record."""
    header = read_header(batch)
    cursor = RecordCursor(header, read_body(batch, header, limit_bytes))
    base_offset = header.base_offset
    has_append_time = header.has_append_time
    times: list[tuple[int, int]] = []
    try:
        for _ in range(header.record_count):
            cursor.advance()
            timestamp = header.max_timestamp if has_append_time else cursor.timestamp
            times.append((base_offset + cursor.offset_delta, timestamp))
    except IndexError as error:
        raise malformed("a record reaches past its end") from error
    cursor.finish()
    return times


def build_batch(
    records: Sequence[Record],
    *,
    codec: int = Codec.NONE,
    level: int | None = None,
    base_offset: int = 0,
    leader_epoch: int = NO_LEADER_EPOCH,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
) -> bytearray:
    """A batch of `records` in their order, at offsets from `base_offset` on, as a producer sends it."""
    if not records:
        raise InvalidBatch(ErrorCode.INVALID_RECORD, "a batch needs a record; send none instead")
    base_timestamp = records[0].timestamp
    body = bytearray()
    max_timestamp = _append_all(body, records, base_timestamp)
    header = BatchHeader(
        base_offset=base_offset,
        size=0,
        leader_epoch=leader_epoch,
        crc=0,
        attributes=codec | (TRANSACTIONAL_BIT if transactional else 0),
        last_offset_delta=len(records) - 1,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(records),
    )
    return assemble_batch(header, body, level)


def rebuild_batch(
    header: BatchHeader,
    kept: Sequence[RecordSlice],
    *,
    delete_horizon_ms: int | None = None,
    level: int | None = None,
) -> bytearray:
    """What compaction leaves of a batch: the `kept` of its slices, under the same offsets and sequences.

    With nothing kept it is an empty batch, which stays for as long as it is its producer's last one: it holds
    the sequence that the next batch of that producer must follow. `delete_horizon_ms` takes the place of the
    base timestamp and says when tombstones and markers may go (KIP-534); without it, one set before stays.
    """
    attributes = header.attributes
    base_timestamp = header.base_timestamp
    if delete_horizon_ms is not None:
        attributes |= DELETE_HORIZON_BIT
        base_timestamp = delete_horizon_ms
    max_timestamp = header.max_timestamp
    if not kept:
        attributes &= ~CODEC_MASK
    elif not attributes & APPEND_TIME_BIT:
        max_timestamp = max(record.timestamp for record in kept)
    body = bytearray()
    for record in kept:
        _append_record(body, record.timestamp - base_timestamp, record.rest)
    rebuilt = BatchHeader(
        base_offset=header.base_offset,
        size=0,
        leader_epoch=header.leader_epoch,
        crc=0,
        attributes=attributes,
        last_offset_delta=header.last_offset_delta,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        record_count=len(kept),
    )
    return assemble_batch(rebuilt, body, level)


def recompress_batch(batch: Buffer, header: BatchHeader, codec: int, limit_bytes: int) -> bytearray:
    """The same records under the same header in another codec, if they are within the limit."""
    body = unpack_body(batch, header, limit_bytes)
    recompressed = read_header(batch)
    recompressed.attributes = header.attributes & ~CODEC_MASK | codec
    return assemble_batch(recompressed, body)


def assemble_batch(header: BatchHeader, body: Buffer, level: int | None = None) -> bytearray:
    """Header and records as one batch, compressed as its attributes say, with size and checksum set."""
    packed = compress(header.attributes & CODEC_MASK, body, level)
    batch = bytearray(HEADER_BYTES + len(packed))
    batch[HEADER_BYTES:] = packed
    HEADER.pack_into(
        batch,
        0,
        header.base_offset,
        len(batch) - PREFIX_BYTES,
        header.leader_epoch,
        MAGIC,
        0,
        header.attributes,
        header.last_offset_delta,
        header.base_timestamp,
        header.max_timestamp,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.record_count,
    )
    write_crc(batch)
    return batch


def build_end_marker(
    *,
    commit: bool,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
    timestamp: int,
    base_offset: int,
    leader_epoch: int,
) -> bytes:
    """The control batch that ends a transaction in one partition.

    One `pack` and a checksum, since every commit pays for it once a partition.
    """
    batch = bytearray(
        MARKER.pack(
            base_offset,
            MARKER.size - PREFIX_BYTES,
            leader_epoch,
            MAGIC,
            0,
            TRANSACTIONAL_BIT | CONTROL_BIT,
            0,
            timestamp,
            timestamp,
            producer_id,
            producer_epoch,
            NO_SEQUENCE,
            1,
            MARKER_RECORD_LENGTH,
            0,
            0,
            0,
            MARKER_KEY_LENGTH,
            0,
            COMMIT if commit else ABORT,
            MARKER_VALUE_LENGTH,
            0,
            coordinator_epoch,
            0,
        )
    )
    write_crc(batch)
    return bytes(batch)


def read_end_marker(batch: Buffer) -> EndMarker | None:
    """The end marker in a control batch; None if it is control of another kind, which readers pass over."""
    if len(batch) == MARKER.size:
        marker = _read_own_marker(batch)
        if marker is not None:
            return marker
    header = read_header(batch)
    if not header.is_control:
        raise malformed("it is not a control batch")
    record = read_records(batch)[0] if header.record_count else None
    if record is None or record.key is None or len(record.key) < MARKER_KEY.size:
        return None
    _, kind = MARKER_KEY.unpack_from(record.key)
    if kind not in (ABORT, COMMIT):
        return None
    if record.value is None or len(record.value) < MARKER_VALUE.size:
        raise malformed("its end marker has no coordinator epoch")
    _, coordinator_epoch = MARKER_VALUE.unpack_from(record.value)
    return EndMarker(kind == COMMIT, header.producer_id, header.producer_epoch, coordinator_epoch)


def _read_own_marker(batch: Buffer) -> EndMarker | None:
    """The end marker if it lies as `build_end_marker` lays it: without walking through its record."""
    fields = MARKER.unpack_from(batch)
    attributes, producer_id, producer_epoch, count = fields[5], fields[9], fields[10], fields[12]
    lengths = (fields[13], fields[17], fields[20])
    kind = fields[19]
    if (
        lengths != (MARKER_RECORD_LENGTH, MARKER_KEY_LENGTH, MARKER_VALUE_LENGTH)
        or attributes & (CODEC_MASK | CONTROL_BIT) != CONTROL_BIT
        or count != 1
        or kind not in (ABORT, COMMIT)
    ):
        return None
    return EndMarker(kind == COMMIT, producer_id, producer_epoch, fields[22])


def encode_headers(headers: Headers) -> bytes:
    """The headers of a record, from their count on."""
    if not headers:
        return NO_HEADERS
    parts = [encode_varint(len(headers))]
    for key, value in headers:
        encoded = key.encode("utf-8", HEADER_KEY_ERRORS)
        parts.append(encode_varint(len(encoded)) + encoded)
        parts.append(NULL if value is None else encode_varint(len(value)) + value)
    return b"".join(parts)


def _append_all(body: bytearray, records: Sequence[Record], base_timestamp: int) -> int:
    """Records at offsets from the base on; returns the largest timestamp.

    In one loop: every record that a client sends passes here.
    """
    max_delta = 0
    for offset_delta, record in enumerate(records):
        key, value = record.key, record.value
        delta = record.timestamp - base_timestamp
        if not MIN_INT64 <= delta <= MAX_INT64:
            raise _apart(delta)
        max_delta = max(max_delta, delta)
        encoded_delta = _SMALL[delta + 1] if -1 <= delta < MAX_SMALL else _encode_varint(delta)
        encoded_offset = (
            _SMALL[offset_delta + 1] if offset_delta < MAX_SMALL else _encode_varint(offset_delta)
        )
        encoded_key = NULL if key is None else encode_varint(len(key)) + key
        if value is None:
            value_length, value = NULL, b""
        else:
            value_length = encode_varint(len(value))
        headers = encode_headers(record.headers) if record.headers else NO_HEADERS
        rest = b"".join(
            (NO_ATTRIBUTES, encoded_delta, encoded_offset, encoded_key, value_length, value, headers)
        )
        body += encode_varint(len(rest))
        body += rest
    return base_timestamp + max_delta


def _append_record(body: bytearray, timestamp_delta: int, rest: Buffer) -> None:
    if not MIN_INT64 <= timestamp_delta <= MAX_INT64:
        raise _apart(timestamp_delta)
    encoded_delta = encode_varint(timestamp_delta)
    body += encode_varint(1 + len(encoded_delta) + len(rest))
    body += NO_ATTRIBUTES
    body += encoded_delta
    body += rest


def _apart(timestamp_delta: int) -> InvalidBatch:
    return InvalidBatch(
        ErrorCode.INVALID_TIMESTAMP, f"timestamps {timestamp_delta} ms apart do not fit in one batch"
    )
