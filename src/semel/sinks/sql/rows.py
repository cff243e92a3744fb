"""Rows, as a writer is given them, made into an Arrow table with the columns that are loaded."""

from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from semel.sinks.errors import WriteFailed
from semel.sinks.sink import Rows
from semel.sinks.sql.columns import Column, Layout
from semel.sinks.sql.dialect import Dialect
from semel.sinks.sql.json_texts import json_text
from semel.sinks.sql.names import DELETE_COLUMN
from semel.sinks.sql.target import Mode

# What a change column may say, in any case: the words of change data capture tools, and their letters.
DELETE_CHANGES: Final = ("d", "delete", "-d")
UPSERT_CHANGES: Final = ("c", "r", "u", "i", "insert", "update", "upsert", "create", "read", "+i", "+u")
JSON_TYPES: Final = frozenset({"json", "jsonb"})


class Shaper:
    """Makes tables of `layout.staged` out of what a writer is given; checks each new schema once."""

    def __init__(self, layout: Layout, dialect: Dialect, schema: pa.Schema | None) -> None:
        self._layout = layout
        self._dialect = dialect
        self._schema = schema
        self._checked: pa.Schema | None = None
        self._sources = [column.source for column in layout.staged if column.source]
        if layout.change_column is not None and layout.change_column not in self._sources:
            self._sources.append(layout.change_column)

    def shape(self, rows: Rows) -> pa.Table:
        """The rows with the columns of `layout.staged`, in order; WriteFailed names what does not fit."""
        table = self._table(rows)
        if table.schema != self._checked:
            self._check(table.schema)
        table = _decoded(table)
        self._check_nulls(table)
        return pa.table([self._column(table, column) for column in self._layout.staged], names=self.names)

    @property
    def names(self) -> list[str]:
        return [column.name for column in self._layout.staged]

    def _table(self, rows: Rows) -> pa.Table:
        if isinstance(rows, pa.Table):
            return rows
        if isinstance(rows, pa.RecordBatch):
            return pa.Table.from_batches([rows])
        return self._from_mappings(rows)

    def _from_mappings(self, rows: Sequence[Mapping[str, object]]) -> pa.Table:
        known = set(self._sources)
        for number, row in enumerate(rows):
            if row.keys() != known:
                _refuse_columns(known, set(row), f"row {number} of this write")
        types = {column.source: column.type_name for column in self._layout.staged}
        return pa.table(
            {
                source: self._array(source, [row[source] for row in rows], types.get(source, ""))
                for source in self._sources
            }
        )

    def _array(self, source: str, values: list[object], type_name: str) -> pa.Array:
        if type_name in JSON_TYPES:
            values = [json_text(value) if isinstance(value, dict | list) else value for value in values]
        if any(isinstance(value, UUID) for value in values):
            values = [str(value) if isinstance(value, UUID) else value for value in values]
        arrow_type = self._schema.field(source).type if self._schema is not None else None
        try:
            return pa.array(values, type=arrow_type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise WriteFailed(f"column {source!r}: {error}", is_permanent=True) from error

    def _check(self, schema: pa.Schema) -> None:
        if set(schema.names) != set(self._sources) or len(schema.names) != len(self._sources):
            _refuse_columns(set(self._sources), set(schema.names), "what was written")
        for column in self._layout.staged:
            if not column.source:
                continue
            arrow_type = schema.field(column.source).type
            if (reason := self._dialect.refuses(arrow_type, column.type_name)) is not None:
                raise WriteFailed(
                    f"column {column.source!r} ({arrow_type}) does not fit {self._layout.table}."
                    f"{column.name} ({column.type_name}): {reason}",
                    is_permanent=True,
                )
        self._checked = schema

    def _check_nulls(self, table: pa.Table) -> None:
        needed = (*self._layout.keys, *self._layout.order_by)
        for column in self._layout.staged:
            if column.name in needed and table.column(column.source).null_count:
                raise WriteFailed(
                    f"column {column.source!r} is null in row {_first_null(table.column(column.source))} of "
                    f"this write: keys and order_by columns may not be null",
                    is_permanent=True,
                )

    def _column(self, table: pa.Table, column: Column) -> pa.ChunkedArray | pa.Array:
        if column.name != DELETE_COLUMN:
            return table.column(column.source)
        if self._layout.change_column is not None:
            return _deletions(table.column(self._layout.change_column), self._layout.change_column)
        return pa.repeat(self._layout.mode is Mode.DELETE, table.num_rows)


def _decoded(table: pa.Table) -> pa.Table:
    """Without dictionaries, which the encoders do not know."""
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(field.type.value_type))
    return table


def _deletions(changes: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """True where the row is a deletion. A value that says neither is refused: guessing would lose rows."""
    if pa.types.is_boolean(changes.type) and not changes.null_count:
        return changes
    if not (pa.types.is_string(changes.type) or pa.types.is_large_string(changes.type)):
        raise WriteFailed(
            f"change column {name!r} is {changes.type} and may not be null: give text ('insert', 'update', "
            f"'delete', or c, u, d) or a boolean that is true for deletions",
            is_permanent=True,
        )
    words = pc.utf8_lower(changes)
    is_delete = pc.is_in(words, value_set=pa.array(DELETE_CHANGES))
    is_known = pc.or_(is_delete, pc.is_in(words, value_set=pa.array(UPSERT_CHANGES)))
    if (row := pc.index(is_known, False).as_py()) >= 0:
        raise WriteFailed(
            f"change column {name!r} is {changes[row].as_py()!r} in row {row} of this write: neither an "
            f"insert, an update nor a delete",
            is_permanent=True,
        )
    return is_delete


def _first_null(column: pa.ChunkedArray) -> int:
    return int(pc.index(pc.is_null(column), True).as_py())


def _refuse_columns(known: set[str], given: set[str], where: str) -> None:
    if missing := sorted(known - given):
        raise WriteFailed(f"{where} has no column {missing[0]!r}", is_permanent=True)
    if unknown := sorted(given - known):
        raise WriteFailed(
            f"{where} has a column {unknown[0]!r} that goes nowhere: map it with columns=, or leave it out",
            is_permanent=True,
        )
    raise WriteFailed(f"{where} has a column twice", is_permanent=True)
