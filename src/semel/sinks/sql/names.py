"""Names of tables and columns: how they are written, and the ones that sinks make for themselves."""

import hashlib
from dataclasses import dataclass
from typing import Final

from semel.errors import ConfigError

SINKS_TABLE: Final = "semel_sinks"
DEAD_LETTERS_TABLE: Final = "semel_dead_letters"
STAGE_PREFIX: Final = "semel_stage_"
# What a direct writer merges from: a temporary table of the owner's session.
MERGE_TABLE: Final = "semel_merge"
# Columns that staged rows have beside their own.
WRITER_COLUMN: Final = "semel_writer"
DELETE_COLUMN: Final = "semel_delete"
ORDER_COLUMN_PREFIX: Final = "semel_order_"
RANK_COLUMN: Final = "semel_rank"

_KEY_CHARACTERS: Final = 16


@dataclass(slots=True, frozen=True)
class TableName:
    """A table, in a schema (MySQL: a database) or, with None, where the connection looks first."""

    schema: str | None
    name: str

    def __str__(self) -> str:
        return self.name if self.schema is None else f"{self.schema}.{self.name}"


def parse_table_name(text: str) -> TableName:
    """`orders`, `sales.orders`, or with what has dots in double quotes: `"my.schema"."my orders"`.

    Names are taken as they are written: nothing is folded to lower case.
    """
    parts = _split_quoted(text)
    if not 1 <= len(parts) <= 2 or not all(parts):
        raise ConfigError(
            f'{text!r} is not the name of a table: write table, schema.table or "schema"."table"'
        )
    return TableName(parts[0], parts[1]) if len(parts) == 2 else TableName(None, parts[0])


def sink_key(sink_id: str) -> str:
    """Stands for a sink's id where its length or characters would not fit, such as names of tables."""
    return hashlib.sha256(sink_id.encode()).hexdigest()[:_KEY_CHARACTERS]


def stage_prefix(sink_id: str) -> str:
    """How the names of a sink's staging tables begin."""
    return f"{STAGE_PREFIX}{sink_key(sink_id)}_"


def _split_quoted(text: str) -> list[str]:
    parts, part, is_quoted = [], "", False
    position = 0
    while position < len(text):
        character = text[position]
        if is_quoted and character == '"' and text[position + 1 : position + 2] == '"':
            part += '"'
            position += 1
        elif character == '"':
            is_quoted = not is_quoted
        elif character == "." and not is_quoted:
            parts.append(part)
            part = ""
        else:
            part += character
        position += 1
    if is_quoted:
        raise ConfigError(f"{text!r} has a double quote that is not closed")
    return [*parts, part]
