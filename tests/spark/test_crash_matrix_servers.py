"""The server at the other end is killed with -9 while a pipeline runs: Semel, Apache Kafka, or a database."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from broker_process import BrokerProcess
from crash_cases import own_kafka  # noqa: F401
from kafka_process import KafkaProcess
from pipeline_cases import ROWS, Pipeline
from pyspark.sql import functions as F  # noqa: N812 - as everyone does

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

TIMEOUT_S: Final = 120.0
MAX_STARTS: Final = 6


def run_through(start: Callable[[], PipelineQuery], kill: Callable[[], None]) -> None:
    """To the end of the input, with a server that dies after a commit or two; started again if need be."""
    query = start()
    give_up = time.monotonic() + TIMEOUT_S
    while query.sinks[0].metrics.commits < 2 and query.isActive and time.monotonic() < give_up:
        query.awaitTermination(0.02)
    assert query.isActive, "all was over before the server was killed"
    kill()
    for _ in range(MAX_STARTS):
        try:
            query.awaitTermination()
            return
        except Exception as error:
            print(f"ended by {type(error).__name__}: {str(error)[:300]}")
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


def test_a_broker_that_is_killed_loses_and_doubles_nothing(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    pipeline = Pipeline(spark, broker.bootstrap, topic, tmp_path)
    pipeline.feed(0, ROWS)
    run_through(lambda: pipeline.start(df=pipeline.read(8)), broker.restart)
    pipeline.check(ROWS)


def test_a_query_with_state_survives_a_broker_that_is_killed(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    """Each row comes twice, far apart: only state that went with the rows tells the second from the first."""
    pipeline = Pipeline(spark, broker.bootstrap, topic, tmp_path)
    for _ in range(2):
        pipeline.feed(0, ROWS)
    run_through(lambda: pipeline.start(df=pipeline.read(24).dropDuplicates(["key"])), broker.restart)
    pipeline.check(ROWS)


def test_apache_kafka_that_is_killed_loses_and_doubles_nothing(
    spark: SparkSession,
    own_kafka: KafkaProcess,  # noqa: F811
    topic: str,
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(spark, own_kafka.bootstrap, topic, tmp_path)
    pipeline.feed(0, ROWS)
    run_through(lambda: pipeline.start(df=pipeline.read(8)), own_kafka.restart)
    pipeline.check(ROWS)


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_a_database_that_is_killed_loses_and_doubles_nothing(
    spark: SparkSession,
    shared_broker: BrokerProcess,
    topic: str,
    tmp_path: Path,
    kind: str,
    request: pytest.FixtureRequest,
) -> None:
    server: PostgresServer | MariaDBServer = request.getfixturevalue(kind)
    pipeline = Pipeline(spark, shared_broker.bootstrap, topic, tmp_path)
    pipeline.feed(0, ROWS)
    server.query("CREATE TABLE arrived (id varchar(40), content varchar(40))")

    def rows() -> DataFrame:
        text = [F.col(name).cast("string").alias(to) for name, to in (("key", "id"), ("value", "content"))]
        return pipeline.read(8).select(*text)

    def sink() -> TransactionalSink:
        if isinstance(server, PostgresServer):
            return PostgresSink(server.dsn, "arrived")
        return MySQLSink(server.url(), "arrived")

    def kill() -> None:
        server.kill()
        server.start()

    run_through(lambda: pipeline.start(sink(), rows()), kill)
    found = Counter(server.query("SELECT id, content FROM arrived"))
    assert found == Counter((f"k{i}", f"v{i}") for i in range(ROWS))
