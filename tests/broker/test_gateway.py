"""The gRPC service: what a subscriber may say, what it is answered, and what is in the topics afterwards."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from broker_process import BrokerProcess, StartBroker, free_port
from gateway_cases import METHOD, GatewayProcess, GrpcSubscriber, copy_all
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kafka_process import KafkaProcess
from subscription_cases import entry_of, eventually, fill, quick, records, values
from transaction_cases import make_topic

from semel.client.cluster import Cluster
from semel.errors import SemelError
from semel.subscriptions.dead_letters import CAUSE
from semel.subscriptions.grpc import subscriptions_pb2 as pb
from semel.subscriptions.grpc.groups import Gateway
from semel.subscriptions.grpc.server import SERVICE, GatewayServer, ServerTls
from semel.subscriptions.grpc.session import Session
from semel.wire.records import Record

COUNT: Final = 12
NEW_KEY: Final = ("-newkey", "rsa:2048", "-nodes", "-keyout")


@pytest.fixture(params=["semel", "kafka"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    process: BrokerProcess | KafkaProcess = request.getfixturevalue(f"{request.param}_broker")
    return process.bootstrap


@pytest.fixture
async def gateway(bootstrap: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[GatewayServer]:
    async with GatewayServer(bootstrap, "127.0.0.1:0", defaults=quick()) as running:
        yield running
    assert "this is a bug" not in caplog.text


@pytest.fixture
def address(gateway: GatewayServer) -> str:
    return f"127.0.0.1:{gateway.port}"


@pytest.fixture
async def subscriber(address: str) -> AsyncIterator[GrpcSubscriber]:
    async with GrpcSubscriber(address) as connected:
        yield connected


async def test_a_delivery_is_worked_on_in_a_transaction_that_commits_with_its_ack(
    cluster: Cluster, topic: str, output: str, subscriber: GrpcSubscriber
) -> None:
    await fill(cluster, topic, 1, keys=1)
    await make_topic(cluster, output)
    ready = await subscriber.setup(topic)
    assert ready.settings.max_in_flight == 16
    delivery = await subscriber.delivery()
    (record,) = delivery.records
    assert (delivery.topic, delivery.partition, delivery.attempt) == (topic, 0, 1)
    assert (record.offset, record.key, record.value) == (0, b"k0", b"0")
    await subscriber.begin(delivery.delivery_id)
    headers = [pb.Header(key="a", value=b"1"), pb.Header(key="b")]
    await subscriber.state(delivery.delivery_id, 7, output, b"x", key=b"k", headers=headers, timestamp_ms=5)
    applied = (await subscriber.receive("applied")).applied
    assert (applied.delivery_id, applied.statement_id) == (delivery.delivery_id, 7)
    assert (applied.partition, applied.offset) == (0, 0)
    assert await records(cluster, output) == []
    await subscriber.ack(delivery.delivery_id)
    assert (await subscriber.receive("committed")).committed.delivery_id == delivery.delivery_id
    (copied,) = await records(cluster, output, at_least=1)
    assert (copied.key, copied.value, copied.timestamp) == (b"k", b"x", 5)
    assert list(copied.headers) == [("a", b"1"), ("b", None)]
    entry = await entry_of(cluster, topic, topic)
    assert entry is not None and entry.offset == 1
    assert await subscriber.leave() == (grpc.StatusCode.OK, "")


async def test_an_ack_needs_no_transaction_and_a_nack_brings_the_delivery_again(
    cluster: Cluster, topic: str, subscriber: GrpcSubscriber
) -> None:
    await fill(cluster, topic, 1)
    await subscriber.setup(topic)
    first = await subscriber.delivery()
    await subscriber.nack(first.delivery_id, "not today")
    rolled_back = (await subscriber.receive("rolled_back")).rolled_back
    assert (rolled_back.cause, rolled_back.reason) == (pb.CAUSE_NACKED, "not today")
    again = await subscriber.delivery()
    assert (again.attempt, again.records[0].value) == (2, b"0")
    assert again.delivery_id != first.delivery_id
    await subscriber.ack(again.delivery_id)
    await subscriber.receive("committed")


async def test_what_a_nacked_transaction_published_is_never_seen(
    cluster: Cluster, topic: str, output: str, subscriber: GrpcSubscriber
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    await subscriber.setup(topic)
    first = await subscriber.delivery()
    await subscriber.begin(first.delivery_id)
    await subscriber.state(first.delivery_id, 1, output, b"wrong")
    await subscriber.receive("applied")
    began = time.monotonic()
    await subscriber.nack(first.delivery_id, delay_ms=300)
    await subscriber.receive("rolled_back")
    again = await subscriber.delivery()
    assert time.monotonic() - began > 0.3
    await subscriber.copy(again, output)
    await subscriber.receive("applied")
    await subscriber.receive("committed")
    assert await values(cluster, output) == [b"0"]


async def test_several_transactions_are_in_flight_on_one_stream_and_end_in_any_order(
    cluster: Cluster, topic: str, output: str, subscriber: GrpcSubscriber
) -> None:
    await fill(cluster, topic, 3)
    await make_topic(cluster, output, partitions=2)
    await subscriber.setup(topic, open_at_once=3)
    deliveries = [await subscriber.delivery() for _ in range(3)]
    for delivery in deliveries:
        await subscriber.begin(delivery.delivery_id)
    for number in range(2):  # interleaved, and none waits for another
        for delivery in deliveries:
            value = delivery.records[0].value + b"-%d" % number
            await subscriber.state(delivery.delivery_id, number, output, value, partition=number)
    applied = [(await subscriber.receive("applied")).applied for _ in range(6)]
    assert {(each.delivery_id, each.statement_id, each.partition) for each in applied} == {
        (delivery.delivery_id, number, number) for delivery in deliveries for number in range(2)
    }
    await subscriber.ack(deliveries[2].delivery_id)
    await subscriber.nack(deliveries[1].delivery_id, delay_ms=60_000)
    kinds = {(await subscriber.receive()).WhichOneof("message") for _ in range(2)}
    assert kinds == {"committed", "rolled_back"}
    seen = {record.value for record in await records(cluster, output)}
    assert seen <= {b"2-0", b"2-1"}, "the first holds up readers as long as it is open"
    await subscriber.ack(deliveries[0].delivery_id)
    await subscriber.receive("committed")
    assert await values(cluster, output) == [b"0-0", b"0-1", b"2-0", b"2-1"]
    entry = await entry_of(cluster, topic, topic)
    assert entry is not None and (entry.offset, entry.acknowledged) == (1, ((2, 3),))


async def test_credits_bound_what_is_open_and_come_back_when_a_delivery_ends(
    cluster: Cluster, topic: str, subscriber: GrpcSubscriber
) -> None:
    await fill(cluster, topic, 6)
    await subscriber.setup(topic, open_at_once=0)
    with pytest.raises(TimeoutError):
        await subscriber.receive(timeout_s=1)
    async with GrpcSubscriber("", subscriber._channel) as other:  # the read that timed out ended that stream
        await other.setup(topic, open_at_once=0)
        await other.send(credits=pb.Credits(count=3))
        open_now = [await other.delivery() for _ in range(3)]
        await other.ack(open_now[0].delivery_id)
        await other.receive("committed")
        fourth = await other.delivery()
        assert fourth.records[0].value == b"3"
        await other.send(credits=pb.Credits(count=1))
        for delivery in open_now[1:]:
            await other.ack(delivery.delivery_id)
            await other.receive("committed")
        await other.ack(fourth.delivery_id)
        await other.receive("committed")  # and not another delivery before: one credit, one open
        await other.delivery()


async def test_subscribers_share_a_group_and_a_key_is_with_one_of_them_at_a_time(
    cluster: Cluster, topic: str, output: str, address: str
) -> None:
    count, keys = 60, 6
    await fill(cluster, topic, count, keys=keys, partitions=2)
    await make_topic(cluster, output)
    done: list[int] = []
    took: dict[int, list[int]] = {}
    open_keys: set[bytes] = set()

    async def work(number: int) -> None:
        async with GrpcSubscriber(address) as subscriber:
            await subscriber.setup(topic, open_at_once=2, client_id=f"worker-{number}")
            keys_of: dict[int, bytes] = {}
            while len(done) < count:
                response = await subscriber.receive()
                kind = response.WhichOneof("message")
                if kind == "delivery":
                    (record,) = response.delivery.records
                    assert record.key not in open_keys, "two have the same key"
                    open_keys.add(record.key)
                    keys_of[response.delivery.delivery_id] = record.key
                    took.setdefault(number, []).append(int(record.value))
                    await subscriber.begin(response.delivery.delivery_id)
                    await subscriber.state(
                        response.delivery.delivery_id, 1, output, record.value, key=record.key
                    )
                elif kind == "applied":
                    open_keys.discard(keys_of[response.applied.delivery_id])
                    await subscriber.ack(response.applied.delivery_id)
                else:
                    done.append(response.committed.delivery_id)

    workers = [asyncio.create_task(work(number)) for number in range(4)]
    await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
    for worker in workers:
        if worker.done():
            worker.result()
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    assert len(took) == 4, "every one of them had something"
    copied = await records(cluster, output, at_least=count)
    assert sorted(int(record.value or b"") for record in copied) == list(range(count))
    for key in range(keys):
        numbers = [int(record.value or b"") for record in copied if record.key == b"k%d" % key]
        assert numbers == sorted(numbers)


async def test_batches_are_delivered_and_acknowledged_as_one(
    cluster: Cluster, topic: str, output: str, subscriber: GrpcSubscriber
) -> None:
    await fill(cluster, topic, COUNT)
    await make_topic(cluster, output)
    await subscriber.setup(topic, batch_size=5)
    sizes = []
    while sum(sizes) < COUNT:
        delivery = await subscriber.delivery()
        sizes.append(len(delivery.records))
        await subscriber.copy(delivery, output)
        for _ in delivery.records:
            await subscriber.receive("applied")
        await subscriber.receive("committed")
    assert max(sizes) == 5
    assert await values(cluster, output) == sorted(b"%d" % number for number in range(COUNT))


# Streams that end


async def test_a_lost_stream_rolls_back_at_once_and_another_gets_the_delivery(
    cluster: Cluster, topic: str, output: str, address: str
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    async with GrpcSubscriber(address) as first, GrpcSubscriber(address) as second:
        await first.setup(topic)
        lost = await first.delivery()
        await second.setup(topic)
        await first.begin(lost.delivery_id)
        await first.state(lost.delivery_id, 1, output, b"lost")
        await first.receive("applied")
        began = time.monotonic()
        await first.close()
        again = await second.delivery()
        assert time.monotonic() - began < 5, "not after the delivery timeout, nor after the session's"
        assert again.attempt == 2
        await second.copy(again, output)
        await second.receive("applied")
        await second.receive("committed")
    assert await values(cluster, output) == [b"0"]


async def test_an_ack_that_was_received_commits_though_the_stream_is_lost(
    bootstrap: str, cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    streams: list[GrpcSubscriber] = []

    def cut_when_sealed(step: str) -> None:
        if step == "sealed":
            streams[0].call.cancel()

    options = quick(on_step=cut_when_sealed)
    async with GatewayServer(bootstrap, "127.0.0.1:0", defaults=options) as gateway:
        async with GrpcSubscriber(f"127.0.0.1:{gateway.port}") as subscriber:
            streams.append(subscriber)
            await subscriber.setup(topic)
            await subscriber.copy(await subscriber.delivery(), output)
            with pytest.raises(asyncio.CancelledError):
                await subscriber.ended()
            assert {response.WhichOneof("message") for response in subscriber.seen} <= {
                *("ready", "delivery", "applied")
            }
        async with GrpcSubscriber(f"127.0.0.1:{gateway.port}") as next_one:
            await next_one.setup(topic)
            await fill(cluster, topic, 1, first=1)
            assert (await next_one.delivery()).records[0].offset == 1
    assert await values(cluster, output) == [b"0"]


async def test_who_leaves_is_answered_and_what_it_leaves_comes_again_without_blame(
    cluster: Cluster, topic: str, output: str, address: str
) -> None:
    await fill(cluster, topic, 2)
    await make_topic(cluster, output)
    async with GrpcSubscriber(address) as first:
        await first.setup(topic, open_at_once=2)
        done, left = [await first.delivery() for _ in range(2)]
        await first.begin(left.delivery_id)
        await first.state(left.delivery_id, 1, output, b"left")
        await first.copy(done, output)
        assert await first.leave() == (grpc.StatusCode.OK, "")
        ends = {
            response.WhichOneof("message"): response
            for response in first.seen
            if response.WhichOneof("message") in ("committed", "rolled_back")
        }
        assert ends["committed"].committed.delivery_id == done.delivery_id
        assert ends["rolled_back"].rolled_back.delivery_id == left.delivery_id
    async with GrpcSubscriber(address) as second:
        await second.setup(topic, open_at_once=2)
        again = await second.delivery()
        assert (again.records[0].offset, again.attempt) == (left.records[0].offset, 1)
    assert await values(cluster, output) == [b"0"]


async def test_the_callers_deadline_gives_back_what_is_open(
    cluster: Cluster, topic: str, address: str
) -> None:
    await fill(cluster, topic, 1)
    async with GrpcSubscriber(address) as first, GrpcSubscriber(address) as second:
        first.call = first._channel.stream_stream(
            METHOD,
            request_serializer=pb.SubscribeRequest.SerializeToString,
            response_deserializer=pb.SubscribeResponse.FromString,
        )(timeout=2)
        await first.setup(topic)
        await first.delivery()
        await second.setup(topic)
        assert (await first.ended())[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await second.delivery()).attempt == 2


async def test_a_delivery_that_takes_too_long_is_taken_back_and_its_late_ack_told(
    cluster: Cluster, topic: str, output: str, subscriber: GrpcSubscriber
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    await subscriber.setup(topic, settings=pb.Settings(delivery_timeout_ms=500))
    late = await subscriber.delivery()
    await subscriber.begin(late.delivery_id)
    await subscriber.state(late.delivery_id, 1, output, b"late")
    await subscriber.receive("applied")
    rolled_back = (await subscriber.receive("rolled_back")).rolled_back
    assert (rolled_back.delivery_id, rolled_back.cause) == (late.delivery_id, pb.CAUSE_TIMED_OUT)
    again = await subscriber.delivery()
    assert again.attempt == 2
    await subscriber.copy(again, output)
    await subscriber.ack(late.delivery_id)
    answers = [await subscriber.receive() for _ in range(3)]
    warning = next(answer.warning for answer in answers if answer.HasField("warning"))
    assert (warning.delivery_id, warning.problem) == (late.delivery_id, pb.PROBLEM_TOO_LATE)
    assert "not acknowledged in time" in warning.reason
    assert await values(cluster, output) == [b"0"]


async def dead_letters(cluster: Cluster, topic: str) -> list[Record]:
    """What is in a dead-letter topic, once there is something."""
    async with asyncio.timeout(60):
        while True:
            with suppress(SemelError):
                if found := await records(cluster, topic):
                    return found
            await asyncio.sleep(0.05)


async def test_a_record_that_kills_its_subscriber_is_given_up_and_its_neighbours_are_not(
    cluster: Cluster, topic: str, output: str, address: str
) -> None:
    """The first subscriber is lost with four deliveries, later ones whenever they get the poison."""
    count, poison = 8, b"2"
    await fill(cluster, topic, count)
    await make_topic(cluster, output)
    settings = pb.Settings(max_attempts=2)
    async with GrpcSubscriber(address) as first:
        await first.setup(topic, open_at_once=4, settings=settings)
        assert {(await first.delivery()).records[0].value for _ in range(4)} == {b"0", b"1", poison, b"3"}
    lives, attempts, done = 0, [], 0
    while done < count - 1 or len(attempts) < 2:
        lives += 1
        async with GrpcSubscriber(address) as next_one:
            await next_one.setup(topic, open_at_once=4, settings=settings)
            while done < count - 1 or len(attempts) < 2:
                response = await next_one.receive()
                if response.HasField("committed"):
                    done += 1
                elif response.HasField("delivery"):
                    if response.delivery.records[0].value == poison:
                        attempts.append(response.delivery.attempt)
                        break
                    await next_one.copy(response.delivery, output)
    assert lives <= 3
    (letter,) = await dead_letters(cluster, f"{topic}.{topic}.dead")
    assert (letter.value, dict(letter.headers)[CAUSE]) == (poison, b"its subscriber has gone")
    assert attempts == [2, 3], "once with three others, then twice alone"
    assert await values(cluster, output) == sorted(b"%d" % number for number in range(count) if number != 2)


class Stream:
    """The messages of a stream without gRPC: what it tells comes in the order that a test wants."""

    def __init__(self) -> None:
        self.written: list[pb.SubscribeResponse] = []
        self.has_delivery = asyncio.Event()
        self.is_cut = False

    async def read(self) -> None:
        """The end of the stream, as soon as there is a delivery."""
        await self.has_delivery.wait()

    async def write(self, response: pb.SubscribeResponse) -> None:
        if self.is_cut:
            raise ConnectionError("as gRPC says it")
        self.written.append(response)
        if response.HasField("delivery"):
            self.has_delivery.set()


class CuttingStream(Stream):
    """Cut when it has had a delivery; gRPC tells of its end before it tells that it was cut."""

    async def read(self) -> None:
        await super().read()
        self.is_cut = True


class CuttingIds:
    """Ends a stream in the moment in which it is given a delivery, before that is written."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def __iter__(self) -> CuttingIds:
        return self

    def __next__(self) -> int:
        self._task.cancel()
        return 1


async def next_attempt(gateway: Gateway, setup: pb.Setup) -> int:
    """Which attempt the next subscriber is told that its delivery is."""
    stream = Stream()
    group, _ = await gateway.join(setup)
    await Session(gateway, group, setup, "next").converse(stream.read, stream.write, [])
    assert [response.WhichOneof("message") for response in stream.written] == [
        "ready",
        "delivery",
        "rolled_back",
    ]
    assert stream.written[2].rolled_back.delivery_id == stream.written[1].delivery.delivery_id
    return stream.written[1].delivery.attempt


async def test_a_stream_that_is_cut_is_not_taken_for_one_that_left(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    await fill(cluster, topic, 1)
    gateway = Gateway(bootstrap, defaults=quick())
    setup = pb.Setup(group=topic, topics=[topic], credits=1)
    group, _ = await gateway.join(setup)
    try:
        cut = CuttingStream()
        await Session(gateway, group, setup, "cut").converse(cut.read, cut.write, [])
        assert await next_attempt(gateway, setup) == 2, "it may have killed its subscriber"
        assert await next_attempt(gateway, setup) == 2, "and who left in peace was not killed"
    finally:
        await gateway.close()


async def test_what_was_never_handed_to_its_stream_is_not_blamed_for_the_end_of_it(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    await fill(cluster, topic, 1)
    gateway = Gateway(bootstrap, defaults=quick())
    setup = pb.Setup(group=topic, topics=[topic], credits=1)
    group, _ = await gateway.join(setup)
    try:
        stream, ids = Stream(), gateway.delivery_ids
        session = Session(gateway, group, setup, "ending")
        conversing = asyncio.create_task(session.converse(stream.read, stream.write, []))
        gateway.delivery_ids = CuttingIds(conversing)
        with pytest.raises(asyncio.CancelledError):
            await conversing
        assert not stream.has_delivery.is_set()
        gateway.delivery_ids = ids
        assert await next_attempt(gateway, setup) == 1
    finally:
        await gateway.close()


async def test_suspects_are_given_out_alone(cluster: Cluster, topic: str, address: str) -> None:
    await fill(cluster, topic, 6)
    async with GrpcSubscriber(address) as first:
        await first.setup(topic, open_at_once=3)
        suspects = {(await first.delivery()).records[0].offset for _ in range(3)}
    async with GrpcSubscriber(address) as second:
        await second.setup(topic, open_at_once=3)
        open_now: set[int] = set()
        offsets: dict[int, int] = {}
        while len(offsets) < 6 or open_now:
            response = await second.receive()
            if response.HasField("delivery"):
                delivery = response.delivery
                offsets[delivery.delivery_id] = delivery.records[0].offset
                open_now.add(delivery.delivery_id)
                is_suspect = delivery.records[0].offset in suspects
                assert delivery.attempt == 1 + is_suspect
                assert not is_suspect or len(open_now) == 1
                await second.ack(delivery.delivery_id)
            else:
                open_now.discard(response.committed.delivery_id)
    assert sorted(offsets.values()) == list(range(6))


async def test_a_subscriber_that_does_not_read_holds_up_nobody_else(
    cluster: Cluster, topic: str, output: str, address: str
) -> None:
    await fill(cluster, topic, 40)
    await make_topic(cluster, output)
    async with GrpcSubscriber(address) as slow, GrpcSubscriber(address) as quick_one:
        await slow.setup(topic, open_at_once=3)
        await slow.delivery()
        await quick_one.setup(topic, open_at_once=2)
        took: list[int] = []
        copying = asyncio.create_task(copy_all(quick_one, output, lambda: False, took))
        await eventually("the others are copied", lambda: len(took) >= 37)
        copying.cancel()
        assert len(set(took)) == 37, "all but the three that the slow one has"


# What makes no sense


async def test_messages_that_make_no_sense_are_told_and_the_stream_goes_on(
    cluster: Cluster, topic: str, output: str, subscriber: GrpcSubscriber
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    await subscriber.setup(topic)
    mine = (await subscriber.delivery()).delivery_id

    async def told(problem: pb.Problem, **message: Any) -> None:
        await subscriber.send(**message)
        warning = (await subscriber.receive("warning")).warning
        assert warning.problem == problem and warning.reason, warning

    await told(pb.PROBLEM_MALFORMED, message=b"\xff\xff\xff")
    await told(pb.PROBLEM_MALFORMED, message=b"")
    await told(pb.PROBLEM_MALFORMED, message=b"\xfa\x01\x03abc")  # a field that this version does not have
    await told(pb.PROBLEM_REPEATED, setup=pb.Setup(group=topic, topics=[topic]))
    await told(pb.PROBLEM_UNKNOWN_DELIVERY, ack=pb.Ack(delivery_id=mine + 1))
    await told(pb.PROBLEM_UNKNOWN_DELIVERY, nack=pb.Nack(delivery_id=0))
    await told(pb.PROBLEM_UNKNOWN_DELIVERY, begin=pb.Begin(delivery_id=2**64 - 1))

    async def refused(problem: pb.Problem, delivery_id: int, statement_id: int, **more: Any) -> None:
        await subscriber.state(delivery_id, statement_id, more.pop("topic", output), b"bad", **more)
        answer = (await subscriber.receive("refused")).refused
        assert (answer.delivery_id, answer.statement_id) == (delivery_id, statement_id)
        assert answer.problem == problem and answer.reason and not answer.rejects_transaction, answer

    await refused(pb.PROBLEM_NO_TRANSACTION, mine, 1)
    await refused(pb.PROBLEM_UNKNOWN_DELIVERY, mine + 1, 1)
    await subscriber.begin(mine)
    await told(pb.PROBLEM_REPEATED, begin=pb.Begin(delivery_id=mine))
    await refused(pb.PROBLEM_NOT_ALLOWED, mine, 2, topic="")
    await refused(pb.PROBLEM_NOT_ALLOWED, mine, 2, partition=-1)
    await refused(pb.PROBLEM_NOT_ALLOWED, mine, 2, timestamp_ms=-7)
    await subscriber.state(mine, 1, output, b"good")
    await subscriber.receive("applied")
    await refused(pb.PROBLEM_REPEATED, mine, 1)
    await subscriber.ack(mine)
    await subscriber.state(mine, 3, output, b"late")  # while it is committed
    await subscriber.ack(mine)
    answers = {kind.WhichOneof("message"): kind for kind in [await subscriber.receive() for _ in range(3)]}
    assert answers["refused"].refused.problem == pb.PROBLEM_TOO_LATE
    assert answers["warning"].warning.problem == pb.PROBLEM_TOO_LATE
    assert answers["committed"].committed.delivery_id == mine
    await refused(pb.PROBLEM_TOO_LATE, mine, 4)
    await told(pb.PROBLEM_TOO_LATE, ack=pb.Ack(delivery_id=mine))
    assert "committed already" in subscriber.seen[-1].warning.reason
    await told(pb.PROBLEM_TOO_LATE, nack=pb.Nack(delivery_id=mine))
    assert await values(cluster, output) == [b"good"]
    await fill(cluster, topic, 1, first=1)
    await subscriber.ack((await subscriber.delivery()).delivery_id)
    await subscriber.receive("committed")


async def test_nobody_touches_the_transaction_of_another_stream(
    cluster: Cluster, topic: str, output: str, address: str
) -> None:
    await fill(cluster, topic, 2)
    await make_topic(cluster, output)
    async with GrpcSubscriber(address) as owner, GrpcSubscriber(address) as other:
        await owner.setup(topic)
        mine = (await owner.delivery()).delivery_id
        await owner.begin(mine)
        await other.setup(topic)
        theirs = (await other.delivery()).delivery_id
        await other.begin(theirs)
        await other.state(mine, 1, output, b"stolen")
        assert (await other.receive("refused")).refused.problem == pb.PROBLEM_UNKNOWN_DELIVERY
        for message in (
            pb.SubscribeRequest(ack=pb.Ack(delivery_id=mine)),
            pb.SubscribeRequest(nack=pb.Nack(delivery_id=mine)),
        ):
            await other.send(message)
            assert (await other.receive("warning")).warning.problem == pb.PROBLEM_UNKNOWN_DELIVERY
        await owner.state(mine, 1, output, b"mine")
        await owner.receive("applied")
        await owner.ack(mine)
        await owner.receive("committed")
        await other.ack(theirs)
        await other.receive("committed")
    assert await values(cluster, output) == [b"mine"]


async def test_a_refused_statement_rejects_its_transaction(
    cluster: Cluster, topic: str, output: str, subscriber: GrpcSubscriber
) -> None:
    await fill(cluster, topic, 1)
    await make_topic(cluster, output)
    await subscriber.setup(topic)
    delivery_id = (await subscriber.delivery()).delivery_id
    await subscriber.begin(delivery_id)
    await subscriber.state(delivery_id, 1, output, b"doomed")
    await subscriber.receive("applied")
    await subscriber.state(delivery_id, 2, output, b"nowhere", partition=17)
    refused = (await subscriber.receive("refused")).refused
    assert (refused.statement_id, refused.problem) == (2, pb.PROBLEM_NOT_ALLOWED)
    assert refused.rejects_transaction
    await subscriber.ack(delivery_id)
    rolled_back = (await subscriber.receive("rolled_back")).rolled_back
    assert (rolled_back.delivery_id, rolled_back.cause) == (delivery_id, pb.CAUSE_REJECTED)
    await subscriber.copy(await subscriber.delivery(), output)
    await subscriber.receive("applied")
    await subscriber.receive("committed")
    assert await values(cluster, output) == [b"0"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (pb.SubscribeRequest(ack=pb.Ack(delivery_id=1)), "must be a Setup"),
        (b"\xff\xff", "must be a Setup"),
        (pb.SubscribeRequest(setup=pb.Setup(topics=["a"])), "group"),
        (pb.SubscribeRequest(setup=pb.Setup(group="g")), "0 topics"),
        (pb.SubscribeRequest(setup=pb.Setup(group="g", topics=["a"] * 101)), "101 topics"),
        (pb.SubscribeRequest(setup=pb.Setup(group="g", topics=[""])), "topic"),
        (
            pb.SubscribeRequest(
                setup=pb.Setup(group="g", topics=["a"], settings=pb.Settings(max_in_flight=401))
            ),
            "max_in_flight",
        ),
        (
            pb.SubscribeRequest(setup=pb.Setup(group="g", topics=["a"], settings=pb.Settings(start=9))),
            "START_LATEST",
        ),
    ],
)
async def test_a_stream_without_a_sensible_setup_is_turned_away(
    subscriber: GrpcSubscriber, message: pb.SubscribeRequest | bytes, says: str
) -> None:
    await subscriber.send(message)
    code, details = await subscriber.ended()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert says in details


async def test_a_stream_that_says_nothing_is_ended(
    subscriber: GrpcSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.subscriptions.grpc.server.SETUP_TIMEOUT_S", 0.2)
    assert (await subscriber.ended())[0] is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_unknown_topic_is_named(topic: str, subscriber: GrpcSubscriber) -> None:
    await subscriber.send(setup=pb.Setup(group=topic, topics=[topic]))
    code, details = await subscriber.ended()
    assert code is grpc.StatusCode.NOT_FOUND
    assert topic in details


async def test_settings_are_those_of_whoever_came_first_and_others_are_told(
    cluster: Cluster, topic: str, address: str
) -> None:
    await fill(cluster, topic, 1)
    async with GrpcSubscriber(address) as first, GrpcSubscriber(address) as second:
        ready = await first.setup(topic, settings=pb.Settings(max_attempts=9, max_in_flight=5))
        assert (ready.settings.max_attempts, ready.settings.max_in_flight) == (9, 5)
        ready = await second.setup(topic, settings=pb.Settings(max_attempts=7, max_in_flight=5))
        assert ready.settings.max_attempts == 9
        warning = (await second.receive("warning")).warning
        assert warning.problem == pb.PROBLEM_OTHER_SETTING
        assert "max_attempts is 9 and not 7" in warning.reason
        for setup in (
            pb.Setup(group=topic, topics=[topic, "more"]),
            pb.Setup(group=topic, topics=[topic], settings=pb.Settings(dead_letter_topic="other")),
        ):
            async with GrpcSubscriber(address) as third:
                await third.send(setup=setup)
                assert (await third.ended())[0] is grpc.StatusCode.FAILED_PRECONDITION


# Around it


async def test_health_and_reflection_are_served(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        described = await stream.read()
        (proto,) = described.file_descriptor_response.file_descriptor_proto
        assert b"semel.subscriptions.v1" in proto


async def test_a_gateway_without_brokers_says_that_it_serves_nobody(start_broker: StartBroker) -> None:
    broker = start_broker(in_memory=True)
    statuses = health_pb2.HealthCheckResponse
    async with (
        asyncio.timeout(60),
        GatewayServer(broker.bootstrap, "127.0.0.1:0") as gateway,
        grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == statuses.SERVING
        await asyncio.to_thread(broker.kill)
        assert (await watch.read()).status == statuses.NOT_SERVING
        await asyncio.to_thread(broker.start)
        assert (await watch.read()).status == statuses.SERVING
        watch.cancel()


def make_certificates(folder: Path) -> None:
    """A CA, and a certificate of it for the gateway and one for a subscriber."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-subj", "/CN=test-ca", "-days", "2", *NEW_KEY, "ca.key", "-out", "ca.pem")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    signed_by_ca = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    for name in ("gateway", "subscriber"):
        openssl("req", "-subj", f"/CN={name}", *NEW_KEY, f"{name}.key", "-out", f"{name}.csr")
        openssl("x509", "-req", "-days", "2", *signed_by_ca, "-in", f"{name}.csr", "-out", f"{name}.pem")


async def test_tls_is_spoken_and_strangers_are_turned_away(
    bootstrap: str, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    make_certificates(tmp_path)
    await fill(cluster, topic, 1)
    tls = ServerTls(str(tmp_path / "gateway.pem"), str(tmp_path / "gateway.key"), str(tmp_path / "ca.pem"))
    ca = (tmp_path / "ca.pem").read_bytes()
    pair = ((tmp_path / "subscriber.key").read_bytes(), (tmp_path / "subscriber.pem").read_bytes())
    async with GatewayServer(bootstrap, "127.0.0.1:0", tls=tls, defaults=quick()) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        known = grpc.ssl_channel_credentials(ca, *pair)
        async with (
            grpc.aio.secure_channel(address, known) as channel,
            GrpcSubscriber("", channel) as subscriber,
        ):
            await subscriber.setup(topic)
            await subscriber.ack((await subscriber.delivery()).delivery_id)
            await subscriber.receive("committed")
        for stranger in (
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca)),
            grpc.aio.insecure_channel(address),
        ):
            async with stranger, GrpcSubscriber("", stranger) as refused:
                assert (await refused.ended())[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_gateway_process_copies_and_stops_when_told(
    bootstrap: str, cluster: Cluster, topic: str, output: str, tmp_path: Path
) -> None:
    await fill(cluster, topic, 2)
    await make_topic(cluster, output)
    process = GatewayProcess(bootstrap, free_port(), tmp_path / "gateway.log")
    try:
        await asyncio.to_thread(process.start)
        async with GrpcSubscriber(process.address) as subscriber:
            await subscriber.setup(topic)
            await subscriber.copy(await subscriber.delivery(), output)
            await subscriber.receive("applied")
            await subscriber.receive("committed")
            left = await subscriber.delivery()
            stopping = asyncio.create_task(asyncio.to_thread(process.stop))
            code, details = await subscriber.ended()
            assert (code, "closed" in details) == (grpc.StatusCode.UNAVAILABLE, True)
            rolled_back = subscriber.seen[-1].rolled_back
            assert (rolled_back.delivery_id, rolled_back.cause) == (left.delivery_id, pb.CAUSE_LOST)
            assert await stopping == 0, process.log
    finally:
        process.kill()
        print(process.log)
    assert await values(cluster, output) == [b"0"]
    entry = await entry_of(cluster, topic, topic)
    assert entry is not None and entry.is_released


async def test_a_broker_serves_grpc_beside_kafka(topic: str, output: str, tmp_path: Path) -> None:
    port = free_port()

    class WithGateway(BrokerProcess):
        @property
        def command(self) -> list[str]:
            return [*super().command, "--grpc", f"127.0.0.1:{port}"]

    broker = WithGateway(tmp_path / "broker")
    try:
        await asyncio.to_thread(broker.start)
        async with Cluster(broker.bootstrap) as cluster:
            await fill(cluster, topic, 1)
            await make_topic(cluster, output)
            async with GrpcSubscriber(f"127.0.0.1:{port}") as subscriber:
                await subscriber.setup(topic)
                await subscriber.copy(await subscriber.delivery(), output)
                await subscriber.receive("applied")
                await subscriber.receive("committed")
            assert await values(cluster, output) == [b"0"]
        assert await asyncio.to_thread(broker.stop) == 0, broker.log
    finally:
        broker.kill()


def test_without_the_extra_the_error_says_what_to_install() -> None:
    program = "import sys; sys.modules['grpc'] = None; from semel.cli import main; main()"
    for arguments in (["gateway"], ["serve", "--in-memory", "--grpc", "127.0.0.1:0"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=dict(os.environ),
        )
        assert done.returncode == 2
        assert "pip install '.[grpc]'" in done.stderr
