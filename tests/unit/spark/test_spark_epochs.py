"""What the driver and the tasks of `exactly_once` decide, without a Spark."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import cloudpickle

from semel.client.metadata import Address
from semel.client.shared_transaction import TransactionHandle
from semel.errors import ConfigError
from semel.sinks.errors import WriteFailed
from semel.sinks.kafka import KafkaPlan
from semel.sinks.kafka.sink import KafkaSink
from semel.sinks.kafka.topics import TopicShape
from semel.sinks.mysql import MySQLSink
from semel.sinks.mysql.bulk_rows import BulkForm
from semel.sinks.postgres import PostgresSink
from semel.sinks.postgres.binary_copy import CopyForm
from semel.sinks.receipts import Place
from semel.sinks.service import ServiceAddress
from semel.sinks.sink import WriterPlan
from semel.sinks.sql.columns import TableColumn
from semel.sinks.sql.columns import lay_out as lay_out_columns
from semel.sinks.sql.dialect import Form
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.target import Strategy
from semel.sinks.tasks import WriteTask
from semel.spark.checkpoint import parse_offsets, source_bootstrap
from semel.spark.epochs import LOST_WORK, _run_tasks
from semel.spark.layout import lay_out, partition_count
from semel.spark.pipeline import exactly_once, sink_id

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


@pytest.mark.parametrize("text", ["", "nonsense", "v1"])
def test_a_file_that_is_no_offsets_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no format"):
        parse_offsets(text)


def test_the_sources_cluster_is_known_if_there_is_one() -> None:
    one, two = {"kafka.bootstrap.servers": "a:1"}, {"kafka.bootstrap.servers": "b:2"}
    assert source_bootstrap([one, one]) == "a:1"
    assert source_bootstrap([one, two]) is None
    assert source_bootstrap([{"path": "x"}]) is None
    assert source_bootstrap([]) is None


def test_the_first_sink_has_the_pipelines_name_so_that_others_may_be_added() -> None:
    assert [sink_id("totals", place) for place in range(3)] == ["totals", "totals/1", "totals/2"]


def test_a_frame_of_spark_connect_is_refused_with_the_reason() -> None:
    remote = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe", "isStreaming": True})()
    with pytest.raises(ConfigError, match="Spark Connect, where foreachBatch runs in another process"):
        exactly_once(remote, KafkaSink("localhost:1", "out"), name="p", checkpoint="/nowhere")


def kafka_plan() -> KafkaPlan:
    sink = KafkaSink("localhost:1", "out")
    handle = TransactionHandle("localhost:1", "semel-sink.x", 1, 0, 2)
    return KafkaPlan(Place("run", 0, 0), handle, sink._writer_settings, ServiceAddress(Address("h", 1), "t"))


async def table_plan(sink: SqlSink, form: type[Form], *limits: int) -> WriterPlan:
    """What `begin` would hand out, had the sink been opened on a table with a column `v`."""
    sink._layout = lay_out_columns(sink.target, [TableColumn("v", "text")], sink._dialect)
    sink._service_address = ServiceAddress(Address("h", 1), "t")
    if sink.strategy is Strategy.STAGED:
        return sink._staged_plan(Place("run", 0, 0))
    session: Any = SimpleNamespace(form=lambda table, columns, stamp: form(table, columns, stamp, *limits))  # type: ignore[call-arg]
    return sink._direct_plan(Place("run", 0, 0), session)


def postgres_plan(strategy: str) -> WriterPlan:
    return asyncio.run(table_plan(PostgresSink("host=h", "t", strategy=strategy), CopyForm))


def mysql_plan(strategy: str) -> WriterPlan:
    return asyncio.run(table_plan(MySQLSink("mysql://u@h/d", "t", strategy=strategy), BulkForm, 1_000))


@pytest.mark.parametrize(
    "make_plan",
    [
        kafka_plan,
        partial(postgres_plan, "direct"),
        partial(postgres_plan, "staged"),
        partial(mysql_plan, "direct"),
        partial(mysql_plan, "staged"),
    ],
    ids=["kafka", "postgres-direct", "postgres-staged", "mysql-direct", "mysql-staged"],
)
def test_executors_import_sinks_client_and_wire_alone(make_plan: Callable[[], WriterPlan]) -> None:
    task = WriteTask(make_plan(), 2, is_once=True, grace_s=0.0).run
    program = (
        "import pickle, sys; pickle.load(sys.stdin.buffer).__self__._plan.writer(0, tasks=2); "
        "print(*sorted(name for name in sys.modules if name.startswith('semel')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], input=cloudpickle.dumps(task), capture_output=True, check=True
    ).stdout.decode()
    allowed = (
        "semel.sinks",
        "semel.client",
        "semel.wire",
        "semel.errors",
        "semel.version",
        "semel.compilation",
    )
    strangers = [name for name in loaded.split() if name != "semel" and not name.startswith(allowed)]
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
    settings = replace(sink._writer_settings, topics={"out": TopicShape(3, 2_000)})
    handle = TransactionHandle("localhost:1", "semel-sink.x", 7, 5, 2)
    return KafkaPlan(Place("run", 0, 0), handle, settings, ServiceAddress(Address("h", 1), "t"))


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
    layout = lay_out(Batch(8), shared_plan(**columns))  # type: ignore[arg-type]
    assert (layout.tasks, partition_count(layout.rows), layout.is_once) == (tasks, tasks, True)


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
