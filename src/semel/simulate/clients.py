"""Clients of a simulated broker, as they would be on a network: ask, wait, retry, give up, start over.

A client's process is a generator. It yields what it asks for and is sent the answer, or None: no answer came
in time, and the request may or may not have been carried out, or still be on its way. So every client here
keeps to what the protocol asks of it: a batch that was not answered is sent again with the same sequence,
and whoever gives up asks for a new identity.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Final

from semel.verify.ledger import Ledger, Outcome, Place, Sent, Unit, Violation, name
from semel.wire.errors import ErrorCode
from semel.wire.frames import Message
from semel.wire.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from semel.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from semel.wire.messages.end_txn import EndTxnRequest, EndTxnResponse
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
)
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)
from semel.wire.records import Record, build_batch

MAX_TRIES: Final = 6
MAX_BATCHES: Final = 3
MAX_INPUTS: Final = 3
TIMEOUT_MS: Final = 5_000
KEEP_PREPARED_VERSION: Final = 6
RECORD_TIME_MS: Final = 1_700_000_000_000

_ODD: Final = frozenset(
    {
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.CORRUPT_MESSAGE,
    }
)
"""What a client that keeps to the rules can only be told by a broker that lost something."""


@dataclass(slots=True, frozen=True)
class Versions:
    """What a client of one age speaks."""

    init_producer_id: int
    produce: int
    txn_offset_commit: int
    end_txn: int
    joins_by_writing: bool
    """Transaction version 2 (KIP-890)."""
    add_partitions: int = 3
    add_offsets: int = 3
    offset_fetch: int = 8


VERSION_1: Final = Versions(4, 9, 3, 3, joins_by_writing=False)
VERSION_2: Final = Versions(5, 12, 5, 5, joins_by_writing=True)


class Ask:
    """A request to send. It is made anew each time it arrives: the broker writes into its bytes."""

    __slots__ = ("make", "may_repeat", "version")

    def __init__(self, make: Callable[[], Message], version: int, *, may_repeat: bool = True) -> None:
        self.make = make
        self.version = version
        self.may_repeat = may_repeat
        """Whether it may arrive once more by itself. No network does that, and some of version 1 rely on it:
        they come twice only if their client asks again, which it does by another connection."""


Process = Generator[Ask, Message | None, None]
ReadInput = Callable[[Place, int], list[tuple[int, bytes]]]


class GaveUp(Exception):  # noqa: N818 - what a client did, not what went wrong
    """No answer, again and again, or one that says that this identity is of no use any more."""


class Client:
    """What all clients share. `process` is one life of it; a kill ends it, and the next one begins."""

    def __init__(
        self, client_id: str, dice: random.Random, ledger: Ledger, places: list[Place], versions: Versions
    ) -> None:
        self.client_id = client_id
        self.lives = 0
        self.unit: Unit | None = None
        self._dice = dice
        self._ledger = ledger
        self._places = places
        self._versions = versions
        self._producer_id = -1
        self._epoch = -1
        self._sequences: dict[Place, int] = {}

    @property
    def life_id(self) -> str:
        return f"{self.client_id}.{self.lives}"

    def process(self) -> Process:
        raise NotImplementedError

    def killed(self) -> None:
        """The process has ended without a word: what it never asked to commit must never be seen."""
        if self.unit is not None and self.unit.outcome is Outcome.OPEN:
            self._ledger.aborted(self.unit)
        self.unit = None

    def _ask(self, ask: Ask) -> Generator[Ask, Message | None, Message]:
        for _ in range(MAX_TRIES):
            answer = yield ask
            if answer is not None:
                return answer
        raise GaveUp

    def _identify(self, transactional_id: str | None, *, named: bool = False) -> Process:
        request = partial(
            InitProducerIdRequest,
            transactional_id=transactional_id,
            transaction_timeout_ms=TIMEOUT_MS,
            producer_id=self._producer_id if named else -1,
            producer_epoch=self._epoch if named else -1,
        )
        answer = yield from self._ask(Ask(request, self._versions.init_producer_id))
        assert isinstance(answer, InitProducerIdResponse)
        if answer.error_code:
            raise GaveUp
        self._take(answer.producer_id, answer.producer_epoch)

    def _take(self, producer_id: int, epoch: int) -> None:
        self._producer_id = producer_id
        self._epoch = epoch
        self._sequences = {}

    def _write(self, transactional_id: str | None, batches: dict[Place, list[Sent]]) -> Process:
        request = partial(
            _produce_request,
            transactional_id,
            self._producer_id,
            self._epoch,
            batches,
            {place: self._sequences.get(place, 0) for place in batches},
        )
        answer = yield from self._ask(Ask(request, self._versions.produce))
        assert isinstance(answer, ProduceResponse)
        for topic in answer.responses:
            for part in topic.partition_responses:
                place = (topic.name, part.index)
                if part.error_code in _ODD:
                    code = ErrorCode(part.error_code).name
                    raise Violation(f"{self.life_id} keeps to the rules and is told {code} by {name(place)}")
                if part.error_code:
                    raise GaveUp
                for sent in batches[place]:
                    self._ledger.acknowledged(sent, part.base_offset + sent.number - batches[place][0].number)
                self._sequences[place] = self._sequences.get(place, 0) + len(batches[place])


class IdempotentClient(Client):
    """Sends batch after batch; each is a unit of its own."""

    def process(self) -> Process:
        self.lives += 1
        while True:
            try:
                yield from self._identify(None)
                while True:
                    yield from self._send()
            except GaveUp:
                self.lives += 1

    def _send(self) -> Process:
        place = self._dice.choice(self._places)
        unit = self._ledger.begin(self.life_id)
        sent = [unit.add(place) for _ in range(self._dice.randint(1, 3))]
        unit.outcome = Outcome.MAYBE  # From the moment that it is sent.
        yield from self._write(None, {place: sent})
        self._ledger.committed(unit)


class TransactionalClient(Client):
    """Transaction after transaction over several partitions; some are aborted."""

    def __init__(
        self,
        client_id: str,
        dice: random.Random,
        ledger: Ledger,
        places: list[Place],
        versions: Versions,
        transactional_id: str,
    ) -> None:
        super().__init__(client_id, dice, ledger, places, versions)
        self.transactional_id = transactional_id
        self._joined: set[Place] = set()

    def process(self) -> Process:
        self.lives += 1
        named = False
        while True:
            try:
                yield from self._identify(self.transactional_id, named=named)
                yield from self._prepare()
                while True:
                    yield from self._transaction()
            except GaveUp:
                self.killed()
                self.lives += 1
                # A client that was only too slow may go on with the identity it had (KIP-360).
                named = self._producer_id >= 0 and not named and self._dice.random() < 0.3

    def _prepare(self) -> Process:
        yield from ()

    def _transaction(self) -> Process:
        self.unit = unit = self._ledger.begin(self.life_id)
        self._joined = set()
        for _ in range(self._dice.randint(1, MAX_BATCHES)):
            places = self._dice.sample(self._places, self._dice.randint(1, min(2, len(self._places))))
            batches = {place: [unit.add(place) for _ in range(self._dice.randint(1, 2))] for place in places}
            yield from self._send(batches)
        yield from self._end(unit, commit=self._dice.random() < 0.7)

    def _send(self, batches: dict[Place, list[Sent]]) -> Process:
        if not self._versions.joins_by_writing:
            new = [place for place in batches if place not in self._joined]
            if new:
                yield from self._join(new)
        yield from self._write(self.transactional_id, batches)

    def _join(self, places: list[Place]) -> Process:
        request = partial(
            AddPartitionsToTxnRequest,
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self._producer_id,
            v3_and_below_producer_epoch=self._epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnTopic(name=place[0], partitions=[place[1]]) for place in places
            ],
        )
        answer = yield from self._ask(Ask(request, self._versions.add_partitions))
        assert isinstance(answer, AddPartitionsToTxnResponse)
        for topic in answer.results_by_topic_v3_and_below:
            if any(part.partition_error_code for part in topic.results_by_partition):
                raise GaveUp
        self._joined.update(places)

    def _end(self, unit: Unit, *, commit: bool) -> Process:
        if commit:
            unit.outcome = Outcome.MAYBE
        else:
            self._ledger.aborted(unit)
        request = partial(
            EndTxnRequest,
            transactional_id=self.transactional_id,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            committed=commit,
        )
        raises_epoch = self._versions.joins_by_writing
        for tries in range(1, MAX_TRIES + 1):
            answer = yield Ask(request, self._versions.end_txn, may_repeat=raises_epoch)
            if answer is None:
                continue
            assert isinstance(answer, EndTxnResponse)
            if answer.error_code:
                if commit and tries == 1:
                    self._refused_once(unit)
                raise GaveUp
            if commit:
                self._ledger.committed(unit)
            if raises_epoch:
                self._take(answer.producer_id, answer.producer_epoch)
            self.unit = None
            return
        raise GaveUp

    def _refused_once(self, unit: Unit) -> None:
        """The only commit that was sent was refused."""
        self._ledger.aborted(unit)


class TwoPhaseClient(TransactionalClient):
    """Prepares, decides elsewhere, completes (KIP-939): what was prepared waits for its decision for ever.

    What is prepared, and what was decided, is stored where a kill does not reach: in this object.
    """

    def __init__(
        self, client_id: str, dice: random.Random, ledger: Ledger, places: list[Place], transactional_id: str
    ) -> None:
        super().__init__(client_id, dice, ledger, places, VERSION_2, transactional_id)
        self._prepared: Unit | None = None
        self._prepared_as = (-1, -1)
        self._decision: bool | None = None

    def killed(self) -> None:
        if self.unit is not self._prepared:
            super().killed()
        self.unit = None

    def process(self) -> Process:
        self.lives += 1
        while True:
            try:
                yield from self._resume()
                while True:
                    yield from self._transaction()
            except GaveUp:
                self.killed()
                self.lives += 1

    def _resume(self) -> Process:
        """Take the id, keep what is open, and bring it to its end."""
        request = partial(
            InitProducerIdRequest,
            transactional_id=self.transactional_id,
            transaction_timeout_ms=TIMEOUT_MS,
            enable_2pc=True,
            keep_prepared_txn=True,
        )
        answer = yield from self._ask(Ask(request, KEEP_PREPARED_VERSION))
        assert isinstance(answer, InitProducerIdResponse)
        if answer.error_code:
            raise GaveUp
        self._take(answer.producer_id, answer.producer_epoch)
        ongoing = (answer.ongoing_txn_producer_id, answer.ongoing_txn_producer_epoch)
        prepared = self._prepared
        if prepared is not None and ongoing == self._prepared_as:
            self.unit = prepared
            yield from self._complete(prepared)
            return
        if prepared is not None:
            self._must_be_decided(prepared)
        if ongoing[0] >= 0:
            yield from self._abort_ongoing()

    def _must_be_decided(self, prepared: Unit) -> None:
        """It is not open any more, so it went as was decided."""
        self._prepared = None
        if self._decision is None:
            raise Violation(f"{prepared} was prepared and not decided, and the broker has it no more")
        if self._decision:
            self._ledger.committed(prepared)

    def _abort_ongoing(self) -> Process:
        unit = self._ledger.begin(self.life_id)  # Empty: it stands for what an earlier process left behind.
        yield from self._end(unit, commit=False)

    def _transaction(self) -> Process:
        self.unit = unit = self._ledger.begin(self.life_id)
        for place in self._dice.sample(self._places, self._dice.randint(1, 2)):
            yield from self._send({place: [unit.add(place)]})
        self._decision = None
        self._prepared_as = (self._producer_id, self._epoch)
        self._prepared = unit
        yield from self._complete(unit)

    def _complete(self, unit: Unit) -> Process:
        if self._decision is None:
            self._decision = self._dice.random() < 0.7
        if unit.outcome is Outcome.COMMITTED:
            raise Violation(f"{unit} is open again")
        yield from self._end(unit, commit=self._decision)
        self._prepared = None

    def _refused_once(self, unit: Unit) -> None:
        """A refusal is no abort: the next process finds out."""


class StageClient(TransactionalClient):
    """Consume, transform, produce: input offsets and output records in one transaction."""

    def __init__(
        self,
        client_id: str,
        dice: random.Random,
        ledger: Ledger,
        places: list[Place],
        versions: Versions,
        group: str,
        source: Place,
        read: ReadInput,
    ) -> None:
        super().__init__(client_id, dice, ledger, places, versions, f"{group}-{source[1]}")
        self._group = group
        self._source = source
        self._read = read
        self._position = 0

    def _prepare(self) -> Process:
        """After the identity, which ends what a predecessor left open: where does the group stand?"""
        topics = [OffsetFetchRequestTopics(name=self._source[0], partition_indexes=[self._source[1]])]
        group = OffsetFetchRequestGroup(group_id=self._group, topics=topics)
        request = partial(OffsetFetchRequest, groups=[group], require_stable=True)
        while True:
            answer = yield from self._ask(Ask(request, self._versions.offset_fetch))
            assert isinstance(answer, OffsetFetchResponse)
            found = answer.groups[0].topics[0].partitions[0]
            if not found.error_code:
                self._position = max(found.committed_offset, 0)
                self._ledger.told_offset(self._group, self._source, self._position)
                return
            if found.error_code != ErrorCode.UNSTABLE_OFFSET_COMMIT:
                raise GaveUp

    def _transaction(self) -> Process:
        inputs = self._read(self._source, self._position)[:MAX_INPUTS]
        if not inputs:
            # Nothing to do yet. Asking for something keeps the turn short.
            yield from self._prepare()
            return
        self.unit = unit = self._ledger.begin(self.life_id)
        self._joined = set()
        end = inputs[-1][0] + 1
        unit.read_to = (self._group, self._source, end)
        for offset, _ in inputs:
            place = self._places[offset % len(self._places)]
            yield from self._send({place: [unit.add(place, (self._source, offset))]})
        yield from self._send_offset(end)
        yield from self._end(unit, commit=self._dice.random() < 0.85)
        if unit.outcome is Outcome.COMMITTED:
            self._position = end

    def _send_offset(self, offset: int) -> Process:
        if not self._versions.joins_by_writing:
            joining = partial(
                AddOffsetsToTxnRequest,
                transactional_id=self.transactional_id,
                producer_id=self._producer_id,
                producer_epoch=self._epoch,
                group_id=self._group,
            )
            joined = yield from self._ask(Ask(joining, self._versions.add_offsets))
            assert isinstance(joined, AddOffsetsToTxnResponse)
            if joined.error_code:
                raise GaveUp
        partitions = [
            TxnOffsetCommitRequestPartition(partition_index=self._source[1], committed_offset=offset)
        ]
        request = partial(
            TxnOffsetCommitRequest,
            transactional_id=self.transactional_id,
            group_id=self._group,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            topics=[TxnOffsetCommitRequestTopic(name=self._source[0], partitions=partitions)],
        )
        repeat = self._versions.joins_by_writing
        answer = yield from self._ask(Ask(request, self._versions.txn_offset_commit, may_repeat=repeat))
        assert isinstance(answer, TxnOffsetCommitResponse)
        if any(part.error_code for topic in answer.topics for part in topic.partitions):
            raise GaveUp


def _produce_request(
    transactional_id: str | None,
    producer_id: int,
    epoch: int,
    batches: dict[Place, list[Sent]],
    sequences: dict[Place, int],
) -> ProduceRequest:
    topics = []
    for (topic, index), records in batches.items():
        batch = build_batch(
            [Record(None, sent.value, RECORD_TIME_MS) for sent in records],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequences[topic, index],
            transactional=transactional_id is not None,
        )
        part = PartitionProduceData(index=index, records=memoryview(batch))
        topics.append(TopicProduceData(name=topic, partition_data=[part]))
    return ProduceRequest(transactional_id=transactional_id, acks=-1, timeout_ms=1000, topic_data=topics)
