"""Subscriptions when something happens at the worst moment: a stop or a loss in the midst of a call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from broker_process import BrokerProcess, StartBroker
from kafka_process import KafkaProcess
from subscription_cases import QUICK, entry_of, eventually, fill, quick, readers_pass, records, values
from transaction_cases import make_topic

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.coordinator import TransactionCoordinator
from semel.client.errors import UnreachableError
from semel.client.group_offsets import CommittedOffset, GroupMetadata, commit_offsets
from semel.client.metadata import Topic, TopicPartition
from semel.client.producer import Producer, ProducerIdentity
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import ConfigError, SemelError
from semel.subscriptions import (
    Delivery,
    DeliveryLostError,
    OutcomeUnknownError,
    Subscription,
    TransactionRejectedError,
)
from semel.subscriptions.entry import Entry
from semel.subscriptions.states import DeliveryState
from semel.wire.records import Record

TIMEOUT_S = 60


@pytest.fixture(params=["semel", "kafka"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    process: BrokerProcess | KafkaProcess = request.getfixturevalue(f"{request.param}_broker")
    return process.bootstrap


@pytest.fixture(autouse=True)
def no_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "semel.subscriptions"):
        yield
    assert "this is a bug" not in caplog.text, caplog.text


async def take(subscription: Subscription) -> Delivery:
    async with asyncio.timeout(TIMEOUT_S):
        return await subscription.channel().take()


class HeldLookUps:
    """Whoever looks up this topic waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, topic: str) -> None:
        self.go = asyncio.Event()
        self.waiting = 0
        look_up = Cluster.topic

        async def wait_and_look_up(cluster: Cluster, name: str) -> Topic:
            if name == topic and not self.go.is_set():
                self.waiting += 1
                await self.go.wait()
            return await look_up(cluster, name)

        monkeypatch.setattr(Cluster, "topic", wait_and_look_up)


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("count", [1, 3])
async def test_a_statement_that_outlives_its_delivery_is_in_no_other_transaction(
    cluster: Cluster, topic: str, output: str, monkeypatch: pytest.MonkeyPatch, count: int, version: int
) -> None:
    """There is one slot: the next delivery has the one that the late statement was for."""
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    slow = f"{topic}-slow"
    await make_topic(cluster, slow)
    held = HeldLookUps(monkeypatch, slow)
    options = quick(max_in_flight=1, delivery_timeout_ms=300, max_transaction_version=version)
    async with Subscription(cluster, [topic], topic, options) as subscription:
        first = await take(subscription)
        stale = [Record(None, b"stale %d" % number) for number in range(count)]
        publishing = asyncio.create_task(first.transaction().publish_many(slow, stale))
        await eventually("it waits", lambda: held.waiting == 1)
        again = await take(subscription)
        assert again.attempt == 2
        tx = again.transaction()
        await tx.publish(output, b"fresh")
        held.go.set()
        with pytest.raises(DeliveryLostError):
            await publishing
        await tx.ack()
    assert await values(cluster, slow) == []
    assert await values(cluster, output) == [b"fresh"]


async def test_a_publish_cancelled_while_it_waits_for_its_slot_gives_the_slot_back(
    cluster: Cluster, topic: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    begin = TransactionalProducer.begin
    begun: list[str] = []

    async def hang_once(slot: TransactionalProducer) -> None:
        if slot.transactional_id.endswith("/1"):
            begun.append(slot.transactional_id)
            if len(begun) == 1:
                await asyncio.Event().wait()
        await begin(slot)

    monkeypatch.setattr(TransactionalProducer, "begin", hang_once)
    async with Subscription(cluster, [topic], topic, quick(max_in_flight=1)) as subscription:
        first = await take(subscription)
        publishing = asyncio.create_task(first.transaction().publish(output, b"cancelled"))
        await eventually("it waits", lambda: len(begun) == 1)
        publishing.cancel()
        await asyncio.wait([publishing])
        await first.nack()
        async with asyncio.timeout(TIMEOUT_S), (await take(subscription)).transaction() as tx:
            await tx.publish(output, b"done")
    assert await values(cluster, output) == [b"done"]


@pytest.mark.parametrize("publishes", [True, False], ids=["transaction", "bare-ack"])
@pytest.mark.parametrize("version", [2, 1])
async def test_whoever_is_fenced_after_a_lost_answer_is_told_that_the_outcome_is_unknown(
    bootstrap: str,
    cluster: Cluster,
    topic: str,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    publishes: bool,
) -> None:
    """The commit is done, its answer is lost, and before it is asked for again another has the slot."""
    await fill(cluster, topic, 2)
    await make_topic(cluster, output)
    end = TransactionCoordinator.end
    is_armed = False
    async with Cluster(bootstrap) as others:

        async def end_and_lose_the_answer(
            coordinator: TransactionCoordinator, identity: ProducerIdentity, *, commit: bool, version: int
        ) -> ProducerIdentity:
            nonlocal is_armed
            successor = await end(coordinator, identity, commit=commit, version=version)
            if is_armed:
                is_armed = False
                await TransactionalProducer(others, coordinator.transactional_id).open()
                raise UnreachableError("the answer was lost")
            return successor

        monkeypatch.setattr(TransactionCoordinator, "end", end_and_lose_the_answer)
        options = quick(max_transaction_version=version)
        async with Subscription(cluster, [topic], topic, options) as subscription:
            delivery = await take(subscription)
            if publishes:
                await delivery.transaction().publish(output, b"done")
            is_armed = True
            with pytest.raises(OutcomeUnknownError, match="either all of it is, or"):
                await delivery.ack()
            assert delivery.state is DeliveryState.LOST
            following = await take(subscription)
            assert following.offset == 1, "the entry has it, and its owner has taken over anew"
            await following.ack()
    assert await values(cluster, output) == ([b"done"] if publishes else [])


async def test_a_suspect_that_was_marked_while_the_subscription_closed_is_not_charged(
    cluster: Cluster, topic: str
) -> None:
    await fill(cluster, topic, 3)
    left_by_a_crash = Entry(0, slots=2, max_in_flight=16)
    where = TopicPartition(topic, 0)
    await commit_offsets(cluster, GroupMetadata(topic), {where: CommittedOffset(0, left_by_a_crash.note())})
    steps: list[str] = []
    closing: list[asyncio.Task[None]] = []

    def on_step(step: str) -> None:
        steps.append(step)
        if steps.count("sending-offsets") == 2 and not closing:  # the first is of the take-over
            closing.append(asyncio.create_task(subscription.close()))

    subscription = Subscription(cluster, [topic], topic, quick(on_step=on_step))
    await subscription.start()
    waiting = asyncio.create_task(subscription.channel().take())
    await eventually("it closes", lambda: bool(closing))
    await closing[0]
    await asyncio.wait([waiting])
    assert "marked" in steps
    assert "released" in steps
    entry = await entry_of(cluster, topic, topic)
    assert entry is not None
    assert (entry.is_released, entry.marks) == (True, ())


async def test_a_subscription_that_closes_while_a_partition_drains_aborts_what_is_open_there(
    bootstrap: str, cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 8, partitions=2)
    await make_topic(cluster, output)
    options = quick(drain_timeout_ms=30_000)
    async with Cluster(bootstrap) as other, Subscription(cluster, [topic], topic, options) as first:
        await eventually("owned", lambda: len(first.partitions) == 2)
        held = [await take(first) for _ in range(8)]
        for delivery in held:
            await delivery.transaction().publish(output, b"open")
        async with Subscription(other, [topic], topic, options) as second:
            await eventually("one drains", lambda: bool(first._changing))
            await first.close()
            assert {delivery.state for delivery in held} == {DeliveryState.RETURNED}
            await eventually("moved", lambda: len(second.partitions) == 2)
            again = [await take(second) for _ in range(8)]
            assert {delivery.attempt for delivery in again} == {1}, "both were released cleanly"
            for delivery in again:
                await delivery.ack()
    assert await values(cluster, output) == []


async def test_a_partition_that_cannot_be_taken_over_is_not_tried_for_ever(
    cluster: Cluster, topic: str
) -> None:
    await fill(cluster, topic, 2)
    where = TopicPartition(topic, 0)
    await commit_offsets(cluster, GroupMetadata(topic), {where: CommittedOffset(1, "semel1 !")})
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        with pytest.raises(ConfigError, match="cannot be read"):
            await take(subscription)
        await eventually("it is at rest", lambda: not subscription._changing, timeout_s=10)


async def test_a_subscriber_that_is_slower_than_retention_goes_on_where_the_log_begins(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds a megabyte and no more; what lies behind is deleted before it comes to it."""
    await make_topic(cluster, topic)
    async with Producer(cluster) as producer:
        for number in range(20):
            await producer.send(topic, b"%d" % number + b"x" * 300_000)
    async with Subscription(cluster, [topic], topic, quick(max_in_flight=1)) as subscription:
        delivery = await take(subscription)
        consumer = subscription._consumer
        await eventually("it pauses", lambda: bool(consumer._paused) and not consumer._fetches)
        where = TopicPartition(topic, 0)
        read = consumer.position(where)
        assert read < 20, "the rest stays with the broker"
        await Admin(cluster).delete_records({where: 20})
        await fill(cluster, topic, 1, first=20)
        seen = []
        while delivery.offset < 20:
            seen.append(delivery.offset)
            await delivery.ack()
            delivery = await take(subscription)
        await delivery.ack()
    assert seen == list(range(read))
    assert f"offsets {read} to 19 of group" in caplog.text
    entry = await entry_of(cluster, topic, topic)
    assert entry is not None
    assert entry.offset == 21


class Copier:
    """A subscriber with connections of its own that copies while it is there."""

    def __init__(self, bootstrap: str, topic: str, output: str) -> None:
        self.cluster = Cluster(bootstrap)
        self.subscription = Subscription(self.cluster, [topic], topic, quick(max_in_flight=8))
        self.output = output
        self.done = 0

    async def run(self) -> None:
        try:
            async with self.subscription:
                await self.subscription.channel().run(self.copy, concurrency=6)
        finally:
            await self.cluster.close()

    async def copy(self, delivery: Delivery) -> None:
        async with delivery.transaction() as tx:
            await tx.publish(self.output, delivery.value, key=delivery.key)
        self.done += 1


async def test_subscribers_that_come_and_go_in_the_midst_of_commits_copy_everything_once(
    bootstrap: str, cluster: Cluster, topic: str, output: str
) -> None:
    count, partitions = 600, 4
    await fill(cluster, topic, count, partitions=partitions, keys=40)
    await make_topic(cluster, output)
    copiers: list[Copier] = []
    running: list[asyncio.Task[None]] = []

    def start() -> None:
        copiers.append(Copier(bootstrap, topic, output))
        running.append(asyncio.create_task(copiers[-1].run()))

    def done() -> int:
        """At least; whoever is cancelled during its commit does not count it."""
        return sum(copier.done for copier in copiers)

    async def acknowledged() -> int:
        entries = [await entry_of(cluster, topic, topic, partition) for partition in range(partitions)]
        return sum(0 if entry is None else entry.offset for entry in entries)

    start()
    for wanted in range(50, count // 2, 50):
        start()
        await eventually(f"{wanted} are copied", lambda least=wanted: done() >= least)  # type: ignore[misc]
        running[-2].cancel()  # it closes with deliveries in every state
    async with asyncio.timeout(TIMEOUT_S):
        while await acknowledged() < count:  # noqa: ASYNC110 - of many tasks
            await asyncio.sleep(0.05)
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    copied = await records(cluster, output)
    assert sorted(int(record.value or b"") for record in copied) == list(range(count))
    for key in {record.key for record in copied}:
        numbers = [int(record.value or b"") for record in copied if record.key == key]
        assert numbers == sorted(numbers), f"key {key!r}"


async def test_on_semel_whoever_loses_its_connection_has_its_transaction_aborted_at_once(
    semel_broker: BrokerProcess, topic: str, output: str
) -> None:
    """The process lives on: it is told, and goes on over new connections."""
    async with Cluster(semel_broker.bootstrap) as cluster:
        await fill(cluster, topic, 1)
        await make_topic(cluster, output)
        options = quick(delivery_timeout_ms=600_000)
        async with Subscription(cluster, [topic], topic, options) as subscription:
            first = await take(subscription)
            await first.transaction().publish(output, b"cut off")
            for writer in subscription._writers:
                for connection in writer._connections.values():
                    connection.close()
            await readers_pass(cluster, output)
            with pytest.raises((DeliveryLostError, TransactionRejectedError)):
                await first.ack()
            async with (await take(subscription)).transaction() as tx:
                await tx.publish(output, b"done")
        assert await values(cluster, output) == [b"done"]


async def test_a_connection_that_the_broker_closes_as_idle_costs_no_transaction(
    start_broker: StartBroker, topic: str, output: str
) -> None:
    broker = start_broker(connections_max_idle_ms=1_000)
    async with Cluster(broker.bootstrap) as cluster:
        await fill(cluster, topic, 1)
        await make_topic(cluster, output)
        async with Subscription(cluster, [topic], topic, QUICK) as subscription:
            delivery = await take(subscription)
            await delivery.transaction().publish(output, b"patient")
            connections = [each for writer in subscription._writers for each in writer._connections.values()]
            await eventually("they are closed", lambda: all(each.is_closed for each in connections))
            await delivery.ack()
        assert await values(cluster, output) == [b"patient"]


async def test_a_broker_that_takes_no_notes_of_such_length_ends_the_subscription(
    start_broker: StartBroker, topic: str
) -> None:
    broker = start_broker(offset_metadata_max_bytes=5)
    async with Cluster(broker.bootstrap) as cluster:
        await fill(cluster, topic, 1)
        async with Subscription(cluster, [topic], topic, QUICK) as subscription:
            with pytest.raises(SemelError, match="OFFSET_METADATA_TOO_LARGE"):
                await take(subscription)
