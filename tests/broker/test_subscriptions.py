"""Subscriptions, by the same claims against Semel and against Apache Kafka."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress

import pytest
from broker_process import BrokerProcess
from kafka_process import KafkaProcess
from subscription_cases import QUICK, entry_of, eventually, fill, quick, records, values
from transaction_cases import make_topic

from semel.client.cluster import Cluster
from semel.client.group_offsets import CommittedOffset, GroupMetadata, commit_offsets
from semel.client.metadata import TopicPartition
from semel.client.producer import Producer
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import ConfigError, FatalError
from semel.subscriptions import (
    Delivery,
    DeliveryLostError,
    DeliveryStateError,
    RedeliveryBackoff,
    Subscription,
    SubscriptionClosedError,
    SubscriptionOptions,
    TransactionRejectedError,
    subscribe,
)
from semel.subscriptions.dead_letters import ATTEMPTS, CAUSE, GROUP, OFFSET, REDRIVEN_FOR, TOPIC
from semel.subscriptions.entry import Entry
from semel.subscriptions.slots import transactional_id
from semel.subscriptions.states import DeliveryState, StatementState, TransactionState
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


async def test_a_commit_publishes_and_acknowledges_at_once(
    bootstrap: str, cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 5, keys=5)
    await make_topic(cluster, output, 2)
    seen: list[bytes | None] = []
    async with (
        asyncio.timeout(TIMEOUT_S),
        subscribe(bootstrap, topic, group=topic, options=QUICK) as deliveries,
    ):
        async for delivery in deliveries:
            assert (delivery.topic, delivery.partition, delivery.attempt) == (topic, 0, 1)
            assert delivery.key == b"k%d" % delivery.offset
            async with delivery.transaction() as tx:
                assert delivery.value is not None
                placed = await tx.publish(output, delivery.value + b"!", partition=1)
                assert (placed.topic, placed.partition) == (output, 1)
            assert tx.state is TransactionState.COMMITTED
            assert [statement.state for statement in tx.statements] == [StatementState.COMMITTED]
            seen.append(delivery.value + b"!")
            if len(seen) == 5:
                break
    assert seen == [b"0!", b"1!", b"2!", b"3!", b"4!"]
    assert await values(cluster, output) == seen
    entry = await entry_of(cluster, topic, topic)
    assert entry == Entry(5, slots=3, max_in_flight=16, is_released=True)


async def test_offsets_come_back_while_the_transaction_is_open(
    cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        delivery = await take(subscription)
        async with delivery.transaction() as tx:
            placed = await asyncio.gather(*(tx.publish(output, b"%d" % number) for number in range(50)))
            assert sorted(each.offset for each in placed) == list(range(50))
            assert await records(cluster, output) == [], "nobody sees it before the commit"
    found = await records(cluster, output)
    assert {each.offset: each.value for each in found} == {
        each.offset: b"%d" % number for number, each in enumerate(placed)
    }


async def test_an_exception_rolls_back_and_the_delivery_comes_again(
    cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        first = await take(subscription)
        with pytest.raises(ZeroDivisionError):
            async with first.transaction() as tx:
                await tx.publish(output, b"rolled back")
                raise ZeroDivisionError
        assert tx.state is TransactionState.REJECTED
        assert tx.statements[0].state is StatementState.REJECTED
        again = await take(subscription)
        assert (again.offset, again.attempt, again.value) == (0, 2, b"0")
        async with again.transaction() as tx:
            await tx.publish(output, b"committed")
    assert await values(cluster, output) == [b"committed"]


async def test_acknowledgements_in_any_order_are_kept(cluster: Cluster, topic: str) -> None:
    await fill(cluster, topic, 9)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        deliveries = [await take(subscription) for _ in range(9)]
        await deliveries[7].ack()
        await deliveries[5].ack()
        for delivery in deliveries[:3]:
            async with delivery.transaction():
                pass
        entry = await entry_of(cluster, topic, topic)
        assert entry is not None
        assert (entry.offset, entry.acknowledged) == (3, ((5, 6), (7, 8)))
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        again = [await take(subscription) for _ in range(4)]
        assert [delivery.offset for delivery in again] == [3, 4, 6, 8]
        assert [delivery.attempt for delivery in again] == [1, 1, 1, 1], "the stop was clean"
        for delivery in again:
            await delivery.ack()
    entry = await entry_of(cluster, topic, topic)
    assert entry is not None
    assert entry.offset == 9


@pytest.mark.parametrize("version", [2, 1])
async def test_parallel_transactions_of_one_partition_lose_no_acknowledgement(
    cluster: Cluster, topic: str, output: str, version: int
) -> None:
    await fill(cluster, topic, 200, keys=40)
    await make_topic(cluster, output, 3)
    offsets: dict[bytes | None, list[int]] = {}

    async def handle(delivery: Delivery) -> None:
        offsets.setdefault(delivery.key, []).append(delivery.offset)
        await delivery.transaction().publish(output, delivery.value, key=delivery.key)

    options = quick(max_in_flight=32, max_transaction_version=version)
    async with Subscription(cluster, [topic], topic, options) as subscription:
        running = asyncio.create_task(subscription.channel().run(handle, concurrency=16))
        await eventually("all", lambda: sum(map(len, offsets.values())) == 200)
        await eventually("acknowledged", lambda: low_of(subscription) == 200)
    await running
    assert all(found == sorted(found) for found in offsets.values()), "in order of each key"
    assert await values(cluster, output) == sorted(b"%d" % number for number in range(200))
    entry = await entry_of(cluster, topic, topic)
    assert entry is not None
    assert (entry.offset, entry.acknowledged) == (200, ())


def low_of(subscription: Subscription) -> int:
    return sum(owner.low for owner in subscription._owners.values())


async def test_a_failed_key_is_held_back_and_others_go_on(cluster: Cluster, topic: str) -> None:
    await make_topic(cluster, topic)
    async with Producer(cluster) as producer:
        for key in (b"a", b"b", b"a", b"b"):
            await producer.send(topic, b"v", key=key)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        first, second = [await take(subscription) for _ in range(2)]
        assert (first.offset, second.offset) == (0, 1)
        await first.nack("not yet", delay_ms=700)
        await second.ack()
        third = await take(subscription)
        assert third.offset == 3
        await third.ack()
        entry = await entry_of(cluster, topic, topic)
        assert entry is not None
        assert (entry.offset, entry.acknowledged, entry.marks[0].attempts) == (0, ((1, 2), (3, 4)), 1)
        again = await take(subscription)
        assert (again.offset, again.attempt) == (0, 2)
        await again.ack()
        assert (await take(subscription)).offset == 2


async def test_a_record_that_fails_too_often_becomes_a_dead_letter(
    cluster: Cluster, topic: str, output: str
) -> None:
    await make_topic(cluster, topic)
    async with Producer(cluster) as producer:
        await producer.send(topic, b"poison", key=b"k", headers=[("kept", b"1")])
        await producer.send(topic, b"fine", key=b"k")
    await make_topic(cluster, output)
    attempts = []
    async with Subscription(cluster, [topic], topic, quick(max_attempts=3)) as subscription:
        while (delivery := await take(subscription)).value == b"poison":
            attempts.append(delivery.attempt)
            with suppress(ValueError):
                async with delivery.transaction() as tx:
                    await tx.publish(output, b"never seen")
                    raise ValueError("cannot be parsed")
        assert delivery.value == b"fine", "its key goes on"
        await delivery.ack()
    assert attempts == [1, 2, 3]
    assert await values(cluster, output) == []
    (letter,) = await records(cluster, f"{topic}.{topic}.dead")
    headers = dict(letter.headers)
    assert (letter.key, letter.value, headers["kept"]) == (b"k", b"poison", b"1")
    assert headers[CAUSE] == b"ValueError('cannot be parsed')"
    assert (headers[ATTEMPTS], headers[TOPIC], headers[OFFSET], headers[GROUP]) == (
        b"3",
        topic.encode(),
        b"0",
        topic.encode(),
    )


async def test_a_delivery_that_takes_too_long_is_taken_back(
    cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    async with Subscription(cluster, [topic], topic, quick(delivery_timeout_ms=300)) as subscription:
        slow = await take(subscription)
        tx = slow.transaction()
        await tx.publish(output, b"too late")
        again = await take(subscription)
        assert (again.offset, again.attempt) == (0, 2)
        async with again.transaction() as second:
            await second.publish(output, b"in time")
        for late in (slow.ack(), tx.ack(), slow.nack(), tx.publish(output, b"later still")):
            with pytest.raises(DeliveryLostError, match="not acknowledged in time"):
                await late
    assert await values(cluster, output) == [b"in time"]


async def test_statements_after_the_ack_are_dropped_and_a_second_ack_is_an_error(
    cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        delivery = await take(subscription)
        async with delivery.transaction() as tx:
            await tx.publish(output, b"before")
            sealing = asyncio.create_task(tx.ack())
            await asyncio.sleep(0)
            with pytest.raises(DeliveryStateError, match="dropped"):
                await tx.publish(output, b"after")
            await sealing
            with pytest.raises(DeliveryStateError, match="dropped"):
                await tx.publish(output, b"after")
            with pytest.raises(DeliveryStateError, match="acknowledged already"):
                await tx.ack()
            with pytest.raises(DeliveryStateError, match="too late to nack"):
                await delivery.nack()
        assert delivery.state is DeliveryState.ACKNOWLEDGED
    assert await values(cluster, output) == [b"before"]


async def test_a_statement_that_is_refused_rejects_the_transaction(
    cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        delivery = await take(subscription)
        tx = delivery.transaction()
        await tx.publish(output, b"accepted")
        with pytest.raises(TransactionRejectedError):
            await tx.publish(output, b"x" * 3_000_000)
        assert [each.state for each in tx.statements] == [StatementState.APPLIED, StatementState.REJECTED]
        with pytest.raises(TransactionRejectedError, match="a statement was rejected"):
            await tx.ack()
        assert tx.state is TransactionState.REJECTED
        again = await take(subscription)
        assert again.attempt == 2
        await again.ack()
    assert await values(cluster, output) == []


async def test_a_statement_that_was_cancelled_cannot_be_committed(
    cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        delivery = await take(subscription)
        tx = delivery.transaction()
        publishing = asyncio.create_task(tx.publish(output, b"perhaps"))
        await asyncio.sleep(0)
        publishing.cancel()
        await asyncio.wait([publishing])
        with pytest.raises(TransactionRejectedError, match="cancelled"):
            await tx.ack()
        async with (await take(subscription)).transaction() as tx:
            await tx.publish_many(output, [Record(b"k", b"1"), Record(b"k", b"2")])
    assert await values(cluster, output) == [b"1", b"2"]


async def test_a_channel_that_closes_ends_whoever_waits_on_it(cluster: Cluster, topic: str) -> None:
    await make_topic(cluster, topic)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        channel = subscription.channel()
        waiting = asyncio.create_task(channel.take())
        await asyncio.sleep(0)
        channel.close()
        with pytest.raises(SubscriptionClosedError):
            await waiting
        with pytest.raises(SubscriptionClosedError):
            await channel.take()


async def test_a_channel_that_closes_gives_back_what_it_has_not_acknowledged(
    cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 2)
    await make_topic(cluster, output)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        lost, kept = subscription.channel(), subscription.channel()
        held = await lost.take()
        await held.transaction().publish(output, b"rolled back")
        sealed = await lost.take()
        await sealed.transaction().publish(output, b"committed")
        committing = asyncio.create_task(sealed.ack())
        await asyncio.sleep(0)
        lost.close()
        await committing
        again = await kept.take()
        assert (again.offset, again.attempt) == (0, 2)
        await again.ack()
    assert await values(cluster, output) == [b"committed"]


async def test_batches_are_one_transaction(cluster: Cluster, topic: str, output: str) -> None:
    await fill(cluster, topic, 25, keys=3)
    await make_topic(cluster, output)
    sizes = []
    options = quick(batch_size=10, max_in_flight=20, max_wait_ms=100)
    async with Subscription(cluster, [topic], topic, options) as subscription:
        channel = subscription.channel()
        while sum(sizes) < 25:
            batch = await channel.take_batch()
            async with batch.transaction() as tx:
                for record in batch.records:
                    await tx.publish(output, record.value)
            sizes.append(len(batch))
    assert sizes == [10, 10, 5]
    assert await values(cluster, output) == sorted(b"%d" % number for number in range(25))


async def test_a_failed_batch_comes_back_one_by_one_and_only_the_poison_dies(
    cluster: Cluster, topic: str
) -> None:
    await fill(cluster, topic, 5)
    done: list[bytes | None] = []
    options = quick(batch_size=5, max_attempts=2)
    async with Subscription(cluster, [topic], topic, options) as subscription:
        channel = subscription.channel()
        while len(done) < 4:
            batch = await channel.take_batch()
            with suppress(ValueError):
                async with batch.transaction():
                    if any(record.value == b"2" for record in batch.records):
                        raise ValueError("two")
                done += [record.value for record in batch.records]
        await eventually("buried", lambda: low_of(subscription) == 5)
    assert sorted(done) == [b"0", b"1", b"3", b"4"]  # type: ignore[type-var]
    assert [letter.value for letter in await records(cluster, f"{topic}.{topic}.dead")] == [b"2"]


async def test_filter_and_transform(cluster: Cluster, topic: str) -> None:
    await fill(cluster, topic, 10)

    def is_even(record: Record) -> bool:
        assert record.value is not None
        return int(record.value) % 2 == 0

    def tenfold(record: Record) -> Record:
        assert record.value is not None
        if record.value == b"4":
            raise ValueError("four")
        return Record(record.key, b"%s0" % record.value, record.timestamp, record.headers, record.offset)

    seen: list[bytes | None] = []

    async def handle(delivery: Delivery) -> None:
        seen.append(delivery.value)

    options = quick(filter=is_even, transform=tenfold, max_attempts=2)
    async with Subscription(cluster, [topic], topic, options) as subscription:
        running = asyncio.create_task(subscription.channel().run(handle))
        await eventually("all passed", lambda: low_of(subscription) == 10)
    await running
    assert seen == [b"00", b"20", b"60", b"80"]
    (letter,) = await records(cluster, f"{topic}.{topic}.dead")
    assert letter.value == b"4", "a dead letter is the record as it was"
    assert b"four" in (dict(letter.headers)[CAUSE] or b"")


async def test_lag_reaches_zero_past_markers(cluster: Cluster, topic: str) -> None:
    await make_topic(cluster, topic)
    async with TransactionalProducer(cluster, f"{topic}-fill") as producer:
        for number in range(3):
            async with producer.transaction():
                await producer.send(topic, b"%d" % number)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        for _ in range(3):
            await (await take(subscription)).ack()
        await eventually("markers are passed", lambda: low_of(subscription) == 6)
    entry = await entry_of(cluster, topic, topic)
    assert entry is not None
    assert entry.offset == 6


async def test_a_second_subscriber_gets_its_share_and_nothing_is_done_twice(
    bootstrap: str, cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 100, partitions=4)
    await make_topic(cluster, output)

    async def handle(delivery: Delivery) -> None:
        await delivery.transaction().publish(output, delivery.value)

    async with Cluster(bootstrap) as other, Subscription(cluster, [topic], topic, QUICK) as first:
        running = [asyncio.create_task(first.channel().run(handle, concurrency=4))]
        await eventually("owned", lambda: len(first.partitions) == 4)
        async with Subscription(other, [topic], topic, QUICK) as second:
            running.append(asyncio.create_task(second.channel().run(handle, concurrency=4)))
            await eventually("shared", lambda: len(first.partitions) == len(second.partitions) == 2)
            assert not first.partitions & second.partitions
            await fill(cluster, topic, 100, partitions=4, first=100)
            await eventually("done", lambda: low_of(first) + low_of(second) == 200)
        await eventually("back", lambda: len(first.partitions) == 4)
    await asyncio.gather(*running)
    assert await values(cluster, output) == sorted(b"%d" % number for number in range(200))


async def test_a_subscriber_without_partitions_waits_and_says_so(
    bootstrap: str, cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(cluster, topic, 1)
    async with Cluster(bootstrap) as other, Subscription(cluster, [topic], topic, QUICK) as first:
        await eventually("owned", lambda: len(first.partitions) == 1)
        async with Subscription(other, [topic], topic, QUICK) as second:
            await eventually("said", lambda: "waits: every partition" in caplog.text)
            assert not second.partitions
            waiting = asyncio.create_task(second.channel().take())
            await first.close()
            delivery = await waiting
            assert delivery.offset == 0


async def test_whoever_takes_a_partition_over_fences_every_slot_of_the_last_owner(
    cluster: Cluster, topic: str, output: str
) -> None:
    """A zombie with transactions open in several slots; its successor has a smaller window."""
    await fill(cluster, topic, 6)
    await make_topic(cluster, output)
    async with Subscription(cluster, [topic], topic, quick(max_in_flight=8)) as zombie:
        held = [await take(zombie) for _ in range(6)]
        for delivery in held:
            await delivery.transaction().publish(output, b"zombie")
        entry = await entry_of(cluster, topic, topic)
        assert entry is not None
        assert entry.slots > 6
        thief = Subscription(cluster, [topic], topic, quick(max_in_flight=1))
        thief._assigned = frozenset(
            {TopicPartition(topic, 0)}
        )  # what a group that forgot the zombie would say
        zombie._is_closing = True  # it must not take the partition back
        await thief._member.join(())
        await thief._take_over(TopicPartition(topic, 0))
        for delivery in held:
            with pytest.raises(DeliveryLostError):
                await delivery.ack()
        zombie._is_closing = False
        entry = await entry_of(cluster, topic, topic)
        assert entry is not None
        assert (entry.offset, entry.slots, entry.max_in_flight) == (0, 2, 1)
        await thief.close()
    assert await values(cluster, output) == []


async def test_an_offset_that_another_tool_moved_is_where_the_group_goes_on(
    cluster: Cluster, topic: str
) -> None:
    await fill(cluster, topic, 9)
    where = TopicPartition(topic, 0)
    await commit_offsets(cluster, GroupMetadata(topic), {where: CommittedOffset(4, "by hand")})
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        delivery = await take(subscription)
        assert (delivery.offset, delivery.attempt) == (4, 1)
        await delivery.ack()


async def test_an_offset_past_the_log_is_an_error_that_says_what_to_do(cluster: Cluster, topic: str) -> None:
    await fill(cluster, topic, 2)
    where = TopicPartition(topic, 0)
    await commit_offsets(cluster, GroupMetadata(topic), {where: CommittedOffset(40)})
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        with pytest.raises(ConfigError, match="semel group reset"):
            await take(subscription)


async def test_a_damaged_note_stops_the_subscription(cluster: Cluster, topic: str) -> None:
    await fill(cluster, topic, 2)
    where = TopicPartition(topic, 0)
    await commit_offsets(cluster, GroupMetadata(topic), {where: CommittedOffset(1, "semel1 !")})
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        with pytest.raises(ConfigError, match="cannot be read"):
            await take(subscription)


async def test_a_group_that_starts_at_the_end_sees_what_comes(cluster: Cluster, topic: str) -> None:
    await fill(cluster, topic, 3)
    async with Subscription(cluster, [topic], topic, quick(start="latest")) as subscription:
        await eventually("owned", lambda: len(subscription.partitions) == 1)
        await fill(cluster, topic, 1, first=3)
        assert (await take(subscription)).value == b"3"


async def test_a_record_that_was_redriven_for_another_group_is_passed_over(
    cluster: Cluster, topic: str
) -> None:
    await make_topic(cluster, topic)
    async with Producer(cluster) as producer:
        await producer.send(topic, b"other", headers=[(REDRIVEN_FOR, b"other")])
        await producer.send(topic, b"own", headers=[(REDRIVEN_FOR, topic.encode())])
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        assert (await take(subscription)).value == b"own"


async def test_an_ordinary_consumer_cannot_join_by_mistake(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    from semel.client.group_member import GroupMember

    await fill(cluster, topic, 1)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription, Cluster(bootstrap) as other:
        await eventually("owned", lambda: len(subscription.partitions) == 1)
        ordinary = GroupMember(other, topic, [topic], "range", QUICK.member)
        with pytest.raises(FatalError, match="use another group id"):
            await ordinary.join(())


def test_transactional_ids_name_group_topic_partition_and_slot() -> None:
    assert transactional_id("g/1", TopicPartition("t", 3), 2) == "g/1/t/3/2"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_in_flight": 401},
        {"max_attempts": 0},
        {"batch_size": 17},
        {"start": "somewhere"},
        {"delivery_timeout_ms": 0},
    ],
)
def test_settings_outside_their_limits_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SubscriptionOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        RedeliveryBackoff(first_ms=10, max_ms=5)
