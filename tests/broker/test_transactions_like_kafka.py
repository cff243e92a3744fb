"""The same requests to this broker and to Apache Kafka: the same error codes, but for what is listed.

A script is a function that sends requests and names each answer. Both brokers run it. What differs must be in
`DIFFERENCES`, with the reason; what is listed there and does not differ any more is reported, too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from broker_process import BrokerProcess
from kafka_process import KafkaProcess
from raw_client import RawClient

from semel.wire.errors import ErrorCode
from semel.wire.messages import add_offsets_to_txn as offsets_joining
from semel.wire.messages import add_partitions_to_txn as joining
from semel.wire.messages import create_topics as creating
from semel.wire.messages import describe_transactions as describing
from semel.wire.messages import end_txn as ending
from semel.wire.messages import find_coordinator as coordinators
from semel.wire.messages import init_producer_id as initialising
from semel.wire.messages import list_transactions as listing
from semel.wire.messages import produce as producing
from semel.wire.messages import txn_offset_commit as committing
from semel.wire.messages import write_txn_markers as marking
from semel.wire.records import Record, build_batch

TIMEOUT_MS: Final = 60_000
SHORT_MS: Final = 500
PATIENCE_S: Final = 30.0
PAUSE_S: Final = 0.02
RETRIED: Final = {
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
}
"""What Kafka says while it is not ready; clients ask again."""

Trace = dict[str, str]


class Run:
    """One script against one broker, and what it was answered."""

    def __init__(self, port: int) -> None:
        self.client = RawClient(port)
        self.topic = f"t-{uuid.uuid4().hex[:10]}"
        self.group = f"g-{uuid.uuid4().hex[:10]}"
        self.trace: Trace = {}
        self._create_topic()
        self._find(self.group, 0)

    def note(self, label: str, code: int) -> int:
        assert label not in self.trace, f"{label} is used twice"
        self.trace[label] = ErrorCode(code).name
        return code

    def ask(self, request: Any, version: int, code_of: Callable[[Any], int]) -> tuple[int, Any]:
        """The answer, once the broker is ready to give one."""
        response_type = getattr(
            __import__(type(request).__module__, fromlist=["_"]),
            type(request).__name__.replace("Request", "Response"),
        )
        give_up = time.monotonic() + PATIENCE_S
        while True:
            response = self.client.ask(request, version, response_type)
            code = code_of(response)
            if code not in RETRIED or time.monotonic() > give_up:
                return code, response
            time.sleep(PAUSE_S)

    def _create_topic(self) -> None:
        topic = creating.CreatableTopic(name=self.topic, num_partitions=3, replication_factor=1)
        request = creating.CreateTopicsRequest(topics=[topic], timeout_ms=10_000)
        code, _ = self.ask(request, 5, lambda response: response.topics[0].error_code)
        assert code == 0

    def _find(self, key: str, key_type: int) -> None:
        request = coordinators.FindCoordinatorRequest(key_type=key_type, coordinator_keys=[key])
        code, _ = self.ask(request, 4, lambda response: response.coordinators[0].error_code)
        assert code == 0

    def producer(self, **fields: Any) -> Producer:
        """A producer with a transactional id of its own."""
        producer = Producer(self, f"x-{uuid.uuid4().hex[:10]}")
        self._find(producer.transactional_id, 1)
        assert producer.init("", **fields) == 0
        return producer

    def list(self, label: str, version: int, **filters: Any) -> None:
        """ListTransactions: the error, the states found, and the filters that were not understood."""
        request = listing.ListTransactionsRequest(**filters)
        code, response = self.ask(request, version, lambda response: response.error_code)
        states = sorted(found.transaction_state for found in response.transaction_states)
        self.note(label, code)
        self.trace[label] += f" {states} {response.unknown_state_filters}"

    def markers(self, label: str, producer: Producer, epoch: int, version: int, **how: Any) -> int:
        topic = marking.WritableTxnMarkerTopic(
            name=how.get("topic", self.topic), partition_indexes=[how.get("index", 0)]
        )
        marker = marking.WritableTxnMarker(
            producer_id=producer.producer_id,
            producer_epoch=epoch,
            transaction_result=how.get("commit", False),
            coordinator_epoch=0,
            transaction_version=how.get("transaction_version", 0),
            topics=[topic],
        )
        code, _ = self.ask(
            marking.WriteTxnMarkersRequest(markers=[marker]),
            version,
            lambda response: response.markers[0].topics[0].partitions[0].error_code,
        )
        return self.note(label, code)


class Producer:
    """A producer by hand: it sends what it is told to, under the identity that it has."""

    def __init__(self, run: Run, transactional_id: str) -> None:
        self.run = run
        self.transactional_id = transactional_id
        self.producer_id = -1
        self.epoch = -1
        self.sequences = [0, 0, 0]

    def twin(self, **changed: Any) -> Producer:
        twin = Producer(self.run, self.transactional_id)
        twin.producer_id, twin.epoch, twin.sequences = self.producer_id, self.epoch, list(self.sequences)
        for name, value in changed.items():
            setattr(twin, name, value)
        return twin

    def _take(self, producer_id: int, epoch: int) -> None:
        if (producer_id, epoch) != (self.producer_id, self.epoch):
            self.producer_id, self.epoch, self.sequences = producer_id, epoch, [0, 0, 0]

    def init(self, label: str, version: int = 5, *, named: bool = False, **fields: Any) -> int:
        fields.setdefault("transaction_timeout_ms", TIMEOUT_MS)
        fields.setdefault("transactional_id", self.transactional_id)
        request = initialising.InitProducerIdRequest(**fields)
        if named:
            request.producer_id, request.producer_epoch = self.producer_id, self.epoch
        code, response = self.run.ask(request, version, lambda response: response.error_code)
        if code == 0:
            self._take(response.producer_id, response.producer_epoch)
        return self.run.note(label, code) if label else code

    def add(self, label: str, index: int = 0, version: int = 3, topic: str | None = None) -> int:
        topics = [joining.AddPartitionsToTxnTopic(name=topic or self.run.topic, partitions=[index])]
        request = joining.AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=topics,
        )
        code, _ = self.run.ask(
            request,
            version,
            lambda response: (
                response.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
            ),
        )
        return self.run.note(label, code)

    def send(
        self,
        label: str,
        index: int = 0,
        version: int = 12,
        *,
        transactional: bool = True,
        named: bool = True,
        sequence: int | None = None,
    ) -> int:
        batch = build_batch(
            [Record(None, b"value", int(time.time() * 1000))],
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self.sequences[index] if sequence is None else sequence,
            transactional=transactional,
        )
        part = producing.PartitionProduceData(index=index, records=memoryview(batch))
        request = producing.ProduceRequest(
            transactional_id=self.transactional_id if named else None,
            acks=-1,
            timeout_ms=10_000,
            topic_data=[producing.TopicProduceData(name=self.run.topic, partition_data=[part])],
        )
        code, _ = self.run.ask(
            request, version, lambda response: response.responses[0].partition_responses[0].error_code
        )
        if code == 0 and sequence is None:
            self.sequences[index] += 1
        return self.run.note(label, code)

    def add_group(self, label: str, version: int = 3) -> int:
        request = offsets_joining.AddOffsetsToTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            group_id=self.run.group,
        )
        code, _ = self.run.ask(request, version, lambda response: response.error_code)
        return self.run.note(label, code)

    def commit_offset(self, label: str, version: int = 5, topic: str | None = None, **who: Any) -> int:
        part = committing.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=1)
        request = committing.TxnOffsetCommitRequest(
            transactional_id=self.transactional_id,
            group_id=self.run.group,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            topics=[committing.TxnOffsetCommitRequestTopic(name=topic or self.run.topic, partitions=[part])],
            **who,
        )
        code, _ = self.run.ask(request, version, lambda response: response.topics[0].partitions[0].error_code)
        return self.run.note(label, code)

    def end(self, label: str, commit: bool = True, version: int = 5, *, take: bool = True) -> int:
        request = ending.EndTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=commit,
        )
        code, response = self.run.ask(request, version, lambda response: response.error_code)
        if code == 0 and version >= 5 and take:
            self._take(response.producer_id, response.producer_epoch)
        return self.run.note(label, code)

    def await_state(self, wanted: str) -> None:
        request = describing.DescribeTransactionsRequest(transactional_ids=[self.transactional_id])
        give_up = time.monotonic() + PATIENCE_S
        while True:
            _, response = self.run.ask(request, 0, lambda response: response.transaction_states[0].error_code)
            state = response.transaction_states[0].transaction_state
            if state == wanted:
                return
            assert time.monotonic() < give_up, f"{state} instead of {wanted}"
            time.sleep(PAUSE_S)


# The scripts.


def ending_nothing(run: Run) -> None:
    for version in range(6):
        for commit in (True, False):
            run.producer().end(f"end v{version} {commit} with nothing added", commit, version)
    producer = run.producer()
    producer.send("v2: first batch")
    producer.end("v2: commit")
    producer.end("v2: commit again with the raised epoch", True)
    producer.end("v2: abort with nothing added after a commit", False)
    producer.end("v2: abort with nothing added after an abort", False)
    producer.end("v2: commit with nothing added after an abort", True)


def ending_again(run: Run) -> None:
    for version in range(6):
        for commit in (True, False):
            producer = run.producer()
            what = f"v{version} {commit}"
            if version < 5:
                producer.add(f"{what}: add")
            producer.send(f"{what}: produce", version=12 if version == 5 else 9)
            producer.end(f"{what}: end", commit, version, take=False)
            producer.await_state("CompleteCommit" if commit else "CompleteAbort")
            producer.end(f"{what}: retry", commit, version, take=False)
            producer.end(f"{what}: the other outcome", not commit, version, take=False)


def other_identities(run: Run) -> None:
    known = run.producer()
    strangers = {
        "older epoch": known.twin(epoch=known.epoch - 1),
        "newer epoch": known.twin(epoch=known.epoch + 1),
        "other producer id": known.twin(producer_id=known.producer_id + 100_000),
        "unknown transactional id": known.twin(transactional_id="nobody-has-this"),
    }
    known.epoch += 1
    known.init("raise the epoch", named=False)
    strangers["older epoch"].epoch = known.epoch - 1
    strangers["newer epoch"].epoch = known.epoch + 1
    run._find("nobody-has-this", 1)
    for who, stranger in strangers.items():
        for version in range(6):
            stranger.end(f"{who}: end v{version}", True, version)
            stranger.commit_offset(f"{who}: commit offset v{version}", version)
        for version in range(4):
            stranger.add(f"{who}: add v{version}", version=version)
        for version in range(5):
            stranger.add_group(f"{who}: add group v{version}", version)
        for version in range(3, 13):
            stranger.send(f"{who}: produce v{version}", version=version)
        if who != "unknown transactional id":
            for version in range(3, 6):
                stranger.init(f"{who}: init v{version}", version, named=True)


def late_batches(run: Run) -> None:
    for version in range(3, 12):
        producer = run.producer()
        producer.send(f"v{version}: before it is added", version=version)
        producer.add(f"v{version}: add")
        producer.send(f"v{version}: added", version=version)
        producer.send(f"v{version}: another partition", 1, version)
        producer.end(f"v{version}: commit", True, 3)
        producer.await_state("CompleteCommit")
        producer.send(f"v{version}: late", version=version)
        producer.send(f"v{version}: a late duplicate", version=version, sequence=0)
    producer = run.producer()
    producer.send("v2: produce")
    late = producer.twin()
    producer.end("v2: commit")
    producer.await_state("CompleteCommit")
    late.send("v2: late after the commit")
    late.send("v2: late to another partition", 1)
    producer.send("v2: the next transaction")
    late.send("v2: late into the next")
    late.end("v2: late commit", True)
    late.end("v2: late abort", False)
    producer.end("v2: commit the next")


def fenced(run: Run) -> None:
    for ends in (3, 5):
        old = run.producer()
        if ends == 3:
            old.add(f"{ends}: add")
        old.send(f"{ends}: produce", version=9 if ends == 3 else 12)
        new = old.twin()
        new.init(f"{ends}: init by another instance")
        for version in range(6):
            old.end(f"{ends}: end v{version}", True, version)
            old.commit_offset(f"{ends}: offsets v{version}", version)
        for version in range(4):
            old.add(f"{ends}: add v{version}", version=version)
        for version in (3, 9, 10, 11, 12):
            old.send(f"{ends}: produce v{version}", version=version)
            old.send(f"{ends}: hidden v{version}", version=version, transactional=False, named=False)
        for version in range(3, 6):
            old.init(f"{ends}: init v{version} with the old identity", version, named=True)
        new.send(f"{ends}: the new instance writes")
        new.end(f"{ends}: the new instance commits")


def recovering(run: Run) -> None:
    producer = run.producer()
    producer.send("produce")
    before = producer.twin()
    producer.init("init with its own identity", named=True)
    before.twin().init("the same again", named=True)
    producer.send("produce with the raised epoch")
    producer.end("commit")
    producer.await_state("CompleteCommit")
    before.init("with an identity that is two transactions old", named=True)
    lost = run.producer()
    lost.send("lost: produce")
    lost.end("lost: commit whose answer is lost", take=False)
    lost.await_state("CompleteCommit")
    lost.init("lost: init with the identity before", named=True)


def timed_out(run: Run) -> None:
    for version in range(6):
        producer = run.producer(transaction_timeout_ms=SHORT_MS)
        if version < 5:
            producer.add(f"v{version}: add")
        producer.send(f"v{version}: produce", version=12 if version == 5 else 9)
        producer.await_state("CompleteAbort")
        producer.send(f"v{version}: produce after the timeout", version=12 if version == 5 else 9)
        producer.add(f"v{version}: add after the timeout", 1)
        producer.end(f"v{version}: commit after the timeout", True, version, take=False)
        producer.end(f"v{version}: abort after the timeout", False, version, take=False)
        producer.init(f"v{version}: init with its old identity", named=True)
        producer.send(f"v{version}: and on it goes")


def misfits(run: Run) -> None:
    producer = run.producer()
    producer.send("produce")
    producer.send("a batch outside of the transaction", transactional=False, named=False)
    producer.send("a transactional batch in a request without an id", named=False)
    producer.send("a gap", sequence=5)
    producer.send("a duplicate", sequence=0)
    producer.add("add an unknown topic", topic="no-such-topic")
    producer.add("add an unknown partition", 77)
    producer.end("commit")
    producer.await_state("CompleteCommit")
    producer.send("the next begins past sequence 0", sequence=1)
    for timeout_ms in (-1, 0, 900_001):
        producer.init(f"a timeout of {timeout_ms}", transaction_timeout_ms=timeout_ms)
    producer.init("an empty transactional id", transactional_id="")
    producer.init("an id without an epoch", producer_id=5)
    producer.init("an epoch without an id", producer_epoch=5)


def offsets(run: Run) -> None:
    for version in range(6):
        producer = run.producer()
        producer.commit_offset(f"v{version}: before the group is added", version)
        producer.add_group(f"v{version}: add the group")
        producer.commit_offset(f"v{version}: added", version)
        producer.commit_offset(f"v{version}: unknown topic", version, topic="no-such-topic")
        if version >= 3:
            producer.commit_offset(f"v{version}: no member", version, generation_id=3, member_id="gone")
        producer.end(f"v{version}: commit", True, 5 if version == 5 else 3)


def listed(run: Run) -> None:
    producers = [run.producer() for _ in range(3)]
    for producer in producers[1:]:
        producer.send(f"produce {producers.index(producer)}")
    producers[2].end("commit")
    producers[2].await_state("CompleteCommit")
    ids = [producer.producer_id for producer in producers]
    run.list("all three", 0, producer_id_filters=ids)
    run.list("by state", 1, producer_id_filters=ids, state_filters=["Ongoing", "Empty", "NoSuchState"])
    run.list("by an unknown state", 1, producer_id_filters=ids, state_filters=["NoSuchState"])
    run.list("by a duration that is over", 1, producer_id_filters=ids[1:2], duration_filter=0)
    run.list("by a duration that is not", 1, producer_id_filters=ids, duration_filter=3_600_000)
    run.list("by a pattern", 2, producer_id_filters=ids, transactional_id_pattern="x-.*")
    run.list("by a pattern for a part of the id", 2, producer_id_filters=ids, transactional_id_pattern="x-")
    run.list("by no pattern", 2, producer_id_filters=ids, transactional_id_pattern="")
    run.list("by a pattern that is none", 2, producer_id_filters=ids, transactional_id_pattern="([")


def marked(run: Run) -> None:
    producer = run.producer()
    producer.init("raise the epoch")
    producer.send("produce")
    for version in (1, 2):
        run.markers(f"v{version}: an older epoch", producer, producer.epoch - 1, version)
        run.markers(f"v{version}: no such partition", producer, producer.epoch, version, index=9)
    run.markers("version 2 with the same epoch", producer, producer.epoch, 2, transaction_version=2)
    run.markers("abort", producer, producer.epoch, 1)


SCRIPTS: Final = (
    ending_nothing,
    ending_again,
    other_identities,
    late_batches,
    fenced,
    recovering,
    timed_out,
    misfits,
    offsets,
    listed,
    marked,
)

DIFFERENCES: Final[dict[str, dict[str, tuple[str, str, str]]]] = {
    "timed_out": {
        "v5: commit after the timeout": (
            "TRANSACTION_ABORTABLE",
            "INVALID_TXN_STATE",
            "to INVALID_TXN_STATE a client must give up; this one can abort and go on",
        )
    },
    "listed": {
        "by a duration that is not": (
            "NONE [] []",
            "NONE ['Empty'] []",
            "what never began has not been open for an hour",
        )
    },
}
"""By script and label: what this broker says, what Kafka says, and why they differ."""


@pytest.fixture(scope="module")
def semel_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    process = BrokerProcess(tmp_path_factory.mktemp("like-kafka") / "broker").start()
    try:
        yield process.port
        assert "this is a bug" not in process.log, process.log
    finally:
        process.kill()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_requests_get_the_same_error_codes(
    script: Callable[[Run], None], semel_port: int, kafka_broker: KafkaProcess
) -> None:
    ours, theirs = Run(semel_port), Run(kafka_broker.port)
    script(ours)
    script(theirs)
    differing = {
        label: (code, theirs.trace[label])
        for label, code in ours.trace.items()
        if code != theirs.trace[label]
    }
    listed = {label: pair[:2] for label, pair in DIFFERENCES.get(script.__name__, {}).items()}
    assert differing == listed
