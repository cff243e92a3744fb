"""Subscribers and brokers that are killed: outputs and acknowledgements agree exactly, by content.

A subscriber copies records from one topic to another, one transaction each. It is killed with -9 at every
step that its owner takes, and another one goes on. In the end every record was copied once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from broker_process import BrokerProcess, StartBroker
from kafka_process import KafkaProcess, why_no_kafka
from subscription_cases import entry_of, eventually, fill, quick, readers_pass, records, values
from transaction_cases import make_topic

from row_checks import check_rows
from semel.client.cluster import Cluster
from semel.client.group_offsets import fetch_offsets
from semel.client.metadata import TopicPartition
from semel.subscriptions import Delivery, Subscription
from semel.subscriptions.dead_letters import CAUSE
from semel.subscriptions.entry import parse_entry

PROGRAM: Final = Path(__file__).with_name("subscriber_process.py")
COUNT: Final = 12
KEYS: Final = 5
WAIT_S: Final = 60.0
# A Kafka that comes back on a busy machine needs most of a minute itself.
COMEBACK_S: Final = 120.0

STEPS: Final = [
    "slot-taken",
    "slots-taken",
    "entry-read",
    "taken-over",
    "dealt",
    "begun",
    "published",
    "handled",
    "sealed",
    "sending-offsets:1",
    "sending-offsets:3",
    "offsets-sent:1",
    "offsets-sent:3",
    "committed:1",
    "committed:4",
]


@pytest.fixture(params=["semel", "kafka"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    process: BrokerProcess | KafkaProcess = request.getfixturevalue(f"{request.param}_broker")
    return process.bootstrap


class Subscriber:
    """A process that copies from a topic to another, and what it printed."""

    def __init__(self, bootstrap: str, topic: str, output: str, *, concurrency: int = 4, **fate: str) -> None:
        environment = {**os.environ, **{f"TEST_{name.upper()}": value for name, value in fate.items()}}
        command = [sys.executable, str(PROGRAM), bootstrap, topic, topic, output, str(concurrency)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += iter(self.process.stdout.readline, "")

    @property
    def took(self) -> list[tuple[int, int]]:
        """Offset and attempt of every delivery that the program got."""
        return [(int(words[2]), int(words[3])) for line in self.lines if (words := line.split())[0] == "took"]

    async def died(self) -> None:
        await eventually("the subscriber dies", lambda: self.process.poll() is not None, WAIT_S)
        self._reader.join(WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def subscribers() -> Iterator[list[Subscriber]]:
    started: list[Subscriber] = []
    yield started
    for subscriber in started:
        subscriber.kill()
        print("".join(subscriber.lines))


async def finish(
    cluster: Cluster, topic: str, output: str, count: int = COUNT, bad: bytes = b"", **options: object
) -> list[int]:
    """Copies in this process what is left; returns the offsets that were delivered here."""
    seen: list[int] = []

    async def handle(delivery: Delivery) -> None:
        seen.append(delivery.offset)
        await delivery.transaction().publish(output, delivery.value, key=delivery.key)
        if delivery.value == bad:
            raise ValueError("bad")

    async with Subscription(cluster, [topic], topic, quick(**options)) as subscription:
        running = asyncio.create_task(subscription.channel().run(handle, concurrency=4))
        await eventually(
            "all is acknowledged",
            lambda: sum(owner.low for owner in subscription._owners.values()) == count,
            WAIT_S,
        )
    await running
    return seen


async def assert_copied_once(cluster: Cluster, topic: str, output: str, count: int = COUNT) -> None:
    """The ledger: every record is there once, each key in order, and the entry has acknowledged all of it."""
    copied = await records(cluster, output)
    check_rows((record.value for record in copied), (b"%d" % number for number in range(count)))
    for key in {record.key for record in copied if record.key is not None}:
        numbers = [int(record.value or b"") for record in copied if record.key == key]
        assert numbers == sorted(numbers), f"key {key!r}"
    entry = await entry_of(cluster, topic, topic)
    assert entry is not None
    assert (entry.offset, entry.acknowledged, entry.marks) == (count, (), ())


@pytest.mark.parametrize("version", ["2", "1"], ids=["version-2", "version-1"])
@pytest.mark.parametrize("steps", [STEPS[::3], STEPS[1::3], STEPS[2::3]], ids=",".join)
async def test_a_subscriber_killed_at_any_step_has_copied_nothing_twice_and_loses_nothing(
    bootstrap: str,
    cluster: Cluster,
    topic: str,
    subscribers: list[Subscriber],
    steps: list[str],
    version: str,
) -> None:
    """Several at a time, each with topics of its own: most of the time they wait for a session to end."""
    await asyncio.gather(
        *(killed_at(step, bootstrap, cluster, topic, subscribers, version) for step in steps)
    )


async def killed_at(
    step: str, bootstrap: str, cluster: Cluster, prefix: str, subscribers: list[Subscriber], version: str
) -> None:
    topic = f"{prefix}-{step.replace(':', '-')}"
    output = f"{topic}-out"
    await fill(cluster, topic, COUNT, keys=KEYS)
    await make_topic(cluster, output)
    subscriber = Subscriber(bootstrap, topic, output, die_at=step, version=version)
    subscribers.append(subscriber)
    await subscriber.died()
    acknowledged = await entry_of_dead(cluster, topic)
    seen = await finish(cluster, topic, output, max_transaction_version=int(version))
    assert not acknowledged & set(seen), "what was acknowledged is never seen again"
    await assert_copied_once(cluster, topic, output)


async def entry_of_dead(cluster: Cluster, topic: str) -> set[int]:
    """The offsets that are acknowledged for certain when a subscriber has died."""
    where = TopicPartition(topic, 0)
    found = await fetch_offsets(cluster, topic, [where], require_stable=False)
    if where not in found:
        return set()
    entry = parse_entry(found[where].offset, found[where].metadata)
    assert entry is not None
    return {
        *range(entry.offset),
        *(offset for start, end in entry.acknowledged for offset in range(start, end)),
    }


async def test_a_subscriber_killed_again_and_again_copies_everything_once(
    bootstrap: str, cluster: Cluster, topic: str, output: str, subscribers: list[Subscriber]
) -> None:
    await fill(cluster, topic, COUNT, keys=KEYS)
    await make_topic(cluster, output)
    for step in ("committed:3", "offsets-sent:4", "marked:2", "published:2", "committed:6"):
        subscribers.append(Subscriber(bootstrap, topic, output, die_at=step))
        await subscribers[-1].died()
    await finish(cluster, topic, output)
    await assert_copied_once(cluster, topic, output)


async def test_seven_before_five_then_kill_9_and_seven_is_never_seen_again(
    bootstrap: str, cluster: Cluster, topic: str, output: str, subscribers: list[Subscriber]
) -> None:
    """Without keys all go out at once; the one that always fails stays behind the others."""
    await fill(cluster, topic, COUNT)
    await make_topic(cluster, output)
    subscribers.append(Subscriber(bootstrap, topic, output, concurrency=8, nack="5", max_attempts="60"))
    await eventually(
        "others are done", lambda: {7, 11} <= {offset for offset, _ in subscribers[0].took}, WAIT_S
    )
    for _ in range(1_000):
        acknowledged = await entry_of_dead(cluster, topic)
        if len(acknowledged) == COUNT - 1:
            break
        await asyncio.sleep(0.02)
    subscribers[0].kill()
    assert acknowledged == set(range(COUNT)) - {5}
    assert await finish(cluster, topic, output) == [5]
    await assert_copied_once(cluster, topic, output)


async def test_a_record_that_kills_its_process_is_given_up_and_nothing_else_is(
    bootstrap: str, cluster: Cluster, topic: str, output: str, subscribers: list[Subscriber]
) -> None:
    await fill(cluster, topic, COUNT, keys=KEYS)
    await make_topic(cluster, output)
    for _ in range(3):  # max_attempts is 2, and the first death can be blamed on nobody
        subscribers.append(Subscriber(bootstrap, topic, output, poison="3", max_attempts="2"))
        await subscribers[-1].died()
    seen = await finish(cluster, topic, output, max_attempts=2)
    assert 3 not in seen
    copied = await values(cluster, output)
    assert copied == sorted(b"%d" % number for number in range(COUNT) if number != 3)
    (letter,) = await records(cluster, f"{topic}.{topic}.dead")
    assert (letter.value, dict(letter.headers)[CAUSE]) == (b"3", b"its process died")


DEAD: Final = 5
"""The value that always fails."""


async def test_a_subscriber_killed_around_a_dead_letter_leaves_one_of_it(
    bootstrap: str, cluster: Cluster, topic: str, subscribers: list[Subscriber]
) -> None:
    """Before its last failure, after it, and when the letter is written and not committed yet."""
    steps = ("returned:1", "returned:2", "dead-published")
    await asyncio.gather(
        *(killed_around_a_dead_letter(step, bootstrap, cluster, topic, subscribers) for step in steps)
    )


async def killed_around_a_dead_letter(
    step: str, bootstrap: str, cluster: Cluster, prefix: str, subscribers: list[Subscriber]
) -> None:
    topic = f"{prefix}-{step.replace(':', '-')}"
    output = f"{topic}-out"
    await fill(cluster, topic, COUNT, keys=KEYS)
    await make_topic(cluster, output)
    subscriber = Subscriber(bootstrap, topic, output, nack=str(DEAD), max_attempts="2", die_at=step)
    subscribers.append(subscriber)
    await subscriber.died()
    await finish(cluster, topic, output, bad=b"%d" % DEAD, max_attempts=2)
    copied = await values(cluster, output)
    assert copied == sorted(b"%d" % number for number in range(COUNT) if number != DEAD)
    (letter,) = await records(cluster, f"{topic}.{topic}.dead")
    assert letter.value == b"%d" % DEAD


@pytest.mark.parametrize("step", ["published:2", "offsets-sent:3", "sealed:2"])
async def test_a_zombie_that_wakes_after_a_rebalance_can_commit_nothing(
    bootstrap: str, cluster: Cluster, topic: str, output: str, subscribers: list[Subscriber], step: str
) -> None:
    await fill(cluster, topic, COUNT, keys=KEYS)
    await make_topic(cluster, output)
    subscribers.append(Subscriber(bootstrap, topic, output, stop_at=step))
    zombie = subscribers[0]
    await eventually("it has stopped", lambda: any(line.startswith("end") for line in zombie.lines), WAIT_S)
    took_before = len(zombie.took)
    await finish(cluster, topic, output)  # after the zombie's session
    copied = await values(cluster, output)
    zombie.process.send_signal(signal.SIGCONT)
    await fill(cluster, topic, 1, keys=KEYS, first=COUNT)
    await eventually("it lives on", lambda: len(zombie.took) > took_before, WAIT_S)
    await eventually("it goes on where the others were", lambda: COUNT in dict(zombie.took), WAIT_S)
    for _ in range(1_000):
        if len(await entry_of_dead(cluster, topic)) == COUNT + 1:
            break
        await asyncio.sleep(0.02)
    assert copied == sorted(b"%d" % number for number in range(COUNT))
    zombie.process.send_signal(signal.SIGTERM)
    await zombie.died()
    await finish(cluster, topic, output, COUNT + 1)
    await assert_copied_once(cluster, topic, output, COUNT + 1)


async def test_a_broker_killed_again_and_again_neither_loses_nor_doubles(
    start_broker: StartBroker, topic: str, output: str
) -> None:
    await copy_while_killed(start_broker(), topic, output, (20, 80, 150))


async def test_a_kafka_broker_killed_neither_loses_nor_doubles(
    tmp_path: Path, topic: str, output: str
) -> None:
    if (missing := await asyncio.to_thread(why_no_kafka)) is not None:
        pytest.skip(missing)
    broker = await asyncio.to_thread(KafkaProcess, tmp_path / "kafka")
    try:
        await asyncio.to_thread(broker.start)
        await copy_while_killed(broker, topic, output, (20, 150))
    finally:
        broker.kill()


async def copy_while_killed(
    broker: BrokerProcess | KafkaProcess, topic: str, output: str, killed_after: tuple[int, ...]
) -> None:
    """Copies with a broker that is killed, and started again, after so many."""
    count = 300
    done: Counter[int] = Counter()
    async with Cluster(broker.bootstrap) as cluster:
        await fill(cluster, topic, count, keys=20)
        await make_topic(cluster, output)

        async def handle(delivery: Delivery) -> None:
            await delivery.transaction().publish(output, delivery.value, key=delivery.key)
            done[delivery.offset] += 1

        async with Subscription(cluster, [topic], topic, quick()) as subscription:
            running = asyncio.create_task(subscription.channel().run(handle, concurrency=8))
            for killed_at in killed_after:
                await eventually("some are done", lambda at=killed_at: len(done) >= at, COMEBACK_S)  # type: ignore[misc]
                await asyncio.to_thread(broker.restart)
            await eventually(
                "all is acknowledged",
                lambda: sum(owner.low for owner in subscription._owners.values()) == count,
                COMEBACK_S,
            )
        await running
        await assert_copied_once(cluster, topic, output, count)


async def test_on_semel_a_subscriber_that_dies_has_its_transactions_aborted_at_once(
    semel_broker: BrokerProcess, topic: str, output: str, subscribers: list[Subscriber]
) -> None:
    """Nobody takes its partitions over, and ten minutes of the transactions' time are left."""
    async with Cluster(semel_broker.bootstrap) as cluster:
        await fill(cluster, topic, 4)
        await make_topic(cluster, output)
        fate = {"die_at": "published", "delivery_timeout_ms": "600000"}
        subscribers.append(Subscriber(semel_broker.bootstrap, topic, output, **fate))
        await subscribers[0].died()
        await readers_pass(cluster, output)
        assert await values(cluster, output) == []
        await finish(cluster, topic, output, 4)
        await assert_copied_once(cluster, topic, output, 4)
