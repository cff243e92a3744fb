"""Arrow record batches from Kafka's record batches, column by column.

Names, types and nulls are those of the rows of Spark's own Kafka source. Only headers are looked at one by
one, and only where there are any.
"""

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from semel.errors import ProtocolError
from semel.spark.source_offsets import OffsetRange
from semel.wire.batch import BatchHeader, Buffer
from semel.wire.columns import BinaryColumn, Bools, RecordColumns, read_columns_of
from semel.wire.records import HEADER_KEY_ERRORS, Headers, unpack_body

HEADERS_TYPE: Final = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
)
SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
    ]
)
SCHEMA_WITH_HEADERS: Final = SCHEMA.append(pa.field("headers", HEADERS_TYPE))

CREATE_TIME: Final = 0
APPEND_TIME: Final = 1
US_PER_MS: Final = 1000
MAX_TIMESTAMP_MS: Final = (2**63 - 1) // US_PER_MS
# Batches are read and handed to Spark together up to so many records or bytes, unpacked: either has a fixed
# cost.
GROUP_RECORDS: Final = 8 * 1024
GROUP_BYTES: Final = 2 * 1024 * 1024

Batch: TypeAlias = tuple[BatchHeader, memoryview]
Unpacked: TypeAlias = tuple[BatchHeader, Buffer]


def to_arrow(
    batches: Iterable[Batch], wanted: OffsetRange, *, include_headers: bool
) -> Iterator[pa.RecordBatch]:
    """The records of these batches that lie in the range, in few Arrow batches."""
    for group in _groups(batches):
        yield _convert(group, wanted, include_headers)


def _groups(batches: Iterable[Batch]) -> Iterator[list[Unpacked]]:
    group: list[Unpacked] = []
    records = size_bytes = 0
    for header, batch in batches:
        body = unpack_body(batch, header)
        group.append((header, body))
        records += header.record_count
        size_bytes += len(body)
        if records >= GROUP_RECORDS or size_bytes >= GROUP_BYTES:
            yield group
            group, records, size_bytes = [], 0, 0
    if group:
        yield group


def _convert(group: list[Unpacked], wanted: OffsetRange, include_headers: bool) -> pa.RecordBatch:
    columns = read_columns_of(group)
    count = len(columns.offsets)
    arrays = [
        _binary(columns.keys),
        _binary(columns.values),
        _repeated(wanted.where.topic, count),
        pa.array(np.full(count, wanted.where.partition, np.int32)),
        pa.array(columns.offsets),
        _timestamps(columns),
        _timestamp_types(group),
    ]
    if include_headers:
        arrays.append(_headers(columns.headers, count))
    schema = SCHEMA_WITH_HEADERS if include_headers else SCHEMA
    whole = pa.RecordBatch.from_arrays(arrays, schema=schema)
    if group[0][0].base_offset >= wanted.start and group[-1][0].last_offset < wanted.end:
        return whole
    first, last = np.searchsorted(columns.offsets, [wanted.start, wanted.end]).tolist()
    return whole.slice(first, last - first)


def _binary(column: BinaryColumn) -> pa.BinaryArray:
    offsets = column.offsets.astype(np.int32)
    buffers = [_bitmap(column.valid), pa.py_buffer(offsets), pa.py_buffer(column.buffer)]
    return pa.BinaryArray.from_buffers(pa.binary(), len(column), buffers)


def _bitmap(valid: Bools | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _repeated(text: str, count: int) -> pa.StringArray:
    encoded = text.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * len(encoded)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(encoded * count))


def _timestamps(columns: RecordColumns) -> pa.TimestampArray:
    timestamps = columns.timestamps
    if len(timestamps) and (timestamps.max() > MAX_TIMESTAMP_MS or timestamps.min() < -MAX_TIMESTAMP_MS):
        raise ProtocolError(
            f"a timestamp at or after offset {columns.offsets[0]} is beyond the years that Spark knows"
        )
    return pa.array(timestamps * US_PER_MS).view(SCHEMA.field("timestamp").type)


def _timestamp_types(group: list[Unpacked]) -> pa.Int32Array:
    types = [APPEND_TIME if header.has_append_time else CREATE_TIME for header, _ in group]
    return pa.array(np.repeat(np.array(types, np.int32), [header.record_count for header, _ in group]))


def _headers(headers: list[Headers] | None, count: int) -> pa.ListArray:
    if headers is None:
        return pa.nulls(count, HEADERS_TYPE)
    listed = [[(_text(key), value) for key, value in each] if each else None for each in headers]
    return pa.array(listed, HEADERS_TYPE)


def _text(key: str) -> str:
    """Java's reading of a header's name: what is no UTF-8 becomes the replacement character."""
    return key if key.isascii() else key.encode(errors=HEADER_KEY_ERRORS).decode(errors="replace")
