"""Record batches from columns and back, a whole column at a time: for clients that hold Arrow data.

A column is laid out as Arrow does it: all values end to end in one buffer, and n + 1 offsets into it. A batch
built from columns is byte for byte what `semel.wire.records.build_batch` makes of the same records. There is
no Python loop over records: widths and places of all fields come from numpy, and bytes move in *words*.

Moving values of different lengths is the costly part. One index for each byte is slow; here each segment is
copied in words of one width, near the mean length, at one index a word. The last word of a segment reaches
past its end and spoils what follows. Order puts that right: segments are copied from left to right, so that
each overwrites what its predecessor spoiled, and the small fields between them are written last.

Reading is the same in reverse. Only the way from one record to the next cannot be foreseen: that is a loop,
which takes runs of records of one size in one step. A numpy call costs as much as a hundred records: small
batches are best read together.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from semel.wire.batch import (
    HEADER_BYTES,
    MAX_SEQUENCE,
    MAX_UNCOMPRESSED_BYTES,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    InvalidBatch,
    read_header,
)
from semel.wire.compression import Codec
from semel.wire.errors import ErrorCode
from semel.wire.records import (
    MAX_INT64,
    NO_LEADER_EPOCH,
    VARINT_MAX_BYTES,
    VARLONG_MAX_BYTES,
    Headers,
    RecordCursor,
    assemble_batch,
    encode_headers,
    encode_varint,
    malformed,
    read_varint,
    unpack_body,
)

Bytes: TypeAlias = NDArray[np.uint8]
Ints: TypeAlias = NDArray[np.int64]
Varints: TypeAlias = NDArray[np.uint64]
Words: TypeAlias = NDArray[np.uint32]
Bools: TypeAlias = NDArray[np.bool_]

MIN_WORD_BYTES: Final = 16
MAX_WORD_BYTES: Final = 1024
# Batches are laid out together until they have this many records: enough to hide the cost of a numpy call,
# few enough that the arrays stay in the cache.
GROUP_RECORDS: Final = 2 * 1024
DEFAULT_MAX_BATCH_BYTES: Final = 1_000_000
DEFAULT_MAX_RECORDS: Final = 64 * 1024
# Room to read a word past the end.
PADDING: Final = bytes(MAX_WORD_BYTES)
# After this many records of one size in a row, the next ones are looked at together, up to so many at once.
RUN_RECORDS: Final = 8
MAX_RUN_RECORDS: Final = 1024


class BinaryColumn:
    """Strings end to end: number i is `buffer[offsets[i] : offsets[i + 1]]`, or null where not `valid[i]`."""

    __slots__ = ("buffer", "offsets", "valid")

    def __init__(
        self, buffer: Bytes | Buffer, offsets: NDArray[np.integer], valid: Bools | None = None
    ) -> None:
        self.buffer: Bytes = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
        self.offsets: Ints = np.asarray(offsets, np.int64)
        self.valid = valid

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, strings: Sequence[bytes | None]) -> "BinaryColumn":
        """A column of Python bytes, taken one by one: for tests, and where there are few."""
        lengths = np.array([0 if string is None else len(string) for string in strings], np.int64)
        valid = np.array([string is not None for string in strings], np.bool_)
        buffer = b"".join([string for string in strings if string is not None])
        return cls(buffer, _offsets_of(lengths), None if valid.all() else valid)

    def to_list(self) -> list[bytes | None]:
        """The strings as Python bytes, one by one."""
        raw = self.buffer.tobytes()
        bounds: list[int] = self.offsets.tolist()
        strings: list[bytes | None] = [raw[start:end] for start, end in pairwise(bounds)]
        if self.valid is not None:
            for i in np.flatnonzero(~self.valid).tolist():
                strings[i] = None
        return strings

    def lengths(self) -> Ints:
        """The length of each string; 0 for a null, whatever lies behind it in the buffer."""
        lengths = self.offsets[1:] - self.offsets[:-1]
        return lengths if self.valid is None else np.where(self.valid, lengths, 0)

    def take(self, indices: Ints) -> "BinaryColumn":
        """The strings at `indices`, in that order."""
        valid = None if self.valid is None else self.valid[indices]
        buffer, offsets = _gather(_padded([self.buffer]), self.offsets[indices], self.lengths()[indices])
        return BinaryColumn(buffer, offsets, valid)


class RecordColumns:
    """The records of one batch, or of a few in a row. `headers` is None if no record has any."""

    __slots__ = ("headers", "keys", "offsets", "timestamps", "values")

    def __init__(
        self,
        offsets: Ints,
        timestamps: Ints,
        keys: BinaryColumn,
        values: BinaryColumn,
        headers: list[Headers] | None,
    ) -> None:
        self.offsets = offsets
        self.timestamps = timestamps
        self.keys = keys
        self.values = values
        self.headers = headers


def valid_from_bitmap(bitmap: Buffer, start: int, count: int) -> Bools:
    """Arrow's validity bitmap, from bit `start` on, as an array of booleans."""
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=start + count, bitorder="little")
    return bits[start:].astype(np.bool_)


def build_batches(
    values: BinaryColumn,
    keys: BinaryColumn | None = None,
    timestamps: Ints | int = NO_TIMESTAMP,
    headers: Sequence[Headers] | None = None,
    *,
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
    max_records: int = DEFAULT_MAX_RECORDS,
    codec: int = Codec.NONE,
    level: int | None = None,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
) -> list[bytearray]:
    """Batches of all records, in order, none larger than `max_batch_bytes` before compression.

    One timestamp may stand for all. Sequences go on from batch to batch. A record that fits in no batch
    raises `InvalidBatch` before anything is built.
    """
    if not len(values):
        return []
    layout = _Layout(values, keys, timestamps, headers)
    batches: list[bytearray] = []
    for bounds in _groups(layout.split(max_batch_bytes - HEADER_BYTES, max_records)):
        body, ends = layout.encode(bounds)
        body_start = 0
        for start, stop, body_end in zip(bounds, bounds[1:], ends, strict=False):
            batch_timestamps = layout.timestamps[start:stop]
            header = BatchHeader(
                base_offset=0,
                size=0,
                leader_epoch=NO_LEADER_EPOCH,
                crc=0,
                attributes=codec | (TRANSACTIONAL_BIT if transactional else 0),
                last_offset_delta=stop - start - 1,
                base_timestamp=int(batch_timestamps[0]),
                max_timestamp=int(batch_timestamps.max()),
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                base_sequence=NO_SEQUENCE if base_sequence < 0 else (base_sequence + start) & MAX_SEQUENCE,
                record_count=stop - start,
            )
            batches.append(assemble_batch(header, body[body_start:body_end], level))
            body_start = body_end
    return batches


def sizes_alone(
    values: BinaryColumn, keys: BinaryColumn | None = None, headers: Sequence[Headers] | None = None
) -> Ints:
    """What each record takes in an uncompressed batch of its own: its deltas are 0, a byte each."""
    return _with_length(_Layout(values, keys, NO_TIMESTAMP, headers).sizes + 2) + HEADER_BYTES


def read_columns(batch: Buffer, limit_bytes: int = MAX_UNCOMPRESSED_BYTES) -> RecordColumns:
    """The records of the one batch that `batch` begins with; refuses what `read_records` refuses."""
    header = read_header(batch)
    return read_columns_of([(header, unpack_body(batch, header, limit_bytes))])


def read_columns_of(batches: Sequence[tuple[BatchHeader, Buffer]]) -> RecordColumns:
    """The records of all these batches, one after the other: of each its header, and its body unpacked."""
    batch_headers = [header for header, _ in batches]
    bodies = [body for _, body in batches]
    raw = b"".join([*bodies, PADDING])
    begins, ends = _find_records(raw, bodies, batch_headers)
    body = np.frombuffer(raw, np.uint8)
    _, starts = _take_varints(body, begins, VARINT_MAX_BYTES)
    timestamp_deltas, at = _take_varints(body, starts + 1, VARLONG_MAX_BYTES)
    offset_deltas, at = _take_varints(body, at, VARINT_MAX_BYTES)
    _check_offset_deltas(offset_deltas, batch_headers)
    keys, at = _take_strings(body, at, ends)
    values, at = _take_strings(body, at, ends)
    headers = _take_headers(body, at, ends, RecordCursor(batch_headers[0], raw))
    timestamps = _add_timestamps(timestamp_deltas, batch_headers)
    offsets = offset_deltas + _spread([header.base_offset for header in batch_headers], batch_headers)
    return RecordColumns(offsets, timestamps, keys, values, headers)


class _Layout:
    """Where everything goes: what does not depend on the batch, once for all; the rest for a few batches."""

    __slots__ = ("columns", "lengths", "prefix_widths", "prefixes", "sizes", "timestamps")

    def __init__(
        self,
        values: BinaryColumn,
        keys: BinaryColumn | None,
        timestamps: Ints | int,
        headers: Sequence[Headers] | None,
    ) -> None:
        count = len(values)
        if keys is None:
            keys = BinaryColumn(b"", np.zeros(count + 1, np.int64), np.zeros(count, np.bool_))
        self.columns = [keys, values]
        self.lengths = [keys.lengths(), values.lengths()]
        self.prefixes = [_length_prefixes(keys, self.lengths[0]), _length_prefixes(values, self.lengths[1])]
        self.prefix_widths = [_widths(self.prefixes[0]), _widths(self.prefixes[1])]
        if headers is not None:
            self.columns.append(BinaryColumn.of([encode_headers(of_record) for of_record in headers]))
            self.lengths.append(self.columns[2].lengths())
        # Attributes, key, value and headers: all of a record but its length and the two deltas.
        self.sizes: Ints = 1 + sum(self.prefix_widths, sum(self.lengths[1:], self.lengths[0]))
        if headers is None:
            self.sizes += 1
        self.timestamps: Ints = (
            np.full(count, timestamps, np.int64)
            if isinstance(timestamps, int)
            else np.asarray(timestamps, np.int64)
        )

    def split(self, room: int, max_records: int) -> list[int]:
        """Where batches begin, and the end. Deltas are taken at their widest: no batch gets too large."""
        count = len(self.sizes)
        spread = int(self.timestamps.max()) - int(self.timestamps.min())
        if spread > MAX_INT64:
            raise InvalidBatch(
                ErrorCode.INVALID_TIMESTAMP, f"timestamps {spread} ms apart do not fit together"
            )
        deltas = len(encode_varint(spread)) + len(encode_varint(min(count, max_records) - 1))
        ends: Ints = np.cumsum(_with_length(self.sizes + deltas))
        bounds = [0]
        while bounds[-1] < count:
            start = bounds[-1]
            before = int(ends[start - 1]) if start else 0
            stop = min(int(np.searchsorted(ends, before + room, side="right")), start + max_records)
            if stop == start:
                self._check_alone(start, room)
                stop = start + 1
            bounds.append(stop)
        return bounds

    def _check_alone(self, index: int, room: int) -> None:
        """A record too large among others may still make a batch: its own deltas are 0, a byte each."""
        size = int(_with_length(self.sizes[index : index + 1] + 2)[0])
        if size > room:
            raise InvalidBatch(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"record {index} takes {size} bytes where a batch has room for {room}; "
                "raise the topic's max.message.bytes and the batch size, or split the record",
            )

    def encode(self, bounds: list[int]) -> tuple[memoryview, list[int]]:
        """The bodies of the batches between `bounds`, end to end, and where each ends."""
        rows = slice(bounds[0], bounds[-1])
        starts = np.array(bounds[:-1], np.int64)
        counts = np.array(bounds[1:], np.int64) - starts
        timestamps = _zigzag(self.timestamps[rows] - np.repeat(self.timestamps[starts], counts))
        offsets = _zigzag(np.arange(bounds[0], bounds[-1], dtype=np.int64) - np.repeat(starts, counts))
        timestamp_widths = _widths(timestamps)
        offset_widths = _widths(offsets)
        key_widths, value_widths = self.prefix_widths[0][rows], self.prefix_widths[1][rows]

        sizes = self.sizes[rows] + timestamp_widths + offset_widths
        lengths = _zigzag(sizes)
        length_widths = _widths(lengths)
        ends: Ints = np.cumsum(sizes + length_widths)
        length_at = ends - sizes - length_widths
        attributes_at = length_at + length_widths
        offset_at = attributes_at + 1 + timestamp_widths
        key_length_at = offset_at + offset_widths
        key_at = key_length_at + key_widths
        value_length_at = key_at + self.lengths[0][rows]
        value_at = value_length_at + value_widths
        headers_at = value_at + self.lengths[1][rows]

        out = np.empty(int(ends[-1]) + MAX_WORD_BYTES, np.uint8)
        self._copy_columns(rows, [key_at, value_at, headers_at], out)
        _put_varints(out, length_at, lengths, length_widths)
        out[attributes_at] = 0
        _put_varints(out, attributes_at + 1, timestamps, timestamp_widths)
        _put_varints(out, offset_at, offsets, offset_widths)
        _put_varints(out, key_length_at, self.prefixes[0][rows], key_widths)
        _put_varints(out, value_length_at, self.prefixes[1][rows], value_widths)
        if len(self.columns) == 2:
            out[headers_at] = 0
        batch_ends: list[int] = ends[np.cumsum(counts) - 1].tolist()
        return out.data, batch_ends

    def _copy_columns(self, rows: slice, places: list[Ints], out: Bytes) -> None:
        """Copies the strings of all columns, record by record, since each spoils what lies right of it."""
        buffers: list[Bytes] = []
        sources: list[Ints] = []
        base = 0
        for column in self.columns:
            offsets = column.offsets[rows.start : rows.stop + 1]
            buffers.append(column.buffer[int(offsets[0]) : int(offsets[-1])])
            sources.append(offsets[:-1] + (base - int(offsets[0])))
            base += len(buffers[-1])
        lengths = [of_column[rows] for of_column in self.lengths]
        _copy_segments(
            _padded(buffers),
            _interleave(sources),
            _interleave(lengths),
            out,
            _interleave(places[: len(lengths)]),
        )


def _groups(bounds: list[int]) -> list[list[int]]:
    """The bounds of batches in groups of about GROUP_RECORDS records; a group begins where the last ended."""
    groups: list[list[int]] = []
    first = 0
    for i in range(1, len(bounds)):
        if bounds[i] - bounds[first] >= GROUP_RECORDS or i == len(bounds) - 1:
            groups.append(bounds[first : i + 1])
            first = i
    return groups


def _offsets_of(lengths: Ints) -> Ints:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _padded(buffers: list[Bytes]) -> Bytes:
    """The buffers end to end, with room to read a word past the end."""
    return np.concatenate([*buffers, np.zeros(MAX_WORD_BYTES, np.uint8)])


def _interleave(arrays: list[Ints]) -> Ints:
    return np.stack(arrays, axis=1).ravel()


def _copy_segments(source: Bytes, source_at: Ints, lengths: Ints, target: Bytes, target_at: Ints) -> None:
    """Copies `lengths[i]` bytes from `source_at[i]` to `target_at[i]`; targets must be in ascending order.

    Up to a word is written past the end of each segment, and read past the end of its source.
    """
    total = int(lengths.sum())
    if not total:
        return
    mean = total // int(np.count_nonzero(lengths))
    word_bytes = min(max(1 << mean.bit_length(), MIN_WORD_BYTES), MAX_WORD_BYTES)
    word = np.dtype(f"V{word_bytes}")
    # Every byte position is the start of a word: the words of these views overlap.
    from_words = np.ndarray((len(source) - word_bytes + 1,), word, source, strides=(1,))
    to_words = np.ndarray((len(target) - word_bytes + 1,), word, target, strides=(1,))
    counts = (lengths + (word_bytes - 1)) // word_bytes
    ends = np.cumsum(counts)
    steps = np.arange(int(ends[-1]), dtype=np.int64)
    steps -= np.repeat(ends - counts, counts)
    steps *= word_bytes
    to_words[steps + np.repeat(target_at, counts)] = from_words[steps + np.repeat(source_at, counts)]


def _gather(source: Bytes, source_at: Ints, lengths: Ints) -> tuple[Bytes, Ints]:
    """The segments of `source` end to end, and their offsets. The source must be padded."""
    offsets = _offsets_of(lengths)
    total = int(offsets[-1])
    target = np.empty(total + MAX_WORD_BYTES, np.uint8)
    _copy_segments(source, source_at, lengths, target, offsets[:-1])
    return target[:total], offsets


def _zigzag(numbers: Ints) -> Varints:
    zigzag: Varints = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
    return zigzag


def _length_prefixes(column: BinaryColumn, lengths: Ints) -> Varints:
    """Zigzag lengths; 1, which is -1, for nulls."""
    doubled = lengths << 1
    prefixes = doubled if column.valid is None else np.where(column.valid, doubled, 1)
    return prefixes.view(np.uint64)


def _widths(numbers: Varints) -> Ints:
    """How many bytes each varint takes."""
    widths = np.ones(len(numbers), np.int64)
    largest = int(numbers.max())
    threshold = 0x80
    while largest >= threshold:
        widths += numbers >= threshold
        threshold <<= 7
    return widths


def _with_length(sizes: Ints) -> Ints:
    """Sizes with the length prefix added that says them."""
    return sizes + _widths(_zigzag(sizes))


def _put_varints(out: Bytes, at: Ints, numbers: Varints, widths: Ints) -> None:
    widest = int(widths.max())
    if widest == 1:
        out[at] = numbers
        return
    out[at] = (numbers & 0x7F) | ((widths > 1).astype(np.uint64) << 7)
    for i in range(1, widest):
        rows = np.flatnonzero(widths > i)
        part = (numbers[rows] >> (7 * i)) & 0x7F
        out[at[rows] + i] = part | ((widths[rows] > i + 1).astype(np.uint64) << 7)


def _find_records(raw: bytes, bodies: Sequence[Buffer], headers: Sequence[BatchHeader]) -> tuple[Ints, Ints]:
    """Where each record begins with its length, and where it ends. The bodies lie end to end in `raw`."""
    places: list[int] = []
    end = 0
    for body, header in zip(bodies, headers, strict=True):
        start, end = end, end + len(body)
        _step_through(raw, start, end, header.record_count, places)
    begins = np.array(places, np.int64)
    # Every body is filled exactly, so a record ends where the next one begins, of whichever batch.
    ends: Ints = np.append(begins[1:], end)[: len(begins)]
    return begins, ends


def _step_through(raw: bytes, pos: int, end: int, count: int, begins: list[int]) -> None:
    """Adds the places of the `count` records between `pos` and `end`, which must fill it exactly."""
    body_start = pos
    same = 0
    previous = 0
    stop = len(begins) + count
    while len(begins) < stop and pos < end:
        begins.append(pos)
        byte = raw[pos]
        second = raw[pos + 1]
        # Zigzag: an odd number is a negative one, which the slow way refuses.
        if byte < 0x80 and not byte & 1:
            width = 1
            size = 1 + (byte >> 1)
        elif second < 0x80 and not byte & 1:
            width = 2
            size = 2 + ((byte & 0x7F) >> 1 | second << 6)
        else:
            length, start = read_varint(raw, pos)
            if length < 0:
                raise malformed(f"a record of {length} bytes at byte {pos - body_start}")
            width = start - pos
            size = width + length
        same = same + 1 if size == previous else 0
        previous = size
        if same >= RUN_RECORDS:
            run = _count_run(raw, pos, end, size, width, stop - len(begins))
            begins.extend(range(pos + size, pos + (run + 1) * size, size))
            pos += run * size
            same = 0 if run < MAX_RUN_RECORDS else RUN_RECORDS
        pos += size
    if len(begins) < stop:
        raise malformed("a record reaches past its end")
    if pos != end:
        raise malformed(f"its records end at byte {pos - body_start} of {end - body_start}")


def _count_run(raw: bytes, pos: int, end: int, size: int, width: int, limit: int) -> int:
    """How many records after the one at `pos` begin with the same length, of `width` bytes."""
    rows = min((end - pos) // size - 1, limit, MAX_RUN_RECORDS)
    if rows <= 0:
        return 0
    table = np.frombuffer(raw, np.uint8, rows * size, pos + size).reshape(rows, size)
    differs = (table[:, :width] != np.frombuffer(raw, np.uint8, width, pos)).any(axis=1)
    return int(differs.argmax()) if differs.any() else rows


def _take_varints(body: Bytes, at: Ints, max_bytes: int) -> tuple[Ints, Ints]:
    """The zigzag varints at these places, and the places after them. The body must be padded."""
    byte = body[at]
    numbers = (byte & 0x7F).astype(np.uint64)
    after = at + 1
    rows = np.flatnonzero(byte & 0x80)
    width = 1
    while len(rows):
        if width == max_bytes:
            raise malformed(f"a number takes more than {max_bytes} bytes")
        byte = body[after[rows]]
        if width == VARLONG_MAX_BYTES - 1 and int(byte.max()) > 1:
            raise malformed("a number does not fit in 64 bits")
        numbers[rows] |= (byte & 0x7F).astype(np.uint64) << (7 * width)
        after[rows] += 1
        rows = rows[(byte & 0x80) != 0]
        width += 1
    # Five bytes hold 35 bits: a length, delta or count of more than 32 is refused as larger than its batch.
    signs = (numbers & 1).astype(np.int64)
    return (numbers >> 1).astype(np.int64) ^ -signs, after


def _take_strings(body: Bytes, at: Ints, ends: Ints) -> tuple[BinaryColumn, Ints]:
    """The strings that begin at these places with their lengths, and the places after them."""
    lengths, starts = _take_varints(body, np.minimum(at, ends), VARINT_MAX_BYTES)
    valid: Bools | None = None
    if len(lengths) and int(lengths.min()) < 0:
        if int(lengths.min()) < -1:
            raise malformed(f"a length of {lengths.min()}")
        valid = lengths >= 0
        lengths = np.where(valid, lengths, 0)
    after = starts + lengths
    if np.any(after > ends):
        raise malformed("a key or a value reaches past its record")
    buffer, offsets = _gather(body, starts, lengths)
    return BinaryColumn(buffer, offsets, valid), after


def _spread(of_batches: list[int], headers: Sequence[BatchHeader]) -> Ints | np.int64:
    """What each batch has, for each of its records."""
    if len(headers) == 1:
        return np.int64(of_batches[0])
    spread: Ints = np.repeat(np.array(of_batches, np.int64), [header.record_count for header in headers])
    return spread


def _check_offset_deltas(deltas: Ints, headers: Sequence[BatchHeader]) -> None:
    """They grow within a batch, from 0 or more up to what its header says."""
    falls = np.diff(deltas, prepend=-1) <= 0
    start = 0
    for header in headers:
        if header.record_count:
            falls[start] = deltas[start] < 0
            start += header.record_count
            if deltas[start - 1] > header.last_offset_delta:
                raise malformed(f"its last offset delta is past {header.last_offset_delta}")
    if falls.any():
        raise malformed("its offset deltas must grow, from 0 or more")


def _add_timestamps(deltas: Ints, headers: Sequence[BatchHeader]) -> Ints:
    bases = _spread([header.base_timestamp for header in headers], headers)
    timestamps = deltas + bases
    # The sum overflowed where its sign is neither that of the base nor that of the delta.
    overflows = ((timestamps ^ bases) & (timestamps ^ deltas)) < 0
    start = 0
    for header in headers:
        end = start + header.record_count
        if header.has_append_time:
            timestamps[start:end] = header.max_timestamp
            overflows[start:end] = False
        start = end
    if overflows.any():
        raise malformed("a timestamp delta overflows")
    return timestamps


def _take_headers(body: Bytes, at: Ints, ends: Ints, cursor: RecordCursor) -> list[Headers] | None:
    """The headers of every record, one by one where there are any; None if there are none at all."""
    counts, after = _take_varints(body, at, VARINT_MAX_BYTES)
    bare = counts == 0
    if np.any(after[bare] != ends[bare]):
        raise malformed("a record does not end where its length says")
    if bare.all():
        return None
    headers: list[Headers] = [()] * len(counts)
    try:
        for i in np.flatnonzero(~bare).tolist():
            cursor.pos = int(at[i])
            cursor.end = int(ends[i])
            headers[i] = cursor.read_headers()
            cursor.finish_record()
    except IndexError as error:
        raise malformed("a header reaches past its record") from error
    return headers
