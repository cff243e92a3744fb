"""`semel txn` against Semel and against Apache Kafka, both as processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from broker_process import SEMEL, BrokerProcess, StartBroker
from kafka_process import KafkaProcess
from transaction_cases import make_topic, read_committed

from semel.client.cluster import TRANSACTION_COORDINATOR, Cluster
from semel.client.coordinator import TransactionCoordinator
from semel.client.errors import check
from semel.client.metadata import TopicPartition
from semel.client.producer import Producer, ProducerIdentity, TransactionScope
from semel.client.shared_transaction import Outcome, TransactionOptions
from semel.client.transaction_admin import STATES
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import AbortableError, FencedError
from semel.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)

BROKER_RESOURCE = 4
TIMEOUT_MS = 123_000


class Shell:
    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "SEMEL_BOOTSTRAP": self.bootstrap}
        return subprocess.run(
            [SEMEL, "txn", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )

    async def text(self, *arguments: str) -> str:
        done = await asyncio.to_thread(self.run, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def json(self, *arguments: str) -> Any:
        return json.loads(await self.text(*arguments, "-o", "json"))


@pytest.fixture(scope="module")
def semel_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("txn") / "broker", in_memory=True).start()
    try:
        yield process
        assert "this is a bug" not in process.log, process.log
    finally:
        process.kill()


@pytest.fixture(params=["semel", "kafka"])
def shell(request: pytest.FixtureRequest) -> Shell:
    process: BrokerProcess | KafkaProcess = request.getfixturevalue(f"{request.param}_broker")
    return Shell(process.bootstrap)


async def leave_open(cluster: Cluster, topic: str) -> TransactionalProducer:
    """A transaction that is open in the second of two partitions."""
    await make_topic(cluster, topic, 2)
    producer = TransactionalProducer(cluster, topic, TransactionOptions(transaction_timeout_ms=TIMEOUT_MS))
    await producer.open()
    async with producer.transaction():
        await producer.send(topic, b"committed", partition=1)
    await producer.begin()
    await producer.send(topic, b"open", partition=1)
    await producer.flush()
    return producer


async def test_what_is_open_is_seen_found_and_aborted(shell: Shell, topic: str) -> None:
    async with Cluster(shell.bootstrap) as cluster:
        producer = await leave_open(cluster, topic)
        await see(shell, topic, producer.identity)
        await find(shell, topic, producer.identity)

        assert "in 1 partition; its producer is fenced" in await shell.text("abort", topic)
        with pytest.raises(FencedError):
            await producer.commit()
        await producer.close()
        assert await read_committed(cluster, topic) == [[], [b"committed"]]
        assert await shell.json("find-hanging", "--longer-than", "0s", "--topic", topic) == []
        assert (await shell.json("describe", topic))["state"] in ("Empty", "CompleteAbort")
        assert "had nothing open" in await shell.text("abort", topic)


async def see(shell: Shell, topic: str, identity: ProducerIdentity) -> None:
    (listed,) = await shell.json("list", "--state", "Ongoing", "--match", f".*{topic[-6:]}")
    assert (listed["transactional_id"], listed["producer_id"]) == (topic, identity.producer_id)
    assert listed["two_phase"] is False
    assert await shell.json("list", "--state", "Ongoing", "--match", topic[:-1]) == []
    assert await shell.json("list", "--longer-than", "1h", "--match", topic) == []
    described = await shell.json("describe", topic)
    assert described["state"] == "Ongoing"
    assert (described["producer_id"], described["producer_epoch"]) == identity
    assert (described["timeout_ms"], described["two_phase"]) == (TIMEOUT_MS, False)
    assert described["partitions"] == [{"topic": topic, "partition": 1}]
    assert 0 <= described["open_for_ms"] < 60_000
    (producer,) = [each for each in await shell.json("producers", topic) if each["start_offset"] is not None]
    assert (producer["partition"], producer["start_offset"]) == (1, 2)  # after a record and its marker
    assert await shell.json("producers", topic, "-p", "0") == []
    stats = await shell.json("stats")
    assert stats["states"]["Ongoing"] >= 1
    assert stats["total"] == sum(stats["states"].values())
    assert stats["oldest"]["state"] == "Ongoing"


async def find(shell: Shell, topic: str, identity: ProducerIdentity) -> None:
    assert await shell.json("find-hanging", "--topic", topic) == []
    (blocking,) = await shell.json("find-hanging", "--longer-than", "0s", "--topic", topic)
    assert (blocking["transactional_id"], blocking["hanging"]) == (topic, False)
    assert (blocking["producer_id"], blocking["lag"]) == (identity.producer_id, 1)
    assert blocking["remedy"] == f"semel txn abort {topic}"


async def test_a_known_transaction_named_by_partition_is_aborted_by_its_coordinator(
    shell: Shell, topic: str
) -> None:
    async with Cluster(shell.bootstrap) as cluster:
        producer = await leave_open(cluster, topic)
        named = ["--topic", topic, "-p", "1", "--producer-id", str(producer.identity.producer_id)]
        assert f"aborted the transaction of '{topic}' in all its partitions" in await shell.text(
            "abort", *named
        )
        with pytest.raises(FencedError):
            await producer.commit()
        await producer.close()
        assert await read_committed(cluster, topic) == [[], [b"committed"]]
        again = await asyncio.to_thread(shell.run, "abort", *named)
        assert (again.returncode, "has no transaction open" in again.stderr) == (4, True)


async def set_verification(cluster: Cluster, enabled: bool) -> None:
    """Whether Kafka checks transactional batches with their coordinator, as it did not before 3.6."""
    config = AlterableConfig(
        name="transaction.partition.verification.enable", config_operation=0, value=str(enabled).lower()
    )
    resource = AlterConfigsResource(resource_type=BROKER_RESOURCE, resource_name="1", configs=[config])
    connection = await cluster.any_connection()
    response = await connection.request(
        IncrementalAlterConfigsRequest(resources=[resource]), IncrementalAlterConfigsResponse
    )
    check(response.responses[0].error_code, "verification", response.responses[0].error_message)


async def joins_nothing(where: TopicPartition) -> None:
    """Leaves the coordinator in the dark."""


async def hang(cluster: Cluster, topic: str) -> int:
    """A batch of a transaction that no coordinator knows, as a late one of an old client leaves it."""
    await make_topic(cluster, topic)
    identity = (await TransactionCoordinator(cluster, topic).init_producer_id(60_000)).identity
    scope = TransactionScope(topic, identity, 9, joins_nothing)
    await set_verification(cluster, False)
    try:
        async with asyncio.timeout(30):
            while not await is_written(cluster, topic, scope):
                pass  # the setting takes a moment to get there
    finally:
        await set_verification(cluster, True)
    return identity.producer_id


async def is_written(cluster: Cluster, topic: str, scope: TransactionScope) -> bool:
    producer = Producer(cluster, transaction=scope)
    await producer.send(topic, b"hanging")
    try:
        await producer.close()
    except AbortableError:
        return False
    return True


async def test_a_transaction_that_no_coordinator_knows_is_found_and_gets_a_marker(
    kafka_broker: KafkaProcess, topic: str
) -> None:
    shell = Shell(kafka_broker.bootstrap)
    async with Cluster(shell.bootstrap) as cluster:
        producer_id = await hang(cluster, topic)
        # The broker is shared: other tests may have left something open.
        (blocking,) = [each for each in await shell.json("find-hanging") if each["topic"] == topic]
        assert (blocking["topic"], blocking["producer_id"]) == (topic, producer_id)
        assert (blocking["hanging"], blocking["transactional_id"]) == (True, None)
        remedy = blocking["remedy"].split()
        assert remedy[:3] == ["semel", "txn", "abort"]
        assert "no coordinator knew" in await shell.text(*remedy[2:])
        assert topic not in {each["topic"] for each in await shell.json("find-hanging")}
        assert await read_committed(cluster, topic) == [[]]


async def test_what_may_be_prepared_is_aborted_by_force_only(start_broker: StartBroker, topic: str) -> None:
    shell = Shell(start_broker(in_memory=True, transaction_two_phase_commit_enable="true").bootstrap)
    async with Cluster(shell.bootstrap) as cluster:
        await make_topic(cluster, topic)
        producer = TransactionalProducer(cluster, topic, TransactionOptions(two_phase=True))
        await producer.open()
        await producer.begin()
        await producer.send(topic, b"prepared")
        await producer.prepare()
        described = await shell.json("describe", topic)
        assert (described["two_phase"], described["timeout_ms"]) == (True, None)
        (listed,) = await shell.json("list")
        assert (listed["transactional_id"], listed["two_phase"]) == (topic, True)
        refused = await asyncio.to_thread(shell.run, "abort", topic)
        assert (refused.returncode, "its other half" in refused.stderr) == (1, True)
        assert "semel txn abort --force" in refused.stderr
        assert (await shell.json("describe", topic))["state"] == "Ongoing"
        (blocking,) = await shell.json("find-hanging", "--longer-than", "0s")
        assert (blocking["transactional_id"], blocking["two_phase"]) == (topic, True)
        assert "let its application recover" in await shell.text("find-hanging", "--longer-than", "0s")
        await shell.text(*blocking["remedy"].split()[2:])
        with pytest.raises(FencedError):
            await producer.complete(Outcome.COMMIT)
        assert await read_committed(cluster, topic) == [[]]
        (listed,) = await shell.json("list")
        assert (listed["transactional_id"], listed["two_phase"]) == (topic, None)  # nothing is open


async def test_what_nobody_knows_is_exit_code_4(shell: Shell) -> None:
    for arguments in (["describe", "nobody"], ["abort", "nobody"], ["producers", "no-such-topic"]):
        done = await asyncio.to_thread(shell.run, *arguments)
        assert done.returncode == 4, done
        assert done.stderr.count("\n") == 1
    async with Cluster(shell.bootstrap) as cluster:
        assert await cluster.coordinator_id(TRANSACTION_COORDINATOR, "nobody") >= 0


async def test_a_state_that_does_not_exist_is_named(shell: Shell) -> None:
    done = await asyncio.to_thread(shell.run, "list", "--state", "Ungoing")
    assert (done.returncode, "no such state: Ungoing; there are Empty, Ongoing," in done.stderr) == (1, True)
    for state in STATES:
        await shell.text("list", "--state", state)
