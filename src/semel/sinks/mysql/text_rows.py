"""Arrow columns as the text that LOAD DATA reads, or as the literals of an INSERT, without a loop over rows.

Each column becomes one Arrow array of text, and Arrow joins the arrays element by element; the buffer of the
result is what is sent. Bytes travel as hexadecimal digits, so that the text is UTF-8 throughout, and the
server converts it to each column's own character set.
"""

import binascii
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pymysql.converters import escape_string

from semel.sinks.mysql.names import quote, quote_table
from semel.sinks.mysql.types import BINARIES, parse_type
from semel.sinks.sql.arrow import is_binary, is_text, singles
from semel.sinks.sql.columns import Column
from semel.sinks.sql.dialect import Form, Part
from semel.sinks.sql.failures import Cause, SqlFailure
from semel.sinks.sql.json_texts import json_texts
from semel.sinks.sql.names import DELETE_COLUMN, WRITER_COLUMN, TableName

T = TypeVar("T")

# How many rows are encoded at a time: their bytes are held once more while they are sent.
MAX_ENCODED_ROWS: Final = 16_384
# How much of it is handed on at a time.
MAX_PART_BYTES: Final = 8 << 20
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


@dataclass(slots=True, frozen=True)
class LinesForm(Form):
    """What LOAD DATA reads: fields end with a tab, and lines with a tab and a newline."""

    table: TableName
    columns: tuple[Column, ...]
    stamp: str | None

    @property
    def statement(self) -> str:
        targets: list[str] = []
        settings: list[str] = []
        for index, column in enumerate(self.columns):
            if parse_type(column.type_name).name in BINARIES:
                targets.append(f"@semel_{index}")
                settings.append(f"{quote(column.name)} = UNHEX(@semel_{index})")
            else:
                targets.append(quote(column.name))
        if self.stamp is not None:
            settings.append(f"{quote(WRITER_COLUMN)} = {text_literal(self.stamp)}")
        assigned = f" SET {', '.join(settings)}" if settings else ""
        return (
            f"LOAD DATA LOCAL INFILE 'semel' INTO TABLE {quote_table(self.table)} CHARACTER SET utf8mb4 "
            r"FIELDS TERMINATED BY '\t' ESCAPED BY '\\' LINES TERMINATED BY '\n' "
            f"({', '.join(targets)}, @semel_end){assigned}"
        )

    def parts(self, rows: pa.Table) -> Iterator[Part]:
        for part in sliced(rows):
            fields = [_load_field(field) for field in each_column(self.columns, part, _field)]
            yield from cut(_joined([*fields, "\n"], "\t", NULL_FIELD), MAX_PART_BYTES)


@dataclass(slots=True, frozen=True)
class TuplesForm(Form):
    """What follows VALUES in an INSERT, a statement's worth at a time: `(…),(…)`."""

    table: TableName
    columns: tuple[Column, ...]
    stamp: str | None
    max_bytes: int

    @property
    def statement(self) -> str:
        return f"INSERT INTO {quote_table(self.table)} ({listed(self.columns, self.stamp)}) VALUES "

    def parts(self, rows: pa.Table) -> Iterator[Part]:
        last = "" if self.stamp is None else f",{text_literal(self.stamp)}"
        for part in sliced(rows):
            fields = [_literal(field) for field in each_column(self.columns, part, _field)]
            inside = _joined(fields, ",", "NULL")
            for each in cut(_joined(["(", inside, f"{last}),"]), self.max_bytes):
                yield Part(each.rows, each.content[:-1])  # without the comma after the last


def sliced(rows: pa.Table) -> Iterator[pa.Table]:
    """As many rows at a time as are encoded at once."""
    for start in range(0, rows.num_rows, MAX_ENCODED_ROWS):
        yield rows.slice(start, MAX_ENCODED_ROWS)


def cut(rows: pa.LargeStringArray | pa.LargeBinaryArray, max_bytes: int) -> Iterator[Part]:
    """Encoded rows in parts of so many bytes; one that is too large goes alone."""
    _, offsets, values = rows.buffers()
    ends = np.frombuffer(offsets, np.int64)[rows.offset : rows.offset + len(rows) + 1]
    content = memoryview(values) if values is not None else memoryview(b"")
    first = 0
    while first < len(rows):
        last = max(int(np.searchsorted(ends, ends[first] + max_bytes, "right")) - 1, first + 1)
        yield Part(last - first, content[int(ends[first]) : int(ends[last])])
        first = last


def listed(columns: Sequence[Column], stamp: str | None) -> str:
    """The names of the columns that a form fills."""
    names = [column.name for column in columns] + ([] if stamp is None else [WRITER_COLUMN])
    return ", ".join(quote(name) for name in names)


def text_literal(text: str) -> str:
    return f"'{escape_string(text)}'"


def each_column(
    columns: Sequence[Column], part: pa.Table, encode: Callable[[Column, pa.Array], T]
) -> list[T]:
    """Every column, encoded. What cannot be said is an SqlFailure that names its column."""
    encoded = []
    for index, column in enumerate(columns):
        try:
            values = _whole(part.column(index))
            if column.is_required and values.null_count and parse_type(column.type_name).name == "timestamp":
                _refuse_nulls(values, columns, part)
            encoded.append(encode(column, values))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, OverflowError) as error:
            raise SqlFailure(f"column {column.name!r}: {error}", Cause.ROW) from error
    return encoded


def _refuse_nulls(values: pa.Array, columns: Sequence[Column], part: pa.Table) -> None:
    """Of what is not deleted. MariaDB writes the time of writing in place of a null, and so may MySQL."""
    is_missing = values.is_null()
    names = [column.name for column in columns]
    if DELETE_COLUMN in names:
        is_missing = pc.and_not(is_missing, _whole(part.column(names.index(DELETE_COLUMN))))
    if pc.any(is_missing).as_py():
        raise ValueError("it is null, and may not be: the server would write the current time instead")


def _whole(chunks: pa.ChunkedArray) -> pa.Array:
    values = chunks.combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks)
    return values.storage if isinstance(values, pa.ExtensionArray) else values


def _field(column: Column, values: pa.Array) -> Fields:
    kind = kind_of(values.type)
    if kind is Kind.BYTES:
        return Fields(kind, _hexadecimal(values.cast(pa.large_binary())))
    if pa.types.is_nested(values.type):
        return Fields(kind, json_texts(values))
    if kind is Kind.MOMENT:
        return Fields(kind, exact_moments(column, values).cast(TEXT))
    if pa.types.is_floating(values.type):
        # The shortest text of a small float is another number to a column that keeps more digits.
        values = values.cast(pa.float64())
        refuse_non_finite(values)
    refuse_lost_numbers(column, values)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    return Fields(kind, values.cast(TEXT))


def refuse_non_finite(values: pa.Array) -> None:
    """An INSERT would take `nan` for the name of a column."""
    if (row := pc.index(pc.is_finite(values), False).as_py()) >= 0:
        raise ValueError(f"{values[row].as_py()} is no number that MySQL has")


def refuse_lost_numbers(column: Column, values: pa.Array) -> None:
    """A server makes zero of what is too small for a float, and rounds integers without a word."""
    name = parse_type(column.type_name).name
    if name == "float":
        singles(values, column.type_name)
    elif name == "double" and pa.types.is_integer(values.type):
        values.cast(pa.float64())


def _hexadecimal(values: pa.LargeBinaryArray) -> pa.LargeStringArray:
    _, offset_buffer, content = values.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[values.offset : values.offset + len(values) + 1]
    digits = b"" if content is None else binascii.hexlify(memoryview(content)[offsets[0] : offsets[-1]])
    bitmap = None if not values.null_count else pc.is_valid(values).buffers()[1]
    doubled = pa.py_buffer(((offsets - offsets[0]) * 2).tobytes())
    return pa.LargeStringArray.from_buffers(len(values), doubled, pa.py_buffer(digits), bitmap)


def exact_moments(column: Column, values: pa.Array) -> pa.Array:
    """Dates by days, times and timestamps by microseconds; refuses those that the column would round."""
    if pa.types.is_date(values.type):
        return values.cast(pa.date32())
    is_time = pa.types.is_time(values.type)
    # A time zone is one of display: the value is in UTC, and so is the session.
    exact = values.cast(pa.time64("us") if is_time else pa.timestamp("us"))
    digits = parse_type(column.type_name).precision or 0
    step = 10 ** (MICROSECOND_DIGITS - min(digits, MICROSECOND_DIGITS))
    micros = pc.fill_null(exact.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    if (micros % step).any():
        row = int(np.flatnonzero(micros % step)[0])
        raise ValueError(
            f"{moment_text(exact, row)} does not fit {column.type_name}, which would round it: give the "
            f"column more digits, such as ({MICROSECOND_DIGITS})"
        )
    return exact


def moment_text(moments: pa.Array, row: int) -> str:
    """One of them for a message: Python has no years after 9999."""
    return str(moments.slice(row, 1).cast(TEXT)[0])


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
