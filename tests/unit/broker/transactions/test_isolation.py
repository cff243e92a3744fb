"""What readers see while the disk is behind: a transaction is open until its marker is durable.

The real `Life` over a journal that releases only when the test says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from coordinator_cases import GROUP, TOPIC, Bench, Producer, opened, started, write

from semel.broker.decision import Caller, Decision, Endpoint
from semel.broker.groups.offset_fetch import offset_fetch
from semel.broker.transactions.describing import list_transactions
from semel.broker.transactions.end_txn import end_txn
from semel.broker.transactions.state import State
from semel.disk import Buffer
from semel.server.building import write_placements
from semel.server.life import Job, Life
from semel.server.list_offsets import LATEST, list_offsets
from semel.storage.memory import MemoryDisk
from semel.storage.store import Store
from semel.wire.frames import Message
from semel.wire.messages.end_txn import EndTxnRequest
from semel.wire.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from semel.wire.messages.list_transactions import ListTransactionsRequest
from semel.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)


class HeldJournal:
    """Takes everything at once, and releases what the test says is durable."""

    def __init__(self, store: Store) -> None:
        self.end = 0
        self.released = 0
        self._store = store

    def append(
        self, entries: Sequence[Sequence[Buffer]], *, sync: bool = False, attachment: object = None
    ) -> int:
        self.end += 1
        if attachment is not None:
            write_placements(self._store, [attachment])
        return self.end


class Waits:
    """A request that waits for its answer."""

    def __init__(self) -> None:
        self.answers: list[Message | None] = []

    def answer(self, response: Message | None) -> None:
        self.answers.append(response)

    def refuse(self) -> None:
        raise AssertionError("this disk does not fail")


class LiveBench(Bench):
    """The bench with a life around its core; the disk follows only on `sync`."""

    def __init__(self) -> None:
        self.store = Store(MemoryDisk(), Path("memory"))
        self.held = HeldJournal(self.store)
        self.life: Life | None = None
        self.is_held = False
        super().__init__()
        self.life = Life(self.broker, self.store, self.held, self._run)

    def _run(self, job: Job) -> None:
        job.run()

    def submit(self, decision: Decision) -> None:
        if self.life is None:
            super().submit(decision)
            return
        self.last_decision = decision
        self.life.submit(None, decision)
        if not self.is_held:
            self.sync()

    def ask_later(self, handler: object, request: Message, version: int) -> Waits:
        """The answer is there when everything that it rests on is durable."""
        assert self.life is not None and callable(handler)
        waits = Waits()
        caller = Caller(version, "client", "10.0.0.1", Endpoint("localhost", 9092), waits)
        self.life.submit(waits, handler(self.broker, request, caller, self.now))
        return waits

    def sync(self, position: int | None = None) -> None:
        assert self.life is not None
        self.held.released = self.held.end if position is None else position
        self.life.release(self.held.released)

    def latest(self, isolation_level: int, index: int = 0) -> int:
        assert self.life is not None
        wanted = ListOffsetsPartition(partition_index=index, timestamp=LATEST)
        request = ListOffsetsRequest(
            isolation_level=isolation_level, topics=[ListOffsetsTopic(name=TOPIC, partitions=[wanted])]
        )
        return list_offsets(self.life, request).topics[0].partitions[0].offset

    @property
    def seen(self) -> tuple[int, int]:
        """The ends of partition 0 for readers of both levels: read_committed and read_uncommitted."""
        return self.latest(1), self.latest(0)

    def aborted(self, index: int = 0) -> list[tuple[int, int, int]]:
        partition = self.partition(index=index)
        view = self.store.partition(partition.topic.topic_id, index)
        return [
            (aborted.producer_id, aborted.first_offset, aborted.last_offset)
            for aborted in view.aborted_in(0, partition.log.last_stable_offset)
        ]


@pytest.fixture
def bench() -> LiveBench:
    return LiveBench()


def end_later(bench: LiveBench, producer: Producer, commit: bool) -> Waits:
    request = EndTxnRequest(
        transactional_id=producer.transactional_id,
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        committed=commit,
    )
    return bench.ask_later(end_txn, request, 5)


@pytest.mark.parametrize("commit", (True, False))
def test_a_marker_that_is_applied_but_not_durable_ends_nothing_for_readers(
    bench: LiveBench, commit: bool
) -> None:
    producer = opened(bench)
    assert bench.seen == (0, 1)
    bench.is_held = True
    waits = end_later(bench, producer, commit)
    assert bench.state_of("app") is not State.ONGOING
    assert bench.partition().log.open_transactions == {}
    assert bench.seen == (0, 1), "the data is durable, its end is not"
    assert waits.answers == []
    assert bench.aborted() == []
    bench.sync()
    assert bench.seen == (2, 2)
    assert len(waits.answers) == 1
    assert bench.aborted() == ([] if commit else [(producer.producer_id, 0, 1)])


def test_what_follows_an_end_that_is_not_durable_stays_behind_it(bench: LiveBench) -> None:
    producer = opened(bench)
    bench.is_held = True
    end_later(bench, producer, True)
    producer.take(producer.producer_id, producer.epoch + 1)
    write(producer)
    before_second_end = bench.held.end
    end_later(bench, producer, True)
    plain = started(bench, "plain")
    plain.produce(transactional=False, named=False)
    assert bench.seen == (0, 1)
    bench.sync(before_second_end)
    assert bench.seen == (2, 3)
    bench.sync()
    assert bench.seen == (5, 5)


def test_data_that_is_not_durable_is_seen_by_nobody(bench: LiveBench) -> None:
    producer = started(bench)
    bench.is_held = True
    write(producer)
    assert bench.seen == (0, 0)
    end_later(bench, producer, True)
    bench.sync(bench.held.end - 1)
    assert bench.seen == (0, 1)


def test_the_oldest_open_transaction_holds_the_last_stable_offset(bench: LiveBench) -> None:
    one, two, three = (opened(bench, name) for name in ("one", "two", "three"))
    assert bench.seen == (0, 3)
    two.commit()
    assert bench.seen == (0, 4)
    bench.is_held = True
    end_later(bench, one, False)
    assert bench.seen == (0, 4)
    bench.sync()
    assert bench.seen == (2, 5), "three is open still"
    bench.is_held = False
    three.abort()
    assert bench.seen == (6, 6)
    assert bench.aborted() == [(one.producer_id, 0, 4), (three.producer_id, 2, 5)]


def test_a_refusal_that_rests_on_an_undurable_end_waits_for_it(bench: LiveBench) -> None:
    producer = opened(bench)
    bench.is_held = True
    end_later(bench, producer, True)
    retry = end_later(bench, producer, True)
    contrary = end_later(bench, producer, False)
    assert retry.answers == contrary.answers == []
    bench.sync()
    assert len(retry.answers) == len(contrary.answers) == 1


def test_offsets_and_descriptions_wait_for_what_they_rest_on(bench: LiveBench) -> None:
    producer = started(bench)
    producer.commit_offset(5)
    bench.is_held = True
    end_later(bench, producer, True)
    wanted = OffsetFetchRequestGroup(
        group_id=GROUP, topics=[OffsetFetchRequestTopics(name=TOPIC, partition_indexes=[0])]
    )
    fetched = bench.ask_later(offset_fetch, OffsetFetchRequest(groups=[wanted], require_stable=True), 9)
    listed = bench.ask_later(list_transactions, ListTransactionsRequest(), 1)
    assert fetched.answers == listed.answers == []
    bench.sync()
    (offsets,) = fetched.answers
    assert offsets is not None
    assert offsets.groups[0].topics[0].partitions[0].committed_offset == 5  # type: ignore[attr-defined]
    assert len(listed.answers) == 1


def test_fencing_shows_its_abort_only_when_it_is_durable(bench: LiveBench) -> None:
    old = opened(bench)
    bench.is_held = True
    new = Producer(bench)
    new.init()
    assert bench.seen == (0, 1)
    write(new)
    bench.sync()
    assert bench.seen == (2, 3)
    assert bench.aborted() == [(old.producer_id, 0, 1)]
