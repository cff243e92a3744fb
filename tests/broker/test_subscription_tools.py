"""What is made of subscriptions: the sync form, stages, and the commands."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker_process import SEMEL, BrokerProcess
from click.testing import CliRunner
from kafka_process import KafkaProcess
from subscription_cases import QUICK, entry_of, eventually, fill, quick, records, values
from transaction_cases import make_topic

from semel.cli import stages as stages_command
from semel.cli import subscription as subscription_command
from semel.client.cluster import Cluster
from semel.errors import ConfigError, SemelError
from semel.subscriptions import Delivery, Subscription
from semel.subscriptions.dead_letters import REDRIVEN_FOR
from semel.subscriptions.redrive import redrive
from semel.subscriptions.stages import Out, run_stages, stage, stages_of
from semel.subscriptions.sync import subscribe_sync


@pytest.fixture(scope="module")
def semel_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("tools") / "broker").start()
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture(params=["semel", "kafka"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    process: BrokerProcess | KafkaProcess = request.getfixturevalue(f"{request.param}_broker")
    return process.bootstrap


def copy_in_threads(bootstrap: str, topic: str, output: str, count: int, failures: list[bytes]) -> None:
    """Two threads copy; whoever meets the value 3 first raises."""
    left = threading.Semaphore(count)
    with subscribe_sync(bootstrap, topic, group=topic, options=QUICK) as deliveries:

        def work() -> None:
            while left.acquire(blocking=False):
                delivery = deliveries.take()
                try:
                    with delivery.transaction() as tx:
                        placed = tx.publish(output, delivery.value, key=delivery.key)
                        assert placed.topic == output
                        if delivery.value == b"3" and delivery.attempt == 1:
                            failures.append(delivery.value)
                            raise ValueError("three")
                except ValueError:
                    left.release()

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


async def test_threads_share_a_subscription(
    bootstrap: str, cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 20, keys=7)
    await make_topic(cluster, output)
    failures: list[bytes] = []
    await asyncio.to_thread(copy_in_threads, bootstrap, topic, output, 20, failures)
    assert failures == [b"3"]
    assert await values(cluster, output) == sorted(b"%d" % number for number in range(20))


def copy_batches(bootstrap: str, topic: str, output: str, count: int) -> list[int]:
    """Copies in batches; returns how large they were."""
    sizes: list[int] = []
    with subscribe_sync(bootstrap, topic, group=topic, batch_size=10, max_wait_ms=100) as deliveries:
        for batch in deliveries.batches():
            with batch.transaction() as tx:
                tx.publish_many(output, batch.records)
            sizes.append(len(batch.records))
            if sum(sizes) == count:
                return sizes
    raise AssertionError(f"it ended after {sizes}")


async def test_batches_come_without_asyncio_too(
    bootstrap: str, cluster: Cluster, topic: str, output: str
) -> None:
    await fill(cluster, topic, 25)
    await make_topic(cluster, output)
    sizes = await asyncio.to_thread(copy_batches, bootstrap, topic, output, 25)
    assert sizes == [10, 10, 5]
    assert await values(cluster, output) == sorted(b"%d" % number for number in range(25))


async def test_stages_make_a_pipeline(
    bootstrap: str, cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_PREFIX", topic)
    module = importlib.reload(importlib.import_module("stages_module"))
    for name in ("mid", "out", "copies"):
        await make_topic(cluster, f"{topic}-{name}")
    await fill(cluster, f"{topic}-in", 10, keys=3)
    running = asyncio.create_task(run_stages(bootstrap, stages_of(module)))
    expected = sorted(b"%d" % (2 * number) for number in range(10) if number not in (2, 7))
    copied: list[bytes | None] = []
    async with asyncio.timeout(60):
        while len(copied) < len(expected) and not running.done():
            copied = await values(cluster, f"{topic}-out")
    running.cancel()
    await asyncio.wait([running])
    assert copied == expected
    assert await values(cluster, f"{topic}-copies") == sorted(b"copy of " + value for value in expected)
    assert {record.key for record in await records(cluster, f"{topic}-out")} <= {b"k0", b"k1", b"k2"}


async def test_the_command_runs_stages_and_stops_cleanly_when_told(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    for name in ("mid", "out", "copies"):
        await make_topic(cluster, f"{topic}-{name}")
    await fill(cluster, f"{topic}-in", 4)
    process = await asyncio.create_subprocess_exec(
        *(SEMEL, "stages", "run", "stages_module", "--only", "double", "--bootstrap", bootstrap),
        cwd=Path(__file__).parent,
        env={**os.environ, "TEST_PREFIX": topic},
    )
    try:
        async with asyncio.timeout(60):
            while len(await values(cluster, f"{topic}-mid")) < 4:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)
            process.terminate()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    entry = await entry_of(cluster, f"{topic}-double", f"{topic}-in")
    assert entry is not None
    assert (entry.offset, entry.is_released) == (4, True)


def test_two_stages_of_one_group_are_refused() -> None:
    @stage("a")
    def first(delivery: Delivery) -> None: ...

    @stage("b", group="first")
    def second(delivery: Delivery) -> None: ...

    module = type(pytest)("made_up")
    module.first, module.second = first, second  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="share the group 'first'"):
        stages_of(module)


def test_a_module_without_stages_says_so() -> None:
    done = CliRunner().invoke(stages_command.command, ["run", "json"])
    assert isinstance(done.exception, ConfigError)
    assert "no stages" in str(done.exception)


async def bury(cluster: Cluster, topic: str, count: int) -> None:
    """Lets all of a topic fail until it is dead."""
    await fill(cluster, topic, count, keys=3)

    async def fail(delivery: Delivery) -> None:
        raise ValueError("not today")

    async with Subscription(cluster, [topic], topic, quick(max_attempts=1)) as subscription:
        running = asyncio.create_task(subscription.channel().run(fail, concurrency=4))
        await eventually(
            "all are dead", lambda: sum(owner.low for owner in subscription._owners.values()) == count
        )
    await running


async def test_dead_letters_go_back_once(cluster: Cluster, topic: str) -> None:
    await bury(cluster, topic, 6)
    dead = f"{topic}.{topic}.dead"
    assert (await redrive(cluster, dead, topic)).counts == {topic: 6}
    assert (await redrive(cluster, dead, topic)).total == 0
    back = [record for record in await records(cluster, topic) if record.headers]
    assert sorted(record.value or b"" for record in back) == [b"%d" % number for number in range(6)]
    assert {tuple(record.headers) for record in back} == {((REDRIVEN_FOR, topic.encode()),)}
    seen = []
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        channel = subscription.channel()
        for _ in range(6):
            delivery = await channel.take()
            seen.append(delivery.value)
            await delivery.ack()
    assert sorted(seen) == [b"%d" % number for number in range(6)]  # type: ignore[type-var]


async def test_a_letter_that_cannot_go_back_stays_and_says_why(cluster: Cluster, topic: str) -> None:
    from semel.client.admin import Admin

    await bury(cluster, topic, 1)
    await Admin(cluster).delete_topics([topic])
    cluster.forget_topic(topic)
    with pytest.raises(SemelError):
        await redrive(cluster, f"{topic}.{topic}.dead", topic)
    assert len(await records(cluster, f"{topic}.{topic}.dead")) == 1


async def test_the_commands_tell_what_is_acknowledged_and_what_fails(
    bootstrap: str, cluster: Cluster, topic: str
) -> None:
    await fill(cluster, topic, 5)
    async with Subscription(cluster, [topic], topic, QUICK) as subscription:
        channel = subscription.channel()
        deliveries = [await channel.take() for _ in range(5)]
        await deliveries[1].ack()
        await deliveries[3].ack()
        await deliveries[0].nack("no", delay_ms=60_000)
        told = await asyncio.to_thread(run_command, "describe", topic, "-o", "json", "-b", bootstrap)
        (partition,) = told["partitions"]
        assert (partition["offset"], partition["stable_end"], partition["waiting"]) == (0, 5, 3)
        assert partition["acknowledged"] == [[1, 2], [3, 4]]
        assert partition["failing"] == [{"from": 0, "to": 0, "attempts": 1, "out": False}]
        assert partition["owner"] is not None
        listed = await asyncio.to_thread(run_command, "list", "-o", "json", "-b", bootstrap)
        assert {"group": topic, "state": "Stable", "topics": [topic], "partitions": 1, "failing": 1} in listed
        table = CliRunner()
        shown = await asyncio.to_thread(
            table.invoke, subscription_command.command, ["describe", topic, "-b", bootstrap]
        )
        assert "ACKNOWLEDGED ABOVE" in shown.output


async def test_the_redrive_command(bootstrap: str, cluster: Cluster, topic: str) -> None:
    await bury(cluster, topic, 2)
    done = await asyncio.to_thread(
        run_command, "redrive", topic, "--topic", topic, "-o", "json", "-b", bootstrap
    )
    assert done == {"redriven": 2, "topics": {topic: 2}}


def run_command(*arguments: str) -> dict[str, list[dict[str, object]]]:
    done = CliRunner().invoke(subscription_command.command, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrong", ["text", [b"x", 7], 5, {"a": 1}])
async def test_a_stage_that_returns_something_else_is_told_what_it_may_return(wrong: object) -> None:
    from semel.subscriptions.stages import _outs

    with pytest.raises(ConfigError, match="must be bytes, Out"):
        _outs("s", wrong, b"k")  # type: ignore[arg-type]
    assert _outs("s", [b"x", Out(b"y")], b"k") == [Out(b"x", b"k"), Out(b"y")]
