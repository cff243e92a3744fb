"""Transactions of `semel.client`, by the same claims against Semel and against Apache Kafka."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from broker_process import BrokerProcess, StartBroker
from kafka_process import KafkaProcess
from transaction_cases import SlowToJoin, make_topic, read_committed, read_values, settle

from semel.client.admin import READ_COMMITTED, READ_UNCOMMITTED, Admin
from semel.client.cluster import Cluster
from semel.client.connection import Connection
from semel.client.coordinator import TransactionCoordinator
from semel.client.errors import TransactionStateError, UnreachableError, UnsupportedRequestError
from semel.client.group_offsets import CommittedOffset, GroupMetadata, commit_offsets, fetch_offsets
from semel.client.metadata import TopicPartition
from semel.client.producer import ProducerOptions
from semel.client.shared_transaction import (
    Outcome,
    Resumed,
    SharedTransaction,
    State,
    TransactionHandle,
    TransactionOptions,
)
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import AbortableError, ConfigError, FatalError, FencedError, RetriableError

WRITER = Path(__file__).with_name("shared_writer.py")
WRITERS = 4
BATCHES = 20
TWO_PHASE = TransactionOptions(two_phase=True)
VERSION_1 = TransactionOptions(max_version=1)
SMALL_BATCHES = ProducerOptions(linger_ms=0, batch_bytes=200)


@pytest.fixture(params=["semel", "kafka"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    process: BrokerProcess | KafkaProcess = request.getfixturevalue(f"{request.param}_broker")
    return process.bootstrap


@pytest.fixture(params=[2, 1], ids=["version-2", "version-1"])
def options(request: pytest.FixtureRequest) -> TransactionOptions:
    return TransactionOptions(max_version=request.param)


async def test_the_version_is_the_newest_that_is_allowed(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    async with TransactionalProducer(cluster, topic, options) as producer:
        assert producer.version == options.max_version


async def test_a_commit_shows_everything_and_an_abort_nothing(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic, 3)
    async with TransactionalProducer(cluster, topic, options) as producer:
        for number in range(6):
            await producer.begin()
            for partition in range(3):
                await producer.send(topic, b"%d" % number, partition=partition)
            await producer.flush()
            await (producer.abort() if number % 2 else producer.commit())
    assert await read_committed(cluster, topic) == [[b"0", b"2", b"4"]] * 3
    everything = await read_values(cluster, topic, READ_UNCOMMITTED)
    assert everything == [[b"0", b"1", b"2", b"3", b"4", b"5"]] * 3


async def test_what_is_open_is_not_read_as_committed(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    async with TransactionalProducer(cluster, topic, options) as producer:
        await producer.begin()
        await producer.send(topic, b"open")
        await producer.flush()
        assert await read_values(cluster, topic, READ_COMMITTED) == [[]]
        assert await read_values(cluster, topic, READ_UNCOMMITTED) == [[b"open"]]
        await producer.commit()
        assert await read_committed(cluster, topic) == [[b"open"]]


async def test_many_batches_of_a_transaction_keep_their_order(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    async with TransactionalProducer(cluster, topic, options, SMALL_BATCHES) as producer:
        for _ in range(3):
            async with producer.transaction():
                for number in range(200):
                    await producer.send(topic, b"%d" % number)
    assert await read_committed(cluster, topic) == [[b"%d" % number for number in range(200)] * 3]


async def test_every_transaction_has_an_epoch_of_its_own(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    seen = []
    async with TransactionalProducer(cluster, topic, options) as producer:
        for number in range(4):
            await producer.begin()
            seen.append(producer.identity)
            await producer.send(topic, b"v")
            await producer.flush()
            await (producer.abort() if number % 2 else producer.commit())
    assert len(set(seen)) == 4
    assert seen == sorted(seen)


async def test_a_transaction_without_anything_in_it_costs_nothing(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    async with TransactionalProducer(cluster, topic, options) as producer:
        identity = producer.identity
        await producer.begin()
        await producer.commit()
        await producer.begin()
        await producer.abort()
        assert producer.identity == identity
        async with producer.transaction():
            await producer.send(topic, b"v")
    assert await read_committed(cluster, topic) == [[b"v"]]


async def test_an_exception_aborts(cluster: Cluster, options: TransactionOptions, topic: str) -> None:
    await make_topic(cluster, topic)
    async with TransactionalProducer(cluster, topic, options) as producer:
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction():
                await producer.send(topic, b"lost")
                await producer.flush()
                _ = 1 / 0
        async with producer.transaction():
            await producer.send(topic, b"kept")
    assert await read_committed(cluster, topic) == [[b"kept"]]


async def test_offsets_are_committed_with_the_records_or_not_at_all(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic, 2)
    group = GroupMetadata(f"group-{topic}")
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    async with TransactionalProducer(cluster, topic, options) as producer:
        async with producer.transaction():
            await producer.send(topic, b"v")
            offsets = {first: CommittedOffset(5, "a note"), second: CommittedOffset(7)}
            await producer.send_offsets(group, offsets)
        found = await fetch_offsets(cluster, group.group_id, [first, second])
        assert {where: each.offset for where, each in found.items()} == {first: 5, second: 7}
        assert found[first].metadata == "a note"

        await producer.begin()
        await producer.send_offsets(group, {first: CommittedOffset(99)})
        with pytest.raises(RetriableError, match="UNSTABLE_OFFSET_COMMIT"):
            await fetch_offsets(cluster, group.group_id, [first], timeout_ms=100)
        unstable = await fetch_offsets(cluster, group.group_id, [first], require_stable=False)
        assert unstable[first].offset == 5
        await producer.abort()
        assert (await fetch_offsets(cluster, group.group_id, [first]))[first].offset == 5


async def test_plain_offsets_can_be_committed_and_read(cluster: Cluster, topic: str) -> None:
    await make_topic(cluster, topic, 2)
    where = TopicPartition(topic, 1)
    await commit_offsets(cluster, GroupMetadata(f"group-{topic}"), {where: CommittedOffset(3, "plain")})
    found = await fetch_offsets(cluster, f"group-{topic}", [TopicPartition(topic, 0), where])
    assert {key: (value.offset, value.metadata) for key, value in found.items()} == {where: (3, "plain")}


async def test_offsets_of_somebody_who_left_the_group_spoil_the_transaction(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    ghost = GroupMetadata(f"group-{topic}", generation_id=3, member_id="ghost")
    async with TransactionalProducer(cluster, topic, options) as producer:
        await producer.begin()
        await producer.send(topic, b"lost")
        with pytest.raises(AbortableError):
            await producer.send_offsets(ghost, {TopicPartition(topic, 0): CommittedOffset(1)})
        with pytest.raises(TransactionStateError, match="abort it and begin another"):
            await producer.commit()
        await producer.abort()
        async with producer.transaction():
            await producer.send(topic, b"kept")
    assert await read_committed(cluster, topic) == [[b"kept"]]


async def test_the_second_instance_fences_the_first_and_not_the_other_way_round(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    old = TransactionalProducer(cluster, topic, options)
    await old.open()
    await old.begin()
    await old.send(topic, b"old")
    await old.flush()
    async with TransactionalProducer(cluster, topic, options) as new:
        await new.begin()
        await new.send(topic, b"new")
        await new.flush()
        with pytest.raises(FencedError, match="another instance took over"):
            await old.commit()
        with pytest.raises(FencedError):
            await old.begin()
        assert old.state is State.FAILED
        await old.close()
        await new.commit()
    assert await read_committed(cluster, topic) == [[b"new"]]


@asynccontextmanager
async def successor(cluster: Cluster, topic: str, options: TransactionOptions) -> AsyncIterator[None]:
    """A second instance, in the midst of a transaction that in the end is there, and nothing else is."""
    async with TransactionalProducer(cluster, topic, options) as new:
        await new.begin()
        await new.send(topic, b"new")
        await new.flush()
        yield
        await new.commit()
    assert await read_committed(cluster, topic) == [[b"new"]]


async def test_an_instance_that_slept_between_transactions_does_not_disturb_its_successor(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    old = SharedTransaction(cluster, topic, options)
    await old.open()
    await old.begin()
    await old.add_partitions([TopicPartition(topic, 0)])
    await old.commit_offsets(GroupMetadata(f"group-{topic}"), {TopicPartition(topic, 0): CommittedOffset(1)})
    await old.commit()
    await old._take_next_identity()  # it falls asleep here
    async with successor(cluster, topic, options):
        await old.begin()  # and wakes up
        with pytest.raises(FencedError):
            await old.commit_offsets(
                GroupMetadata(f"group-{topic}"), {TopicPartition(topic, 0): CommittedOffset(2)}
            )
        await old.close()
    assert (await fetch_offsets(cluster, f"group-{topic}", [TopicPartition(topic, 0)])).popitem()[
        1
    ].offset == 1


@pytest.mark.parametrize("end", [SharedTransaction.abort, SharedTransaction.commit])
async def test_an_instance_that_was_replaced_before_anybody_wrote_does_not_disturb_its_successor(
    cluster: Cluster, options: TransactionOptions, topic: str, end: Callable[[SharedTransaction], Any]
) -> None:
    await make_topic(cluster, topic)
    old = SharedTransaction(cluster, topic, options)
    await old.open()
    await old.begin()
    old.handle()  # its writers have not come so far as to write
    async with successor(cluster, topic, options):
        with pytest.raises(FencedError):
            await end(old)
        await old.close()


class CutOff(Cluster):
    """A cluster that cannot be reached for a while."""

    is_cut = False

    async def coordinator(self, kind: int, key: str) -> Connection:
        if self.is_cut:
            raise UnreachableError("the network is away")
        return await super().coordinator(kind, key)


async def test_an_instance_that_was_cut_off_right_after_its_commit_does_not_disturb_its_successor(
    cluster: Cluster, bootstrap: str, topic: str
) -> None:
    """On version 1 it has yet to ask for its next epoch, and brokers do not look at the one that it has."""
    await make_topic(cluster, topic)
    async with CutOff(bootstrap) as cut_off, SharedTransaction(cut_off, topic, VERSION_1) as old:
        await old.begin()
        await old.add_partitions([TopicPartition(topic, 0)])
        await old.commit()
        cut_off.is_cut = True
        async with successor(cluster, topic, VERSION_1):
            cut_off.is_cut = False
            with pytest.raises(FencedError):
                await old.begin()


async def test_an_instance_that_was_cut_off_right_after_its_commit_goes_on(
    cluster: Cluster, bootstrap: str, topic: str
) -> None:
    await make_topic(cluster, topic)
    async with CutOff(bootstrap) as cut_off, SharedTransaction(cut_off, topic, VERSION_1) as owner:
        await owner.begin()
        await owner.add_partitions([TopicPartition(topic, 0)])
        await owner.commit()
        cut_off.is_cut = True
        beginning = asyncio.create_task(owner.begin())
        await asyncio.sleep(0)
        assert not beginning.done()
        cut_off.is_cut = False
        await beginning
        await owner.add_partitions([TopicPartition(topic, 0)])
        await owner.commit()


async def test_a_fenced_instance_cannot_write(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    old = TransactionalProducer(cluster, topic, options)
    await old.open()
    await old.begin()
    async with TransactionalProducer(cluster, topic, options) as new:
        await old.send(topic, b"old")
        with pytest.raises(FencedError):
            await old.flush()
        async with new.transaction():
            await new.send(topic, b"new")
    await old.close()
    assert await read_values(cluster, topic, READ_UNCOMMITTED) == [[b"new"]]


async def test_a_transaction_that_took_too_long_is_not_committed(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    short = TransactionOptions(transaction_timeout_ms=300, max_version=options.max_version)
    async with TransactionalProducer(cluster, topic, short) as producer:
        await producer.begin()
        await producer.send(topic, b"late")
        await producer.flush()
        await settle(cluster, topic)  # the broker has aborted it
        with pytest.raises((AbortableError, FencedError)) as caught:
            await producer.commit()
        if isinstance(caught.value, AbortableError):
            await producer.abort()
            async with producer.transaction():
                await producer.send(topic, b"next")
    expected = [b"next"] if isinstance(caught.value, AbortableError) else []
    assert await read_committed(cluster, topic) == [expected]


async def test_a_timeout_above_the_brokers_maximum_is_refused(cluster: Cluster, topic: str) -> None:
    producer = TransactionalProducer(cluster, topic, TransactionOptions(transaction_timeout_ms=2**31 - 1))
    with pytest.raises(FatalError, match=r"transaction\.max\.timeout\.ms"):
        await producer.open()


async def test_a_topic_that_does_not_exist_spoils_nothing(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    async with TransactionalProducer(cluster, topic, options) as producer, producer.transaction():
        with pytest.raises(ConfigError, match="no partition 7"):
            await producer.send(topic, b"v", partition=7)
        await producer.send(topic, b"v", partition=0)
    assert await read_committed(cluster, topic) == [[b"v"]]


async def test_a_batch_that_is_too_large_spoils_the_transaction_alone(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await Admin(cluster).create_topic(topic, partitions=1, configs={"max.message.bytes": "500"})
    async with TransactionalProducer(cluster, topic, options) as producer:
        with pytest.raises(AbortableError, match="MESSAGE_TOO_LARGE"):
            async with producer.transaction():
                await producer.send(topic, b"small")
                await producer.flush()
                await producer.send(topic, b"x" * 1000)
        async with producer.transaction():
            await producer.send(topic, b"kept")
    assert await read_committed(cluster, topic) == [[b"kept"]]


# Shared


class Writer:
    """A process that writes one partition of a shared transaction."""

    def __init__(self, handle: TransactionHandle, topic: str, partition: int, stop_after: int) -> None:
        encoded = b64encode(pickle.dumps(handle)).decode()
        numbers = [str(number) for number in (partition, BATCHES, stop_after)]
        self._process = subprocess.Popen(
            [sys.executable, str(WRITER), encoded, topic, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def says(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.to_thread(self._process.stdout.readline)).strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def start_writers(handle: TransactionHandle, topic: str, stop: dict[int, int] | None = None) -> list[Writer]:
    return [Writer(handle, topic, index, (stop or {}).get(index, -1)) for index in range(WRITERS)]


def all_values() -> list[list[bytes | None]]:
    return [[b"%d-%d" % (index, number) for number in range(BATCHES * 10)] for index in range(WRITERS)]


async def begin_shared(owner: SharedTransaction, topic: str) -> TransactionHandle:
    await owner.begin()
    await owner.add_partitions(TopicPartition(topic, index) for index in range(WRITERS))
    return owner.handle()


async def test_a_writer_is_killed_and_its_transaction_aborted_and_done_again(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic, WRITERS)
    marker = {TopicPartition(topic, 0): CommittedOffset(1, "epoch 1")}
    async with SharedTransaction(cluster, topic, options) as owner:
        writers = start_writers(await begin_shared(owner, topic), topic, stop={1: 5})
        assert await writers[1].says() == "halfway"
        writers[1].kill()
        assert [await writers[index].says() for index in (0, 2, 3)] == ["done 200"] * 3
        await owner.abort()
        assert await read_committed(cluster, topic) == [[]] * WRITERS

        writers += start_writers(await begin_shared(owner, topic), topic)
        assert [await writer.says() for writer in writers[WRITERS:]] == ["done 200"] * WRITERS
        await owner.commit_offsets(GroupMetadata(f"{topic}.epoch"), marker)
        await owner.commit()
    for writer in writers:
        writer.kill()
    assert await read_committed(cluster, topic) == all_values()
    found = await fetch_offsets(cluster, f"{topic}.epoch", marker)
    assert [(each.offset, each.metadata) for each in found.values()] == [(1, "epoch 1")]


async def test_a_writer_that_wakes_up_late_reaches_neither_its_transaction_nor_the_next(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic, WRITERS)
    async with SharedTransaction(cluster, topic, options) as owner:
        sleeper, *others = start_writers(await begin_shared(owner, topic), topic, stop={0: 5})
        assert await sleeper.says() == "halfway"
        await owner.abort()
        again = start_writers(await begin_shared(owner, topic), topic, stop={0: 10})
        assert await again[0].says() == "halfway"
        sleeper.go_on()
        assert (await sleeper.says()).split()[0] in ("FencedError", "AbortableError")
        again[0].go_on()
        assert [await writer.says() for writer in again] == ["done 200"] * WRITERS
        await owner.commit()
    for writer in (sleeper, *others, *again):
        writer.kill()
    assert await read_committed(cluster, topic) == all_values()


async def test_an_owner_that_was_replaced_ends_nothing(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic, WRITERS)
    old = SharedTransaction(cluster, topic, options)
    await old.open()
    await begin_shared(old, topic)
    async with SharedTransaction(cluster, topic, options) as new:
        writers = start_writers(await begin_shared(new, topic), topic)
        assert [await writer.says() for writer in writers] == ["done 200"] * WRITERS
        with pytest.raises(FencedError):
            await old.abort()
        await new.commit()
    await old.close()
    for writer in writers:
        writer.kill()
    assert await read_committed(cluster, topic) == all_values()


async def test_a_partition_that_joins_late_reaches_no_other_transaction(cluster: Cluster, topic: str) -> None:
    await make_topic(cluster, topic, 2)
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    async with SharedTransaction(cluster, topic, VERSION_1) as owner:
        owner._coordinator = coordinator = SlowToJoin(cluster, topic)
        for end in (owner.abort, owner.commit):
            await owner.begin()
            await owner.add_partitions([first])
            coordinator.stop()
            late = asyncio.create_task(owner.add_partitions([second]))
            await coordinator.is_asked.wait()
            await end()
            await owner.begin()
            coordinator.go_on()
            with pytest.raises(TransactionStateError):
                await late
            await owner.add_partitions([second])
            await owner.commit()


async def test_a_transaction_that_nothing_could_join_is_aborted(
    cluster: Cluster, options: TransactionOptions, topic: str
) -> None:
    await make_topic(cluster, topic)
    async with SharedTransaction(cluster, topic, options) as owner:
        await owner.begin()
        first = owner.handle().identity
        if owner.version == 1:
            with pytest.raises(AbortableError, match="UNKNOWN_TOPIC_OR_PARTITION"):
                await owner.add_partitions([TopicPartition(topic, 9)])
        await owner.abort()
        await owner.begin()
        assert owner.identity > first
        await owner.add_partitions([TopicPartition(topic, 0)])
        await owner.commit_offsets(
            GroupMetadata(f"group-{topic}"), {TopicPartition(topic, 0): CommittedOffset(1)}
        )
        await owner.commit()


# Crashes and two-phase commit


async def test_a_transaction_goes_on_after_the_broker_was_killed(
    start_broker: StartBroker, options: TransactionOptions, topic: str
) -> None:
    broker = start_broker()
    async with Cluster(broker.bootstrap) as cluster:
        await make_topic(cluster, topic)
        async with TransactionalProducer(cluster, topic, options) as producer:
            await producer.begin()
            await producer.send(topic, b"before")
            await producer.flush()
            broker.restart()
            await producer.send(topic, b"after")
            await producer.flush()
            broker.restart()
            await producer.commit()
            async with producer.transaction():
                await producer.send(topic, b"next")
        assert await read_committed(cluster, topic) == [[b"before", b"after", b"next"]]


async def test_a_transaction_is_committed_after_kafka_was_killed(
    kafka_broker: KafkaProcess, options: TransactionOptions, topic: str
) -> None:
    async with Cluster(kafka_broker.bootstrap) as cluster:
        await make_topic(cluster, topic)
        async with TransactionalProducer(cluster, topic, options) as producer:
            await producer.begin()
            await producer.send(topic, b"before")
            await producer.flush()
            await asyncio.to_thread(kafka_broker.restart)
            await producer.commit()
            async with producer.transaction():
                await producer.send(topic, b"next")
        assert await read_committed(cluster, topic) == [[b"before", b"next"]]


async def test_a_commit_during_which_the_broker_dies_is_done_once_it_is_back(
    start_broker: StartBroker, options: TransactionOptions, topic: str
) -> None:
    broker = start_broker()
    async with Cluster(broker.bootstrap) as cluster:
        await make_topic(cluster, topic)
        async with TransactionalProducer(cluster, topic, options) as producer:
            for number in range(5):
                await producer.begin()
                await producer.send(topic, b"%d" % number)
                await producer.flush()
                committing = asyncio.create_task(producer.commit())
                await asyncio.sleep(0)  # the commit is on its way, and how far it got differs
                broker.kill()
                await asyncio.to_thread(broker.start)
                await committing
        assert await read_committed(cluster, topic) == [[b"%d" % number for number in range(5)]]


@pytest.mark.parametrize("outcome", Outcome)
async def test_a_prepared_transaction_survives_broker_and_client(
    start_broker: StartBroker, topic: str, outcome: Outcome
) -> None:
    broker = start_broker(transaction_two_phase_commit_enable="true")
    async with Cluster(broker.bootstrap) as cluster:
        await make_topic(cluster, topic)
        first = TransactionalProducer(cluster, topic, TWO_PHASE)
        await first.open()
        await first.begin()
        await first.send(topic, b"prepared")
        stored = await first.prepare()
        await first.close()
    broker.restart()
    async with Cluster(broker.bootstrap) as cluster:
        second = TransactionalProducer(cluster, topic, TWO_PHASE)
        assert await second.resume(stored) is Resumed.SAME
        with pytest.raises(TransactionStateError, match="complete it"):
            await second.begin()
        broker.restart()
        await second.complete(outcome)
        async with second.transaction():
            await second.send(topic, b"next")
        await second.close()
        expected = [b"prepared", b"next"] if outcome is Outcome.COMMIT else [b"next"]
        assert await read_committed(cluster, topic) == [expected]

        third = TransactionalProducer(cluster, topic, TWO_PHASE)
        assert await third.resume(stored) is Resumed.NOTHING
        await third.close()


async def test_a_prepared_transaction_that_nobody_stored_is_told_from_the_stored_one(
    start_broker: StartBroker, topic: str
) -> None:
    broker = start_broker(transaction_two_phase_commit_enable="true")
    async with Cluster(broker.bootstrap) as cluster:
        await make_topic(cluster, topic)
        first = TransactionalProducer(cluster, topic, TWO_PHASE)
        await first.open()
        await first.begin()
        await first.send(topic, b"stored")
        stored = await first.prepare()
        await first.complete(Outcome.COMMIT)
        await first.begin()
        await first.send(topic, b"not stored")
        await first.flush()
        second = TransactionalProducer(cluster, topic, TWO_PHASE)
        assert await second.resume(stored) is Resumed.OTHER
        with pytest.raises(FencedError):
            await first.prepare()
            await first.complete(Outcome.COMMIT)
        await second.complete(Outcome.ABORT)
        await second.close()
        assert await read_committed(cluster, topic) == [[b"stored"]]


async def test_open_aborts_a_prepared_transaction(start_broker: StartBroker, topic: str) -> None:
    broker = start_broker(transaction_two_phase_commit_enable="true")
    async with Cluster(broker.bootstrap) as cluster:
        await make_topic(cluster, topic)
        first = TransactionalProducer(cluster, topic, TWO_PHASE)
        await first.open()
        await first.begin()
        await first.send(topic, b"prepared")
        await first.prepare()
        async with TransactionalProducer(cluster, topic, TWO_PHASE):
            pass
        with pytest.raises(FencedError):
            await first.complete(Outcome.COMMIT)
        assert await read_committed(cluster, topic) == [[]]


async def test_a_broker_that_may_not_do_two_phase_commit_says_what_it_needs(
    semel_broker: BrokerProcess, topic: str
) -> None:
    async with Cluster(semel_broker.bootstrap) as cluster:
        with pytest.raises(FatalError, match=r"transaction\.two\.phase\.commit\.enable"):
            await TransactionalProducer(cluster, topic, TWO_PHASE).open()


async def test_kafka_has_no_two_phase_commit_yet(kafka_broker: KafkaProcess, topic: str) -> None:
    async with Cluster(kafka_broker.bootstrap) as cluster:
        with pytest.raises(UnsupportedRequestError, match=r"InitProducerId v6 \(KIP-939\)"):
            await TransactionalProducer(cluster, topic, TWO_PHASE).resume(None)


async def test_a_shared_transaction_that_nobody_wrote_in_is_aborted_instead(
    cluster: Cluster, topic: str
) -> None:
    await make_topic(cluster, topic)
    async with SharedTransaction(cluster, topic) as owner:
        await owner.begin()
        owner.handle()
        with pytest.raises(AbortableError, match="has nothing in it"):
            await owner.commit()
        await owner.abort()
        await owner.begin()


async def test_the_coordinator_refuses_partitions_that_do_not_exist(cluster: Cluster, topic: str) -> None:
    await make_topic(cluster, topic)
    coordinator = TransactionCoordinator(cluster, topic)
    identity = (await coordinator.init_producer_id(60_000)).identity
    wanted = [TopicPartition(topic, 0), TopicPartition(topic, 9)]
    with pytest.raises(RetriableError, match=f"{topic}-9 did not join.*UNKNOWN_TOPIC_OR_PARTITION"):
        await coordinator.add_partitions(identity, wanted)
