"""What the driver and the tasks of `exactly_once` decide, without a Spark."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import cloudpickle

import semel
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.client.metadata import Address
from semel.client.security import Sasl
from semel.client.shared_transaction import TransactionHandle
from semel.errors import ConfigError
from semel.sinks.blocking import BlockingSink
from semel.sinks.errors import WriteFailed
from semel.sinks.kafka import KafkaPlan
from semel.sinks.kafka.sink import KafkaSink
from semel.sinks.kafka.topics import TopicShape
from semel.sinks.kafka.writer import WriterSettings
from semel.sinks.mysql import MySQLSink
from semel.sinks.mysql.bulk_rows import BulkForm
from semel.sinks.postgres import PostgresSink
from semel.sinks.postgres.binary_copy import CopyForm
from semel.sinks.receipts import Place
from semel.sinks.service import ServiceAddress
from semel.sinks.sink import WriterPlan
from semel.sinks.sql.columns import TableColumn, lay_out
from semel.sinks.sql.dialect import Form
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.stage import Stage
from semel.sinks.sql.target import Strategy
from semel.sinks.tasks import WriteTask
from semel.spark.checkpoint import parse_offsets
from semel.spark.epochs import LOST_WORK, _run_tasks, computed_once
from semel.spark.pipeline import sink_id
from semel.spark.shares import partition_count, share_out
from semel.spark.source_cluster import SourceCluster, one_cluster

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":%d,"conf":{}}'


def offsets_text(time_ms: int, *sources: str) -> str:
    return "\n".join(["v1", METADATA % time_ms, *sources])


def test_the_digest_is_of_the_sources_offsets_and_not_of_the_time_of_planning() -> None:
    first = parse_offsets(offsets_text(1, '{"orders":{"0":12}}'))
    again = parse_offsets(offsets_text(2, '{"orders":{"0":12}}'))
    other = parse_offsets(offsets_text(1, '{"orders":{"0":13}}'))
    assert first.digest == again.digest
    assert first.digest != other.digest


def test_the_digest_tells_sources_apart() -> None:
    assert (
        parse_offsets(offsets_text(1, "1", "23")).digest != parse_offsets(offsets_text(1, "12", "3")).digest
    )


def test_offsets_of_several_topics_are_taken_together_and_those_of_other_sources_left_out() -> None:
    found = parse_offsets(
        offsets_text(1, '{"a":{"0":1,"1":2}}', "7", "-", '{"b":{"0":3}}', '{"logOffset":4}')
    )
    assert found.by_topic() == {"a": {0: 1, 1: 2}, "b": {0: 3}}


def test_offsets_of_sources_that_have_names_are_read_without_them() -> None:
    named = offsets_text(1, '1:{"b":{"0":3}}', '0:{"a":{"0":1}}', 'clicks:{"c":{"0":5}}', "other:-", "7:8")
    found = parse_offsets(named.replace("v1", "v2", 1))
    assert found.by_topic() == {"a": {0: 1}, "b": {0: 3}, "c": {0: 5}}


@pytest.mark.parametrize("ends", [(7, 3), (3, 7), (3, 7, 5)])
def test_a_topic_of_several_sources_is_read_as_far_as_the_slowest_of_them(ends: tuple[int, ...]) -> None:
    sources = ['{"a":{"0":%d,"1":9}}' % end for end in ends]  # noqa: UP031 - braces
    found = parse_offsets(offsets_text(1, *sources, '{"a":{"2":4}}'))
    assert found.by_topic() == {"a": {0: 3, 1: 9, 2: 4}}


@pytest.mark.parametrize("text", ["", "nonsense", "v1"])
def test_a_file_that_is_no_offsets_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no format"):
        parse_offsets(text)


def test_the_sources_cluster_is_known_if_there_is_one() -> None:
    one, two = {"kafka.bootstrap.servers": "a:1"}, {"kafka.bootstrap.servers": "b:2"}
    assert one_cluster([one, one]) == SourceCluster("a:1", ConnectionOptions())
    assert one_cluster([one, two]) is None
    assert one_cluster([{"path": "x"}]) is None
    assert one_cluster([]) is None


def test_the_sources_cluster_is_reached_as_the_source_reaches_it() -> None:
    login = 'PlainLoginModule required username="ada" password="secret";'
    options = {
        "kafka.bootstrap.servers": "a:1",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": login,
    }
    found = one_cluster([options])
    assert found is not None and found.connection.tls is not None
    assert found.connection.sasl == Sasl("ada", "secret", "PLAIN")
    key_store = {**options, "kafka.ssl.truststore.location": "trust.jks"}
    assert one_cluster([key_store]) == SourceCluster("a:1", None), "only Java reads that"


def test_why_a_batch_ended_is_told_though_it_cannot_be_let_go_of() -> None:
    def unpersist() -> None:
        raise ConnectionError("the JVM is gone")

    batch: Any = SimpleNamespace(persist=lambda: batch, unpersist=unpersist)
    with pytest.raises(WriteFailed, match="full"), computed_once(batch):
        raise WriteFailed("the disk is full")


def test_the_first_sink_has_the_pipelines_name_so_that_others_may_be_added() -> None:
    assert [sink_id("totals", place) for place in range(3)] == ["totals", "totals/1", "totals/2"]


# Nobody listens there.
NOWHERE = ServiceAddress(Address("127.0.0.1", 1), "t")


async def table_plan(sink: SqlSink, form: type[Form], *limits: int) -> WriterPlan:
    """What `begin` would hand out, had the sink been opened on a table with a column `v`."""
    sink._layout = lay_out(sink.target, [TableColumn("v", "text")], sink._dialect)
    sink._service_address = NOWHERE
    if sink.strategy is Strategy.STAGED:
        sink._stage = Stage(sink._dialect, "s", sink._layout, refuses_nulls=False)
        return sink._staged_plan(Place("run", 0, 0))
    session: Any = SimpleNamespace(form=lambda table, columns, stamp: form(table, columns, stamp, *limits))  # type: ignore[call-arg]
    return sink._direct_plan(Place("run", 0, 0), session)


@contextmanager
def postgres_plan(strategy: str) -> Iterator[WriterPlan]:
    sink = PostgresSink("host=127.0.0.1 port=1", "t", strategy=strategy)
    yield asyncio.run(table_plan(sink, CopyForm))


@contextmanager
def mysql_plan(strategy: str) -> Iterator[WriterPlan]:
    sink = MySQLSink("mysql://u@127.0.0.1:1/d", "t", strategy=strategy)
    yield asyncio.run(table_plan(sink, BulkForm, 1_000))


async def create_topic(bootstrap: str, topic: str) -> None:
    async with Cluster(bootstrap) as cluster:
        await Admin(cluster).create_topic(topic, partitions=1)


@contextmanager
def kafka_plan() -> Iterator[WriterPlan]:
    with semel.Broker() as broker:
        asyncio.run(create_topic(broker.bootstrap, "out"))
        sink = KafkaSink(broker.bootstrap, "out", key=None, value="v")
        sink.share("127.0.0.1")
        with BlockingSink(sink) as owner:
            owner.open("p")
            plan = owner.begin(0)
            assert plan is not None
            yield plan


# A worker of Spark that is handed a task, and says what came of it and what is loaded then.
WORKER = """
import pickle, sys
from types import SimpleNamespace
import pyarrow as pa

run = pickle.load(sys.stdin.buffer)
from semel.sinks import tasks

numbers = dict.fromkeys(("attemptNumber", "stageId", "taskAttemptId", "partitionId"), lambda: 0)
tasks.TaskContext = SimpleNamespace(get=lambda: SimpleNamespace(**numbers))
(outcome,) = run(iter([pa.RecordBatch.from_pydict({"v": ["x"]})]))
print(repr(pickle.loads(outcome.column(0)[0].as_py())))
print(*(name for name in sys.modules if name.partition(".")[0] == "semel"))
"""
ALLOWED = ("semel.sinks", "semel.client", "semel.wire", "semel.errors", "semel.version", "semel.compilation")


@pytest.mark.parametrize(
    ("planned", "outcome"),
    [
        (kafka_plan, r"Receipt\(.*rows=1, "),
        (partial(postgres_plan, "direct"), "the sink's owner at 127.0.0.1:1"),
        (partial(postgres_plan, "staged"), "Connection refused"),
        (partial(mysql_plan, "direct"), "the sink's owner at 127.0.0.1:1"),
        (partial(mysql_plan, "staged"), "Connection refused"),
    ],
    ids=["kafka", "postgres-direct", "postgres-staged", "mysql-direct", "mysql-staged"],
)
def test_executors_that_write_import_sinks_client_and_wire_alone(
    planned: Callable[[], AbstractContextManager[WriterPlan]], outcome: str
) -> None:
    """Those that have no server to write to have got as far as asking for it."""
    with planned() as plan:
        task = WriteTask(plan, 1, one_attempt=True, grace_s=0.0).run
        said = subprocess.run(
            [sys.executable, "-c", WORKER], input=cloudpickle.dumps(task), capture_output=True, check=True
        ).stdout.decode()
    came_out, loaded = said.rstrip().rsplit("\n", 1)
    assert re.search(outcome, came_out), came_out
    strangers = [name for name in loaded.split() if name != "semel" and not name.startswith(ALLOWED)]
    assert "semel.sinks.tasks" in loaded
    assert not strangers


class Batch:
    """A frame of so many partitions, which can be coalesced."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self._jdf = self

    def coalesce(self, partitions: int) -> "Batch":
        return Batch(partitions)

    # What `partition_count` goes through.

    def queryExecution(self) -> "Batch":
        return self

    def toRdd(self) -> "Batch":
        return self

    def getNumPartitions(self) -> int:
        return self.partitions


def shared_plan(**columns: str | None) -> KafkaPlan:
    sink = KafkaSink("localhost:1", "out", **columns)  # type: ignore[arg-type]
    settings = WriterSettings(
        sink_id="x",
        topic="out",
        dead_letter_topic=None,
        layout=sink.layout,
        codec=sink.codec,
        connection=sink.connection,
        transaction_timeout_ms=60_000,
        max_buffered=100,
        topics={"out": TopicShape(3, 2_000)},
    )
    handle = TransactionHandle("localhost:1", "semel-sink.x", 7, 5, 2)
    return KafkaPlan(Place("run", 0, 0), handle, settings, NOWHERE)


@pytest.mark.parametrize(
    ("columns", "tasks"),
    [
        ({}, 8),
        ({"key": None, "partition_column": "p"}, 8),
        ({"key": None, "topic_column": "t"}, 8),
        ({"key": None}, 3),
    ],
    ids=["key", "partition", "topic", "none"],
)
def test_only_rows_that_say_nothing_of_their_place_are_written_by_no_more_tasks_than_partitions(
    columns: dict[str, str | None], tasks: int
) -> None:
    shares = share_out(Batch(8), shared_plan(**columns))  # type: ignore[arg-type]
    assert (shares.tasks, partition_count(shares.rows), shares.one_attempt) == (tasks, tasks, True)


class GivenUp:
    """A frame whose job fails."""

    def __init__(self, says: str) -> None:
        self._says = says

    def collect(self) -> list[object]:
        raise RuntimeError(f"Job aborted due to stage failure\n{self._says}\n\tat DAGScheduler.scala:1")


@pytest.mark.parametrize("says", LOST_WORK)
def test_a_job_that_spark_gave_up_for_what_it_lost_spoils_the_epoch(says: str) -> None:
    with pytest.raises(WriteFailed, match=f"gave the job up: stage 6: {says}$") as spoiled:
        _run_tasks(GivenUp(f"stage 6: {says}"))  # type: ignore[arg-type]
    assert not spoiled.value.is_permanent


def test_a_job_that_the_users_code_has_failed_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="119 is not allowed"):
        _run_tasks(GivenUp("ValueError: 119 is not allowed"))  # type: ignore[arg-type]
