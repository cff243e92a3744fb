"""The owner of a Kafka sink, with brokers that misbehave: what it leaves behind, and what it can do again."""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "client"))

from fake_broker import NODE_ID, Answer, FakeBroker, ThreadedBroker, stay_silent
from memory_sink import MemorySink, failing

from semel.client.cluster import UNKNOWN_TOPIC_PATIENCE_MS
from semel.client.connection import ConnectionOptions
from semel.client.security import PLAIN, Sasl
from semel.sinks import source_group
from semel.sinks.errors import AbortFailed, BeginFailed, CommitFailed, FencedOut, InitFailed, SinkError
from semel.sinks.kafka import KafkaSink
from semel.sinks.settings import OnBadRow, SinkSettings
from semel.sinks.sink import State, TransactionalSink, WriterPlan
from semel.sinks.source_group import PATIENCE_S, SourceOffsets
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.messages.describe_configs import DescribeConfigsResponse, DescribeConfigsResult
from semel.wire.messages.end_txn import EndTxnResponse
from semel.wire.messages.init_producer_id import InitProducerIdResponse
from semel.wire.messages.metadata import MetadataResponse
from semel.wire.messages.offset_commit import OffsetCommitResponse
from semel.wire.messages.offset_fetch import (
    OffsetFetchResponse,
    OffsetFetchResponsePartition,
    OffsetFetchResponseTopic,
)
from semel.wire.messages.sasl_authenticate import SaslAuthenticateResponse
from semel.wire.messages.sasl_handshake import SaslHandshakeResponse
from semel.wire.messages.txn_offset_commit import (
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """On a loop of its own, which outlives those that the tests run."""
    with ThreadedBroker(FakeBroker({"out": 1})) as running:
        yield running


def no_marker(broker: FakeBroker, request: Any) -> OffsetFetchResponse:
    """Somebody else's offset, where the marker should be."""
    partition = OffsetFetchResponsePartition(partition_index=0, committed_offset=5, metadata="mine")
    return OffsetFetchResponse(topics=[OffsetFetchResponseTopic("out", [partition])])


def sockets_beside(*brokers: FakeBroker) -> set[tuple[str, int]]:
    """What this process listens at or is connected from, but for the brokers' own ends."""
    theirs = [broker.port for broker in brokers]
    return {
        each.laddr
        for each in psutil.Process().net_connections("tcp")
        if each.status in (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED) and each.laddr.port not in theirs
    }


def wait_for(broker: FakeBroker, api: int) -> None:
    """Until a request has come to its thread."""
    while not broker.seen(api):
        time.sleep(0.001)


async def open_and_close(sink: KafkaSink) -> None:
    assert await sink.open("s") is None
    await sink.close()


# Opening


def no_permission(broker: FakeBroker, request: Any) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)


@pytest.mark.parametrize(
    ("api", "trick"), [(ApiKey.OFFSET_FETCH, no_marker), (ApiKey.INIT_PRODUCER_ID, no_permission)]
)
def test_an_open_that_fails_leaves_nothing_behind_and_may_be_repeated(
    broker: FakeBroker, api: int, trick: Any
) -> None:
    before = sockets_beside(broker)
    sink = KafkaSink(broker.bootstrap, "out")
    sink.share()
    broker.misbehave(api, trick)
    with pytest.raises(InitFailed):
        asyncio.run(sink.open("s"))
    assert sockets_beside(broker) == before
    assert sink.state is State.CLOSED
    asyncio.run(open_and_close(sink))  # in another loop
    assert sockets_beside(broker) == before


def too_long(broker: FakeBroker, request: Any) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=ErrorCode.INVALID_TRANSACTION_TIMEOUT)


def too_long_and_silent_on_it(broker: FakeBroker, request: Any) -> InitProducerIdResponse:
    """From here on nobody may read configs."""
    broker.misbehave(ApiKey.DESCRIBE_CONFIGS, configs_denied)
    return too_long(broker, request)


def configs_denied(broker: FakeBroker, request: Any) -> DescribeConfigsResponse:
    refused = DescribeConfigsResult(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    return DescribeConfigsResponse(results=[refused])


@pytest.mark.parametrize(
    ("trick", "most"), [(too_long, "at most 900 s"), (too_long_and_silent_on_it, "less")]
)
def test_a_timeout_above_the_brokers_is_named_as_the_sink_has_it(
    broker: FakeBroker, trick: Any, most: str
) -> None:
    broker.configs[str(NODE_ID)] = {"transaction.max.timeout.ms": "900000"}
    broker.misbehave(ApiKey.INIT_PRODUCER_ID, trick)
    sink = KafkaSink(broker.bootstrap, "out", transaction_timeout=1000)
    with pytest.raises(
        InitFailed, match=rf"transaction_timeout is 1000 s, and the broker takes {most} \("
    ) as caught:
        asyncio.run(sink.open("s"))
    assert caught.value.is_permanent


def test_an_open_that_is_cancelled_leaves_nothing_behind_and_may_be_repeated(broker: FakeBroker) -> None:
    before = sockets_beside(broker)
    sink = KafkaSink(broker.bootstrap, "out")
    sink.share()
    broker.misbehave(ApiKey.OFFSET_FETCH, stay_silent)

    async def cancel() -> None:
        opening = asyncio.create_task(sink.open("s"))
        await asyncio.to_thread(wait_for, broker, ApiKey.OFFSET_FETCH)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)

    asyncio.run(cancel())
    assert sockets_beside(broker) == before
    asyncio.run(open_and_close(sink))
    assert sockets_beside(broker) == before


def test_a_topic_that_was_just_made_is_waited_for(broker: FakeBroker) -> None:
    """A broker that does not know it yet is not to blame for wrong settings."""
    sink = KafkaSink(broker.bootstrap, "new")

    async def open_amid() -> None:
        opening = asyncio.create_task(sink.open("s"))
        await asyncio.sleep(2 * UNKNOWN_TOPIC_PATIENCE_MS / 1000)  # for which every call waits by itself
        assert not opening.done()
        broker.topics["new"] = broker.topics["out"]
        assert await opening is None
        await sink.close()

    asyncio.run(open_amid())


async def test_a_coordinator_that_has_not_heard_of_the_topic_yet_is_not_to_blame_for_wrong_settings() -> None:
    """It was found: on a cluster, metadata is not everywhere at once."""
    async with FakeBroker({"out": 1}) as broker:
        broker.misbehave(ApiKey.TXN_OFFSET_COMMIT, *[unknown_topic] * 1_000)
        with pytest.raises(InitFailed) as raised:
            await KafkaSink(broker.bootstrap, "out").open("s")
        assert not raised.value.is_permanent


def unknown_topic(broker: FakeBroker, request: Any) -> TxnOffsetCommitResponse:
    return refused_offsets(request, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


def refused_offsets(request: Any, code: int) -> TxnOffsetCommitResponse:
    (topic,) = request.topics
    answers = [TxnOffsetCommitResponsePartition(each.partition_index, code) for each in topic.partitions]
    return TxnOffsetCommitResponse(topics=[TxnOffsetCommitResponseTopic(topic.name, answers)])


# Fenced, or late


def loading(broker: FakeBroker, request: Any) -> OffsetFetchResponse:
    return OffsetFetchResponse(error_code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)


def loaded(broker: FakeBroker, request: Any) -> OffsetFetchResponse:
    """The marker as it was last signed."""
    (topic,) = broker.seen(ApiKey.TXN_OFFSET_COMMIT)[-1].topics
    (signed,) = topic.partitions
    partition = OffsetFetchResponsePartition(
        partition_index=0, committed_offset=signed.committed_offset, metadata=signed.committed_metadata
    )
    return OffsetFetchResponse(topics=[OffsetFetchResponseTopic(topic.name, [partition])])


@pytest.mark.parametrize(
    ("answer", "writes", "meaning"),
    [(loaded, True, AbortFailed), (loading, True, FencedOut), (loaded, False, FencedOut)],
)
async def test_an_owner_whose_abort_is_refused_comes_back_only_if_it_was_late_and_the_marker_is_its_own(
    answer: Any, writes: bool, meaning: type[SinkError]
) -> None:
    """It took too long, and perhaps another has come. Where nobody can tell, it must not fence that one.

    Without a row nothing was open for too long, however long it took.
    """
    async with (
        FakeBroker({"out": 1}) as broker,
        KafkaSink(broker.bootstrap, "out", transaction_timeout=0.05) as sink,
    ):
        await sink.open("s")
        plan = await sink.begin(0)
        if writes:
            await write_a_row(plan)
        await asyncio.sleep(sink.transaction_timeout)
        broker.misbehave(ApiKey.END_TXN, fence)
        broker.misbehave(ApiKey.OFFSET_FETCH, *[answer] * 1_000)
        with pytest.raises(meaning):
            await sink.abort(0)


async def write_a_row(plan: WriterPlan | None) -> None:
    assert plan is not None
    async with asyncio.timeout(10):
        writer = plan.writer(0)
        await writer.write([{"key": b"k", "value": b"v"}])
        await writer.finish()


async def test_an_epoch_that_takes_too_long_twice_is_not_begun_a_third_time() -> None:
    """Each attempt holds up readers for as long as its transaction may be open."""
    async with (
        FakeBroker({"out": 1}) as broker,
        KafkaSink(broker.bootstrap, "out", transaction_timeout=0.05) as sink,
    ):
        await sink.open("s")
        for writes in (False, False, True, True):  # without a row there is nothing to wait for
            plan = await sink.begin(0)
            if writes:
                await write_a_row(plan)
            await asyncio.sleep(sink.transaction_timeout)
            await sink.abort(0)
        with pytest.raises(BeginFailed, match=r"epoch 0 .* took too long 2 times.*maxOffsetsPerTrigger"):
            await sink.begin(0)


# Rows that name topics


async def test_a_row_for_a_topic_that_cannot_be_is_a_bad_row_though_its_name_is_very_long() -> None:
    settings = SinkSettings(on_bad_row=OnBadRow.DEAD_LETTER)
    for name in ("t" * 250, "é" * 30_000, "..", ""):
        async with (
            FakeBroker({"out": 1, "dead": 1}) as broker,
            KafkaSink(
                broker.bootstrap, "out", topic_column="topic", dead_letter_topic="dead", settings=settings
            ) as sink,
        ):
            sink.share()
            await sink.open("s")
            plan = await sink.begin(0)
            writer = pickle.loads(pickle.dumps(plan)).writer(0)
            await writer.write([{"key": b"k", "value": b"v", "topic": name}])
            receipt = await writer.finish()
            assert (receipt.rows, receipt.dead_letters) == (0, 1)
            await sink.commit(0, [receipt])


async def test_a_topic_that_is_not_there_is_looked_for_once_an_epoch() -> None:
    settings = SinkSettings(on_bad_row=OnBadRow.DEAD_LETTER, max_buffered=1)
    async with (
        FakeBroker({"out": 1, "dead": 1}) as broker,
        KafkaSink(
            broker.bootstrap, "out", topic_column="topic", dead_letter_topic="dead", settings=settings
        ) as sink,
    ):
        await sink.open("s")
        plan = await sink.begin(0)
        assert plan is not None
        receipts = []
        asked = []
        for task in range(2):
            writer = plan.writer(task, tasks=2)
            for _ in range(2):
                await writer.write([{"key": b"k", "value": b"v", "topic": "nowhere"}])
                asked.append(times_asked(broker, "nowhere"))
            receipts.append(await writer.finish())
        assert len(set(asked)) == 1
        await sink.commit(0, receipts)


def times_asked(broker: FakeBroker, topic: str) -> int:
    return sum(
        each.name == topic for request in broker.seen(ApiKey.METADATA) for each in request.topics or ()
    )


# The source


class SourceBroker(FakeBroker):
    """Another cluster, that takes offsets of groups."""

    def __init__(self, topics: dict[str, int] | None = None) -> None:
        super().__init__(topics or {"in": 1})
        self.versions[ApiKey.OFFSET_COMMIT] = (2, 8)
        self.committed: list[int] = []

    def handle(self, request: Any) -> Answer:
        if request.API_KEY == ApiKey.OFFSET_COMMIT:
            self.committed.append(request.topics[0].partitions[0].committed_offset)
            return OffsetCommitResponse()
        answer = super().handle(request)
        if isinstance(answer, MetadataResponse):
            answer.cluster_id = "source"
        return answer


class SecretBroker(FakeBroker):
    """Believes everybody who says a password."""

    def __init__(self) -> None:
        super().__init__({"out": 1})
        self.versions |= {ApiKey.SASL_HANDSHAKE: (1, 1), ApiKey.SASL_AUTHENTICATE: (0, 2)}

    def handle(self, request: Any) -> Answer:
        if request.API_KEY == ApiKey.SASL_HANDSHAKE:
            return SaslHandshakeResponse(mechanisms=["PLAIN"])
        if request.API_KEY == ApiKey.SASL_AUTHENTICATE:
            return SaslAuthenticateResponse()
        return super().handle(request)


@pytest.fixture
def source() -> Iterator[SourceBroker]:
    broker = SourceBroker()
    with ThreadedBroker(broker):
        yield broker


async def commit_epoch(sink: TransactionalSink, epoch: int, source: SourceBroker) -> float:
    """An epoch without rows; how long its commit took, in seconds."""
    await sink.begin(epoch)
    started = time.monotonic()
    await sink.commit(epoch, [], SourceOffsets(source.bootstrap, {"in": {0: epoch + 10}}))
    return time.monotonic() - started


async def test_a_sink_that_is_no_topic_tells_its_source_how_far_it_is_once_that_is_committed(
    source: SourceBroker,
) -> None:
    async with MemorySink(failing("commit", CommitFailed("no"))) as sink:
        await sink.open("s")
        with pytest.raises(CommitFailed):
            await commit_epoch(sink, 0, source)
        await sink.abort(0)
        assert source.committed == []
        for epoch in range(2):
            await commit_epoch(sink, epoch, source)
    assert source.committed == [10, 11]
    assert len(source.seen(ApiKey.API_VERSIONS)) == 1


async def test_a_source_on_another_cluster_never_sees_the_secrets_of_the_sink(source: SourceBroker) -> None:
    secret = ConnectionOptions(sasl=Sasl("alice", "hers", PLAIN))
    async with SecretBroker() as broker, KafkaSink(broker.bootstrap, "out", connection=secret) as sink:
        await sink.open("s")
        await commit_epoch(sink, 0, source)
        assert broker.seen(ApiKey.SASL_AUTHENTICATE)
    assert source.seen(ApiKey.SASL_HANDSHAKE) == source.seen(ApiKey.SASL_AUTHENTICATE) == []
    assert source.committed == [10]


@pytest.mark.parametrize("code", [ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION])
async def test_offsets_that_the_sink_may_not_commit_cost_an_attempt_and_are_committed_by_themselves(
    code: ErrorCode,
) -> None:
    """Source and sink are one cluster, and not of one mind."""

    def refuse(broker: FakeBroker, request: Any) -> Answer:
        return refused_offsets(request, code) if request.topics[0].name == "in" else broker.handle(request)

    async with SourceBroker({"in": 1, "out": 1}) as broker, KafkaSink(broker.bootstrap, "out") as sink:
        await sink.open("s")
        broker.misbehave(ApiKey.TXN_OFFSET_COMMIT, *[refuse] * 1_000)
        with pytest.raises(CommitFailed):
            await commit_epoch(sink, 0, broker)
        await sink.abort(0)
        for epoch in range(3):
            await commit_epoch(sink, epoch, broker)
        assert sink.tracker.last_committed == 2
    assert broker.committed == [10, 11, 12]


async def test_offsets_of_a_source_that_only_java_can_reach_go_where_the_sink_goes(
    source: SourceBroker,
) -> None:
    async with FakeBroker({"in": 1, "out": 1}) as broker, KafkaSink(broker.bootstrap, "out") as sink:
        await sink.open("s")
        for epoch, where in enumerate((broker, source)):
            await sink.begin(epoch)
            await sink.commit(epoch, [], SourceOffsets(where.bootstrap, {"in": {0: epoch + 10}}, None))
        assert sink.tracker.last_committed == 1
        assert broker.offsets["in", 0] == 10
    assert source.requests == []


async def test_which_cluster_the_source_is_on_is_asked_once_and_over_one_connection(
    source: SourceBroker,
) -> None:
    async with FakeBroker({"out": 1}) as broker, KafkaSink(broker.bootstrap, "out") as sink:
        await sink.open("s")
        for epoch in range(5):
            await commit_epoch(sink, epoch, source)
    assert source.committed == [10, 11, 12, 13, 14]
    assert len(source.seen(ApiKey.METADATA)) == 1
    assert len(source.seen(ApiKey.API_VERSIONS)) == 1


async def test_a_source_that_is_far_away_is_reached_while_commits_go_on(source: SourceBroker) -> None:
    """It takes longer than a commit waits for it."""

    def be_slow(broker: FakeBroker, request: Any) -> Answer:
        time.sleep(1.5 * PATIENCE_S)
        return broker.handle(request)

    source.misbehave(ApiKey.METADATA, be_slow)
    async with FakeBroker({"out": 1}) as broker, KafkaSink(broker.bootstrap, "out") as sink:
        await sink.open("s")
        took_s = [await commit_epoch(sink, epoch, source) for epoch in range(10)]
        assert sum(took_s) < 2 * PATIENCE_S
        assert sink._source is not None
        assert sink._source._working is not None
        await sink._source._working
        await commit_epoch(sink, 10, source)
    assert source.committed == [20]


async def test_a_slow_source_gets_the_newest_offsets_when_it_is_ready_also_at_the_end(
    source: SourceBroker,
) -> None:
    def be_slow(broker: FakeBroker, request: Any) -> Answer:
        time.sleep(1.5 * PATIENCE_S)
        return broker.handle(request)

    async with FakeBroker({"out": 1}) as broker, KafkaSink(broker.bootstrap, "out") as sink:
        await sink.open("s")
        await commit_epoch(sink, 0, source)
        source.misbehave(ApiKey.OFFSET_COMMIT, be_slow)
        for epoch in range(1, 5):
            await commit_epoch(sink, epoch, source)
    assert source.committed == [10, 11, 14]


@pytest.mark.parametrize("api", [ApiKey.METADATA, ApiKey.OFFSET_COMMIT])
async def test_a_silent_source_costs_a_moment_and_is_then_left_alone(
    source: SourceBroker, api: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_group, "LIMIT_S", 1.5 * PATIENCE_S)
    settings = SinkSettings(commit_timeout=PATIENCE_S / 2)  # which is not for the source
    source.misbehave(api, stay_silent)
    async with (
        FakeBroker({"out": 1}) as broker,
        KafkaSink(broker.bootstrap, "out", settings=settings) as sink,
    ):
        await sink.open("s")
        took_s = [await commit_epoch(sink, epoch, source) for epoch in range(10)]
        assert sink.tracker.last_committed == 9
        assert sum(took_s) < 2 * PATIENCE_S
        assert len(source.seen(api)) == 1
        assert source.committed == []
        assert sink._source is not None
        assert sink._source._working is not None
        await sink._source._working
        assert (await commit_epoch(sink, 10, source), source.committed) < (PATIENCE_S, [0])
        sink._source._rests_until = 0.0
        await commit_epoch(sink, 11, source)
        assert source.committed == [21]


def fence(broker: FakeBroker, request: Any) -> EndTxnResponse:
    return EndTxnResponse(error_code=ErrorCode.PRODUCER_FENCED)


@pytest.mark.parametrize("fate", ["committed", "fenced", "silent"])
def test_no_connection_to_the_source_outlives_the_sink(
    broker: FakeBroker, source: SourceBroker, fate: str
) -> None:
    before = sockets_beside(broker, source)

    async def run() -> None:
        async with KafkaSink(broker.bootstrap, "out") as sink:
            await sink.open("s")
            await commit_epoch(sink, 0, source)
            if fate == "fenced":
                broker.misbehave(ApiKey.END_TXN, fence)
            if fate == "silent":
                source.misbehave(ApiKey.OFFSET_COMMIT, stay_silent)
            with pytest.raises(FencedOut) if fate == "fenced" else nullcontext():
                await commit_epoch(sink, 1, source)

    asyncio.run(run())
    assert sockets_beside(broker, source) == before
