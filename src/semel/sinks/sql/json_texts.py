"""Nested values as JSON text: the one place with work for each row, since Arrow cannot write JSON."""

import json
from typing import Any

import pyarrow as pa


def json_texts(values: pa.Array) -> pa.Array:
    """Structs, maps and lists as strings; null stays null."""
    items = [_plain(item, values.type) for item in values.to_pylist()]
    return pa.array([None if item is None else json_text(item) for item in items], pa.large_string())


def row_text(row: pa.Table) -> str:
    """The first row for people to read, whatever may be wrong with it."""
    return json_text({name: _readable(row.column(name)) for name in row.column_names})


def json_text(item: object) -> str:
    """What JSON has no word for, such as a date or a decimal, is written as a string."""
    return json.dumps(item, default=str)


def _readable(column: pa.ChunkedArray) -> object:
    try:
        return column[0].as_py()
    except (OverflowError, ValueError):  # Python has no dates after the year 9999
        return column.slice(0, 1).combine_chunks().to_string().strip("[]\n ")


def _plain(item: Any, arrow_type: pa.DataType) -> object:
    """A value of a nested type as JSON has it. Maps come from Arrow as lists of pairs."""
    if item is None:
        return None
    if pa.types.is_map(arrow_type):
        return {str(key): _plain(value, arrow_type.item_type) for key, value in item}
    if pa.types.is_struct(arrow_type):
        return {field.name: _plain(item[field.name], field.type) for field in arrow_type}
    if pa.types.is_nested(arrow_type):
        return [_plain(value, arrow_type.value_type) for value in item]
    return item
