"""Arrow columns as the text that LOAD DATA reads, or as the literals of an INSERT, without a loop over rows.

Each column becomes one Arrow array of text, and Arrow joins the arrays element by element; the buffer of the
result is what is sent. Bytes travel as hexadecimal digits, so that the text is UTF-8 throughout, and the
server converts it to each column's own character set.
"""

import binascii
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.sinks.mysql.types import is_binary, is_text, parse_type
from semel.sinks.sql.columns import Column
from semel.sinks.sql.failures import Cause, SqlFailure
from semel.sinks.sql.json_texts import json_texts

# How many rows are encoded at a time: their bytes are held once more while they are sent.
MAX_ENCODED_ROWS: Final = 16_384
TEXT: Final = pa.large_string()
MICROSECOND_DIGITS: Final = 6
# What LOAD DATA must not find in a field as it is, and what it reads in its place.
LOAD_ESCAPES: Final = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\0", "\\0"))
LITERAL_ESCAPES: Final = (("\\", "\\\\"), ("'", "\\'"))
NULL_FIELD: Final = "\\N"


class Kind(Enum):
    NUMBER = "number"
    MOMENT = "moment"  # dates and times: in quotes, with nothing to escape
    TEXT = "text"
    BYTES = "bytes"  # as hexadecimal digits


class Fields:
    """One column's values as text, with nulls."""

    __slots__ = ("kind", "values")

    def __init__(self, kind: Kind, values: pa.LargeStringArray) -> None:
        self.kind = kind
        self.values = values


def kind_of(arrow_type: pa.DataType) -> Kind:
    if is_binary(arrow_type):
        return Kind.BYTES
    if is_text(arrow_type) or pa.types.is_nested(arrow_type):
        return Kind.TEXT
    return Kind.MOMENT if pa.types.is_temporal(arrow_type) else Kind.NUMBER


def lines(columns: Sequence[Column], rows: pa.Table) -> Iterator[memoryview]:
    """What LOAD DATA reads, a part at a time: fields end with a tab, and lines with a tab and a newline."""
    for part in _parts(rows):
        fields = [_load_field(field) for field in _fields(columns, part)]
        yield _content(_joined([*fields, "\n"], "\t", NULL_FIELD))


def tuples(columns: Sequence[Column], rows: pa.Table, last: str, max_bytes: int) -> Iterator[memoryview]:
    """What follows VALUES, a statement's worth at a time: `(…),(…)`. `last` ends each tuple, as it stands."""
    for part in _parts(rows):
        fields = [_literal(field) for field in _fields(columns, part)]
        inside = _joined(fields, ",", "NULL")
        joined = _joined(["(", inside, f"{last}),"])
        content = _content(joined)
        ends = np.frombuffer(joined.buffers()[1], np.int64)[joined.offset : joined.offset + len(joined) + 1]
        yield from _split(content, ends - ends[0], max_bytes)


def _split(
    content: memoryview, ends: np.ndarray[tuple[int], np.dtype[np.int64]], max_bytes: int
) -> Iterator[memoryview]:
    """Whole tuples, as many as fit; without the comma after the last. One that is too large goes alone."""
    first = 0
    while first < len(ends) - 1:
        last = max(int(np.searchsorted(ends, ends[first] + max_bytes, "right")) - 1, first + 1)
        yield content[int(ends[first]) : int(ends[last]) - 1]
        first = last


def _parts(rows: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, rows.num_rows, MAX_ENCODED_ROWS):
        yield rows.slice(start, MAX_ENCODED_ROWS)


def _content(joined: pa.LargeStringArray) -> memoryview:
    _, offsets, values = joined.buffers()
    ends = np.frombuffer(offsets, np.int64)
    return memoryview(values)[int(ends[joined.offset]) : int(ends[joined.offset + len(joined)])]


def _fields(columns: Sequence[Column], part: pa.Table) -> list[Fields]:
    found = []
    for index, column in enumerate(columns):
        try:
            found.append(_field(column, part.column(index).combine_chunks()))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise SqlFailure(f"column {column.name!r}: {error}", Cause.ROW) from error
    return found


def _field(column: Column, values: pa.Array) -> Fields:
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks)
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    kind = kind_of(values.type)
    if kind is Kind.BYTES:
        return Fields(kind, _hexadecimal(values.cast(pa.large_binary())))
    if pa.types.is_nested(values.type):
        return Fields(kind, json_texts(values))
    if kind is Kind.MOMENT:
        return Fields(kind, _moments(column, values))
    if pa.types.is_floating(values.type):
        _refuse_non_finite(values)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    return Fields(kind, values.cast(TEXT))


def _refuse_non_finite(values: pa.Array) -> None:
    """An INSERT would take `nan` for the name of a column."""
    if (row := pc.index(pc.is_finite(values), False).as_py()) >= 0:
        raise ValueError(f"{values[row].as_py()} is no number that MySQL has")


def _hexadecimal(values: pa.LargeBinaryArray) -> pa.LargeStringArray:
    _, offset_buffer, content = values.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[values.offset : values.offset + len(values) + 1]
    digits = b"" if content is None else binascii.hexlify(memoryview(content)[offsets[0] : offsets[-1]])
    bitmap = None if not values.null_count else pc.is_valid(values).buffers()[1]
    doubled = pa.py_buffer(((offsets - offsets[0]) * 2).tobytes())
    return pa.LargeStringArray.from_buffers(len(values), doubled, pa.py_buffer(digits), bitmap)


def _moments(column: Column, values: pa.Array) -> pa.LargeStringArray:
    if pa.types.is_date(values.type):
        return values.cast(pa.date32()).cast(TEXT)
    is_time = pa.types.is_time(values.type)
    # A time zone is one of display: the value is in UTC, and so is the session.
    exact = values.cast(pa.time64("us") if is_time else pa.timestamp("us"))
    digits = parse_type(column.type_name).precision or 0
    step = 10 ** (MICROSECOND_DIGITS - min(digits, MICROSECOND_DIGITS))
    micros = pc.fill_null(exact.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    if (micros % step).any():
        row = int(np.flatnonzero(micros % step)[0])
        raise ValueError(
            f"{values[row].as_py()} does not fit {column.type_name}, which would round it: give the column "
            f"more digits, such as ({MICROSECOND_DIGITS})"
        )
    return exact.cast(TEXT)


def _load_field(field: Fields) -> pa.LargeStringArray:
    return _escaped(field.values, LOAD_ESCAPES) if field.kind is Kind.TEXT else field.values


def _literal(field: Fields) -> pa.LargeStringArray:
    if field.kind is Kind.NUMBER:
        return field.values
    if field.kind is Kind.BYTES:
        return _joined(["X'", field.values, "'"])
    values = _escaped(field.values, LITERAL_ESCAPES) if field.kind is Kind.TEXT else field.values
    return _joined(["'", values, "'"])


def _joined(
    parts: Sequence[pa.LargeStringArray | str], separator: str = "", null: str | None = None
) -> pa.LargeStringArray:
    """The parts of each row, one after the other. A null makes all of it null, or is written as `null`."""
    scalars = [pa.scalar(part, TEXT) if isinstance(part, str) else part for part in (*parts, separator)]
    if null is None:
        return pc.binary_join_element_wise(*scalars)
    return pc.binary_join_element_wise(*scalars, null_handling="replace", null_replacement=null)


def _escaped(values: pa.LargeStringArray, escapes: Sequence[tuple[str, str]]) -> pa.LargeStringArray:
    for found, written in escapes:
        if pc.any(pc.match_substring(values, found)).as_py():
            values = pc.replace_substring(values, found, written)
    return values
