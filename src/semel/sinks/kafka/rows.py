"""Rows as Arrow columns, and Kafka's records in them: key, value, headers, timestamp, topic and partition.

Nothing here looks at rows one by one, except at headers and at rows that are wrong: buffers are handed from
Arrow to numpy as they are.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.sinks.errors import WriteFailed
from semel.sinks.sink import Rows
from semel.wire.columns import BinaryColumn, Bools, Ints, valid_from_bitmap
from semel.wire.records import Headers

MAX_INT16: Final = 2**15 - 1
# Types whose values lie end to end in one buffer, with the width of their offsets.
OFFSET_TYPES: Final[dict[pa.DataType, np.dtype[Any]]] = {
    pa.binary(): np.dtype(np.int32),
    pa.string(): np.dtype(np.int32),
    pa.large_binary(): np.dtype(np.int64),
    pa.large_string(): np.dtype(np.int64),
}


@dataclass(slots=True, frozen=True)
class RecordLayout:
    """Which column of a row holds which part of a record; None where records have no such part.

    `headers` is a column of lists of (key, value), or of maps. `timestamp` is one of timestamps, or of
    milliseconds as integers.
    """

    value: str = "value"
    key: str | None = "key"
    headers: str | None = None
    topic: str | None = None
    partition: str | None = None
    timestamp: str | None = None


class RecordRows:
    """Rows in the order in which they are sent, ready to be encoded."""

    __slots__ = ("headers", "keys", "timestamps", "values")

    def __init__(
        self,
        values: BinaryColumn,
        keys: BinaryColumn | None,
        timestamps: Ints,
        headers: list[Headers] | None,
    ) -> None:
        self.values = values
        self.keys = keys
        self.timestamps = timestamps
        self.headers = headers

    def slice(self, start: int, stop: int) -> "RecordRows":
        return RecordRows(
            slice_column(self.values, start, stop),
            None if self.keys is None else slice_column(self.keys, start, stop),
            self.timestamps[start:stop],
            None if self.headers is None else self.headers[start:stop],
        )


def as_batches(rows: Rows) -> list[pa.RecordBatch]:
    """What a writer was given, as Arrow batches."""
    if isinstance(rows, pa.RecordBatch):
        return [rows]
    if isinstance(rows, pa.Table):
        return list(rows.to_batches())
    try:
        return [pa.RecordBatch.from_pylist([dict(row) for row in rows])] if rows else []
    except pa.ArrowException as error:
        raise WriteFailed(
            f"rows could not be read as columns: {error}. Give all values of a column one type",
            is_permanent=True,
        ) from error


def column(batch: pa.RecordBatch, name: str, role: str) -> pa.Array:
    """A column by name."""
    index = batch.schema.get_field_index(name)
    if index < 0:
        raise WriteFailed(
            f"there is no column {name!r} for the record's {role}; the rows have "
            f"{', '.join(batch.schema.names) or 'none'}",
            is_permanent=True,
        )
    return batch.column(index)


def read_rows(batch: pa.RecordBatch, layout: RecordLayout) -> RecordRows:
    """All of a batch's rows as records."""
    values = binary_column(column(batch, layout.value, "value"), layout.value)
    keys = None
    if layout.key is not None:
        keys = binary_column(column(batch, layout.key, "key"), layout.key)
    headers = None
    if layout.headers is not None:
        headers = read_headers(column(batch, layout.headers, "headers"), layout.headers)
    if layout.timestamp is None:
        timestamps = np.full(len(values), now_ms(), np.int64)
    else:
        timestamps = read_timestamps(column(batch, layout.timestamp, "timestamp"), layout.timestamp)
    return RecordRows(values, keys, timestamps, headers)


def now_ms() -> int:
    return int(time.time() * 1000)


def binary_column(array: pa.Array, name: str) -> BinaryColumn:
    """Strings or bytes as they lie in Arrow's buffers, without a copy."""
    array = _plain(array)
    offset_type = OFFSET_TYPES.get(array.type)
    if offset_type is None:
        array = _to_binary(array, name)
        offset_type = OFFSET_TYPES[array.type]
    count = len(array)
    bitmap, offsets_buffer, values_buffer = array.buffers()
    if count == 0 or offsets_buffer is None:
        offsets = np.zeros(count + 1, np.int64)
    else:
        offsets = np.frombuffer(offsets_buffer, offset_type)[array.offset : array.offset + count + 1]
    valid: Bools | None = None
    if bitmap is not None and array.null_count:
        valid = valid_from_bitmap(bitmap, array.offset, count)
    return BinaryColumn(b"" if values_buffer is None else values_buffer, offsets, valid)


def _plain(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    return array


def _to_binary(array: pa.Array, name: str) -> pa.Array:
    kind = array.type
    if not (
        pa.types.is_null(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_string_view(kind)
    ):
        raise WriteFailed(
            f"column {name!r} is of type {kind}, and records are made of bytes: cast it to string or binary",
            is_permanent=True,
        )
    return array.cast(pa.large_binary())


def slice_column(rows: BinaryColumn, start: int, stop: int) -> BinaryColumn:
    return BinaryColumn(
        rows.buffer, rows.offsets[start : stop + 1], None if rows.valid is None else rows.valid[start:stop]
    )


def read_timestamps(array: pa.Array, name: str) -> Ints:
    """Milliseconds since 1970; nulls are now."""
    kind = array.type
    if pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("ms", kind.tz), safe=False).cast(pa.int64())
    elif pa.types.is_integer(kind):
        array = array.cast(pa.int64())
    else:
        raise WriteFailed(
            f"column {name!r} is of type {kind}; timestamps are timestamps, or integers in milliseconds",
            is_permanent=True,
        )
    return _filled(array, now_ms())


def read_partitions(array: pa.Array, name: str, null: int) -> Ints:
    """Partition numbers, `null` where there is none."""
    if not (pa.types.is_integer(array.type) or pa.types.is_null(array.type)):
        raise WriteFailed(
            f"column {name!r} is of type {array.type}; partitions are integers", is_permanent=True
        )
    return _filled(array.cast(pa.int64()), null)


def read_topics(array: pa.Array, name: str) -> tuple[list[str | None], Ints]:
    """The topics that rows name, and for each row which of them it names."""
    kind = _plain(array).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
        raise WriteFailed(f"column {name!r} is of type {kind}; topics are strings", is_permanent=True)
    encoded = _plain(array).cast(pa.string()).dictionary_encode(null_encoding="encode")
    topics: list[str | None] = encoded.dictionary.to_pylist()
    return topics, encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _filled(array: pa.Array, null: int) -> Ints:
    if array.null_count:
        array = pc.fill_null(array, null)
    numbers: Ints = array.to_numpy(zero_copy_only=False)
    return numbers


def read_headers(array: pa.Array, name: str) -> list[Headers]:
    """Headers, row by row: lists of pairs of a name and bytes."""
    return [_headers_of(of_row, name) for of_row in array.to_pylist()]


def _headers_of(of_row: Sequence[Any] | None, name: str) -> Headers:
    if not of_row:
        return ()
    try:
        return [_header(pair) for pair in of_row]
    except (TypeError, ValueError, KeyError) as error:
        raise WriteFailed(
            f"column {name!r} should hold lists of (key, value), or maps of string to binary: {error}",
            is_permanent=True,
        ) from error


def _header(pair: Any) -> tuple[str, bytes | None]:
    key, value = (pair["key"], pair["value"]) if isinstance(pair, dict) else pair
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(key, str) or not isinstance(value, bytes | None):
        raise TypeError(f"a header of {type(key).__name__} and {type(value).__name__}")
    return key, value


def order_by_partition(partitions: Ints) -> tuple[Ints | None, list[tuple[int, int, int]]]:
    """How to reorder rows so that those of one partition lie together, in their order; and the runs.

    A run is (partition, start, stop). None where the rows lie well already.
    """
    if not len(partitions):
        return None, []
    order: Ints | None = None
    if np.any(partitions[1:] < partitions[:-1]):
        # Numpy sorts 16 bits by radix, six times as fast as 64.
        narrow = partitions.astype(np.int16) if partitions.max() <= MAX_INT16 else partitions
        order = np.argsort(narrow, kind="stable")
        partitions = partitions[order]
    bounds = [0, *(np.flatnonzero(np.diff(partitions)) + 1).tolist(), len(partitions)]
    runs = [(int(partitions[start]), start, stop) for start, stop in pairwise(bounds)]
    return order, runs
