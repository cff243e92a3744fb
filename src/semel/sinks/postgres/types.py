"""PostgreSQL's types: which Arrow types fit them, and which of them an Arrow type gets in a table that we
create.

Whether a *value* fits (an integer in range, a decimal without loss) is checked when it is encoded; what is
refused here could never fit, or only by a guess such as a time zone.
"""

import re
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from semel.sinks.errors import InitFailed
from semel.sinks.sql.arrow import has_zone, is_binary, is_text

# The number that arrays say their elements are of, from PostgreSQL's catalogue of built-in types.
OIDS: Final = {
    "boolean": 16,
    "bytea": 17,
    "bigint": 20,
    "smallint": 21,
    "integer": 23,
    "text": 25,
    "json": 114,
    "real": 700,
    "double precision": 701,
    "character": 1042,
    "character varying": 1043,
    "date": 1082,
    "time without time zone": 1083,
    "timestamp without time zone": 1114,
    "timestamp with time zone": 1184,
    "interval": 1186,
    "numeric": 1700,
    "uuid": 2950,
    "jsonb": 3802,
}
INTEGERS: Final = ("smallint", "integer", "bigint")
FLOATS: Final = ("real", "double precision")
TEXTS: Final = ("text", "character varying", "character", "citext", "name", "xml")
JSONS: Final = ("json", "jsonb")

_MODIFIED = re.compile(r"\((\d+)(?:,(-?\d+))?\)")


@dataclass(slots=True, frozen=True)
class PgType:
    """A type's name apart from its modifiers: `numeric(10,2)[]` is numeric, 10, 2, an array."""

    name: str
    precision: int | None = None
    scale: int | None = None
    is_array: bool = False

    @property
    def is_enum(self) -> bool:
        """`describe` writes the names of enums, and of nothing else, in quotes."""
        return self.name.startswith('"')


def parse_type(type_name: str) -> PgType:
    """What `format_type` wrote, taken apart."""
    is_array = type_name.endswith("[]")
    text = type_name.removesuffix("[]")
    if text.startswith('"'):
        return PgType(text, is_array=is_array)
    found = _MODIFIED.search(text)
    if found is None:
        return PgType(text, is_array=is_array)
    name = text[: found.start()] + text[found.end() :]
    scale = int(found[2]) if found[2] else (0 if name == "numeric" else None)
    return PgType(name, int(found[1]), scale, is_array)


def refuses(arrow_type: pa.DataType, type_name: str) -> str | None:
    """Why such values cannot go into such a column; None if they can."""
    pg_type = parse_type(type_name)
    if isinstance(arrow_type, pa.BaseExtensionType):
        arrow_type = arrow_type.storage_type
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if pa.types.is_null(arrow_type):
        return None  # nothing but nulls
    if pg_type.is_array:
        if not _is_list(arrow_type):
            return "an array takes lists"
        if pg_type.is_enum or pg_type.name not in OIDS:
            return "arrays of this type are not supported"
        return refuses(arrow_type.value_type, type_name.removesuffix("[]"))
    return _refuses_value(arrow_type, pg_type)


def _refuses_value(arrow_type: pa.DataType, pg_type: PgType) -> str | None:
    name = pg_type.name
    if pg_type.is_enum or name in TEXTS:
        return None if is_text(arrow_type) else "it takes text; cast the column to string"
    if name in JSONS:
        fits = is_text(arrow_type) or pa.types.is_nested(arrow_type)
        return None if fits else "it takes JSON as text, structs, maps or lists"
    if name in INTEGERS:
        return None if pa.types.is_integer(arrow_type) else "it takes integers"
    if name in FLOATS:
        fits = pa.types.is_floating(arrow_type) or pa.types.is_integer(arrow_type)
        return None if fits else "it takes floating-point numbers and integers"
    if name == "numeric":
        fits = pa.types.is_decimal(arrow_type) or pa.types.is_integer(arrow_type)
        return None if fits else "it takes decimals and integers; cast the column to decimal"
    if name == "bytea":
        return None if is_binary(arrow_type) else "it takes binary"
    if name == "uuid":
        fits = is_text(arrow_type) or arrow_type == pa.binary(16)
        return None if fits else "it takes text, or binary of 16 bytes"
    if name in ("timestamp with time zone", "timestamp without time zone"):
        return _refuses_timestamp(arrow_type, name)
    return _refuses_simple(arrow_type, name)


def _refuses_simple(arrow_type: pa.DataType, name: str) -> str | None:
    if name == "boolean":
        return None if pa.types.is_boolean(arrow_type) else "it takes booleans"
    if name == "date":
        return None if pa.types.is_date(arrow_type) else "it takes dates"
    if name == "time without time zone":
        return None if pa.types.is_time(arrow_type) else "it takes times of day"
    if name == "interval":
        return None if pa.types.is_duration(arrow_type) else "it takes durations"
    return f"{name} is not supported; write to a text column, or a view's"


def _refuses_timestamp(arrow_type: pa.DataType, name: str) -> str | None:
    if not pa.types.is_timestamp(arrow_type):
        return "it takes timestamps"
    if name == "timestamp with time zone" and not has_zone(arrow_type):
        return "the rows' timestamps have no time zone; give them one, since any would be a guess"
    if name == "timestamp without time zone" and has_zone(arrow_type):
        return "the rows' timestamps have a time zone and the column has none; use timestamptz"
    return None


def type_for(arrow_type: pa.DataType) -> str:
    """The column type for values of an Arrow type."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        return "uuid" if arrow_type.storage_type == pa.binary(16) else type_for(arrow_type.storage_type)
    if pa.types.is_dictionary(arrow_type):
        return type_for(arrow_type.value_type)
    if _is_list(arrow_type) and not pa.types.is_nested(arrow_type.value_type):
        return f"{type_for(arrow_type.value_type)}[]"
    if pa.types.is_decimal(arrow_type):
        return f"numeric({arrow_type.precision},{max(0, arrow_type.scale)})"
    for fits, type_name in _BY_ARROW:
        if fits(arrow_type):
            return type_name
    raise InitFailed(f"there is no PostgreSQL type for Arrow's {arrow_type}: cast the column")


def _is_list(arrow_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(arrow_type)
        or pa.types.is_large_list(arrow_type)
        or pa.types.is_fixed_size_list(arrow_type)
    )


def _is_big(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_int64(arrow_type) or pa.types.is_uint32(arrow_type))


def _is_small(arrow_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_int8(arrow_type) or pa.types.is_int16(arrow_type) or pa.types.is_uint8(arrow_type)
    )


_BY_ARROW: Final = (
    (pa.types.is_boolean, "boolean"),
    (_is_big, "bigint"),
    (pa.types.is_uint64, "numeric(20,0)"),
    (_is_small, "smallint"),
    (pa.types.is_integer, "integer"),
    (pa.types.is_float64, "double precision"),
    (pa.types.is_floating, "real"),
    (is_text, "text"),
    (is_binary, "bytea"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time without time zone"),
    (has_zone, "timestamp with time zone"),
    (pa.types.is_timestamp, "timestamp without time zone"),
    (pa.types.is_duration, "interval"),
    (pa.types.is_nested, "jsonb"),
)
