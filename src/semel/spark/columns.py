"""The columns of a DataFrame, checked against what a sink will ask for: before anything is written.

Kafka is checked here. A database knows the types of its table when it is opened, and is told what to expect.
"""

from typing import TYPE_CHECKING, Final

from semel.errors import ConfigError
from semel.sinks.kafka import KafkaSink
from semel.sinks.sink import TransactionalSink
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.target import Strategy

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

TEXT: Final = ("string", "binary")
INTEGERS: Final = ("tinyint", "smallint", "int", "bigint")
TIMES: Final = ("timestamp", "timestamp_ntz", "bigint")
HEADER_VALUES: Final = (*TEXT, "void")
HEADERS: Final = "array<struct<key:string,value:binary>> or map<string,binary>, where values may be strings"
# The settings by which Spark encrypts what its processes send each other.
ENCRYPTION: Final = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
)


def prepare_columns(df: "DataFrame", sink: TransactionalSink) -> list[str]:
    """The columns that the sink takes. Raises ConfigError if one is missing or of a wrong type."""
    if isinstance(sink, KafkaSink):
        _check_kafka(df.schema, sink)
        layout = sink.layout
        wanted = (layout.value, layout.key, layout.headers, layout.topic, layout.partition, layout.timestamp)
        return list(dict.fromkeys(name for name in wanted if name is not None))
    if isinstance(sink, SqlSink):
        return _prepare_sql(df, sink)
    return df.schema.fieldNames()


def _check_kafka(schema: "StructType", sink: KafkaSink) -> None:
    layout = sink.layout
    _require(schema, "value", layout.value, TEXT)
    _require(schema, "key", layout.key, TEXT)
    _require(schema, "topic", layout.topic, ("string",))
    _require(schema, "partition", layout.partition, INTEGERS)
    _require(schema, "timestamp", layout.timestamp, TIMES)
    _require_headers(schema, layout.headers)


def _prepare_sql(df: "DataFrame", sink: SqlSink) -> list[str]:
    from pyspark.sql.pandas.types import to_arrow_schema

    if _is_encrypted(df.sparkSession.sparkContext.getConf()):
        # Rows that go through the driver go there in the clear; staged ones by the database's own TLS.
        sink.prefer(Strategy.STAGED)
    target = sink.target
    names = df.schema.fieldNames()
    if target.columns is not None:
        wanted = (*target.columns, *target.keys, *target.order_by, target.change_column)
        missing = [name for name in wanted if name is not None and name not in names]
        if missing:
            raise ConfigError(
                f"there is no column {missing[0]!r}, which the sink takes to table {target.table}; the rows "
                f"have {', '.join(names)}"
            )
        names = [name for name in names if name in wanted]
    time_zone = str(df.sparkSession.conf.get("spark.sql.session.timeZone"))
    sink.expect(to_arrow_schema(df.select(*map(quoted, names)).schema, timezone=time_zone))
    return names


def _is_encrypted(conf: "SparkConf") -> bool:
    return any(str(conf.get(setting, "false")).lower() == "true" for setting in ENCRYPTION)


def select_columns(batch: "DataFrame", names: list[str]) -> "DataFrame":
    """The batch with these columns alone: others are not sent to the tasks' Python."""
    return batch if names == batch.columns else batch.select(*map(quoted, names))


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _require(schema: "StructType", role: str, column: str | None, types: tuple[str, ...]) -> None:
    if column is None:
        return
    found = _type_of(schema, role, column).simpleString()
    if found not in types:
        raise ConfigError(
            f"column {column!r} is of type {found}; the record's {role} must be {' or '.join(types)}: cast "
            "it, or encode it (to_json)"
        )


def _require_headers(schema: "StructType", column: str | None) -> None:
    if column is None:
        return
    found = _type_of(schema, "headers", column)
    if not _holds_headers(found):
        raise ConfigError(
            f"column {column!r} is of type {found.simpleString()}; the record's headers must be {HEADERS}"
        )


def _holds_headers(found: "DataType") -> bool:
    """Pairs of a name and a value; what else a pair has, the sink does not look at."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(found, MapType):
        pair = {"key": found.keyType, "value": found.valueType}
    elif isinstance(found, ArrayType) and isinstance(found.elementType, StructType):
        pair = {field.name: field.dataType for field in found.elementType}
    else:
        return False
    types = {name: kind.simpleString() for name, kind in pair.items()}
    return types.get("key") == "string" and types.get("value") in HEADER_VALUES


def _type_of(schema: "StructType", role: str, column: str) -> "DataType":
    if column not in schema.fieldNames():
        none = f", or pass {role}=None to the sink" if role == "key" else ""
        raise ConfigError(
            f"there is no column {column!r} for the record's {role}; the rows have "
            f"{', '.join(schema.fieldNames())}. Select one{none}"
        )
    return schema[column].dataType
