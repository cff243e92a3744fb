"""Topics that come and go, grow, are compacted and cut, on a machine that fails: against a model, from seeds.

The model is the list of all states that the broker was taken through since the last one that is certain: one
for each request, in the order of the requests. Whatever happens to the machine, what it shows afterwards must
be one of them, and none that lies before an acknowledged request.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import pytest

from semel.journal.snapshot import snapshot_numbers, snapshot_path
from semel.server.life import Life
from semel.simulate.machine import Call, Machine
from semel.simulate.reading import read_whole
from semel.wire.errors import ErrorCode
from semel.wire.frames import Message
from semel.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
)
from semel.wire.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from semel.wire.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
)
from semel.wire.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

SEEDS: Final = int(os.environ.get("TEST_SIMULATION_SEEDS", "8"))
STEPS: Final = 500
NAMES: Final = ("a", "b")
KEYS: Final = 4
MAX_PARTITIONS: Final = 3
SEGMENT_BYTES: Final = 300


@dataclass(slots=True, frozen=True)
class Log:
    """A partition: the value of the record at each offset, and where it begins."""

    values: tuple[bytes, ...] = ()
    start: int = 0


@dataclass(slots=True, frozen=True)
class Topic:
    is_compacted: bool
    logs: tuple[Log, ...]

    def with_log(self, index: int, log: Log) -> Topic:
        return replace(self, logs=(*self.logs[:index], log, *self.logs[index + 1 :]))


State = dict[str, Topic]
"""Never changed in place."""


@dataclass(slots=True)
class Asked:
    """A request that was decided: what it must be answered with, and the state after it."""

    call: Call
    code: ErrorCode
    state: State
    code_of: Callable[[Message], int]


def shows(life: Life, state: State) -> str | None:
    """Why what a broker shows is not this state, or None if it is."""
    catalog = {topic.name: len(topic.partitions) for topic in life.broker.catalog}
    if catalog != {name: len(topic.logs) for name, topic in state.items()}:
        return f"the topics are {catalog}"
    for name, topic in state.items():
        for index, log in enumerate(topic.logs):
            content = read_whole(life, (name, index))
            where = f"{name}-{index}"
            if (content.ends.start, content.ends.high) != (log.start, len(log.values)):
                return f"{where} goes from {content.ends.start} to {content.ends.high}"
            expected = {offset: log.values[offset] for offset in range(log.start, len(log.values))}
            wrong = [offset for offset, value in content.stored.items() if expected.get(offset) != value]
            if wrong:
                return f"{where} has other records than were written, at {wrong}"
            needed = newest_of_keys(expected) if topic.is_compacted else set(expected)
            if needed - set(content.stored):
                return f"{where} lacks {sorted(needed - set(content.stored))}"
    return None


def topic_id(life: Life, name: str) -> bytes:
    return life.broker.catalog.by_name[name].topic_id


def newest_of_keys(values: dict[int, bytes]) -> set[int]:
    return set({value.split(b":")[0]: offset for offset, value in values.items()}.values())


class Churn:
    """One run from one seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(f"churn/{seed}")
        self.machine = Machine(seed)
        self.life = self.machine.life
        self.certain: State = {}
        self.asked: list[Asked] = []
        self.written = 0
        self.damages = 0

    @property
    def state(self) -> State:
        """What the broker has applied."""
        return self.asked[-1].state if self.asked else self.certain

    async def run(self) -> None:
        for _ in range(STEPS):
            await self.step()
            self.hear()
            self.check_life()
            if self.dice.random() < 0.03:
                self.check_fork()
        self.machine.heal()
        await self.settle()
        assert not self.asked, "something was never answered"
        why = shows(self.machine.life, self.certain)
        assert why is None, f"at rest, {why}"

    async def step(self) -> None:
        machine, dice = self.machine, self.dice
        roll = dice.random()
        if roll < 0.34:
            self.ask()
        elif roll < 0.52:
            machine.write()
        elif roll < 0.67:
            machine.report()
        elif roll < 0.82:
            machine.work()
        elif roll < 0.87:
            machine.begin_checkpoint(flush=dice.random() < 0.7)
        elif roll < 0.90:
            # Compaction keeps away from what the last two snapshots describe: several must be completed.
            machine.begin_checkpoint(flush=True)
            await machine.rest()
        elif roll < 0.96:
            machine.begin_compaction((dice.choice(NAMES), dice.randrange(2)))
        elif roll < 0.98:
            machine.recover()
        elif roll < 0.989:
            self.plan_trouble()
        elif roll < 0.992:
            machine.kill()
        elif roll < 0.995:
            machine.crash()
        elif roll < 0.996:
            machine.stop()
        else:
            self.damage_newest_snapshot()
            machine.crash()
        await machine.breathe()
        machine.now_ms += dice.randrange(50)

    def plan_trouble(self) -> None:
        faults, dice = self.machine.disk.faults, self.dice
        roll = dice.randrange(4)
        if roll == 0:
            faults.lose_power(faults.counts["any"] + dice.randint(1, 15))
        elif roll == 1:
            faults.shorten(faults.counts["write"] + dice.randint(1, 4), dice.randrange(200))
        else:
            kind = dice.choice(("write", "sync", "create", "rename", "sync_dir", "allocate", "unlink", "any"))
            faults.fail(kind, faults.counts[kind] + dice.randint(1, 6))

    def damage_newest_snapshot(self) -> None:
        """Unless it is the only one: without any there is nothing to fall back to."""
        disk, directory = self.machine.disk, self.machine.layout.snapshots
        numbers = snapshot_numbers(disk, directory)
        if len(numbers) > 1:
            path = snapshot_path(directory, numbers[-1])
            disk.corrupt(path, self.dice.randrange(len(disk.content(path))))
            self.damages += 1

    async def settle(self) -> None:
        """Let everything that is under way come to its end."""
        await self.machine.rest()
        self.hear()
        self.check_life()

    # Asking.

    def ask(self) -> None:
        name = self.dice.choice(NAMES)
        topic = self.state.get(name)
        roll = self.dice.random()
        if topic is None or roll < 0.02:
            is_compacted = self.dice.random() < 0.5
            self.create(name, is_compacted=is_compacted, partitions=self.dice.randint(1, 2))
        elif roll < 0.04:
            self.delete(name)
        elif roll < 0.06:
            self.grow(name, topic)
        elif roll < 0.12:
            self.delete_records(name, topic)
        else:
            self.produce(name, topic)

    def submit(
        self,
        request: Message,
        version: int,
        code: ErrorCode,
        state: State,
        code_of: Callable[[Message], int],
    ) -> None:
        if self.machine.is_recovering:
            return
        call = Call()
        self.asked.append(Asked(call, code, state, code_of))
        self.machine.deliver(call, request, version)

    def create(self, name: str, *, is_compacted: bool, partitions: int) -> None:
        configs = {"segment.bytes": str(SEGMENT_BYTES), "min.cleanable.dirty.ratio": "0.01"}
        if is_compacted:
            configs["cleanup.policy"] = "compact"
        wanted = CreatableTopic(
            name=name,
            num_partitions=partitions,
            replication_factor=1,
            configs=[CreatableTopicConfig(name=key, value=value) for key, value in configs.items()],
        )
        state, code = self.state, ErrorCode.TOPIC_ALREADY_EXISTS
        if name not in state:
            state, code = {**state, name: Topic(is_compacted, (Log(),) * partitions)}, ErrorCode.NONE
        self.submit(CreateTopicsRequest(topics=[wanted]), 5, code, state, code_of_creation)

    def delete(self, name: str) -> None:
        state = {other: topic for other, topic in self.state.items() if other != name}
        self.submit(DeleteTopicsRequest(topic_names=[name]), 4, ErrorCode.NONE, state, code_of_deletion)

    def grow(self, name: str, topic: Topic) -> None:
        count = len(topic.logs) + 1
        if count > MAX_PARTITIONS:
            return
        state = {**self.state, name: replace(topic, logs=(*topic.logs, Log()))}
        wanted = CreatePartitionsTopic(name=name, count=count, assignments=None)
        self.submit(CreatePartitionsRequest(topics=[wanted]), 1, ErrorCode.NONE, state, code_of_growth)

    def delete_records(self, name: str, topic: Topic) -> None:
        index = self.dice.randrange(len(topic.logs))
        log = topic.logs[index]
        # Only what is visible can be deleted: whoever asks for more is refused.
        offset = self.dice.randint(log.start, len(log.values))
        partition = self.machine.life.broker.catalog.partition(name, index)
        if partition is None or offset > partition.log.high_watermark:
            return
        state = {**self.state, name: topic.with_log(index, replace(log, start=max(log.start, offset)))}
        part = DeleteRecordsPartition(partition_index=index, offset=offset)
        request = DeleteRecordsRequest(topics=[DeleteRecordsTopic(name=name, partitions=[part])])
        self.submit(request, 1, ErrorCode.NONE, state, code_of_cut)

    def produce(self, name: str, topic: Topic) -> None:
        index = self.dice.randrange(len(topic.logs))
        log = topic.logs[index]
        values = []
        for _ in range(self.dice.randint(1, 3)):
            self.written += 1
            values.append(
                b"k%d:%d:" % (self.dice.randrange(KEYS), self.written) + b"x" * self.dice.randrange(60)
            )
        batch = build_batch([Record(value.split(b":")[0], value, self.machine.now_ms) for value in values])
        part = PartitionProduceData(index=index, records=memoryview(batch))
        request = ProduceRequest(acks=-1, topic_data=[TopicProduceData(name=name, partition_data=[part])])
        grown = replace(log, values=(*log.values, *values))
        state = {**self.state, name: topic.with_log(index, grown)}
        self.submit(request, 9, ErrorCode.NONE, state, code_of_produce)

    # Checking.

    def hear(self) -> None:
        """Take the answers: what was acknowledged is certain, with all that was asked before it."""
        for number in range(len(self.asked) - 1, -1, -1):
            asked = self.asked[number]
            if asked.call.response is not None:
                for answered in self.asked[: number + 1]:
                    if answered.call.response is not None:
                        code = answered.code_of(answered.call.response)
                        assert code == answered.code, (
                            f"{ErrorCode(code).name} instead of {answered.code.name}"
                        )
                self.certain = asked.state
                del self.asked[: number + 1]
                return

    def check_life(self) -> None:
        """A new life goes on from one of the states that may be."""
        if self.machine.life is not self.life:
            self.life = self.machine.life
            self.certain = self.found_in(self.life)
            self.asked.clear()

    def check_fork(self) -> None:
        """If the power failed now, all that is certain would be there."""
        fork = self.machine.fork(unlucky=self.dice.random() < 0.7)
        try:
            self.found_in(fork.life)
        finally:
            fork.switch_off()

    def found_in(self, life: Life) -> State:
        reasons = []
        for state in (self.certain, *(asked.state for asked in self.asked)):
            why = shows(life, state)
            if why is None:
                return state
            reasons.append(why)
        raise AssertionError(f"a state that never was: {'; or '.join(dict.fromkeys(reasons))}")


def code_of_creation(answer: Message) -> int:
    assert isinstance(answer, CreateTopicsResponse)
    return answer.topics[0].error_code


def code_of_deletion(answer: Message) -> int:
    assert isinstance(answer, DeleteTopicsResponse)
    return answer.responses[0].error_code


def code_of_growth(answer: Message) -> int:
    assert isinstance(answer, CreatePartitionsResponse)
    return answer.results[0].error_code


def code_of_cut(answer: Message) -> int:
    assert isinstance(answer, DeleteRecordsResponse)
    return answer.topics[0].partitions[0].error_code


def code_of_produce(answer: Message) -> int:
    assert isinstance(answer, ProduceResponse)
    return answer.responses[0].partition_responses[0].error_code


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
async def test_what_is_found_is_always_a_state_that_was_and_none_before_an_answer(first: int) -> None:
    crashes = damages = 0
    for seed in range(first, min(first + 10, SEEDS)):
        churn = Churn(seed)
        try:
            await churn.run()
        except BaseException:
            print(f"seed {seed}")
            raise
        crashes += churn.machine.crashes
        damages += churn.damages
        churn.machine.switch_off()
    assert crashes > 10 and damages > 2, "a simulation in which nothing happens would hold, too"


async def test_a_deleted_segment_that_a_crash_brings_back_is_not_built_on() -> None:
    """Found by a seed: an older segment came back, a newer did not, and a recovery wrote into the wrong file.

    The recovery after that met what was left of it, and took it for corruption.
    """
    churn = Churn(0)
    machine = churn.machine
    churn.create("a", is_compacted=False, partitions=1)
    await churn.settle()
    while len(machine.life.store.partition(topic_id(machine.life, "a"), 0).segments) < 4:
        churn.produce("a", churn.state["a"])
        await churn.settle()
    for _ in range(2):
        machine.begin_checkpoint(flush=True)
        await churn.settle()
    view = machine.life.store.partition(topic_id(machine.life, "a"), 0)
    oldest = view.segments[1].path
    content = machine.disk.content(oldest)
    for _ in range(12):
        churn.produce("a", churn.state["a"])
        await churn.settle()
    topic = churn.state["a"]
    log = topic.logs[0]
    state = {"a": topic.with_log(0, replace(log, start=len(log.values) - 1))}
    part = DeleteRecordsPartition(partition_index=0, offset=len(log.values) - 1)
    request = DeleteRecordsRequest(topics=[DeleteRecordsTopic(name="a", partitions=[part])])
    churn.submit(request, 1, ErrorCode.NONE, state, code_of_cut)
    await churn.settle()
    assert not machine.disk.exists(oldest)
    machine.disk.fsync_dir(oldest.parent)
    machine.disk.put(oldest, content[:40] + bytes(len(content)))
    machine.crash()
    churn.check_life()


async def test_compaction_leaves_alone_what_an_older_snapshot_says_is_flushed() -> None:
    """A damaged snapshot sends recovery back to the one before: what that calls flushed must be as it was."""
    churn = Churn(0)
    machine = churn.machine
    churn.create("a", is_compacted=True, partitions=1)
    await churn.settle()
    for _ in range(5):
        for _ in range(15):
            churn.produce("a", churn.state["a"])
            await churn.settle()
        machine.begin_checkpoint(flush=True)
        await churn.settle()
        machine.begin_compaction(("a", 0))
        await churn.settle()
    stored = len(read_whole(machine.life, ("a", 0)).stored)
    assert stored < len(churn.state["a"].logs[0].values), "nothing was compacted"
    churn.damage_newest_snapshot()
    assert churn.damages == 1
    machine.crash()
    churn.check_life()
