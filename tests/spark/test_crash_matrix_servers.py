"""The server at the other end is killed with -9 while a pipeline runs: Semel, Apache Kafka, or a database.

It dies with an epoch open, as it says itself: rows are there and not committed, and a task is under way.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import pytest
from broker_process import BrokerProcess
from crash_cases import check, expected_windows, feed, keep_state, own_kafka, windows  # noqa: F401
from kafka_process import KafkaProcess
from open_epochs import (
    Hold,
    IsOpen,
    is_open_in_mariadb,
    is_open_in_postgres,
    is_open_on_broker,
    is_staged_in_postgres,
)
from pipeline_cases import ROWS, Pipeline
from pyspark.sql import functions as F  # noqa: N812 - as everyone does
from spark_cases import committed_records

import semel.spark
from semel.errors import SemelError
from semel.sinks import MySQLSink, PostgresSink
from semel.sinks.sink import TransactionalSink
from semel.spark import PipelineQuery
from semel.testing.postgres_server import PostgresServer

sys.path.append(str(Path(__file__).parents[1] / "sinks"))
from mariadb_server import MariaDBServer, mariadb, mariadb_server  # noqa: F401
from postgres_server import postgres, postgres_cluster  # noqa: F401

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_STARTS: Final = 6
PER_BATCH: Final = 24
# In a batch that has others before it and after it.
AMID: Final = b"v60"
# The same for windows, of which few come of many numbers.
NUMBERS_PER_BATCH: Final = 150
AMID_WINDOWS: Final = sorted(expected_windows())[40][1]
# Of `pipeline_cases`: all but the one that is held are written.
SOURCE_PARTITIONS: Final = 3
EMPTIED: Final = "staging tables do not survive that"

Broker: TypeAlias = BrokerProcess | KafkaProcess


def run_through(
    start: Callable[[], PipelineQuery], kill: Callable[[], None], hold: Hold, is_open: IsOpen
) -> int:
    """To the end of the input, with a server that dies amid an epoch; started again if need be.

    How often a batch was tried in vain.
    """
    query = start()
    try:
        hold.await_open(is_open)
        assert query.isActive, "all was over before the server was killed"
    except BaseException:
        query.stop()  # the session is that of other tests, too
        raise
    kill()
    hold.let_go()
    in_vain = 0
    for _ in range(MAX_STARTS):
        try:
            query.awaitTermination()
            return in_vain + query.attempts - query.batches
        except Exception as error:
            print(f"ended by {type(error).__name__}: {str(error)[:300]}")
            in_vain += query.attempts - query.batches
            query = restarted(start)
    raise AssertionError(f"it did not come to the end in {MAX_STARTS} starts")


def restarted(start: Callable[[], PipelineQuery]) -> PipelineQuery:
    for _ in range(MAX_STARTS):
        try:
            return start()
        except SemelError as error:
            print(f"not started: {error}")
            time.sleep(1)
    raise AssertionError("the server is back, and the pipeline cannot be started")


# A broker


def die_amid_an_epoch(spark: SparkSession, server: Broker, topic: str, directory: Path) -> None:
    """From topic to topic: a batch in the middle is under way when the server dies."""
    pipeline = Pipeline(spark, server.bootstrap, topic, directory)
    pipeline.feed(0, ROWS)
    hold = Hold(directory, AMID)
    run_through(
        lambda: pipeline.start(df=hold.rows(pipeline.read(PER_BATCH))),
        server.restart,
        hold,
        partial(is_open_on_broker, server.bootstrap, topic, pipeline.target),
    )
    pipeline.check(ROWS)


def test_a_broker_that_is_killed_loses_and_doubles_nothing(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    die_amid_an_epoch(spark, broker, topic, tmp_path)


def test_apache_kafka_that_is_killed_loses_and_doubles_nothing(
    spark: SparkSession,
    own_kafka: KafkaProcess,  # noqa: F811
    topic: str,
    tmp_path: Path,
) -> None:
    die_amid_an_epoch(spark, own_kafka, topic, tmp_path)


@pytest.mark.parametrize(("kind", "state_format"), [("broker", 1), ("broker", 2), ("own_kafka", 2)])
def test_a_query_with_state_survives_a_broker_that_is_killed(
    spark: SparkSession,
    topic: str,
    tmp_path: Path,
    kind: str,
    state_format: int,
    request: pytest.FixtureRequest,
) -> None:
    server: Broker = request.getfixturevalue(kind)
    pipeline = pipeline_of_windows(spark, server.bootstrap, topic, tmp_path, state_format)
    hold = Hold(tmp_path, AMID_WINDOWS)
    run_through(
        lambda: pipeline.start(df=hold.rows(windows_of(pipeline))),
        server.restart,
        hold,
        partial(is_open_on_broker, server.bootstrap, topic, pipeline.target),
    )
    found = committed_records(server.bootstrap, pipeline.target)
    check("windows", ((record.key, record.value) for _, record in found))


def pipeline_of_windows(
    spark: SparkSession, bootstrap: str, name: str, directory: Path, state_format: int
) -> Pipeline:
    """In a session of its own, as others keep no state, or in other ways."""
    session = spark.newSession()
    keep_state(session, state_format)
    feed(bootstrap)
    return Pipeline(session, bootstrap, name, directory)


def windows_of(pipeline: Pipeline) -> DataFrame:
    numbers = semel.spark.read(
        pipeline.spark, pipeline.bootstrap, "numbers", maxOffsetsPerTrigger=NUMBERS_PER_BATCH
    )
    return windows(numbers)


# A database


@pytest.mark.parametrize(
    ("kind", "strategy"), [("postgres", "direct"), ("postgres", "staged"), ("mariadb", "direct")]
)
def test_a_database_that_is_killed_loses_and_doubles_nothing(
    spark: SparkSession,
    shared_broker: BrokerProcess,
    topic: str,
    tmp_path: Path,
    kind: str,
    strategy: str,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With its transaction; what PostgreSQL had in a stage is gone as well, and the commit notices."""
    server: PostgresServer | MariaDBServer = request.getfixturevalue(kind)
    pipeline = Pipeline(spark, shared_broker.bootstrap, topic, tmp_path)
    pipeline.feed(0, ROWS)
    server.query("CREATE TABLE arrived (id varchar(40), content varchar(40))")
    hold = Hold(tmp_path, AMID)

    def sink() -> TransactionalSink:
        if isinstance(server, PostgresServer):
            return PostgresSink(server.dsn, "arrived", strategy=strategy)
        return MySQLSink(server.url(), "arrived", strategy=strategy)

    def is_open() -> bool:
        if isinstance(server, MariaDBServer):
            return is_open_in_mariadb(server)
        if strategy == "staged":
            return is_staged_in_postgres(server, writers=SOURCE_PARTITIONS - 1)
        return is_open_in_postgres(server, "arrived")

    in_vain = run_through(
        lambda: pipeline.start(sink(), as_text(hold.rows(pipeline.read(PER_BATCH)))),
        partial(kill_and_start, server),
        hold,
        is_open,
    )
    found = Counter(server.query("SELECT id, content FROM arrived"))
    assert found == Counter((f"k{i}", f"v{i}") for i in range(ROWS))
    assert in_vain, "what was written was gone, and yet it was committed"
    assert strategy == "direct" or EMPTIED in caplog.text


def test_a_query_with_state_survives_a_database_that_is_killed(
    spark: SparkSession,
    broker: BrokerProcess,
    topic: str,
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
) -> None:
    """The state of the batch was written, the rows were not: it is computed again, from the state before."""
    pipeline = pipeline_of_windows(spark, broker.bootstrap, topic, tmp_path, state_format=2)
    postgres.query("CREATE TABLE arrived (id varchar(40), content varchar(40))")
    hold = Hold(tmp_path, AMID_WINDOWS)
    in_vain = run_through(
        lambda: pipeline.start(
            PostgresSink(postgres.dsn, "arrived", strategy="direct"), as_text(hold.rows(windows_of(pipeline)))
        ),
        partial(kill_and_start, postgres),
        hold,
        partial(is_open_in_postgres, postgres, "arrived"),
    )
    rows = postgres.query("SELECT id, content FROM arrived")
    check("windows", ((key.encode(), value.encode()) for key, value in rows))
    assert in_vain, "what was written was gone, and yet it was committed"


def as_text(rows: DataFrame) -> DataFrame:
    text = [F.col(name).cast("string").alias(to) for name, to in (("key", "id"), ("value", "content"))]
    return rows.select(*text)


def kill_and_start(server: PostgresServer | MariaDBServer) -> None:
    server.kill()
    server.start()
