"""The same pipeline into different targets: topics of Semel and of Kafka, tables of PostgreSQL and MariaDB.

What a test does with it is the same; where rows and marker are kept is not.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from click.testing import CliRunner
from crash_cases import STATES, check_state, keep_state
from mariadb_server import MariaDBServer
from pipeline_cases import Pipeline
from spark_cases import delete_records

from semel.cli.root import root
from semel.client.cluster import Cluster
from semel.client.groups import delete_group
from semel.sinks.mysql import MySQLSink
from semel.sinks.postgres import PostgresSink
from semel.sinks.sql.sink import SqlSink
from semel.testing.postgres_server import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TARGETS: Final = ("semel", "kafka", "postgres", "mariadb")
OUTPUT_PARTITIONS: Final = 4
# Of DeleteRecords: everything that is there.
TO_THE_END: Final = -1


class TargetPipeline(Pipeline):
    """A pipeline whose marker can be lost and set by hand, and whose target can be emptied: here, a topic."""

    def lose_marker(self) -> None:
        asyncio.run(_delete_group(self.bootstrap, f"{self.name}.epoch"))

    def empty(self) -> None:
        everywhere = {(self.target, partition): TO_THE_END for partition in range(OUTPUT_PARTITIONS)}
        delete_records(self.bootstrap, everywhere)

    def adopt(self, epoch: int) -> None:
        adopt(self.name, epoch, *self._place())

    def _place(self) -> list[str]:
        return ["--topic", self.target, "--bootstrap", self.bootstrap]


def adopt(sink_id: str, epoch: int, *place: str) -> None:
    """What the error advises, at the command line."""
    done = CliRunner().invoke(root, ["sink", "adopt", sink_id, "--epoch", str(epoch), *place])
    assert done.exit_code == 0, done.output


def group_offsets(group: str, bootstrap: str) -> dict[str, int]:
    """What the command line shows of a group that has read one topic."""
    arguments = ["group", "describe", group, "--bootstrap", bootstrap, "--output", "json"]
    done = CliRunner().invoke(root, arguments)
    assert done.exit_code == 0, done.output
    return {str(row["partition"]): row["committed"] for row in json.loads(done.output)["partitions"]}


async def _delete_group(bootstrap: str, group: str) -> None:
    async with Cluster(bootstrap) as cluster:
        await delete_group(cluster, group)


class StatefulPipeline(TargetPipeline):
    """Every value is remembered in Spark's state, and goes on the first time that it is seen.

    All of them come again with the next ones: what has been forgotten would be there twice.
    """

    def __init__(
        self, spark: SparkSession, bootstrap: str, name: str, directory: Path, state_format: int
    ) -> None:
        super().__init__(spark.newSession(), bootstrap, name, directory)
        keep_state(self.spark, state_format)
        self.state_format = state_format

    def feed(self, start: int, stop: int) -> None:
        super().feed(0, stop)

    def check(self, stop: int, topic: str | None = None) -> None:
        super().check(stop, topic)
        check_state(self.checkpoint, self.state_format)

    def read(self, per_batch: int = 50) -> DataFrame:
        return super().read(per_batch).dropDuplicates(["value"])


class TablePipeline(TargetPipeline):
    """From a topic of Semel into a table of a database."""

    bytes_type = "bytea"

    def __init__(
        self,
        spark: SparkSession,
        bootstrap: str,
        name: str,
        directory: Path,
        query: Callable[[str], list[tuple[Any, ...]]],
    ) -> None:
        super().__init__(spark, bootstrap, name, directory)
        self.query = query
        self.table = self.target.replace("-", "_")
        query(f"CREATE TABLE {self.table} (k {self.bytes_type}, v {self.bytes_type})")

    def content(self, topic: str | None = None) -> Counter[bytes | None]:
        if topic is not None:
            return super().content(topic)
        return Counter(bytes(row[0]) for row in self.query(f"SELECT v FROM {self.table}"))

    def lose_marker(self) -> None:
        self.query(f"DELETE FROM semel_sinks WHERE sink_id = '{self.name}'")

    def empty(self) -> None:
        self.query(f"DELETE FROM {self.table}")


class PostgresPipeline(TablePipeline):
    def __init__(
        self, spark: SparkSession, bootstrap: str, name: str, directory: Path, server: PostgresServer
    ) -> None:
        super().__init__(spark, bootstrap, name, directory, server.query)
        self.dsn = server.dsn

    def sink(self, table: str | None = None, **options: Any) -> SqlSink:  # type: ignore[override]
        return PostgresSink(
            self.dsn, table or self.table, **{"columns": {"key": "k", "value": "v"}, **options}
        )

    def _place(self) -> list[str]:
        return ["--postgres", self.dsn]


class MariaDBPipeline(TablePipeline):
    bytes_type = "varbinary(40)"

    def __init__(
        self, spark: SparkSession, bootstrap: str, name: str, directory: Path, server: MariaDBServer
    ) -> None:
        super().__init__(spark, bootstrap, name, directory, server.query)
        self.url = server.url()

    def sink(self, table: str | None = None, **options: Any) -> SqlSink:  # type: ignore[override]
        return MySQLSink(self.url, table or self.table, **{"columns": {"key": "k", "value": "v"}, **options})

    def _place(self) -> list[str]:
        return ["--mysql", self.url]


def into(*targets: str, soak: Sequence[str] = ()) -> pytest.MarkDecorator:
    """The test is run with a pipeline into each of these; into the last ones in the long runs."""
    later = (pytest.param(target, marks=pytest.mark.soak) for target in soak)
    return pytest.mark.parametrize("pipeline", [*targets, *later], indirect=True)


def make_pipeline(
    target: str, spark: SparkSession, name: str, directory: Path, request: pytest.FixtureRequest
) -> TargetPipeline:
    """A pipeline into one of TARGETS, or with state. Only the servers that it needs are started."""
    broker = request.getfixturevalue("kafka_broker" if target == "kafka" else "shared_broker")
    given = (spark, broker.bootstrap, name, directory)
    if target == "postgres":
        return PostgresPipeline(*given, request.getfixturevalue("postgres"))
    if target == "mariadb":
        return MariaDBPipeline(*given, request.getfixturevalue("mariadb"))
    if target in STATES:
        return StatefulPipeline(*given, STATES[target])
    return TargetPipeline(*given)
