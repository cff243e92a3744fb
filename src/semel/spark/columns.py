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
    from pyspark.sql.types import StructType

TEXT: Final = ("string", "binary")
INTEGERS: Final = ("tinyint", "smallint", "int", "bigint")
TIMES: Final = ("timestamp", "timestamp_ntz", "bigint")


def check_columns(schema: "StructType", sink: TransactionalSink) -> None:
    """Raises ConfigError if a column is missing or of a wrong type."""
    if isinstance(sink, KafkaSink):
        _check_kafka(schema, sink)
    elif isinstance(sink, SqlSink):
        _prepare_sql(schema, sink)


def _check_kafka(schema: "StructType", sink: KafkaSink) -> None:
    layout = sink.layout
    _require(schema, "value", layout.value, TEXT)
    _require(schema, "key", layout.key, TEXT)
    _require(schema, "topic", layout.topic, ("string",))
    _require(schema, "partition", layout.partition, INTEGERS)
    _require(schema, "timestamp", layout.timestamp, TIMES)
    _require(schema, "headers", layout.headers, ("array", "map"))


def _prepare_sql(schema: "StructType", sink: SqlSink) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    if sink.strategy is not Strategy.STAGED:
        raise ConfigError(
            "the tasks of Spark are not in this process: make the sink with strategy='staged', where they "
            "stage rows and the driver moves them in one transaction"
        )
    sink.expect(to_arrow_schema(schema))


def _require(schema: "StructType", role: str, column: str | None, types: tuple[str, ...]) -> None:
    if column is None:
        return
    if column not in schema.fieldNames():
        none = f", or pass {role}=None to the sink" if role == "key" else ""
        raise ConfigError(
            f"there is no column {column!r} for the record's {role}; the rows have "
            f"{', '.join(schema.fieldNames())}. Select one{none}"
        )
    found = schema[column].dataType.simpleString()
    if found.partition("<")[0].partition("(")[0] not in types:
        raise ConfigError(
            f"column {column!r} is of type {found}; the record's {role} must be {' or '.join(types)}: cast "
            "it, or encode it (to_json)"
        )
