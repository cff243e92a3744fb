"""What the client does about transactions when answers are late, lost or bad."""

import asyncio
import pickle
from contextlib import nullcontext
from typing import Any, cast

import pytest
from fake_broker import FakeBroker, hang_up, lose_answer, stay_silent

from semel.client.cluster import Cluster
from semel.client.errors import TransactionStateError, UnknownOutcomeError, UnsupportedRequestError
from semel.client.group_offsets import CommittedOffset, GroupMetadata, fetch_offsets
from semel.client.metadata import TopicPartition
from semel.client.partition_writer import SharedWriter
from semel.client.producer import ProducerIdentity
from semel.client.shared_transaction import (
    SharedTransaction,
    State,
    TransactionHandle,
    TransactionOptions,
    format_prepared,
    parse_prepared,
)
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import AbortableError, ConfigError, FatalError, FencedError, RetriableError
from semel.wire.apis import ApiKey
from semel.wire.batch import read_header
from semel.wire.columns import BinaryColumn
from semel.wire.errors import ErrorCode
from semel.wire.messages.add_partitions_to_txn import AddPartitionsToTxnResponse
from semel.wire.messages.describe_transactions import DescribeTransactionsResponse, TransactionState
from semel.wire.messages.end_txn import EndTxnResponse
from semel.wire.messages.init_producer_id import InitProducerIdResponse
from semel.wire.messages.offset_fetch import (
    OffsetFetchResponse,
    OffsetFetchResponsePartition,
    OffsetFetchResponseTopic,
)
from semel.wire.messages.produce import PartitionProduceResponse, ProduceResponse, TopicProduceResponse
from semel.wire.messages.txn_offset_commit import (
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from semel.wire.records import Record

FIRST = TopicPartition("t", 0)
GROUP = GroupMetadata("g")
IMPATIENT = TransactionOptions(end_timeout_ms=200)
VERSION_1 = TransactionOptions(max_version=1)


def refuse_end(code: int) -> Any:
    def answer(broker: FakeBroker, request: Any) -> EndTxnResponse:
        return EndTxnResponse(error_code=code)

    return answer


def refuse_partitions(code: int) -> Any:
    def answer(broker: FakeBroker, request: Any) -> AddPartitionsToTxnResponse:
        response = broker.add_partitions_to_txn(request)
        for topic in response.results_by_topic_v3_and_below:
            for result in topic.results_by_partition:
                result.partition_error_code = code
        return response

    return answer


def refuse_batch(code: int) -> Any:
    def answer(broker: FakeBroker, request: Any) -> ProduceResponse:
        topic = request.topic_data[0]
        partition = PartitionProduceResponse(index=topic.partition_data[0].index, error_code=code)
        return ProduceResponse(
            responses=[TopicProduceResponse(name=topic.name, partition_responses=[partition])]
        )

    return answer


async def begun(cluster: Cluster, options: TransactionOptions | None = None) -> TransactionalProducer:
    """A producer whose transaction has one record in it."""
    producer = TransactionalProducer(cluster, "id", options)
    await producer.open()
    await producer.begin()
    await producer.send("t", b"v")
    await producer.flush()
    return producer


# The unknown outcome


async def test_a_commit_whose_answer_was_lost_is_sent_again_as_it_was() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster)
        broker.misbehave(ApiKey.END_TXN, lose_answer, lose_answer)
        await producer.commit()
        sent = [(each.producer_epoch, each.committed) for each in broker.seen(ApiKey.END_TXN)]
        assert sent == [(0, True)] * 3
        assert broker.ends == [(0, True)]
        assert producer.identity.producer_epoch == 1
        await producer.close()


async def test_a_commit_without_an_answer_is_never_aborted() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster, IMPATIENT)
        broker.misbehave(ApiKey.END_TXN, *[hang_up] * 50)
        with pytest.raises(UnknownOutcomeError, match="call commit again"):
            await producer.commit()
        with pytest.raises(TransactionStateError, match="never aborted"):
            await producer.abort()
        with pytest.raises(TransactionStateError):
            await producer.begin()
        await producer.close()
        assert {each.committed for each in broker.seen(ApiKey.END_TXN)} == {True}


async def test_a_commit_may_be_asked_for_again_until_it_is_answered() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster, TransactionOptions(end_timeout_ms=1))
        broker.misbehave(ApiKey.END_TXN, lose_answer, hang_up)
        for _ in range(2):
            with pytest.raises(UnknownOutcomeError):
                await producer.commit()
        await producer.commit()
        assert producer.state is State.READY
        assert broker.ends == [(0, True)]
        await producer.close()


async def test_a_cancelled_commit_can_only_be_committed() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster)
        broker.misbehave(ApiKey.END_TXN, stay_silent)
        committing = asyncio.create_task(producer.commit())
        await broker.heard(ApiKey.END_TXN)
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        with pytest.raises(TransactionStateError):
            await producer.abort()
        assert producer.state is State.COMMITTING
        await cluster.close()  # the silent connection
        await producer.commit()
        assert broker.ends == [(0, True)]
        await producer.close()


async def test_fencing_after_a_lost_answer_says_that_the_commit_may_have_been_done() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster)
        broker.misbehave(ApiKey.END_TXN, lose_answer, refuse_end(ErrorCode.PRODUCER_FENCED))
        with pytest.raises(FencedError, match="An earlier attempt may have committed it"):
            await producer.commit()
        assert producer.state is State.FAILED
        await producer.close()


async def test_fencing_at_the_first_answer_leaves_no_doubt() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster)
        broker.misbehave(ApiKey.END_TXN, refuse_end(ErrorCode.PRODUCER_FENCED))
        with pytest.raises(FencedError) as caught:
            await producer.commit()
        assert "earlier attempt" not in str(caught.value)
        with pytest.raises(FencedError):
            await producer.begin()
        await producer.close()
        assert len(broker.seen(ApiKey.END_TXN)) == 1
        assert len(broker.seen(ApiKey.INIT_PRODUCER_ID)) == 1


async def test_a_commit_that_the_broker_aborted_can_be_done_again() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster)
        broker.misbehave(ApiKey.END_TXN, refuse_end(ErrorCode.TRANSACTION_ABORTABLE))
        with pytest.raises(AbortableError):
            await producer.commit()
        await producer.abort()
        async with producer.transaction():
            await producer.send("t", b"again")
        assert broker.ends == [(0, False), (1, True)]
        await producer.close()


async def test_an_abort_whose_answer_was_lost_is_sent_again() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster, TransactionOptions(end_timeout_ms=1))
        broker.misbehave(ApiKey.END_TXN, lose_answer)
        with pytest.raises(RetriableError):
            await producer.abort()
        await producer.abort()
        assert broker.ends == [(0, False)]
        await producer.begin()
        await producer.close()


# Back-off and spoiling


async def test_a_coordinator_that_has_moved_is_looked_for() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster)
        broker.misbehave(
            ApiKey.END_TXN,
            refuse_end(ErrorCode.NOT_COORDINATOR),
            refuse_end(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        )
        await producer.commit()
        assert len(broker.seen(ApiKey.FIND_COORDINATOR)) == 3
        assert broker.ends == [(0, True)]
        await producer.close()


async def test_concurrent_transactions_is_waited_for_without_asking_where_things_are() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        busy = ErrorCode.CONCURRENT_TRANSACTIONS
        broker.misbehave(
            ApiKey.INIT_PRODUCER_ID,
            lambda broker, request: InitProducerIdResponse(error_code=busy),
            lambda broker, request: InitProducerIdResponse(error_code=busy),
        )
        broker.misbehave(ApiKey.PRODUCE, refuse_batch(busy), refuse_batch(busy))
        broker.misbehave(ApiKey.END_TXN, refuse_end(busy))
        producer = await begun(cluster)
        await producer.commit()
        assert broker.topics["t"][0].values() == [b"v"]
        assert len(broker.seen(ApiKey.FIND_COORDINATOR)) == 1
        assert len(broker.seen(ApiKey.METADATA)) == 2  # at the start, and for the topic
        await producer.close()


async def test_a_batch_that_was_refused_spoils_the_transaction_and_no_other() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster)
        broker.misbehave(ApiKey.PRODUCE, refuse_batch(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER))
        await producer.send("t", b"refused")
        with pytest.raises(AbortableError, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
            await producer.flush()
        with pytest.raises(TransactionStateError, match="abort it and begin another"):
            await producer.commit()
        await producer.abort()
        async with producer.transaction():
            await producer.send("t", b"next")
        assert broker.ends == [(0, False), (1, True)]
        await producer.close()


async def test_a_fenced_batch_ends_the_producer_on_version_1() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster, VERSION_1)
        broker.misbehave(ApiKey.PRODUCE, refuse_batch(ErrorCode.INVALID_PRODUCER_EPOCH))
        await producer.send("t", b"late")
        with pytest.raises(FencedError):
            await producer.commit()
        with pytest.raises(FencedError):
            await producer.abort()
        await producer.close()
        assert broker.seen(ApiKey.END_TXN) == []


def abort_by_timeout(broker: FakeBroker, request: Any) -> TxnOffsetCommitResponse:
    """The broker has aborted the transaction, and raised the epoch, before these offsets came."""
    producer_id, epoch = broker.identities["id"]
    broker.identities["id"] = (producer_id, epoch + 1)
    broker.ends.append((epoch, False))
    return refuse_offsets(broker, request)


def refuse_offsets(broker: FakeBroker, request: Any) -> TxnOffsetCommitResponse:
    answer = TxnOffsetCommitResponsePartition(0, ErrorCode.INVALID_PRODUCER_EPOCH)
    return TxnOffsetCommitResponse(topics=[TxnOffsetCommitResponseTopic("t", [answer])])


async def test_an_abort_that_is_accepted_after_fencing_was_a_timeout_and_the_owner_goes_on() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with SharedTransaction(cluster, "id") as owner:
            await owner.begin()
            broker.misbehave(ApiKey.TXN_OFFSET_COMMIT, abort_by_timeout)
            with pytest.raises(FencedError):
                await owner.commit_offsets(GROUP, {FIRST: CommittedOffset(1)})
            with pytest.raises(TransactionStateError, match="abort it and begin another"):
                await owner.commit()
            await owner.abort()
            await owner.begin()
            assert owner.identity.producer_epoch == 1
            await owner.commit_offsets(GROUP, {FIRST: CommittedOffset(1)})
            await owner.commit()
        assert broker.ends == [(0, False), (1, True)]
        assert len(broker.seen(ApiKey.INIT_PRODUCER_ID)) == 1, "that would fence a successor"


async def test_an_abort_that_is_refused_after_fencing_is_final() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with SharedTransaction(cluster, "id") as owner:
            await owner.begin()
            broker.misbehave(ApiKey.TXN_OFFSET_COMMIT, refuse_offsets)
            broker.misbehave(ApiKey.END_TXN, refuse_end(ErrorCode.PRODUCER_FENCED))
            with pytest.raises(FencedError):
                await owner.commit_offsets(GROUP, {FIRST: CommittedOffset(1)})
            for again in (owner.abort, owner.abort, owner.begin, owner.commit):
                with pytest.raises(FencedError):
                    await again()
            assert owner.state is State.FAILED
        assert len(broker.seen(ApiKey.END_TXN)) == 1
        assert len(broker.seen(ApiKey.INIT_PRODUCER_ID)) == 1


async def test_a_transaction_with_nothing_in_it_is_not_ended() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with TransactionalProducer(cluster, "id") as producer:
            async with producer.transaction():
                pass
            await producer.begin()
            await producer.abort()
        assert broker.seen(ApiKey.END_TXN) == []


async def test_closing_aborts_what_is_open() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster)
        await producer.close()
        assert broker.ends == [(0, False)]


async def test_calls_out_of_place_say_what_to_do() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = TransactionalProducer(cluster, "id")
        with pytest.raises(TransactionStateError, match="open it first"):
            await producer.begin()
        await producer.open()
        with pytest.raises(TransactionStateError, match="call begin first"):
            await producer.send("t", b"v")
        with pytest.raises(TransactionStateError, match="begin first"):
            await producer.commit()
        await producer.begin()
        with pytest.raises(TransactionStateError, match="is open, and this needs ready"):
            await producer.begin()
        with pytest.raises(ConfigError, match="two_phase"):
            await producer.prepare()
        await producer.close()


def test_a_transactional_id_must_have_a_name() -> None:
    with pytest.raises(ConfigError, match="at least one character"):
        SharedTransaction(Cluster("localhost"), "")


# The two versions


async def test_version_2_adds_nothing_beforehand() -> None:
    async with FakeBroker({"t": 2}) as broker, Cluster(broker.bootstrap) as cluster:
        async with TransactionalProducer(cluster, "id") as producer, producer.transaction():
            await producer.send("t", b"v")
            await producer.send_offsets(GROUP, {FIRST: CommittedOffset(1)})
        assert broker.seen(ApiKey.ADD_PARTITIONS_TO_TXN) == []
        assert broker.seen(ApiKey.ADD_OFFSETS_TO_TXN) == []
        assert broker.versions_seen(ApiKey.PRODUCE) == [12]
        assert broker.versions_seen(ApiKey.TXN_OFFSET_COMMIT) == [5]
        assert broker.versions_seen(ApiKey.END_TXN) == [5]
        (request,) = broker.seen(ApiKey.PRODUCE)
        assert request.transactional_id == "id"
        assert read_header(broker.topics["t"][0].batches[0]).is_transactional


async def test_a_broker_that_has_not_finalized_version_2_gets_version_1_in_every_request() -> None:
    async with FakeBroker({"t": 2}) as broker:
        broker.transaction_version = 1
        async with Cluster(broker.bootstrap) as cluster, TransactionalProducer(cluster, "id") as producer:
            assert producer.version == 1
            async with producer.transaction():
                await producer.send("t", b"v")
                await producer.send_offsets(GROUP, {FIRST: CommittedOffset(1)})
                await producer.send_offsets(GROUP, {FIRST: CommittedOffset(2)})
        assert broker.versions_seen(ApiKey.ADD_PARTITIONS_TO_TXN) == [3]
        assert len(broker.seen(ApiKey.ADD_OFFSETS_TO_TXN)) == 1
        assert broker.versions_seen(ApiKey.PRODUCE) == [11]
        assert broker.versions_seen(ApiKey.TXN_OFFSET_COMMIT) == [4, 4]
        assert broker.versions_seen(ApiKey.END_TXN) == [4]


async def test_a_broker_that_cannot_speak_version_2_gets_version_1() -> None:
    async with FakeBroker({"t": 1}) as broker:
        broker.versions[ApiKey.END_TXN] = (0, 4)
        async with Cluster(broker.bootstrap) as cluster, TransactionalProducer(cluster, "id") as producer:
            assert producer.version == 1


async def test_version_1_adds_a_partition_before_its_first_batch_and_many_at_once() -> None:
    async with FakeBroker({"t": 20}) as broker, Cluster(broker.bootstrap) as cluster:
        async with TransactionalProducer(cluster, "id", VERSION_1) as producer, producer.transaction():
            for partition in range(20):
                await producer.send("t", b"v", partition=partition)
        keys = [key for key, _, _ in broker.requests]
        assert keys.index(ApiKey.ADD_PARTITIONS_TO_TXN) < keys.index(ApiKey.PRODUCE)
        added = [
            index
            for request in broker.seen(ApiKey.ADD_PARTITIONS_TO_TXN)
            for topic in request.v3_and_below_topics
            for index in topic.partitions
        ]
        assert sorted(added) == list(range(20))
        assert len(broker.seen(ApiKey.ADD_PARTITIONS_TO_TXN)) <= 2


async def test_version_1_asks_for_the_next_epoch_right_after_the_end() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster, VERSION_1)
        first = producer.identity
        await producer.commit()
        await broker.heard(ApiKey.INIT_PRODUCER_ID, 2)  # with no begin to ask for it
        request = broker.seen(ApiKey.INIT_PRODUCER_ID)[-1]
        assert (request.producer_id, request.producer_epoch) == first
        await producer.begin()
        assert producer.identity == (first.producer_id, first.producer_epoch + 1)
        await producer.close()


async def test_version_1_that_was_fenced_in_between_says_so_at_begin() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster, VERSION_1)
        broker.misbehave(
            ApiKey.INIT_PRODUCER_ID,
            lambda broker, request: InitProducerIdResponse(error_code=ErrorCode.PRODUCER_FENCED),
        )
        await producer.commit()
        with pytest.raises(FencedError):
            await producer.begin()
        assert producer.state is State.FAILED
        await producer.close()


@pytest.mark.parametrize("end", [SharedTransaction.commit, SharedTransaction.abort])
async def test_version_1_gives_an_unused_handle_an_epoch_of_its_own(end: Any) -> None:
    """The end of nothing comes first: whoever was replaced meanwhile is told so, and asks for nothing."""
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with SharedTransaction(cluster, "id", VERSION_1) as owner:
            await owner.begin()
            first = owner.handle()
            broker.misbehave(ApiKey.END_TXN, refuse_end(ErrorCode.INVALID_TXN_STATE))
            await end(owner)
            await owner.begin()
            assert owner.handle().producer_epoch == first.producer_epoch + 1
        assert [request.committed for request in broker.seen(ApiKey.END_TXN)] == [False, False]


@pytest.mark.parametrize("state", ["Ongoing", "Empty"])
async def test_version_1_looks_for_a_successors_transaction_before_it_asks_again(state: str) -> None:
    def answer(code: int, state: str) -> Any:
        seen = TransactionState(error_code=code, transactional_id="id", transaction_state=state)
        return lambda broker, request: DescribeTransactionsResponse(transaction_states=[seen])

    does_not_know_yet = answer(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "")

    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        broker.versions[ApiKey.DESCRIBE_TRANSACTIONS] = (0, 0)
        broker.misbehave(ApiKey.DESCRIBE_TRANSACTIONS, does_not_know_yet, answer(ErrorCode.NONE, state))
        producer = await begun(cluster, VERSION_1)
        broker.misbehave(ApiKey.INIT_PRODUCER_ID, hang_up)
        await producer.commit()
        with pytest.raises(FencedError) if state == "Ongoing" else nullcontext():
            await producer.begin()
        asked_for_the_next = len(broker.seen(ApiKey.INIT_PRODUCER_ID)) - 1
        assert asked_for_the_next == (1 if state == "Ongoing" else 2)
        await producer.close()


async def test_a_partition_that_cannot_join_spoils_the_transaction() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with TransactionalProducer(cluster, "id", VERSION_1) as producer:
            broker.misbehave(
                ApiKey.ADD_PARTITIONS_TO_TXN, refuse_partitions(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
            )
            with pytest.raises(AbortableError, match="ask for an ACL on that topic"):
                async with producer.transaction():
                    await producer.send("t", b"v")
            async with producer.transaction():
                await producer.send("t", b"allowed")
        assert broker.topics["t"][0].values() == [b"allowed"]


def load(broker: FakeBroker, request: Any) -> AddPartitionsToTxnResponse:
    """The coordinator is being loaded; but whose epoch is over is fenced."""
    _, epoch = broker.identities["id"]
    is_over = request.v3_and_below_producer_epoch != epoch
    code = ErrorCode.INVALID_PRODUCER_EPOCH if is_over else ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    return cast("AddPartitionsToTxnResponse", refuse_partitions(code)(broker, request))


@pytest.mark.parametrize("end", [SharedTransaction.commit, SharedTransaction.abort])
async def test_a_partition_that_still_joins_when_its_transaction_ends_leaves_the_next_alone(end: Any) -> None:
    async with (
        FakeBroker({"t": 3}) as broker,
        Cluster(broker.bootstrap) as cluster,
        SharedTransaction(cluster, "id", VERSION_1) as owner,
    ):
        await owner.begin()
        await owner.add_partitions([FIRST])
        broker.misbehave(ApiKey.ADD_PARTITIONS_TO_TXN, *[load] * 1_000)
        asking = asyncio.create_task(owner.add_partitions([TopicPartition("t", 1)]))
        await broker.heard(ApiKey.ADD_PARTITIONS_TO_TXN, 2)
        in_line = asyncio.create_task(owner.add_partitions([TopicPartition("t", 2)]))
        await asyncio.sleep(0)  # it asks, and waits
        sent = len(broker.seen(ApiKey.ADD_PARTITIONS_TO_TXN))
        await end(owner)
        await owner.begin()
        for late in (asking, in_line):
            with pytest.raises(TransactionStateError, match="is over: no partition joins it any more"):
                await late
        assert owner.state is State.OPEN
        assert len(broker.seen(ApiKey.ADD_PARTITIONS_TO_TXN)) == sent
        await owner.commit()


def later(goes_on: asyncio.Event, code: int) -> Any:
    async def answer(broker: FakeBroker, request: Any) -> AddPartitionsToTxnResponse:
        await goes_on.wait()
        return cast("AddPartitionsToTxnResponse", refuse_partitions(code)(broker, request))

    return answer


@pytest.mark.parametrize("code", [ErrorCode.NONE, ErrorCode.TOPIC_AUTHORIZATION_FAILED])
@pytest.mark.parametrize("leaves", [True, False])
async def test_tasks_that_share_a_request_hear_what_came_of_it_though_the_first_to_ask_leaves(
    leaves: bool, code: int
) -> None:
    alone, shared = asyncio.Event(), asyncio.Event()
    async with FakeBroker({"t": 3}) as broker, Cluster(broker.bootstrap) as cluster:
        async with SharedTransaction(cluster, "id", VERSION_1) as owner:
            await owner.begin()
            broker.misbehave(ApiKey.ADD_PARTITIONS_TO_TXN, later(alone, ErrorCode.NONE), later(shared, code))
            before = asyncio.create_task(owner.add_partitions([FIRST]))
            await broker.heard(ApiKey.ADD_PARTITIONS_TO_TXN)
            first, second = [
                asyncio.create_task(owner.add_partitions([TopicPartition("t", index)])) for index in (1, 2)
            ]
            await asyncio.sleep(0)  # they ask, and wait
            alone.set()
            await before
            await broker.heard(ApiKey.ADD_PARTITIONS_TO_TXN, 2)
            if leaves:
                first.cancel()
                await asyncio.wait([first])
            shared.set()
            for waiting in [second] if leaves else [first, second]:
                with pytest.raises(AbortableError, match="ACL on that topic") if code else nullcontext():
                    await waiting
            assert owner.state is (State.SPOILED if code else State.OPEN)
        (topic,) = broker.seen(ApiKey.ADD_PARTITIONS_TO_TXN)[-1].v3_and_below_topics
        assert sorted(topic.partitions) == [1, 2]
        assert len(broker.seen(ApiKey.ADD_PARTITIONS_TO_TXN)) == 2


async def test_what_nothing_has_joined_is_aborted_though_version_1_finds_nothing_to_abort() -> None:
    async with (
        FakeBroker({"t": 1}) as broker,
        Cluster(broker.bootstrap) as cluster,
        SharedTransaction(cluster, "id", VERSION_1) as owner,
    ):
        await owner.begin()
        first = owner.identity
        broker.misbehave(
            ApiKey.ADD_PARTITIONS_TO_TXN, refuse_partitions(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
        )
        with pytest.raises(AbortableError):
            await owner.add_partitions([FIRST])
        broker.misbehave(ApiKey.END_TXN, refuse_end(ErrorCode.INVALID_TXN_STATE))
        await owner.abort()
        await owner.begin()
        assert owner.identity == (first.producer_id, first.producer_epoch + 1)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (VERSION_1, ErrorCode.PRODUCER_FENCED),
        (VERSION_1, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        (TransactionOptions(), ErrorCode.INVALID_TXN_STATE),
    ],
)
async def test_no_other_refusal_of_an_abort_is_taken_for_one_with_nothing_to_abort(
    options: TransactionOptions, code: int
) -> None:
    """On version 2 an abort with nothing in it is accepted; if the state is refused, something is wrong."""
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        producer = await begun(cluster, options)
        broker.misbehave(ApiKey.END_TXN, refuse_end(code))
        with pytest.raises((FatalError, FencedError)):
            await producer.abort()
        assert producer.state is State.FAILED
        await producer.close()


# Two-phase commit


async def test_two_phase_commit_needs_a_broker_that_has_it() -> None:
    async with FakeBroker() as broker:
        broker.versions[ApiKey.INIT_PRODUCER_ID] = (0, 5)
        async with Cluster(broker.bootstrap) as cluster:
            producer = TransactionalProducer(cluster, "id", TransactionOptions(two_phase=True))
            with pytest.raises(UnsupportedRequestError, match=r"transaction\.two\.phase\.commit\.enable"):
                await producer.open()
        assert broker.seen(ApiKey.INIT_PRODUCER_ID) == []


async def test_nobody_else_asks_for_two_phase_commit() -> None:
    async with FakeBroker() as broker, Cluster(broker.bootstrap) as cluster:
        async with TransactionalProducer(cluster, "id"):
            pass
        assert broker.versions_seen(ApiKey.INIT_PRODUCER_ID) == [5]


def test_the_text_of_a_prepared_transaction_is_read_back() -> None:
    identity = ProducerIdentity(2**40, 32_000)
    assert parse_prepared(format_prepared(identity)) == identity


@pytest.mark.parametrize("text", ["", "1", "1:", ":1", "1:2:3", "a:b", "-1:2", "1:-2", " 1:2"])
def test_a_text_that_names_no_prepared_transaction_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="PRODUCER_ID:EPOCH"):
        parse_prepared(text)


# Writers


def records(*values: bytes) -> list[Record]:
    return [Record(None, value, 0, ()) for value in values]


async def test_a_handle_goes_through_pickle_and_writes_batches_with_sequences_from_0() -> None:
    async with FakeBroker({"t": 2}) as broker, Cluster(broker.bootstrap) as cluster:
        async with SharedTransaction(cluster, "id") as owner:
            for _ in range(2):
                await owner.begin()
                handle = pickle.loads(pickle.dumps(owner.handle()))
                async with SharedWriter(handle) as writer:
                    target = writer.partition("t", 1)
                    assert writer.partition("t", 1) is target
                    await target.write(records(b"a", b"b"))
                    await target.write(records(b"c"))
                    await writer.flush()
                    assert (target.records_written, target.next_sequence) == (3, 3)
                await owner.commit()
        headers = [read_header(batch) for batch in broker.topics["t"][1].batches]
        written = [(each.producer_epoch, each.base_sequence, each.record_count) for each in headers]
        assert written == [(0, 0, 2), (0, 2, 1), (1, 0, 2), (1, 2, 1)]
        assert all(each.is_transactional for each in headers)
        assert broker.ends == [(0, True), (1, True)]


async def test_columns_are_split_into_batches_whose_sequences_go_on() -> None:
    values = [b"%050d" % number for number in range(100)]
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        async with SharedTransaction(cluster, "id") as owner:
            await owner.begin()
            async with SharedWriter(owner.handle()) as writer:
                target = writer.partition("t", 0)
                await target.write_columns(BinaryColumn.of(values), timestamps=7, max_batch_bytes=1000)
                await target.write_columns(BinaryColumn.of([b"last"]))
                await writer.flush()
            await owner.commit()
        assert broker.topics["t"][0].values() == [*values, b"last"]
        headers = [read_header(batch) for batch in broker.topics["t"][0].batches]
        assert len(headers) > 5
        expected = 0
        for header in headers:
            assert header.base_sequence == expected
            expected += header.record_count


async def test_writers_that_take_turns_go_on_where_the_other_has_ended() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        owner = SharedTransaction(cluster, "id")
        await owner.open()
        await owner.begin()
        async with SharedWriter(owner.handle()) as first, SharedWriter(owner.handle()) as second:
            sequence = 0
            for turn, writer in enumerate((first, second, second, first, second)):
                partition = writer.partition("t", 0)
                partition.begin_at(sequence)
                for number in range(turn + 1):
                    await partition.write(records(b"%d.%d" % (turn, number)))
                await partition.flush()
                sequence = partition.next_sequence
            await owner.commit()
        headers = [read_header(batch) for batch in broker.topics["t"][0].batches]
        assert [header.base_sequence for header in headers] == list(range(15))
        expected = [b"%d.%d" % (turn, number) for turn in range(5) for number in range(turn + 1)]
        assert broker.topics["t"][0].values() == expected


async def test_a_batch_with_another_sequence_or_identity_is_refused_before_it_is_sent() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        owner = SharedTransaction(cluster, "id")
        await owner.open()
        await owner.begin()
        handle = owner.handle()
        other = TransactionHandle(handle.bootstrap, "id", handle.producer_id, 9, handle.version)
        async with SharedWriter(handle) as writer, SharedWriter(other) as stranger:
            target = writer.partition("t", 0)
            await stranger.partition("t", 0).write(records(b"x"))
            await stranger.flush()
            with pytest.raises(ConfigError, match="encode batches in the order of writing"):
                target._queue(bytearray(broker.topics["t"][0].batches[0]))
            await target.write(records(b"x"))
            await writer.flush()
            with pytest.raises(ConfigError, match=r"and sequence 0, and .* and 1 were due"):
                target._queue(bytearray(broker.topics["t"][0].batches[1]))
        assert len(broker.seen(ApiKey.PRODUCE)) == 2


async def test_a_writer_whose_transaction_is_gone_fails_at_flush_and_ever_after() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        owner = SharedTransaction(cluster, "id")
        await owner.open()
        await owner.begin()
        async with SharedWriter(owner.handle()) as writer:
            broker.misbehave(ApiKey.PRODUCE, refuse_batch(ErrorCode.INVALID_TXN_STATE))
            await writer.partition("t", 0).write(records(b"x"))
            with pytest.raises(AbortableError, match="INVALID_TXN_STATE"):
                await writer.flush()
            with pytest.raises(AbortableError):
                await writer.partition("t", 0).write(records(b"y"))


# Offsets of groups


async def test_unstable_offsets_are_waited_for() -> None:
    def unstable(broker: FakeBroker, request: Any) -> OffsetFetchResponse:
        code = ErrorCode.UNSTABLE_OFFSET_COMMIT
        partition = OffsetFetchResponsePartition(partition_index=0, committed_offset=-1, error_code=code)
        return OffsetFetchResponse(topics=[OffsetFetchResponseTopic("t", [partition])])

    async with FakeBroker({"t": 2}) as broker, Cluster(broker.bootstrap) as cluster:
        broker.offsets["t", 0] = 5
        broker.misbehave(ApiKey.OFFSET_FETCH, unstable)
        found = await fetch_offsets(cluster, "g", [FIRST, TopicPartition("t", 1)])
        assert {where: each.offset for where, each in found.items()} == {FIRST: 5}
        assert [each.require_stable for each in broker.seen(ApiKey.OFFSET_FETCH)] == [True, True]


async def test_a_broker_that_cannot_tell_stable_offsets_is_refused() -> None:
    async with FakeBroker({"t": 1}) as broker:
        broker.versions[ApiKey.OFFSET_FETCH] = (1, 6)
        async with Cluster(broker.bootstrap) as cluster:
            with pytest.raises(UnsupportedRequestError, match="OffsetFetch v7"):
                await fetch_offsets(cluster, "g", [FIRST])
            assert await fetch_offsets(cluster, "g", [FIRST], require_stable=False) == {}


async def test_an_id_that_may_not_be_used_fails_the_open() -> None:
    async with FakeBroker() as broker, Cluster(broker.bootstrap) as cluster:
        code = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        broker.misbehave(
            ApiKey.INIT_PRODUCER_ID, lambda broker, request: InitProducerIdResponse(error_code=code)
        )
        with pytest.raises(FatalError, match="ACL on that transactional id"):
            await TransactionalProducer(cluster, "id").open()
