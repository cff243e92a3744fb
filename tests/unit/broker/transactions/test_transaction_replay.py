"""Random histories: the state is a pure function of the journal, and no partition holds what nobody can end.

Each history is a list of operations by a few producers, among them delayed ones: a twin of a producer acts
later with what it knew then. Hypothesis prints the history that breaks a claim.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from coordinator_cases import (
    TIMEOUT_MS,
    TOPIC,
    Bench,
    Producer,
    snapshot_parts,
    state,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.broker.core import Broker, Limits
from semel.broker.entries import TRANSACTION_ENTRIES, decode_entry
from semel.broker.transactions.state import State
from semel.journal.chain import Group
from semel.server.recovery import Replay
from semel.storage.memory import MemoryDisk
from semel.storage.store import Store

IDS: Final = ("a", "b")
HISTORIES: Final = 80
AT_REST: Final = {State.EMPTY, State.ONGOING, State.COMPLETE_COMMIT, State.COMPLETE_ABORT}


class History:
    """A bench, the producers of it that are up to date, and those that are late."""

    def __init__(self) -> None:
        self.bench = Bench(Limits(two_phase_commit=True, transactional_id_expiration_ms=5 * TIMEOUT_MS))
        self.producers = {name: Producer(self.bench, name) for name in IDS}
        self.late: list[Producer] = []
        for producer in self.producers.values():
            producer.init()
        self.ends: list[int] = []
        """Where in the journal each group ends, in entries."""
        self._count_groups(0)

    def step(self, operation: tuple[str, ...], dice: int) -> None:
        verb, name = operation
        producer = self.producers[name]
        if dice % 5 == 0 and self.late:
            producer = self.late[dice % len(self.late)]
        elif dice % 5 == 1:
            self.late = [*self.late[-5:], producer.twin()]
        before = len(self.bench.groups)
        ACTIONS[verb](self.bench, producer, dice)
        self._count_groups(before)

    def _count_groups(self, first: int) -> None:
        for group in self.bench.groups[first:]:
            self.ends.append((self.ends[-1] if self.ends else 0) + len(group))


def advance(bench: Bench, producer: Producer, dice: int) -> None:
    bench.advance(TIMEOUT_MS // 2)


def forget(bench: Bench, producer: Producer, dice: int) -> None:
    bench.forget_idle()


def recreate_topic(bench: Bench, producer: Producer, dice: int) -> None:
    bench.delete_topic(TOPIC)
    bench.create_topic(TOPIC, 2)


def near_the_last_epoch(bench: Bench, producer: Producer, dice: int) -> None:
    """As if the id had been used 32,000 times: InitProducerId again and again takes too long here."""
    transaction = bench.broker.transactions.by_id.get(producer.transactional_id)
    if transaction is not None and transaction.state is State.EMPTY and transaction.epoch < 32_000:
        producer.init()
        entry = bench.last_decision.entries[-1]
        entry.producer_epoch = 32_765 + dice % 2  # type: ignore[union-attr]
        bench.submit(bench.last_decision)
        producer.take(producer.producer_id, entry.producer_epoch)  # type: ignore[union-attr]


ACTIONS: Final[dict[str, Callable[[Bench, Producer, int], Any]]] = {
    "init": lambda bench, producer, dice: producer.init(),
    "init named": lambda bench, producer, dice: producer.init(named=producer.producer_id >= 0),
    "init two-phase": lambda bench, producer, dice: producer.init(6, enable_2pc=True),
    "resume": lambda bench, producer, dice: producer.init(6, enable_2pc=True, keep_prepared_txn=True),
    "add": lambda bench, producer, dice: producer.add(dice % 2),
    "write": lambda bench, producer, dice: producer.produce(dice % 2, version=9 + dice % 5),
    "write again": lambda bench, producer, dice: producer.produce(dice % 2, sequence=dice % 3),
    "write plainly": lambda bench, producer, dice: producer.produce(transactional=False, named=False),
    "add group": lambda bench, producer, dice: producer.add_group(f"g{dice % 2}"),
    "commit offset": lambda bench, producer, dice: producer.commit_offset(
        dice, group=f"g{dice % 2}", version=3 + dice % 3
    ),
    "commit offset plainly": lambda bench, producer, dice: bench.commit_offset(dice, group=f"g{dice % 2}"),
    "commit": lambda bench, producer, dice: producer.end(True, 5, take=dice % 4 != 0),
    "abort": lambda bench, producer, dice: producer.end(False, 5, take=dice % 4 != 0),
    "commit v1": lambda bench, producer, dice: producer.end(True, 3),
    "abort v1": lambda bench, producer, dice: producer.end(False, 3),
    "wait": advance,
    "forget": forget,
    "recreate topic": recreate_topic,
    "near the last epoch": near_the_last_epoch,
    "restart": lambda bench, producer, dice: bench.restart(),
    "restart from snapshot": lambda bench, producer, dice: bench.restart_from_snapshot(),
}

# What makes a transaction comes more often than what disturbs it.
VERBS: Final = [
    *ACTIONS,
    *(("add", "write", "write", "write", "commit offset", "commit", "commit v1", "abort") * 2),
]
operations = st.lists(
    st.tuples(st.tuples(st.sampled_from(VERBS), st.sampled_from(IDS)), st.integers(0, 2**16)),
    min_size=20,
    max_size=50,
)


def check(bench: Bench) -> None:
    """The claims that hold at every moment."""
    broker = bench.broker
    for transaction in broker.transactions.by_id.values():
        assert transaction.state in AT_REST
        assert broker.transactions.by_producer_id[transaction.producer_id] is transaction
        assert 0 <= transaction.epoch <= 32_766
        if not transaction.is_open:
            assert not transaction.partitions and not transaction.groups
    for topic in broker.catalog:
        for partition in topic.partitions:
            log = partition.log
            assert log.last_stable_offset <= log.high_watermark == log.end_offset
            assert sorted(log.unstable) == sorted(log.open_transactions.values())
            for producer_id in log.open_transactions:
                owner = broker.transactions.by_producer_id.get(producer_id)
                assert owner is not None and owner.is_open, f"producer {producer_id} hangs in {partition}"
                assert owner.open_producer_id == producer_id
                assert (topic.topic_id, partition.index) in owner.partitions
    for group in broker.groups:
        for producer_id in group.offsets.pending:
            owner = broker.transactions.by_producer_id.get(producer_id)
            assert owner is not None and owner.is_open and group.group_id in owner.groups


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations)
def test_replay_and_snapshot_bring_back_the_live_state_at_every_point(
    history: list[tuple[tuple[str, str], int]],
) -> None:
    run = History()
    bench = run.bench
    for operation, dice in history:
        run.step(operation, dice)
        check(bench)
    live = state(bench.broker)
    assert state(bench.replayed()) == live
    assert state(bench.loaded(bytes(part) for part in bench.snapshot_parts())) == live


class PartByPart:
    """A snapshot as the checkpointer takes it: requests are served between one part and the next."""

    def __init__(self, bench: Bench, ends: list[int], dice: random.Random) -> None:
        self._bench = bench
        self._ends = ends
        self._dice = dice
        self._at = dice.randrange(len(ends) + 1)

    def parts(self) -> list[tuple[int, memoryview]]:
        begun = self._broker()
        wanted = [bytes(part) for part in snapshot_parts(begun)]
        found: list[tuple[int, memoryview]] = [(self._at, memoryview(wanted[0]))]
        for part in wanted[1:]:
            self._at = min(len(self._ends), self._at + self._dice.choice((0, 0, 0, 1, 2)))
            current = {_name(later): bytes(later) for later in snapshot_parts(self._broker())}
            if _name(part) in current:
                found.append((self._at, memoryview(current[_name(part)])))
        return found

    def _broker(self) -> Broker:
        entries = self._ends[self._at - 1] if self._at else 0
        return self._bench.replayed(self._bench.journal[:entries])


def _name(part: bytes | bytearray) -> tuple[int, bytes]:
    """What tells the part of one thing from that of another: its kind and the id that it begins with."""
    if part[0] == 1:
        return 1, b""
    if part[0] == 2:
        return 2, bytes(part[2:22])
    return part[0], bytes(part[2 : 3 + part[2]])


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations, st.integers(0, 2**32))
def test_recovery_from_a_snapshot_taken_part_by_part_equals_the_live_state(
    history: list[tuple[tuple[str, str], int]], seed: int
) -> None:
    run = History()
    for operation, dice in history:
        run.step(operation, dice)
    bench = run.bench
    broker = bench._new_broker()
    replay = Replay(broker, Store(MemoryDisk(), Path("memory")))
    replay.load(PartByPart(bench, run.ends, random.Random(seed)))  # type: ignore[arg-type]
    start = 0
    for position, end in enumerate(run.ends):
        entries = [memoryview(bytearray(stored)) for stored in bench.journal[start:end]]
        replay.replay(Group(position=position, end=position + 1, entries=entries))
        start = end
    replay.finish()
    assert state(broker) == state(bench.broker)


def test_a_replay_that_begins_in_the_middle_of_a_forgotten_life_passes() -> None:
    bench = Bench(Limits(two_phase_commit=True))
    producer = Producer(bench)
    producer.init(6, enable_2pc=True)
    producer.produce()
    keeper = Producer(bench)
    keeper.init(6, enable_2pc=True, keep_prepared_txn=True)
    keeper.commit()
    for first in range(2, len(bench.journal)):
        broker = bench.loaded([bytes(bench.snapshot_parts()[0])])
        for stored in bench.journal[first:]:
            entry = decode_entry(memoryview(stored))
            if isinstance(entry, TRANSACTION_ENTRIES):
                broker.apply(entry)
