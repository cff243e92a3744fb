"""`semel sink` against Semel and Apache Kafka, PostgreSQL and MariaDB."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transaction_cases import make_topic, read_committed

from semel.cli.root import root
from semel.client.cluster import Cluster
from semel.client.group_offsets import CommittedOffset, GroupMetadata, commit_offsets
from semel.client.metadata import TopicPartition
from semel.sinks.errors import FencedOut, InitFailed, MarkerMismatch, WriteFailed
from semel.sinks.kafka import KafkaSink
from semel.sinks.mysql import MySQLSink
from semel.sinks.postgres import PostgresSink
from semel.sinks.receipts import Origin

ROWS = [{"key": b"k", "value": b"v"}]


class Shell:
    """The command in this process."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    async def run(self, *arguments: str) -> Result:
        command = ["sink", *arguments, "--bootstrap", self._bootstrap]
        return await asyncio.to_thread(CliRunner().invoke, root, command)

    async def text(self, *arguments: str) -> str:
        done = await self.run(*arguments)
        assert done.exit_code == 0, done.output
        return done.output

    async def json(self, *arguments: str) -> Any:
        return json.loads(await self.text(*arguments, "-o", "json"))


@pytest.fixture
def shell(bootstrap: str) -> Shell:
    return Shell(bootstrap)


async def write_epochs(sink: KafkaSink, epochs: range) -> None:
    for epoch in epochs:
        if await sink.begin(epoch, Origin("query", str(epoch))) is not None:
            writer = sink.writer()
            await writer.write(ROWS)
            await sink.commit(epoch, [await writer.finish()])


async def test_a_sink_is_listed_with_its_epoch_and_its_owner(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, shell: Shell
) -> None:
    await make_topic(cluster, topic)
    not_a_sink = GroupMetadata(f"{sink_id}-other.epoch")
    await commit_offsets(cluster, not_a_sink, {TopicPartition(topic, 0): CommittedOffset(3, "a note")})
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        await write_epochs(sink, range(3))
        assert (await shell.json("status", sink_id))["is_alive"] is False
        await sink.begin(3, Origin("query", "3"))
        await (writer := sink.writer()).write(ROWS)
        await writer.finish()
        listed = {each["sink"]: each for each in await shell.json("list")}
        assert f"{sink_id}-other" not in listed
        found = listed[sink_id]
        assert found == await shell.json("status", sink_id)
        assert (found["epoch"], found["query_id"], found["offsets_digest"]) == (2, "query", "2")
        assert (found["owner_host"], found["owner_pid"]) == (socket.gethostname(), os.getpid())
        assert found["owner_run"] == sink.run
        assert found["is_alive"] is True
    table = await shell.text("list")
    assert table.split("\n")[0].split() == ["SINK", "EPOCH", "QUERY", "OWNER", "SINCE", "ALIVE"]
    assert sink_id in table


async def test_an_adopted_sink_goes_on_where_it_was_told_and_its_owner_is_fenced(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, shell: Shell
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        await write_epochs(sink, range(2))
        said = await shell.text("adopt", sink_id, "--epoch", "6")
        assert said == f"sink '{sink_id}' goes on with epoch 7, from any query\n"
        with pytest.raises(FencedOut, match=r"\(run by hand, since"):
            await write_epochs(sink, range(2, 3))
    async with KafkaSink(bootstrap, topic) as sink:
        assert await sink.open(sink_id) == 6
        assert await sink.begin(6, Origin("a new query", "x")) is None
        await sink.begin(7, Origin("a new query", "y"))
        await sink.commit(7, [])
        with pytest.raises(MarkerMismatch, match="of another query"):
            await sink.begin(8, Origin("query", "8"))
    assert await read_committed(cluster, topic) == [[b"v", b"v"]]


async def test_a_sink_without_a_marker_is_adopted_by_its_topic(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, shell: Shell
) -> None:
    await make_topic(cluster, topic)
    done = await shell.run("adopt", sink_id, "--epoch", "4")
    assert done.exit_code == 2
    assert "name its output topic with --topic" in done.output
    done = await shell.run("adopt", sink_id, "--epoch", "4", "--topic", f"{topic}-missing")
    assert done.exit_code != 0
    await shell.text("adopt", sink_id, "--epoch", "4", "--query-id", "query", "--topic", topic)
    async with KafkaSink(bootstrap, topic) as sink:
        assert await sink.open(sink_id) == 4
        await write_epochs(sink, range(5, 6))
    done = await shell.run("adopt", sink_id, "--epoch", "4", "--topic", f"{topic}-moved")
    assert f"keeps its marker with topic '{topic}'" in done.output


async def test_a_forgotten_sink_begins_at_0_and_its_owner_is_fenced(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, shell: Shell
) -> None:
    await make_topic(cluster, topic)
    async with KafkaSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        await write_epochs(sink, range(2))
        assert await shell.text("forget", sink_id) == f"sink '{sink_id}' is forgotten: it begins at epoch 0\n"
        with pytest.raises(WriteFailed, match="a transaction that is over"):
            await write_epochs(sink, range(2, 3))
        with pytest.raises(FencedOut, match="by another owner"):
            await sink.abort(2)
    for command in ("status", "forget"):
        done = await shell.run(command, sink_id)
        assert done.exit_code == 4
        assert f"there is no sink '{sink_id}'" in done.output
    async with KafkaSink(bootstrap, topic) as sink:
        assert await sink.open(sink_id) is None
        await write_epochs(sink, range(1))


async def test_a_group_that_somebody_else_uses_is_refused_until_it_is_adopted(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, shell: Shell
) -> None:
    await make_topic(cluster, topic)
    group = GroupMetadata(f"{sink_id}.epoch")
    await commit_offsets(cluster, group, {TopicPartition(topic, 0): CommittedOffset(3, "not a marker")})
    with pytest.raises(InitFailed, match="holds an offset that is no marker"):
        await KafkaSink(bootstrap, topic).open(sink_id)
    await shell.text("adopt", sink_id, "--epoch", "2", "--topic", topic)
    async with KafkaSink(bootstrap, topic) as sink:
        assert await sink.open(sink_id) == 2


async def test_options_that_do_not_go_together_are_refused(shell: Shell) -> None:
    for arguments in (
        ("list", "--postgres", "x", "--mysql", "y"),
        ("adopt", "s", "--epoch", "1", "--topic", "t", "--postgres", "x"),
        ("adopt", "s", "--epoch", "-2"),
        ("adopt", "s"),
    ):
        assert (await shell.run(*arguments)).exit_code == 2


class DatabaseShell(Shell):
    """The command, and a sink of the database that it is pointed at."""

    def __init__(self, option: str, request: pytest.FixtureRequest) -> None:
        self._option = option
        self.server = request.getfixturevalue("postgres" if option == "--postgres" else "mariadb")
        self._address = self.server.dsn if option == "--postgres" else self.server.url()

    def name_nothing(self) -> None:
        """From here on the database is one that the server does not have."""
        if self._option == "--postgres":
            self._address = f"{self._address} dbname=nope"
        else:
            self._address = f"{self._address.rpartition('/')[0]}/nope"

    def make_sink(self) -> PostgresSink | MySQLSink:
        kind = PostgresSink if self._option == "--postgres" else MySQLSink
        return kind(self._address, "kept")

    async def run(self, *arguments: str) -> Result:
        command = ["sink", *arguments, self._option, self._address]
        return await asyncio.to_thread(CliRunner().invoke, root, command)


async def write_rows(sink: PostgresSink | MySQLSink, epoch: int) -> None:
    await sink.begin(epoch)
    writer = sink.writer()
    await writer.write([{"value": "v"}])
    await sink.commit(epoch, [await writer.finish()])


@pytest.mark.parametrize("option", ["--postgres", "--mysql"])
async def test_the_sinks_of_a_database_are_listed_adopted_and_forgotten(
    option: str, request: pytest.FixtureRequest
) -> None:
    shell = DatabaseShell(option, request)
    shell.server.query("CREATE TABLE kept (value text)")
    assert await shell.json("list") == []
    async with shell.make_sink() as sink:
        await sink.open("s")
        await write_rows(sink, 0)
        (listed,) = await shell.json("list")
        assert (listed["sink"], listed["epoch"], listed["owner_pid"]) == ("s", 0, os.getpid())
        assert listed["is_alive"]
        assert "goes on with epoch 42" in await shell.text("adopt", "s", "--epoch", "41")
        with pytest.raises(FencedOut):
            await write_rows(sink, 1)
    assert (await shell.json("status", "s"))["epoch"] == 41
    async with shell.make_sink() as sink:
        assert await sink.open("s") == 41
    assert "begins at epoch 0" in await shell.text("forget", "s")
    unknown = await shell.run("status", "s")
    assert unknown.exit_code == 4
    assert "no sink 's'" in unknown.output
    assert shell.server.query("SELECT count(*) FROM kept") == [(1,)]


@pytest.mark.parametrize("option", ["--postgres", "--mysql"])
async def test_a_database_that_does_not_exist_is_exit_code_4(
    option: str, request: pytest.FixtureRequest
) -> None:
    shell = DatabaseShell(option, request)
    shell.name_nothing()
    done = await shell.run("list")
    assert done.exit_code == 4
    assert "the database cannot be opened: " in done.output
    assert "nope" in done.output
