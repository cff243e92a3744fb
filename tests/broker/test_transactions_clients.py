"""Stock clients run their transactions against a real broker process: each claim for each library."""

from __future__ import annotations

import re
import time
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Final

import pytest
from broker_process import BrokerProcess, free_port
from client_java import Java
from confluent_kafka import KafkaException, TopicPartition
from raw_client import RawClient
from txn_cases import (
    COMMITTED,
    LIBRARIES,
    TIMEOUT_S,
    UNCOMMITTED,
    Confluent,
    JavaClients,
    Library,
    Transactional,
    create_topic,
    values,
)

from semel.wire.errors import ErrorCode
from semel.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from semel.wire.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)
from semel.wire.messages.end_txn import EndTxnRequest, EndTxnResponse
from semel.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)

OLD_LIBRARIES: Final = tuple(name for name in LIBRARIES if name != "java")
"""Those that speak transaction version 1 only."""
SHORT_MS: Final = 1_000
"""A transaction timeout that tests wait for."""
PATIENCE_S: Final = 15.0
PAUSE_S: Final = 0.05


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One durable broker for all libraries; restarts are part of the claims."""
    figures = {"metrics.listeners": f"127.0.0.1:{free_port()}"}
    process = BrokerProcess(tmp_path_factory.mktemp("transactions") / "broker", figures).start()
    try:
        yield process
        assert "this is a bug" not in process.log, process.log
        assert process.stop() == 0, process.log
    finally:
        process.kill()


@pytest.fixture(scope="module")
def libraries(process: BrokerProcess) -> Iterator[dict[str, Library]]:
    made: dict[str, Library] = {
        name: library(process.bootstrap)
        for name, library in LIBRARIES.items()
        if name != "java" or Java.missing() is None
    }
    yield made
    for library in made.values():
        library.close()


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, libraries: dict[str, Library]) -> Library:
    if request.param not in libraries:
        pytest.skip(f"no Java client: {Java.missing()}")
    return libraries[request.param]


@pytest.fixture
def java(libraries: dict[str, Library]) -> JavaClients:
    if "java" not in libraries:
        pytest.skip(f"no Java client: {Java.missing()}")
    found = libraries["java"]
    assert isinstance(found, JavaClients)
    return found


@pytest.fixture
def producers() -> Iterator[list[Transactional]]:
    """Producers that are closed after the test, whatever state they are in."""
    made: list[Transactional] = []
    yield made
    for producer in made:
        producer.close()


@pytest.fixture
def name() -> str:
    """A topic, transactional id or group of this test's own."""
    return f"t-{uuid.uuid4().hex[:10]}"


def eventually(library: Library, topic: str, partition: int, wanted: list[str]) -> None:
    """Wait until read_committed shows this."""
    give_up = time.monotonic() + PATIENCE_S
    while (seen := library.read(topic, partition, COMMITTED)) != wanted:
        assert time.monotonic() < give_up, f"read {seen}, wanted {wanted}"
        time.sleep(PAUSE_S)


def test_a_bulk_commit_over_many_partitions_and_topics_is_read_whole(
    process: BrokerProcess, library: Library, producers: list[Transactional], name: str
) -> None:
    topics = [f"{name}-{n}" for n in range(3)]
    for topic in topics:
        create_topic(process.bootstrap, topic, 4)
    producers.append(producer := library.producer(name))
    producer.begin()
    for topic in topics:
        for partition in range(4):
            producer.send(topic, partition, f"{topic}-{partition}-", 200)
            assert library.read(topic, partition, COMMITTED) == []
    producer.commit()
    for topic in topics:
        for partition in range(4):
            assert library.read(topic, partition, COMMITTED) == values(f"{topic}-{partition}-", 200)


def test_what_is_aborted_is_read_by_read_uncommitted_only(
    process: BrokerProcess, library: Library, producers: list[Transactional], name: str
) -> None:
    create_topic(process.bootstrap, name, 2)
    producers.append(producer := library.producer(name))
    for n in range(6):
        producer.begin()
        producer.send(name, 0, f"{n}-", 5)
        producer.send(name, 1, f"{n}-", 5)
        producer.commit() if n % 2 else producer.abort()
    for partition in (0, 1):
        committed = [value for n in (1, 3, 5) for value in values(f"{n}-", 5)]
        assert library.read(name, partition, COMMITTED) == committed
        everything = [value for n in range(6) for value in values(f"{n}-", 5)]
        assert library.read(name, partition, UNCOMMITTED) == everything


def test_reading_while_transactions_are_open_on_one_partition(
    process: BrokerProcess, library: Library, producers: list[Transactional], name: str
) -> None:
    create_topic(process.bootstrap, name)
    producers += [one := library.producer(f"{name}-1"), two := library.producer(f"{name}-2")]
    one.begin()
    one.send(name, 0, "one-", 2)
    two.begin()
    two.send(name, 0, "two-", 2)
    two.commit()
    assert library.read(name, 0, COMMITTED) == [], "an older transaction is open"
    assert library.read(name, 0, UNCOMMITTED) == ["one-0", "one-1", "two-0", "two-1"]
    two.begin()
    two.send(name, 0, "later-", 2)
    one.abort()
    assert library.read(name, 0, COMMITTED) == ["two-0", "two-1"]
    two.commit()
    assert library.read(name, 0, COMMITTED) == ["two-0", "two-1", "later-0", "later-1"]


def test_a_transaction_left_open_times_out_and_readers_go_on(
    process: BrokerProcess, library: Library, producers: list[Transactional], name: str
) -> None:
    create_topic(process.bootstrap, name)
    producers += [hung := library.producer(name, SHORT_MS), other := library.producer(f"{name}-other")]
    hung.begin()
    hung.send(name, 0, "hung-", 3)
    other.begin()
    other.send(name, 0, "other-", 3)
    other.commit()
    assert library.read(name, 0, COMMITTED) == []
    eventually(library, name, 0, values("other-", 3))
    with pytest.raises(Exception, match=r"(?i)fenc|epoch|abort|state"):
        hung.commit()
    assert library.read(name, 0, COMMITTED) == values("other-", 3)
    producers.append(again := library.producer(name))
    again.begin()
    again.send(name, 0, "again-")
    again.commit()
    assert library.read(name, 0, COMMITTED) == [*values("other-", 3), "again-0"]


@pytest.mark.parametrize("learns_by", ("commit", "send"))
def test_a_producer_of_version_2_whose_time_ran_out_aborts_and_goes_on(
    process: BrokerProcess, java: JavaClients, producers: list[Transactional], name: str, learns_by: str
) -> None:
    # To the clients of version 1 the old epoch means that another instance has taken over.
    create_topic(process.bootstrap, name)
    producers += [late := java.producer(name, SHORT_MS), other := java.producer(f"{name}-other")]
    late.begin()
    late.send(name, 0, "late-", 3)
    other.begin()
    other.send(name, 0, "other-")
    other.commit()
    eventually(java, name, 0, ["other-0"])
    with pytest.raises(Exception, match=r"(?i)epoch|abort"):
        late.commit() if learns_by == "commit" else late.send(name, 0, "too-late-")
    late.abort()
    late.begin()
    late.send(name, 0, "again-", 2)
    late.commit()
    assert java.read(name, 0, COMMITTED) == ["other-0", "again-0", "again-1"]


def test_a_new_instance_fences_the_old_one_and_aborts_what_it_left(
    process: BrokerProcess, library: Library, producers: list[Transactional], name: str
) -> None:
    create_topic(process.bootstrap, name)
    producers.append(old := library.producer(name))
    old.begin()
    old.send(name, 0, "old-", 3)
    producers.append(new := library.producer(name))
    with pytest.raises(Exception, match=r"(?i)fenc|epoch"):
        old.commit()
    new.begin()
    new.send(name, 0, "new-", 3)
    new.commit()
    assert library.read(name, 0, COMMITTED) == values("new-", 3)
    with pytest.raises(Exception, match=r"(?i)fenc|epoch|state|fatal"):
        old.begin()
        old.send(name, 0, "zombie-")
        old.commit()
    assert library.read(name, 0, UNCOMMITTED) == [*values("old-", 3), *values("new-", 3)]


def test_consume_transform_produce_has_every_record_once(
    process: BrokerProcess, library: Library, producers: list[Transactional], name: str
) -> None:
    source, target = f"{name}-source", f"{name}-target"
    for topic in (source, target):
        create_topic(process.bootstrap, topic, 2)
    producers += [feeder := library.producer(f"{name}-feeder"), worker := library.producer(name)]
    for n in range(4):
        feeder.begin()
        feeder.send(source, n % 2, f"{n}-", 50)
        feeder.commit() if n < 2 else feeder.abort()
    worker.transform(source, target, name, 100)
    feeder.begin()
    feeder.send(source, 0, "last-", 50)
    feeder.commit()
    # Another instance of the application takes over where the offsets say.
    producers.append(successor := library.producer(name))
    successor.transform(source, target, name, 50)
    transformed = [f"{value}'" for value in (*values("0-", 50), *values("last-", 50))]
    assert library.read(target, 0, COMMITTED) == transformed
    assert library.read(target, 1, COMMITTED) == [f"{value}'" for value in values("1-", 50)]


def test_offsets_of_a_consumer_that_left_its_group_are_refused(
    process: BrokerProcess, libraries: dict[str, Library], producers: list[Transactional], name: str
) -> None:
    library = libraries["confluent"]
    assert isinstance(library, Confluent)
    create_topic(process.bootstrap, name)
    consumer = library.consumer(COMMITTED, name)
    consumer.subscribe([name])
    give_up = time.monotonic() + PATIENCE_S
    while not consumer.assignment():
        assert time.monotonic() < give_up
        consumer.poll(0.1)
    membership = consumer.consumer_group_metadata()
    producers.append(producer := library.producer(name))
    producer.begin()
    producer.send(name, 0, "x")
    producer.send_offsets(name, 7, membership)
    producer.commit()
    consumer.close()
    producer.begin()
    producer.send(name, 0, "y")
    with pytest.raises(KafkaException, match=r"UNKNOWN_MEMBER_ID|ILLEGAL_GENERATION"):
        producer.send_offsets(name, 99, membership)
    producer.abort()
    again = library.consumer(COMMITTED, name)
    (found,) = again.committed([TopicPartition(name, 0)], TIMEOUT_S)
    again.close()
    assert found.offset == 7
    assert library.read(name, 0, COMMITTED) == ["x0"]


@pytest.mark.parametrize("how", ("kill", "stop"))
def test_a_transaction_goes_on_after_the_broker_came_back(
    process: BrokerProcess, library: Library, producers: list[Transactional], name: str, how: str
) -> None:
    create_topic(process.bootstrap, name, 2)
    producers.append(producer := library.producer(name))
    producer.begin()
    producer.send(name, 0, "aborted-", 3)
    producer.abort()
    producer.begin()
    producer.send(name, 0, "before-", 3)
    if how == "kill":
        process.kill()
    else:
        assert process.stop() == 0
    process.start()
    assert library.read(name, 0, COMMITTED) == []
    producer.send(name, 0, "after-", 3)
    producer.send(name, 1, "after-", 3)
    producer.commit()
    assert library.read(name, 0, COMMITTED) == [*values("before-", 3), *values("after-", 3)]
    assert library.read(name, 1, COMMITTED) == values("after-", 3)
    process.restart()
    assert library.read(name, 0, COMMITTED) == [*values("before-", 3), *values("after-", 3)]


# Producers of version 1 with several connections, and what they left behind on one of them.


class Connection(RawClient):
    """One more connection of a producer, whose identity the broker tells."""

    def __init__(self, process: BrokerProcess, transactional_id: str) -> None:
        super().__init__(process.port)
        self._transactional_id = transactional_id
        # An answer: the broker has this connection, and has it before those that are opened from now on.
        self._identity()

    def _identity(self) -> tuple[int, int]:
        request = DescribeTransactionsRequest(transactional_ids=[self._transactional_id])
        (state,) = self.ask(request, 0, DescribeTransactionsResponse).transaction_states
        return state.producer_id, state.producer_epoch

    def add(self, topic: str, partition: int) -> int:
        producer_id, epoch = self._identity()
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._transactional_id,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name=topic, partitions=[partition])],
        )
        answer = self.ask(request, 0, AddPartitionsToTxnResponse)
        return answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code

    def commit_offset(self, group: str, topic: str, offset: int) -> int:
        producer_id, epoch = self._identity()
        partition = TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
        request = TxnOffsetCommitRequest(
            transactional_id=self._transactional_id,
            group_id=group,
            producer_id=producer_id,
            producer_epoch=epoch,
            topics=[TxnOffsetCommitRequestTopic(name=topic, partitions=[partition])],
        )
        return self.ask(request, 0, TxnOffsetCommitResponse).topics[0].partitions[0].error_code

    def commit(self) -> int:
        producer_id, epoch = self._identity()
        request = EndTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=True,
        )
        return self.ask(request, 0, EndTxnResponse).error_code


def asked_again(process: BrokerProcess) -> int:
    """How many requests the broker has told to come again."""
    with urllib.request.urlopen(f"http://{process.settings['metrics.listeners']}/metrics") as response:
        found = re.search(r"^semel_transactions_asked_again_total (\d+)$", response.read().decode(), re.M)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("library", OLD_LIBRARIES, indirect=True)
def test_an_end_left_behind_on_a_connection_does_not_end_the_next_transaction(
    process: BrokerProcess, library: Library, producers: list[Transactional], name: str
) -> None:
    create_topic(process.bootstrap, name)
    with Connection(process, name) as left_behind:
        producers.append(producer := library.producer(name))
        producer.begin()
        producer.send(name, 0, "first-")
        producer.commit()
        producer.begin()
        producer.send(name, 0, "second-")
        before = asked_again(process)
        assert left_behind.commit() == ErrorCode.CONCURRENT_TRANSACTIONS
        assert library.read(name, 0, COMMITTED) == ["first-0"]
        producer.send(name, 0, "third-")
        producer.commit()
        assert asked_again(process) == before + 1, "its owner was not disturbed"
    assert library.read(name, 0, COMMITTED) == ["first-0", "second-0", "third-0"]


@pytest.mark.parametrize("library", OLD_LIBRARIES, indirect=True)
def test_a_producer_that_is_told_to_ask_again_does_so(
    process: BrokerProcess, library: Library, producers: list[Transactional], name: str
) -> None:
    create_topic(process.bootstrap, name, 2)
    producers.append(producer := library.producer(name))
    before = asked_again(process)
    for n in range(2):
        producer.begin()
        producer.send(name, 0, f"{n}-")
        # As if it had another connection, younger than the one that it ends transactions by.
        with Connection(process, name) as younger:
            assert younger.add(name, 1) == ErrorCode.NONE
            producer.commit()
    assert library.read(name, 0, COMMITTED) == ["0-0", "1-0"]
    assert asked_again(process) > before


def test_offsets_left_behind_are_not_taken_and_those_asked_for_again_are(
    process: BrokerProcess, libraries: dict[str, Library], producers: list[Transactional], name: str
) -> None:
    library = libraries["confluent"]
    assert isinstance(library, Confluent)
    create_topic(process.bootstrap, name)
    consumer = library.consumer(COMMITTED, name)
    membership = consumer.consumer_group_metadata()
    with Connection(process, name) as left_behind:
        producers.append(producer := library.producer(name))
        for n in range(2):
            producer.begin()
            producer.send_offsets(name, n, membership)
            if n == 1:
                assert left_behind.commit_offset(name, name, 99) == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
                with Connection(process, name) as younger:
                    assert younger.commit_offset(name, name, 50) == ErrorCode.NONE
                    before = asked_again(process)
                    producer.send_offsets(name, 7, membership)
                    assert asked_again(process) == before + 1
            producer.commit()
    (found,) = consumer.committed([TopicPartition(name, 0)], TIMEOUT_S)
    consumer.close()
    assert found.offset == 7


# What Java's Admin does for operators.


def test_admin_lists_and_describes_transactions_and_producers(
    process: BrokerProcess, java: JavaClients, producers: list[Transactional], name: str
) -> None:
    create_topic(process.bootstrap, name, 2)
    producers += [one := java.producer(f"{name}-one"), two := java.producer(f"{name}-two")]
    for producer in (one, two):
        producer.begin()
        producer.send(name, 0, "x", 2)
    one.commit()
    listed = {line.split("\t")[0]: line.split("\t")[2] for line in java.call("list", f"{name}-.*")}
    assert listed == {f"{name}-one": "CompleteCommit", f"{name}-two": "Ongoing"}
    state, producer_id, epoch, timeout_ms, partitions = java.call("describe", f"{name}-two")[0].split("\t")
    assert (state, timeout_ms, partitions) == ("Ongoing", "60000", "1")
    active = {line.split("\t")[0]: line.split("\t")[1:] for line in java.call("producers", name, 0)}
    assert active[producer_id] == [epoch, "1", "-1", "2"]
    two.abort()
    assert java.call("producers", name, 0)[1].split("\t")[4] == "-1"


@pytest.mark.parametrize("owner", LIBRARIES)
def test_admin_aborts_a_hanging_transaction_and_its_owner_cannot_commit_it(
    process: BrokerProcess,
    libraries: dict[str, Library],
    java: JavaClients,
    producers: list[Transactional],
    name: str,
    owner: str,
) -> None:
    create_topic(process.bootstrap, name, 2)
    producers.append(hanging := libraries[owner].producer(name))
    hanging.begin()
    hanging.send(name, 0, "hanging-", 3)
    hanging.send(name, 1, "hanging-", 3)
    producer_id, epoch, _, coordinator_epoch, _ = java.call("producers", name, 0)[0].split("\t")
    java.call("abort-hanging", name, 0, producer_id, epoch, max(0, int(coordinator_epoch)))
    with pytest.raises(Exception, match=r"(?i)fenc|epoch|abort|state"):
        hanging.commit()
    for partition in (0, 1):
        assert java.read(name, partition, COMMITTED) == []
        assert java.read(name, partition, UNCOMMITTED) == values("hanging-", 3)


def test_admin_fences_a_producer(
    process: BrokerProcess, java: JavaClients, producers: list[Transactional], name: str
) -> None:
    create_topic(process.bootstrap, name)
    producers.append(producer := java.producer(name))
    producer.begin()
    producer.send(name, 0, "x", 3)
    java.call("fence", name)
    with pytest.raises(Exception, match=r"Fenced|Epoch"):
        producer.commit()
    assert java.read(name, 0, COMMITTED) == []
