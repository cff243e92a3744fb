"""A Kafka sink whose writers are other processes that die or sleep; brokers that are killed; lost answers."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path

import pytest
from broker_process import BrokerProcess, StartBroker
from end_txn_proxy import EndTxnProxy, Loss, ProxiedSink
from kafka_driver import PARTITIONS, TASKS, expected, origin_of, rows_of, run_epoch
from kafka_process import KafkaProcess
from kafka_task import TASK_STEPS
from stopped import wait_until_stopped
from transaction_cases import SlowToJoin, make_topic, read_committed

from row_checks import about_rows
from semel.client.cluster import Cluster
from semel.client.metadata import parse_addresses
from semel.client.shared_transaction import SharedTransaction, TransactionOptions
from semel.client.transaction_admin import TransactionAdmin
from semel.sinks.blocking import BlockingSink
from semel.sinks.errors import AbortFailed, CommitFailed, UnknownOutcome, WriteFailed
from semel.sinks.kafka import KafkaSink
from semel.sinks.kafka.markers import transactional_id_of
from semel.sinks.marker import Marker, Owner
from semel.sinks.receipts import Receipt
from semel.sinks.settings import SinkSettings
from semel.sinks.sink import State, WriterPlan

TASK = Path(__file__).with_name("kafka_task.py")
TASK_TIMEOUT_S = 60
SMALL = SinkSettings(max_buffered=10)
IMPATIENT = SinkSettings(max_buffered=10, commit_timeout=1, abort_timeout=1)


class SharedSink(KafkaSink):
    """A sink with writers in other processes, that keeps to a version of transactions."""

    def __init__(self, bootstrap: str, topic: str, version: int = 2) -> None:
        super().__init__(bootstrap, topic, key=None, partition_column="partition", settings=SMALL)
        self._version = version
        self.share()

    def _transaction_options(self) -> TransactionOptions:
        return TransactionOptions(max_version=self._version)


class Task:
    """A task as a child process."""

    def __init__(self, plan: WriterPlan | None, task: int, epoch: int, step: str = "", how: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(TASK), str(task), str(epoch), step, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(b64encode(pickle.dumps(plan)).decode() + "\n")
        self._process.stdin.close()

    async def reach_step(self) -> None:
        assert self._process.stdout is not None
        said = await asyncio.to_thread(self._process.stdout.readline)
        assert said.startswith("at "), said

    async def wait_until_stopped(self) -> None:
        await self.reach_step()
        await asyncio.to_thread(wait_until_stopped, self._process.pid)

    async def wait_until_killed(self) -> None:
        await self.reach_step()
        assert await asyncio.to_thread(self._process.wait, TASK_TIMEOUT_S) == -signal.SIGKILL

    async def receipt(self) -> Receipt:
        said = await self.last_words()
        assert said.startswith("receipt "), said
        receipt = pickle.loads(b64decode(said.removeprefix("receipt ")))
        assert isinstance(receipt, Receipt)
        return receipt

    async def wake(self) -> str:
        self._process.send_signal(signal.SIGCONT)
        return await self.last_words()

    async def last_words(self) -> str:
        assert self._process.stdout is not None
        said = await asyncio.to_thread(self._process.stdout.read)
        await asyncio.to_thread(self._process.wait, TASK_TIMEOUT_S)
        return said

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(params=[2, 1], ids=["version-2", "version-1"])
def version(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


async def run_tasks(sink: KafkaSink, epoch: int) -> None:
    """An epoch by tasks in other processes."""
    plan = await sink.begin(epoch, origin_of(epoch))
    tasks = [Task(plan, task, epoch) for task in range(TASKS)]
    await sink.commit(epoch, await asyncio.gather(*(task.receipt() for task in tasks)))


async def write_task(plan: WriterPlan, epoch: int, task: int) -> Receipt:
    """A task in this process."""
    writer = plan.writer(task, tasks=TASKS)
    await writer.write(rows_of(epoch, task))
    return await writer.finish()


# Writers


async def test_one_transaction_is_written_by_several_processes(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, version: int
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    async with SharedSink(bootstrap, topic, version) as sink:
        await sink.open(sink_id)
        for epoch in range(2):
            await run_tasks(sink, epoch)
    with about_rows():
        assert await read_committed(cluster, topic) == expected(2)


@pytest.mark.parametrize("step", TASK_STEPS)
async def test_the_rows_of_a_writer_that_is_killed_are_gone(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, step: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    async with SharedSink(bootstrap, topic) as sink:
        await sink.open(sink_id)
        plan = await sink.begin(0, origin_of(0))
        assert plan is not None
        receipt = await write_task(plan, 0, 0)
        await Task(plan, 1, 0, step, "kill").wait_until_killed()
        if step != "began":
            with pytest.raises(CommitFailed, match=r"task 1 has written to .* and gave no receipt"):
                await sink.commit(0, [receipt])
        await sink.abort(0)
        await run_epoch(sink, 0)
    with about_rows():
        assert await read_committed(cluster, topic) == expected(1)


@pytest.mark.parametrize("when", ["in the next attempt", "after the commit", "under another owner"])
async def test_a_writer_that_wakes_up_late_writes_nothing_and_spoils_nothing(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, version: int, when: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    async with SharedSink(bootstrap, topic, version) as sink, SharedSink(bootstrap, topic, version) as other:
        await sink.open(sink_id)
        zombie = Task(await sink.begin(0, origin_of(0)), 1, 0, "half written", "stop")
        try:
            await zombie.wait_until_stopped()
            if when == "under another owner":
                await other.open(sink_id)
            else:
                await sink.abort(0)
            living = other if when == "under another owner" else sink
            plan = await living.begin(0, origin_of(0))
            assert plan is not None
            receipts = [await write_task(plan, 0, 0)]
            if when != "after the commit":
                said = await zombie.wake()
            receipts.append(await write_task(plan, 0, 1))
            await living.commit(0, receipts)
            if when == "after the commit":
                said = await zombie.wake()
            assert said.startswith("FencedOut" if when == "under another owner" else "WriteFailed"), said
            await run_epoch(living, 1)
        finally:
            zombie.kill()
    with about_rows():
        assert await read_committed(cluster, topic) == expected(2)


# Brokers


async def test_a_broker_that_is_killed_and_comes_back_is_waited_for(
    start_broker: StartBroker, topic: str, sink_id: str
) -> None:
    broker = start_broker()
    async with Cluster(broker.bootstrap) as cluster:
        await make_topic(cluster, topic, PARTITIONS)
    settings = SinkSettings(max_buffered=10)
    sink = KafkaSink(broker.bootstrap, topic, key=None, partition_column="partition", settings=settings)
    async with sink:
        await sink.open(sink_id)
        await run_epoch(sink, 0)
        plan = await sink.begin(1, origin_of(1))
        assert plan is not None
        receipts = []
        for task in range(TASKS):
            writer = plan.writer(task, tasks=TASKS)
            rows = rows_of(1, task)
            await writer.write(rows[:20])
            broker.restart()  # in the midst of writing
            await writer.write(rows[20:])
            receipts.append(await writer.finish())
        broker.restart()  # between the last row and the marker
        await sink.commit(1, receipts)
        broker.restart()
        await run_epoch(sink, 2)
    async with Cluster(broker.bootstrap) as cluster:
        with about_rows():
            assert await read_committed(cluster, topic) == expected(3)


async def test_kafka_killed_before_the_commit_is_waited_for(
    kafka_broker: KafkaProcess, topic: str, sink_id: str
) -> None:
    async with Cluster(kafka_broker.bootstrap) as cluster:
        await make_topic(cluster, topic, PARTITIONS)
    settings = SinkSettings(max_buffered=10, commit_timeout=90)
    sink = KafkaSink(kafka_broker.bootstrap, topic, key=None, partition_column="partition", settings=settings)
    async with sink:
        await sink.open(sink_id)
        plan = await sink.begin(0, origin_of(0))
        assert plan is not None
        receipts = [await write_task(plan, 0, task) for task in range(TASKS)]
        restarting = asyncio.create_task(asyncio.to_thread(kafka_broker.restart))
        await sink.commit(0, receipts)
        await restarting
        await run_epoch(sink, 1)
    async with Cluster(kafka_broker.bootstrap) as cluster:
        with about_rows():
            assert await read_committed(cluster, topic) == expected(2)


async def test_a_broker_that_stays_away_before_the_commit_means_not_committed(
    start_broker: StartBroker, topic: str, sink_id: str
) -> None:
    broker = start_broker()
    async with Cluster(broker.bootstrap) as cluster:
        await make_topic(cluster, topic, PARTITIONS)
    sink = KafkaSink(broker.bootstrap, topic, key=None, partition_column="partition", settings=IMPATIENT)
    async with sink:
        await sink.open(sink_id)
        plan = await sink.begin(0, origin_of(0))
        assert plan is not None
        writer = plan.writer(0)
        await writer.write(rows_of(0, 0))
        receipt = await writer.finish()
        broker.kill()
        with pytest.raises(CommitFailed, match="was not accepted within 1 s; nothing was committed"):
            await sink.commit(0, [receipt])
        with pytest.raises(AbortFailed, match="not confirmed"):
            await sink.abort(0)
        assert sink.state is State.FAILED
        broker.start()
        assert await sink.open(sink_id) is None
        await run_epoch(sink, 0)
    async with Cluster(broker.bootstrap) as cluster:
        with about_rows():
            assert await read_committed(cluster, topic) == expected(1)


@pytest.mark.parametrize("has_rows", [True, False])
async def test_an_epoch_that_is_aborted_while_a_partition_joins_is_run_again(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, has_rows: bool
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    async with SharedSink(bootstrap, topic, version=1) as sink:
        await sink.open(sink_id)
        transaction = sink._require_transaction()
        transaction._coordinator = coordinator = SlowToJoin(cluster, transaction.transactional_id)
        plan = await sink.begin(0, origin_of(0))
        assert plan is not None
        if has_rows:
            await write_task(plan, 0, 0)
        coordinator.stop()
        late = asyncio.create_task(plan.writer(1).write([{"value": b"late", "partition": 1}] * 10))
        await coordinator.is_asked.wait()
        await sink.abort(0)
        plan = await sink.begin(0, origin_of(0))
        assert plan is not None
        coordinator.go_on()
        with pytest.raises(WriteFailed):
            await late
        await sink.commit(0, [await write_task(plan, 0, task) for task in range(TASKS)])
    with about_rows():
        assert await read_committed(cluster, topic) == expected(1)


# The outcome


async def write_through(
    proxy: EndTxnProxy, bootstrap: str, topic: str, sink_id: str, loss: Loss, *, only_once: bool
) -> int | None:
    """Loses the commit of epoch 0, and runs on as after a restart; gives the epoch that was found."""
    async with ProxiedSink(proxy, bootstrap, topic, IMPATIENT) as sink:
        await sink.open(sink_id)
        proxy.loss, proxy.only_once = loss, only_once
        if only_once:
            await run_epoch(sink, 0)
        else:
            with pytest.raises(UnknownOutcome, match=r"whether epoch 0 .* is not known after 1 s"):
                await run_epoch(sink, 0)
            assert sink.state is State.FAILED
            proxy.loss = Loss.NOTHING
            await sink.open(sink_id)
        committed = sink.tracker.last_committed
        for epoch in range(1 if only_once else 0, 2):
            await run_epoch(sink, epoch)
        return committed


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.ANSWER])
async def test_a_commit_that_is_lost_once_is_sent_again(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str, loss: Loss
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    async with EndTxnProxy(parse_addresses(bootstrap)[0]) as proxy:
        assert await write_through(proxy, bootstrap, topic, sink_id, loss, only_once=True) == 0
        assert proxy.losses == 1
    with about_rows():
        assert await read_committed(cluster, topic) == expected(2)


async def test_a_commit_whose_answers_are_lost_is_found_by_the_next_open(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    async with EndTxnProxy(parse_addresses(bootstrap)[0]) as proxy:
        assert await write_through(proxy, bootstrap, topic, sink_id, Loss.ANSWER, only_once=False) == 0
    with about_rows():
        assert await read_committed(cluster, topic) == expected(2)


async def test_a_commit_that_never_arrived_is_undone_by_the_next_open(
    bootstrap: str, cluster: Cluster, topic: str, sink_id: str
) -> None:
    await make_topic(cluster, topic, PARTITIONS)
    async with EndTxnProxy(parse_addresses(bootstrap)[0]) as proxy:
        assert await write_through(proxy, bootstrap, topic, sink_id, Loss.REQUEST, only_once=False) is None
    with about_rows():
        assert await read_committed(cluster, topic) == expected(2)


# Interrupted


class InterruptedSink(SharedSink):
    """Ctrl-C while it opens, with its marker written and not committed."""

    is_interrupted = True

    async def _sign(self, transaction: SharedTransaction, marker: Marker, owner: Owner) -> None:
        if not self.is_interrupted:
            await super()._sign(transaction, marker, owner)
            return
        self.is_interrupted = False
        await transaction.begin()
        await self._markers.put(transaction, marker, owner)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()


def test_a_sink_that_is_interrupted_while_it_opens_leaves_nothing_behind(
    semel_broker: BrokerProcess, semel_topic: str
) -> None:
    shared = InterruptedSink(semel_broker.bootstrap, semel_topic)
    with pytest.raises(KeyboardInterrupt), BlockingSink(shared) as sink:
        sink.open(semel_topic)
    assert shared.state is State.CLOSED
    with BlockingSink(shared) as sink:
        state = asyncio.run(transaction_of(semel_broker.bootstrap, semel_topic))
        assert state == "CompleteAbort"
        assert sink.open(semel_topic) is None


async def transaction_of(bootstrap: str, sink_id: str) -> str:
    async with Cluster(bootstrap) as cluster:
        return (await TransactionAdmin(cluster).describe(transactional_id_of(sink_id))).state
