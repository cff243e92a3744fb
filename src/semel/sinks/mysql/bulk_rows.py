"""Arrow columns as the rows of MariaDB's array binding, without a Python object a row.

A prepared INSERT is executed for many rows at once: the types of its parameters, then for each row each
field's indicator and, unless that says null, its binary value. The server parses no text, and so needs less
CPU than for LOAD DATA. Each column becomes Arrow arrays of such fields (numpy lays out what has a fixed
width), and Arrow joins them element by element; the buffer of the result is what is sent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pymysql.constants import FIELD_TYPE

from semel.sinks.mysql.names import quote_table
from semel.sinks.mysql.text_rows import (
    TEXT,
    cut,
    each_column,
    exact_moments,
    listed,
    moment_text,
    refuse_lost_numbers,
    refuse_non_finite,
    sliced,
    text_literal,
)
from semel.sinks.sql.arrow import filled, is_binary
from semel.sinks.sql.columns import Column
from semel.sinks.sql.dialect import Form, Part
from semel.sinks.sql.json_texts import json_texts
from semel.sinks.sql.names import TableName

BYTES: Final = pa.large_binary()
NULL_INDICATOR: Final = b"\x01"
UNSIGNED: Final = 0x80

# The days of 0000-01-01 and 9999-12-31, counted from 1970-01-01: a year beyond would wrap in its two bytes.
FIRST_DAY: Final = -719_528
LAST_DAY: Final = 2_932_896
SECOND_US: Final = 1_000_000
DAY_US: Final = 86_400 * SECOND_US

_EMPTY: Final = pa.scalar(b"", BYTES)

# Lengths below 251 are a byte. Others follow a byte that says in how many bytes, the least significant first.
SHORT_LENGTHS: Final = 251
_LENGTH_LIMITS: Final = (SHORT_LENGTHS, 1 << 16, 1 << 24)
_LENGTH_MARKS: Final = np.array([0, 0xFC, 0xFD, 0xFE], np.uint8)
_HEADER_WIDTHS: Final = np.array([2, 4, 5, 10])
_HEADER: Final = np.dtype([("indicator", "u1"), ("mark", "u1"), ("length", "<u8")])

_DATE_PARTS: Final = [("indicator", "u1"), ("size", "u1"), ("year", "<u2"), ("month", "u1"), ("day", "u1")]
_CLOCK_PARTS: Final = [("hour", "u1"), ("minute", "u1"), ("second", "u1"), ("us", "<u4")]
_DATE: Final = np.dtype(_DATE_PARTS)
_DATETIME: Final = np.dtype([*_DATE_PARTS, *_CLOCK_PARTS])
_TIME: Final = np.dtype(
    [("indicator", "u1"), ("size", "u1"), ("is_negative", "u1"), ("days", "<u4"), *_CLOCK_PARTS]
)
# The indicator and the size itself are not counted.
_UNCOUNTED_BYTES: Final = 2

# How fixed widths are sent: the type, whether it is unsigned, and its layout.
_NUMBERS: Final = {
    pa.int8(): (FIELD_TYPE.TINY, 0, "i1"),
    pa.uint8(): (FIELD_TYPE.TINY, UNSIGNED, "u1"),
    pa.int16(): (FIELD_TYPE.SHORT, 0, "<i2"),
    pa.uint16(): (FIELD_TYPE.SHORT, UNSIGNED, "<u2"),
    pa.int32(): (FIELD_TYPE.LONG, 0, "<i4"),
    pa.uint32(): (FIELD_TYPE.LONG, UNSIGNED, "<u4"),
    pa.int64(): (FIELD_TYPE.LONGLONG, 0, "<i8"),
    pa.uint64(): (FIELD_TYPE.LONGLONG, UNSIGNED, "<u8"),
    pa.float32(): (FIELD_TYPE.FLOAT, 0, "<f4"),
    pa.float64(): (FIELD_TYPE.DOUBLE, 0, "<f8"),
}


@dataclass(slots=True, frozen=True)
class Fields:
    """One column: the type of its parameter, and arrays that, joined in order, are its fields."""

    type_code: int
    type_flags: int
    pieces: list[pa.LargeBinaryArray]


@dataclass(slots=True, frozen=True)
class BulkForm(Form):
    """What a bulk execution of a prepared INSERT is given: the parameters' types, and rows."""

    table: TableName
    columns: tuple[Column, ...]
    stamp: str | None
    max_bytes: int

    # The server takes longer for a row than others do, and little for an execution: it is to begin soon.
    frame_rows: ClassVar[int] = 10_000

    @property
    def statement(self) -> str:
        values = ["?"] * len(self.columns) + ([] if self.stamp is None else [text_literal(self.stamp)])
        names = listed(self.columns, self.stamp)
        return f"INSERT INTO {quote_table(self.table)} ({names}) VALUES ({', '.join(values)})"

    def parts(self, rows: pa.Table) -> Iterator[Part]:
        for part in sliced(rows):
            fields = each_column(self.columns, part, _fields)
            types = bytes(byte for field in fields for byte in (field.type_code, field.type_flags))
            for each in cut(_joined([piece for field in fields for piece in field.pieces]), self.max_bytes):
                yield Part(each.rows, memoryview(types + each.content))


def _joined(pieces: list[pa.LargeBinaryArray]) -> pa.LargeBinaryArray:
    # What is null has its indicator in the piece before, and no value.
    return pc.binary_join_element_wise(*pieces, _EMPTY, null_handling="replace", null_replacement="")


def _fields(column: Column, values: pa.Array) -> Fields:
    arrow_type = values.type
    if pa.types.is_null(arrow_type):
        return Fields(FIELD_TYPE.NULL, 0, [pa.repeat(pa.scalar(NULL_INDICATOR, BYTES), len(values))])
    if pa.types.is_temporal(arrow_type):
        return _moments(exact_moments(column, values))
    if pa.types.is_boolean(arrow_type):
        return _numbers(values.cast(pa.int8()))
    if pa.types.is_floating(arrow_type):
        values = values.cast(pa.float32()) if pa.types.is_float16(arrow_type) else values
        refuse_non_finite(values)
        refuse_lost_numbers(column, values)
        return _numbers(values)
    if pa.types.is_integer(arrow_type):
        refuse_lost_numbers(column, values)
        return _numbers(values)
    if is_binary(arrow_type):
        # Of this type the server takes bytes as they are, and of text it converts the character set.
        return Fields(FIELD_TYPE.BLOB, 0, _sized(values.cast(BYTES)))
    # Decimals, too: as text they are read as LOAD DATA reads them, and none of their digits is dropped.
    texts = json_texts(values) if pa.types.is_nested(arrow_type) else values.cast(TEXT)
    return Fields(FIELD_TYPE.VAR_STRING, 0, _sized(texts.cast(BYTES)))


def _numbers(values: pa.Array) -> Fields:
    type_code, type_flags, layout = _NUMBERS[values.type]
    return Fields(type_code, type_flags, [_of_one_width(values, filled(values), layout)])


def _of_one_width(values: pa.Array, numbers: npt.NDArray[Any], layout: str) -> pa.LargeBinaryArray:
    fields = np.zeros(len(numbers), [("indicator", "u1"), ("value", layout)])
    fields["value"] = numbers
    return _regular(values, fields)


def _regular(values: pa.Array, fields: npt.NDArray[Any]) -> pa.LargeBinaryArray:
    """Fields that numpy has laid out; those of nulls are replaced."""
    array = _array(np.arange(len(fields) + 1, dtype=np.int64) * fields.dtype.itemsize, fields)
    return array if not values.null_count else pc.if_else(values.is_valid(), array, NULL_INDICATOR)


def _array(offsets: npt.NDArray[np.int64], content: npt.NDArray[Any]) -> pa.LargeBinaryArray:
    """Binary values out of numpy's memory, without a copy."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    return pa.Array.from_buffers(BYTES, len(offsets) - 1, buffers)


# Fields of any width: a header with their length, then their bytes.


def _sized(values: pa.LargeBinaryArray) -> list[pa.LargeBinaryArray]:
    lengths = filled(pc.binary_length(values))
    if not len(lengths) or lengths.max() < SHORT_LENGTHS:
        return [_of_one_width(values, lengths, "u1"), values]
    return [_headers(values, lengths), values]


def _headers(values: pa.LargeBinaryArray, lengths: npt.NDArray[Any]) -> pa.LargeBinaryArray:
    """All as wide as the widest, of which each keeps its first bytes."""
    kinds = np.searchsorted(_LENGTH_LIMITS, lengths, "right")
    headers = np.zeros(len(lengths), _HEADER)
    headers["mark"] = np.where(kinds == 0, lengths, _LENGTH_MARKS[kinds])
    headers["length"] = lengths
    widths = _HEADER_WIDTHS[kinds]
    if values.null_count:
        is_null = values.is_null().to_numpy(zero_copy_only=False)
        headers["indicator"] = is_null
        widths = np.where(is_null, 1, widths)
    kept = np.arange(_HEADER.itemsize) < widths[:, np.newaxis]
    content = headers.view(np.uint8).reshape(len(headers), _HEADER.itemsize)[kept]
    return _array(np.concatenate(([0], np.cumsum(widths))), content)


# Dates and times


def _moments(exact: pa.Array) -> Fields:
    """`exact` has dates by days, or times and timestamps by microseconds."""
    if pa.types.is_date(exact.type):
        days = filled(exact.cast(pa.int32()))
        dates = np.zeros(len(days), _DATE)
        _set_date(dates, days, exact)
        return Fields(FIELD_TYPE.DATE, 0, [_regular(exact, dates)])
    days, micros = np.divmod(filled(exact.cast(pa.int64())), DAY_US)
    if pa.types.is_time(exact.type):
        _refuse(days != 0, exact)
        times = np.zeros(len(days), _TIME)
        times["size"] = _TIME.itemsize - _UNCOUNTED_BYTES
        _set_clock(times, micros)
        return Fields(FIELD_TYPE.TIME, 0, [_regular(exact, times)])
    moments = np.zeros(len(days), _DATETIME)
    _set_date(moments, days, exact)
    _set_clock(moments, micros)
    return Fields(FIELD_TYPE.DATETIME, 0, [_regular(exact, moments)])


def _set_date(moments: npt.NDArray[Any], days: npt.NDArray[Any], exact: pa.Array) -> None:
    _refuse((days < FIRST_DAY) | (days > LAST_DAY), exact)
    dates = pa.array(days, pa.int32()).cast(pa.date32())
    moments["size"] = moments.dtype.itemsize - _UNCOUNTED_BYTES
    for name, part_of in (("year", pc.year), ("month", pc.month), ("day", pc.day)):
        moments[name] = part_of(dates).to_numpy()


def _set_clock(moments: npt.NDArray[Any], micros: npt.NDArray[Any]) -> None:
    """`micros` are those of the day."""
    seconds, moments["us"] = np.divmod(micros, SECOND_US)
    minutes, moments["second"] = np.divmod(seconds, 60)
    moments["hour"], moments["minute"] = np.divmod(minutes, 60)


def _refuse(is_wrong: npt.NDArray[np.bool_], exact: pa.Array) -> None:
    if is_wrong.any():
        row = int(np.flatnonzero(is_wrong)[0])
        raise ValueError(f"{moment_text(exact, row)} is no date or time that MySQL has")
