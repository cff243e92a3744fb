"""Settings that are wrong: an error before a row is written, in the good sinks beside the wrong one, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from pipeline_cases import Pipeline
from spark_cases import StartDriver
from target_cases import TablePipeline, into

from row_checks import check_rows
from semel.errors import ConfigError, SemelError
from semel.sinks.blocking import BlockingSink
from semel.sinks.errors import InitFailed
from semel.sinks.kafka import KafkaSink
from semel.sinks.settings import SinkSettings
from semel.sinks.sink import TransactionalSink
from semel.sinks.sql.names import STAGE_PREFIX
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.target import Strategy
from semel.spark.checkpoint import Checkpoint
from semel.spark.pipeline import sink_id
from semel.spark.running import is_final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FEW: Final = 30
ENCRYPTED: Final = "spark.ssl.rpc.enabled"


def refused(
    pipeline: Pipeline,
    make_sink: Callable[[], TransactionalSink],
    kind: type[SemelError],
    match: str,
    df: DataFrame | None = None,
) -> SemelError:
    """Beside a sink that is in order, and is before it in the list."""
    good = KafkaSink(pipeline.bootstrap, pipeline.target)
    with pytest.raises(kind, match=match) as raised:
        pipeline.start([good, make_sink()], df)
    assert not pipeline.checkpoint.exists()
    check_rows(pipeline.content(pipeline.target), [])
    return raised.value


def refused_for_good(*given: Any) -> None:
    """So that `semel run` does not start it again."""
    assert is_final(refused(*given))


@into("semel", "kafka")
def test_a_topic_that_is_not_there_or_a_timeout_above_the_brokers_maximum_is_refused(
    pipeline: Pipeline,
) -> None:
    pipeline.feed(0, FEW)
    nowhere = f"{pipeline.target}-nowhere"
    refused_for_good(pipeline, lambda: KafkaSink(pipeline.bootstrap, nowhere), InitFailed, nowhere)
    refused_for_good(
        pipeline,
        lambda: pipeline.sink(transaction_timeout=100_000.0),
        InitFailed,
        r"INVALID_TRANSACTION_TIMEOUT; the broker's transaction\.max\.timeout\.ms",
    )


@into("postgres", "mariadb")
def test_a_table_that_does_not_fit_is_refused(pipeline: TablePipeline) -> None:
    pipeline.feed(0, FEW)
    pipeline.query(f"CREATE TABLE numbers (k {pipeline.bytes_type}, v int)")
    pipeline.query(
        f"CREATE TABLE needy (k {pipeline.bytes_type}, v {pipeline.bytes_type}, must int NOT NULL)"
    )
    wrong: tuple[tuple[dict[str, Any], type[SemelError], str], ...] = (
        ({"table": "nowhere"}, InitFailed, "there is no table .*nowhere"),
        ({"columns": {"nothing": "v"}}, ConfigError, "no column 'nothing'.*the rows have key, value"),
        ({"columns": {"key": "k", "value": "w"}}, InitFailed, r"has no column 'w' \(it has 'k', 'v'\)"),
        ({"columns": None}, InitFailed, "has no column 'key'"),
        ({"table": "needy"}, InitFailed, "'must' of .*needy.* may not be null"),
        ({"table": "numbers"}, InitFailed, r"column 'value' \(binary\) does not fit .*numbers.*v"),
        ({"mode": "upsert"}, ConfigError, "mode 'upsert' needs keys"),
        ({"mode": "upsert", "keys": ["topic"]}, InitFailed, "column 'topic' is not written"),
        ({"mode": "upsert", "keys": ["key"]}, InitFailed, r"no primary key or unique constraint.*\(k\)"),
    )
    for options, kind, match in wrong:
        refused_for_good(pipeline, lambda options=options: pipeline.sink(**options), kind, match)
    check_rows(pipeline.content(), [])


@into("semel")
def test_a_column_of_headers_that_are_no_pairs_is_refused(pipeline: Pipeline) -> None:
    pipeline.feed(0, FEW)
    names_only = pipeline.read().selectExpr("key", "value", "array('source') AS names")
    refused_for_good(
        pipeline,
        lambda: pipeline.sink(headers="names"),
        ConfigError,
        r"'names' is of type array<string>.*must be array<struct<key:string,value:binary>>",
        names_only,
    )


@into("semel", "postgres", "mariadb")
def test_a_sink_that_another_has_and_that_is_not_to_be_fenced_may_be_free_the_next_time(
    pipeline: Pipeline,
) -> None:
    pipeline.feed(0, FEW)
    gently = SinkSettings(fence_on_open=False)
    with BlockingSink(pipeline.sink()) as owner:
        owner.open(sink_id(pipeline.name, 1))
        owner.begin(0)
        with owner.writer() as writer:
            writer.write([{"key": b"k", "value": b"v"}])
            writer.finish()
        error = refused(
            pipeline, lambda: pipeline.sink(settings=gently), InitFailed, "fence_on_open is off.*top that one"
        )
        assert not is_final(error)


@into("semel")
def test_threads_that_hide_their_query_are_refused(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.feed(0, FEW)
    monkeypatch.setenv("PYSPARK_PIN_THREAD", "false")
    refused_for_good(pipeline, pipeline.sink, ConfigError, "PYSPARK_PIN_THREAD=false.*unset it")


def test_a_checkpoint_is_looked_for_with_what_is_set_on_the_session(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Keys of an object store, say. Here it is where a path leads."""
    (tmp_path / "metadata").write_text('{"id":"that of the query"}')
    way = "fs.viewfs.mounttable.elsewhere.link./ck"
    spark.conf.set(way, tmp_path.as_uri())
    try:
        assert Checkpoint(spark, "viewfs://elsewhere/ck").query_id() == "that of the query"
    finally:
        spark.conf.unset(way)


CONNECTED: Final = """
from pyspark.sql import SparkSession

import semel.spark
from semel.errors import ConfigError
from semel.sinks.kafka import KafkaSink
from semel.spark.session import prepare_environment

prepare_environment()
spark = SparkSession.builder.remote("local[1]").getOrCreate()
stream = spark.readStream.format("rate").load()
assert stream.isStreaming, "Connect works"
for ask in (
    lambda: semel.spark.read(spark, "localhost:1", "in"),
    lambda: semel.spark.exactly_once(stream, KafkaSink("localhost:1", "out"), name="p", checkpoint="ck"),
):
    try:
        ask()
    except ConfigError as error:
        print(f"refused: {error}", flush=True)
"""


def test_sessions_of_spark_connect_are_refused_with_the_reason(start_driver: StartDriver) -> None:
    log = start_driver(CONNECTED).succeed()
    for given in ("SparkSession", "DataFrame"):
        assert f"refused: this {given} is of Spark Connect, where foreachBatch runs in another process" in log


@pytest.fixture
def encrypted(spark: SparkSession) -> Iterator[None]:
    """As far as the driver can tell: what is sent is not looked at here."""
    spark.sparkContext._conf.set(ENCRYPTED, "true")
    yield
    spark.sparkContext._conf.set(ENCRYPTED, "false")


@into("postgres")
def test_where_spark_encrypts_rows_go_by_way_of_a_stage_unless_told_otherwise(
    pipeline: TablePipeline, encrypted: None
) -> None:
    pipeline.feed(0, FEW)
    sink = pipeline.sink()
    pipeline.run(sink)
    pipeline.check(FEW)
    assert isinstance(sink, SqlSink)
    assert sink.strategy is Strategy.STAGED
    assert pipeline.query(f"SELECT 1 FROM pg_tables WHERE starts_with(tablename, '{STAGE_PREFIX}')")
    told = pipeline.sink(strategy="direct")
    pipeline.run(told)
    assert told.strategy is Strategy.DIRECT
