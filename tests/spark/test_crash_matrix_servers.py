"""The server at the other end is killed with -9 while a pipeline runs: a broker, or a database."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from broker_process import BrokerProcess
from pipeline_cases import ROWS, Pipeline
from pyspark.sql import functions as F  # noqa: N812 - as everyone does

from semel.errors import SemelError
from semel.sinks import PostgresSink
from semel.sinks.sink import TransactionalSink
from semel.spark import PipelineQuery
from semel.testing.postgres_server import PostgresServer

sys.path.append(str(Path(__file__).parents[1] / "sinks"))
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


def test_a_database_that_is_killed_loses_and_doubles_nothing(
    spark: SparkSession,
    shared_broker: BrokerProcess,
    topic: str,
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
) -> None:
    pipeline = Pipeline(spark, shared_broker.bootstrap, topic, tmp_path)
    pipeline.feed(0, ROWS)
    postgres.query("CREATE TABLE arrived (id text, content text)")

    def rows() -> DataFrame:
        text = [F.col(name).cast("string").alias(to) for name, to in (("key", "id"), ("value", "content"))]
        return pipeline.read(8).select(*text)

    def sink() -> TransactionalSink:
        return PostgresSink(postgres.dsn, "arrived", strategy="staged")

    def kill() -> None:
        postgres.kill()
        postgres.start()

    run_through(lambda: pipeline.start(sink(), rows()), kill)
    found = Counter(postgres.query("SELECT id, content FROM arrived"))
    assert found == Counter((f"k{i}", f"v{i}") for i in range(ROWS))
