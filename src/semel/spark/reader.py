"""Topics as DataFrames: by the reader in Python, or by Spark's own connector where its jars are at hand.

Both give the same columns and the same rows, take the same options, and read committed records only unless
asked otherwise.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from semel.errors import ConfigError
from semel.spark.session import require_classic
from semel.spark.source_options import (
    BOOTSTRAP,
    DEFAULTS,
    FORMAT,
    INCLUDE_HEADERS,
    ISOLATION_LEVEL,
    STARTING_OFFSETS,
    SUBSCRIBE,
    SourceOptions,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Connector: TypeAlias = Literal["python", "jvm", "auto"]
OptionValue: TypeAlias = str | int | bool

JVM_FORMAT: Final = "kafka"
JVM_CLASS: Final = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
# Where the two would differ, or Spark's own source would show what was aborted.
SAID_TO_BOTH: Final = (ISOLATION_LEVEL, STARTING_OFFSETS, INCLUDE_HEADERS)


def read(
    spark: "SparkSession",
    bootstrap: str,
    topics: str | Sequence[str],
    *,
    connector: Connector = "python",
    **options: OptionValue,
) -> "DataFrame":
    """A stream of the committed records of these topics; options have the names of Spark's Kafka source."""
    source, settings = _prepare(spark, bootstrap, topics, connector, options)
    return spark.readStream.format(source).options(**settings).load()


def read_batch(
    spark: "SparkSession",
    bootstrap: str,
    topics: str | Sequence[str],
    *,
    connector: Connector = "python",
    **options: OptionValue,
) -> "DataFrame":
    """The committed records that are there now, or those between `startingOffsets` and `endingOffsets`."""
    source, settings = _prepare(spark, bootstrap, topics, connector, options)
    return spark.read.format(source).options(**settings).load()


def register(spark: "SparkSession") -> None:
    """Makes the format "semel" known to the session; `read` and `read_batch` do it themselves."""
    from semel.spark.source import SemelDataSource

    require_classic(spark)
    jsession: Any = spark._jsparkSession
    if jsession.sessionState().dataSourceManager().dataSourceExists(FORMAT):
        return  # Spark warns of every further time
    with _active(spark):
        spark.dataSource.register(SemelDataSource)


@contextmanager
def _active(spark: "SparkSession") -> Iterator[None]:
    """Spark looks in the active session for a source of that name, and refuses to know it in another."""
    jvm: Any = spark.sparkContext._jvm
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def has_jvm_connector(spark: "SparkSession") -> bool:
    """Whether Spark's own Kafka connector is on the class path of the session."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    return loader.getResource(JVM_CLASS.replace(".", "/") + ".class") is not None


def _prepare(
    spark: "SparkSession",
    bootstrap: str,
    topics: str | Sequence[str],
    connector: Connector,
    options: dict[str, OptionValue],
) -> tuple[str, dict[str, str]]:
    """The format to read with, and all of its options, checked."""
    require_classic(spark)
    settings = {name: DEFAULTS[name] for name in SAID_TO_BOTH}
    settings |= {name: _text(value) for name, value in options.items()}
    settings[BOOTSTRAP] = bootstrap
    settings[SUBSCRIBE] = topics if isinstance(topics, str) else ",".join(topics)
    SourceOptions.of(settings)
    if connector not in ("python", "jvm", "auto"):
        raise ConfigError(f"connector is {connector!r}: it must be python, jvm or auto")
    if connector == "jvm" or (connector == "auto" and has_jvm_connector(spark)):
        if not has_jvm_connector(spark):
            raise ConfigError(
                "Spark's own Kafka connector is not on the class path: `semel spark doctor` says which jars "
                'it needs; connector="python" needs none'
            )
        return JVM_FORMAT, settings
    register(spark)
    return FORMAT, settings


def _text(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
