"""Which Arrow types fit which column types of MySQL and MariaDB."""

import re
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from semel.sinks.errors import InitFailed
from semel.sinks.sql.arrow import has_zone, is_binary, is_text

INTEGERS: Final = frozenset({"tinyint", "smallint", "mediumint", "int", "integer", "bigint"})
FLOATS: Final = frozenset({"float", "double", "real"})
DECIMALS: Final = frozenset({"decimal", "numeric"})
TEXTS: Final = frozenset(
    {"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "uuid", "inet4", "inet6"}
)
BINARIES: Final = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
MAX_DECIMAL_SCALE: Final = 30

# What text columns of tables that we make are like: compared byte by byte, as everywhere else.
OUR_TEXT: Final = "longtext CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
# What an index can hold, for key columns of tables that we make.
OUR_KEY_TEXT: Final = "varchar(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
OUR_KEY_BINARY: Final = "varbinary(255)"

_TYPE = re.compile(r"([a-z0-9]+)(?:\((\d+)(?:,(\d+))?\))?")


@dataclass(slots=True, frozen=True)
class MySQLType:
    """A type's name apart from its modifiers: `datetime(6)` is datetime, 6."""

    name: str
    precision: int | None = None
    scale: int | None = None


def parse_type(type_name: str) -> MySQLType:
    """What `information_schema` or CREATE TABLE says, taken apart."""
    found = _TYPE.match(type_name.lower())
    if found is None:
        return MySQLType(type_name)
    return MySQLType(found[1], int(found[2]) if found[2] else None, int(found[3]) if found[3] else None)


def refuses(arrow_type: pa.DataType, type_name: str) -> str | None:
    """Why such values cannot go into such a column; None if they can."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        arrow_type = arrow_type.storage_type
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if pa.types.is_null(arrow_type):
        return None  # nothing but nulls
    name = parse_type(type_name).name
    if name in TEXTS:
        return None if is_text(arrow_type) else "it takes text; cast the column to string"
    if name == "json":
        fits = is_text(arrow_type) or pa.types.is_nested(arrow_type)
        return None if fits else "it takes JSON as text, structs, maps or lists"
    if name in BINARIES:
        return None if is_binary(arrow_type) else "it takes binary"
    return _refuses_number(arrow_type, name) if name in NUMBERS else _refuses_time(arrow_type, name)


def _refuses_number(arrow_type: pa.DataType, name: str) -> str | None:
    if name in INTEGERS:
        fits = pa.types.is_integer(arrow_type) or (name == "tinyint" and pa.types.is_boolean(arrow_type))
        return None if fits else "it takes integers, and tinyint booleans, too"
    if name in FLOATS:
        fits = pa.types.is_floating(arrow_type) or pa.types.is_integer(arrow_type)
        return None if fits else "it takes floating-point numbers and integers"
    fits = pa.types.is_decimal(arrow_type) or pa.types.is_integer(arrow_type)
    return None if fits else "it takes decimals and integers; cast the column to decimal"


def _refuses_time(arrow_type: pa.DataType, name: str) -> str | None:
    if name == "date":
        return None if pa.types.is_date(arrow_type) else "it takes dates"
    if name == "time":
        return None if pa.types.is_time(arrow_type) else "it takes times of day"
    if name == "datetime":
        if not pa.types.is_timestamp(arrow_type):
            return "it takes timestamps"
        return (
            None
            if arrow_type.tz is None
            else (
                "the rows' timestamps have a time zone and the column has none; use a timestamp column, or "
                "cast them to the time zone that is meant"
            )
        )
    if name == "timestamp":
        if not pa.types.is_timestamp(arrow_type):
            return "it takes timestamps"
        return (
            None
            if arrow_type.tz is not None
            else ("the rows' timestamps have no time zone; give them one, since any would be a guess")
        )
    return f"{name} is not supported; write to a text column"


def type_for(arrow_type: pa.DataType) -> str:
    """The column type for values of an Arrow type."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        return type_for(arrow_type.storage_type)
    if pa.types.is_dictionary(arrow_type):
        return type_for(arrow_type.value_type)
    if pa.types.is_decimal(arrow_type) and 0 <= arrow_type.scale <= MAX_DECIMAL_SCALE:
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    for fits, type_name in _BY_ARROW:
        if fits(arrow_type):
            return type_name
    raise InitFailed(f"there is no MySQL type for Arrow's {arrow_type}: cast the column")


def key_type(type_name: str) -> str:
    """A type for a key column of a table that we make: an index takes no text of any length."""
    if type_name == OUR_TEXT:
        return OUR_KEY_TEXT
    return OUR_KEY_BINARY if type_name == "longblob" else type_name


NUMBERS: Final = INTEGERS | FLOATS | DECIMALS

_BY_ARROW: Final = (
    (pa.types.is_boolean, "tinyint(1)"),
    (pa.types.is_int8, "tinyint"),
    (pa.types.is_uint8, "tinyint unsigned"),
    (pa.types.is_int16, "smallint"),
    (pa.types.is_uint16, "smallint unsigned"),
    (pa.types.is_int32, "int"),
    (pa.types.is_uint32, "int unsigned"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_uint64, "bigint unsigned"),
    (pa.types.is_float64, "double"),
    (pa.types.is_floating, "float"),
    (is_text, OUR_TEXT),
    (is_binary, "longblob"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time(6)"),
    (has_zone, "timestamp(6)"),
    (pa.types.is_timestamp, "datetime(6)"),
    (pa.types.is_nested, "json"),
)
