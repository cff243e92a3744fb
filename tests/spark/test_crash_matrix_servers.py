"""The server at the other end is killed with -9 while a pipeline runs: Semel, Apache Kafka, or a database.

It dies with an epoch open, as it says itself: rows are there and not committed, and a task is under way.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import pytest
from broker_process import BrokerProcess
from crash_cases import (
    Content,
    expected,
    feed,
    joined,
    keep_state,
    windows,
)
from kafka_process import KafkaProcess
from mariadb_server import MariaDBServer
from open_epochs import (
    Hold,
    IsOpen,
    is_open_in_mariadb,
    is_open_in_postgres,
    is_open_on_broker,
    is_staged_in_mariadb,
    is_staged_in_postgres,
)
from pipeline_cases import ROWS, Pipeline
from pyspark.sql import functions as F  # noqa: N812 - as everyone does
from spark_cases import committed_records

import semel.spark
from row_checks import check_rows
from semel.errors import SemelError
from semel.sinks import MySQLSink, PostgresSink
from semel.sinks.sink import TransactionalSink
from semel.spark import PipelineQuery
from semel.testing.postgres_server import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_STARTS: Final = 6
# Without state, and with it: windows in both formats of RocksDB, and a join of two streams.
QUERIES: Final = ("orders", "windows", "windows2", "join")
PER_BATCH: Final = {"orders": 24, "windows": 150, "windows2": 150, "join": 150}
# In a batch that has others before it and after it.
AMID_WINDOWS: Final = sorted(expected("windows"))[40][1]
AMID: Final = {
    "orders": b"v60",
    "windows": AMID_WINDOWS,
    "windows2": AMID_WINDOWS,
    "join": b"order 200+payment 200",
}
# What is left of everything is for the long runs.
BROKERS: Final = ("broker", "own_kafka")
ON_BROKERS: Final = (
    ("broker", "orders"),
    ("broker", "windows"),
    ("broker", "join"),
    ("own_kafka", "orders"),
    ("own_kafka", "windows2"),
    ("own_kafka", "join"),
)
DATABASES: Final = (
    ("postgres", "direct"),
    ("postgres", "staged"),
    ("mariadb", "direct"),
    ("mariadb", "staged"),
)
IN_DATABASES: Final = (
    *((*database, "orders") for database in DATABASES),
    ("postgres", "direct", "windows2"),
    ("postgres", "staged", "join"),
    ("mariadb", "direct", "join"),
    ("mariadb", "direct", "windows"),
)
# Those behind which the source is killed.
BEHIND_DATABASES: Final = (("postgres", "direct", "windows2"), ("mariadb", "direct", "orders"))
# Of `pipeline_cases`, and of `spark_cases`.
SOURCE_PARTITIONS: Final = 3
SHUFFLE_PARTITIONS: Final = 2
EMPTIED: Final = "staging tables do not survive that"

Broker: TypeAlias = BrokerProcess | KafkaProcess
Database: TypeAlias = PostgresServer | MariaDBServer


class Work(NamedTuple):
    """A pipeline whose input is there, what it computes, the row that is held, and what must come out.

    Beside the task that is held there are so many others.
    """

    pipeline: Pipeline
    compute: Callable[[], DataFrame]
    amid: bytes
    others: int
    expected: Counter[Content]


def work_of(spark: SparkSession, bootstrap: str, topic: str, directory: Path, query: str) -> Work:
    """In a session of its own: others keep no state, or in other ways."""
    session = spark.newSession()
    pipeline = Pipeline(session, bootstrap, topic, directory)
    per_batch = PER_BATCH[query]
    if query == "orders":
        pipeline.feed(0, ROWS)
        rows = Counter[Content]((b"k%d" % i, b"v%d" % i) for i in range(ROWS))
        return Work(pipeline, partial(pipeline.read, per_batch), AMID[query], SOURCE_PARTITIONS - 1, rows)
    keep_state(session, 1 if query == "windows" else 2)
    feed(bootstrap)

    def read(topic: str) -> DataFrame:
        return semel.spark.read(session, bootstrap, topic, maxOffsetsPerTrigger=per_batch)

    def compute() -> DataFrame:
        return joined(read("orders"), read("payments")) if query == "join" else windows(read("numbers"))

    return Work(pipeline, compute, AMID[query], SHUFFLE_PARTITIONS - 1, expected(query))


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


@pytest.mark.parametrize(
    ("kind", "query"),
    [
        pytest.param(kind, query, marks=[] if (kind, query) in ON_BROKERS else pytest.mark.soak)
        for kind in BROKERS
        for query in QUERIES
    ],
)
def test_a_broker_that_is_killed_loses_and_doubles_nothing(
    spark: SparkSession, topic: str, tmp_path: Path, kind: str, query: str, request: pytest.FixtureRequest
) -> None:
    """From topic to topic: a batch in the middle is under way when the server dies."""
    server: Broker = request.getfixturevalue(kind)
    work = work_of(spark, server.bootstrap, topic, tmp_path, query)
    hold = Hold(tmp_path, work.amid)
    run_through(
        lambda: work.pipeline.start(df=hold.rows(work.compute())),
        server.restart,
        hold,
        partial(is_open_on_broker, server.bootstrap, topic, work.pipeline.target),
    )
    found = committed_records(server.bootstrap, work.pipeline.target)
    check_rows(((record.key, record.value) for _, record in found), work.expected)


# A database


@pytest.mark.parametrize(
    ("kind", "strategy", "query"),
    [
        pytest.param(*database, query, marks=[] if (*database, query) in IN_DATABASES else pytest.mark.soak)
        for database in DATABASES
        for query in QUERIES
    ],
)
def test_a_database_that_is_killed_loses_and_doubles_nothing(
    spark: SparkSession,
    broker: BrokerProcess,
    topic: str,
    tmp_path: Path,
    kind: str,
    strategy: str,
    query: str,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With its transaction; what PostgreSQL had in a stage is gone as well, and the commit notices.

    The state of a batch may be written when its rows are not: it is computed again, from the state before.
    """
    server: Database = request.getfixturevalue(kind)
    work = work_of(spark, broker.bootstrap, topic, tmp_path, query)
    server.query("CREATE TABLE arrived (id varchar(40), content varchar(40))")
    hold = Hold(tmp_path, work.amid)
    in_vain = run_through(
        lambda: work.pipeline.start(sink_into(server, strategy), as_text(hold.rows(work.compute()))),
        partial(kill_and_start, server),
        hold,
        is_open_in(server, strategy, work.others),
    )
    found = server.query("SELECT id, content FROM arrived")
    check_rows(((key.encode(), value.encode()) for key, value in found), work.expected)
    # A stage of MariaDB's survives: the epoch goes on with what is there.
    assert in_vain or (kind, strategy) == ("mariadb", "staged"), (
        "what was written was gone, and yet committed"
    )
    assert (kind, strategy) != ("postgres", "staged") or EMPTIED in caplog.text


@pytest.mark.parametrize(
    ("kind", "strategy", "query"),
    [
        pytest.param(*case, marks=[] if case in BEHIND_DATABASES else pytest.mark.soak)
        for case in product(("postgres", "mariadb"), ("direct", "staged"), ("orders", "windows2"))
    ],
)
def test_a_source_that_is_killed_while_a_table_is_written_loses_and_doubles_nothing(
    spark: SparkSession,
    broker: BrokerProcess,
    topic: str,
    tmp_path: Path,
    kind: str,
    strategy: str,
    query: str,
    request: pytest.FixtureRequest,
) -> None:
    """The database has rows of a batch, and the broker that the others are to come from is gone."""
    server: Database = request.getfixturevalue(kind)
    work = work_of(spark, broker.bootstrap, topic, tmp_path, query)
    server.query("CREATE TABLE arrived (id varchar(40), content varchar(40))")
    hold = Hold(tmp_path, work.amid)
    run_through(
        lambda: work.pipeline.start(sink_into(server, strategy), as_text(hold.rows(work.compute()))),
        broker.restart,
        hold,
        is_open_in(server, strategy, work.others),
    )
    found = server.query("SELECT id, content FROM arrived")
    check_rows(((key.encode(), value.encode()) for key, value in found), work.expected)


def sink_into(server: Database, strategy: str) -> TransactionalSink:
    if isinstance(server, PostgresServer):
        return PostgresSink(server.dsn, "arrived", strategy=strategy)
    return MySQLSink(server.url(), "arrived", strategy=strategy)


def is_open_in(server: Database, strategy: str, writers: int) -> IsOpen:
    """`writers` are those that stage all their rows, and end."""
    if isinstance(server, PostgresServer):
        if strategy == "staged":
            return partial(is_staged_in_postgres, server, writers)
        return partial(is_open_in_postgres, server, "arrived")
    if strategy == "staged":
        return partial(is_staged_in_mariadb, server, writers)
    return partial(is_open_in_mariadb, server)


def as_text(rows: DataFrame) -> DataFrame:
    text = [F.col(name).cast("string").alias(to) for name, to in (("key", "id"), ("value", "content"))]
    return rows.select(*text)


def kill_and_start(server: Database) -> None:
    server.kill()
    server.start()
