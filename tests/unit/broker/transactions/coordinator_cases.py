"""A broker core under a virtual clock, and producers that talk to it without any network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from semel.broker.core import Broker, Identity, Limits
from semel.broker.decision import Caller, Decision, Endpoint, Now
from semel.broker.entries import Append, Entry, decode_entry, encode_entry
from semel.broker.groups.offset_commit import offset_commit
from semel.broker.groups.offset_fetch import offset_fetch
from semel.broker.journal_messages import CatalogPart, PartitionPart, TopicCreated, TopicDeleted
from semel.broker.produce import produce
from semel.broker.tick import tick
from semel.broker.topics import Partition
from semel.broker.transaction_messages import TransactionPart
from semel.broker.transactions.end_txn import end_txn
from semel.broker.transactions.init_producer_id import init_producer_id
from semel.broker.transactions.joining import add_offsets_to_txn, add_partitions_to_txn
from semel.broker.transactions.state import State, Transaction
from semel.broker.transactions.timeouts import forget_idle, start_clocks
from semel.broker.transactions.txn_offset_commit import txn_offset_commit
from semel.server.parts import (
    decode_part,
    encode_catalog,
    encode_group,
    encode_partition,
    encode_transaction,
    load_catalog,
    load_partition,
)
from semel.wire.errors import ErrorCode
from semel.wire.frames import Message
from semel.wire.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from semel.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from semel.wire.messages.end_txn import EndTxnRequest, EndTxnResponse
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from semel.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from semel.wire.records import EndMarker, Record, build_batch, read_end_marker

TOPIC = "orders"
OTHER_TOPIC = "audit"
GROUP = "readers"
WALL_MS = 1_700_000_000_000
TIMEOUT_MS = 60_000
NONE = ErrorCode.NONE
FENCED = ErrorCode.PRODUCER_FENCED
OLD_EPOCH = ErrorCode.INVALID_PRODUCER_EPOCH
BAD_STATE = ErrorCode.INVALID_TXN_STATE
BAD_MAPPING = ErrorCode.INVALID_PRODUCER_ID_MAPPING
ABORTABLE = ErrorCode.TRANSACTION_ABORTABLE

Handler = Callable[[Broker, Any, Caller, Now], Decision]


class Nobody:
    """Waits for no answer: the bench hands replies back directly."""

    def answer(self, response: Message | None) -> None:
        raise AssertionError("nothing is parked here")

    def refuse(self) -> None:
        raise AssertionError("nothing is parked here")


class Bench:
    """The core with its journal, as a node would drive it; two topics of three partitions."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.journal: list[bytes] = []
        self.groups: list[list[Entry]] = []
        """The journal's groups, decoded: one for each decision that changed anything."""
        self.monotonic_ms = 1_000_000
        self.wall_ms = WALL_MS
        self.leader_epoch = 1
        self.last_decision = Decision(None)
        self._ids = 0
        self.broker = self._new_broker()
        self.create_topic(TOPIC)
        self.create_topic(OTHER_TOPIC)

    def _new_broker(self) -> Broker:
        return Broker(
            self.leader_epoch,
            identity=Identity("cluster", 1),
            limits=self.limits,
            topic_defaults={},
            settings=[],
            new_id=self._new_id,
        )

    def _new_id(self) -> bytes:
        self._ids += 1
        return self._ids.to_bytes(16)

    @property
    def now(self) -> Now:
        return Now(self.wall_ms, self.monotonic_ms)

    # Requests.

    def ask(
        self,
        handler: Handler,
        request: Message,
        version: int,
        principal: str = "User:ann",
        connection: int = 0,
    ) -> Any:
        """Decide, journal and apply; the reply as a client of `version` reads it."""
        endpoint = Endpoint("localhost", 9092)
        caller = Caller(version, "client", "10.0.0.1", endpoint, Nobody(), connection, principal)
        decision = handler(self.broker, request, caller, self.now)
        self.submit(decision)
        reply: Any = decision.reply
        assert reply is not None
        encoded = bytearray()
        reply.encode(encoded, version, [])
        decoded, end = type(reply).decode(memoryview(encoded), 0, version)
        assert end == len(encoded)
        return decoded

    def submit(self, decision: Decision) -> None:
        self.last_decision = decision
        if not decision.entries:
            return
        group: list[Entry] = []
        for entry in decision.entries:
            stored = b"".join(bytes(buffer) for buffer in encode_entry(entry))
            self.journal.append(stored)
            group.append(decode_entry(memoryview(stored)))
            self.apply(entry)
        self.groups.append(group)

    def apply(self, entry: Entry) -> None:
        """Apply, and show at once: this journal is always durable."""
        effect = self.broker.apply(entry)
        if isinstance(entry, Append) and effect is not None:
            partition = self.broker.catalog.partition_by_id(entry.topic_id, entry.index)
            assert partition is not None
            partition.log.reveal(entry.header.last_offset + 1)
            first_offset = getattr(effect, "ended_first_offset", -1)
            if first_offset >= 0:
                partition.log.reveal_end(first_offset)

    # Time and restarts.

    def advance(self, ms: int) -> None:
        """Let time pass, then ask what has come due."""
        self.monotonic_ms += ms
        self.wall_ms += ms
        self.tick()

    def tick(self) -> None:
        for decision in tick(self.broker, self.now):
            self.submit(decision)

    def forget_idle(self) -> None:
        self.submit(forget_idle(self.broker, list(self.broker.transactions.by_id), self.now))

    def restart(self) -> None:
        """A new life from the journal alone."""
        self.leader_epoch += 1
        self.broker = self.replayed()
        self.broker.producer_ids.skip_given()
        start_clocks(self.broker, self.now)

    def replayed(self, journal: Iterable[bytes] | None = None) -> Broker:
        """What a replay makes of the journal."""
        live, self.broker = self.broker, self._new_broker()
        for stored in self.journal if journal is None else journal:
            self.apply(decode_entry(memoryview(stored)))
        replayed, self.broker = self.broker, live
        return replayed

    def restart_from_snapshot(self) -> None:
        """A new life from a snapshot of every part."""
        parts = [bytes(part) for part in self.snapshot_parts()]
        self.leader_epoch += 1
        self.broker = self.loaded(parts)
        self.broker.producer_ids.skip_given()
        start_clocks(self.broker, self.now)

    def snapshot_parts(self) -> list[bytearray]:
        return snapshot_parts(self.broker)

    def loaded(self, parts: Iterable[bytes]) -> Broker:
        broker = self._new_broker()
        for stored in parts:
            load_part(broker, stored)
        return broker

    # Topics.

    def create_topic(self, name: str, partitions: int = 3) -> bytes:
        topic_id = self._new_id()
        self.submit(
            Decision(None, [TopicCreated(topic_id=topic_id, name=name, partitions=partitions, configs=[])])
        )
        return topic_id

    def delete_topic(self, name: str) -> None:
        self.submit(Decision(None, [TopicDeleted(topic_id=self.broker.catalog.by_name[name].topic_id)]))

    def partition(self, topic: str = TOPIC, index: int = 0) -> Partition:
        found = self.broker.catalog.partition(topic, index)
        assert found is not None
        return found

    def last_stable_offset(self, topic: str = TOPIC, index: int = 0) -> int:
        return self.partition(topic, index).log.last_stable_offset

    def markers(self, topic: str = TOPIC, index: int = 0) -> list[EndMarker]:
        """Every end marker ever written to the partition that has this name now."""
        topic_id = self.partition(topic, index).topic.topic_id
        found = []
        for stored in self.journal:
            entry = decode_entry(memoryview(stored))
            if isinstance(entry, Append) and (entry.topic_id, entry.index) == (topic_id, index):
                marker = read_end_marker(entry.batch) if entry.header.is_control else None
                if marker is not None:
                    found.append(marker)
        return found

    def state_of(self, transactional_id: str) -> State:
        return self.transaction(transactional_id).state

    def transaction(self, transactional_id: str) -> Transaction:
        return self.broker.transactions.by_id[transactional_id]

    # Groups.

    def commit_offset(self, offset: int, index: int = 0, group: str = GROUP) -> int:
        """A plain OffsetCommit."""
        partition = OffsetCommitRequestPartition(partition_index=index, committed_offset=offset)
        request = OffsetCommitRequest(
            group_id=group, topics=[OffsetCommitRequestTopic(name=TOPIC, partitions=[partition])]
        )
        code: int = self.ask(offset_commit, request, 9).topics[0].partitions[0].error_code
        return code

    def offset(self, index: int = 0, *, stable: bool = False, group: str = GROUP) -> int | ErrorCode:
        """The committed offset, -1 if there is none, or the error."""
        wanted = OffsetFetchRequestTopics(name=TOPIC, partition_indexes=[index])
        request = OffsetFetchRequest(
            groups=[OffsetFetchRequestGroup(group_id=group, topics=[wanted])], require_stable=stable
        )
        found = self.ask(offset_fetch, request, 9).groups[0].topics[0].partitions[0]
        offset: int = found.committed_offset
        return ErrorCode(found.error_code) if found.error_code else offset


class Producer:
    """A producer with a transactional id that remembers what it was told."""

    def __init__(self, bench: Bench, transactional_id: str = "app", principal: str = "User:ann") -> None:
        self.bench = bench
        self.transactional_id = transactional_id
        self.principal = principal
        self.connection = 0
        self.producer_id = -1
        self.epoch = -1
        self.sequences: dict[tuple[str, int], int] = {}

    @property
    def identity(self) -> tuple[int, int]:
        return self.producer_id, self.epoch

    def twin(self) -> Producer:
        """The same process as another sees it: same identity and sequences, from now on on its own."""
        twin = Producer(self.bench, self.transactional_id, self.principal)
        twin.producer_id, twin.epoch = self.identity
        twin.sequences = dict(self.sequences)
        return twin

    def init(self, version: int = 5, *, named: bool = False, **fields: Any) -> InitProducerIdResponse:
        """InitProducerId; `named` tells the identity that it has (KIP-360)."""
        fields.setdefault("transaction_timeout_ms", TIMEOUT_MS)
        request = InitProducerIdRequest(transactional_id=self.transactional_id, **fields)
        if named:
            request.producer_id, request.producer_epoch = self.identity
        response: InitProducerIdResponse = self.bench.ask(
            init_producer_id, request, version, self.principal, self.connection
        )
        if response.error_code == 0:
            self.take(response.producer_id, response.producer_epoch)
        return response

    def take(self, producer_id: int, epoch: int) -> None:
        if (producer_id, epoch) != self.identity:
            self.producer_id, self.epoch = producer_id, epoch
            self.sequences = {}

    def add(self, index: int = 0, topic: str = TOPIC, version: int = 3) -> int:
        """AddPartitionsToTxn of one partition."""
        topics = [AddPartitionsToTxnTopic(name=topic, partitions=[index])]
        if version < 4:
            request = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=self.transactional_id,
                v3_and_below_producer_id=self.producer_id,
                v3_and_below_producer_epoch=self.epoch,
                v3_and_below_topics=topics,
            )
            response = self.bench.ask(
                add_partitions_to_txn, request, version, self.principal, self.connection
            )
            results = response.results_by_topic_v3_and_below
        else:
            request = AddPartitionsToTxnRequest(
                transactions=[
                    AddPartitionsToTxnTransaction(
                        transactional_id=self.transactional_id,
                        producer_id=self.producer_id,
                        producer_epoch=self.epoch,
                        topics=topics,
                    )
                ]
            )
            response = self.bench.ask(
                add_partitions_to_txn, request, version, self.principal, self.connection
            )
            results = response.results_by_transaction[0].topic_results
        code: int = results[0].results_by_partition[0].partition_error_code
        return code

    def send(
        self,
        index: int = 0,
        topic: str = TOPIC,
        *,
        version: int = 12,
        transactional: bool = True,
        sequence: int | None = None,
        named: bool = True,
        records: int = 1,
    ) -> Any:
        """Produce one batch; the partition's answer."""
        key = (topic, index)
        first = self.sequences.get(key, 0) if sequence is None else sequence
        batch = build_batch(
            [Record(None, b"v%d" % (first + n), self.bench.wall_ms) for n in range(records)],
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=first,
            transactional=transactional,
        )
        known = self.bench.broker.catalog.by_name.get(topic)
        data = TopicProduceData(
            name=topic,
            topic_id=known.topic_id if version >= 13 and known is not None else bytes(16),
            partition_data=[PartitionProduceData(index=index, records=memoryview(batch))],
        )
        request = ProduceRequest(
            transactional_id=self.transactional_id if named else None, acks=-1, topic_data=[data]
        )
        answer = (
            self.bench.ask(produce, request, version, self.principal, self.connection)
            .responses[0]
            .partition_responses[0]
        )
        if answer.error_code == 0 and sequence is None:
            self.sequences[key] = first + records
        return answer

    def produce(self, index: int = 0, topic: str = TOPIC, **how: Any) -> int:
        """Produce one batch; the error code."""
        code: int = self.send(index, topic, **how).error_code
        return code

    def add_group(self, group: str = GROUP, version: int = 3) -> int:
        """AddOffsetsToTxn."""
        request = AddOffsetsToTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            group_id=group,
        )
        code: int = self.bench.ask(
            add_offsets_to_txn, request, version, self.principal, self.connection
        ).error_code
        return code

    def commit_offset(
        self,
        offset: int,
        index: int = 0,
        *,
        group: str = GROUP,
        version: int = 5,
        member_id: str = "",
        generation: int = -1,
        topic: str = TOPIC,
        metadata: str = "",
    ) -> int:
        """TxnOffsetCommit of one partition."""
        partition = TxnOffsetCommitRequestPartition(
            partition_index=index, committed_offset=offset, committed_metadata=metadata
        )
        request = TxnOffsetCommitRequest(
            transactional_id=self.transactional_id,
            group_id=group,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            generation_id=generation,
            member_id=member_id,
            topics=[TxnOffsetCommitRequestTopic(name=topic, partitions=[partition])],
        )
        response = self.bench.ask(txn_offset_commit, request, version, self.principal, self.connection)
        code: int = response.topics[0].partitions[0].error_code
        return code

    def end(self, commit: bool = True, version: int = 5, *, take: bool = True) -> EndTxnResponse:
        """EndTxn; a raised identity in the answer is taken over unless `take` is off: the answer got lost."""
        request = EndTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=commit,
        )
        response: EndTxnResponse = self.bench.ask(end_txn, request, version, self.principal, self.connection)
        if response.error_code == 0 and version >= 5 and take:
            self.take(response.producer_id, response.producer_epoch)
        return response

    def commit(self, version: int = 5) -> int:
        return self.end(True, version).error_code

    def abort(self, version: int = 5) -> int:
        return self.end(False, version).error_code


def started(bench: Bench, transactional_id: str = "app", **fields: Any) -> Producer:
    """A producer with an identity."""
    producer = Producer(bench, transactional_id)
    assert producer.init(**fields).error_code == NONE
    return producer


def opened(bench: Bench, transactional_id: str = "app", version: int = 5, **fields: Any) -> Producer:
    """A producer with a batch in an open transaction, joined the way that EndTxn `version` goes with."""
    producer = started(bench, transactional_id, **fields)
    write(producer, version)
    return producer


def write(producer: Producer, version: int = 5, index: int = 0, topic: str = TOPIC) -> None:
    """Begin a transaction, or go on with it, by one batch."""
    if version < 5:
        assert producer.add(index, topic) == NONE
    assert producer.produce(index, topic, version=12 if version >= 5 else 9) == NONE


def exhausted(bench: Bench, transactional_id: str = "app") -> Producer:
    """A producer whose epoch is the last that it can have."""
    producer = started(bench, transactional_id)
    transaction = bench.transaction(transactional_id)
    transaction.epoch = producer.epoch = 32_766
    return producer


# States to compare.


def snapshot_parts(broker: Broker) -> list[bytearray]:
    parts = [encode_catalog(broker)]
    parts += [encode_partition(partition, None) for topic in broker.catalog for partition in topic.partitions]
    parts += [encode_group(group) for group in broker.groups if group.is_journaled]
    parts += [encode_transaction(transaction) for transaction in broker.transactions.by_id.values()]
    return parts


def load_part(broker: Broker, stored: bytes) -> None:
    part = decode_part(memoryview(stored))
    if isinstance(part, TransactionPart):
        broker.transactions.load(part)
    elif isinstance(part, PartitionPart):
        partition = broker.catalog.partition_by_id(part.topic_id, part.index)
        assert partition is not None
        load_partition(partition.log, part)
        partition.log.reveal(partition.log.end_offset)
    elif isinstance(part, CatalogPart):
        load_catalog(broker, part)
    else:
        broker.groups.load(part)


def state(broker: Broker) -> dict[str, Any]:
    """All that a restart must bring back, in a form that can be compared."""
    transactions = broker.transactions
    return {
        "parts": sorted(bytes(part) for part in snapshot_parts(broker)),
        "owners": {owned: owner.transactional_id for owned, owner in transactions.by_producer_id.items()},
        "open": {who: count for who, count in transactions.open_by_principal.items() if count},
        "groups": sorted(broker.groups.by_id),
        "pending": {
            group.group_id: {key: sorted(held) for key, held in group.offsets._holders.items()}
            for group in broker.groups
        },
        "unstable": {
            repr(partition): dict(partition.log.unstable)
            for topic in broker.catalog
            for partition in topic.partitions
        },
    }
