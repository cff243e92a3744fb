"""Fetches that wait, fetches that go on in a session, and how much one of them brings."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

import pytest
from broker_process import BrokerProcess
from raw_client import FETCH_VERSION, RawClient, create_topic, encoded, fetch_request, produce

from semel.wire.batch import iter_batches
from semel.wire.errors import ErrorCode
from semel.wire.frames import decode_response
from semel.wire.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from semel.wire.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse
from semel.wire.messages.fetch import (
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
)
from semel.wire.records import Record, build_batch

LONG_MS = 60_000
"""A wait that no test waits for."""
A_MOMENT_S = 0.3
"""How long an answer that must not come is listened for."""
NO_SESSION, NEW_SESSION, ANSWERED = 0, 0, 1


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    made = BrokerProcess(tmp_path_factory.mktemp("fetch") / "broker").start()
    yield made
    made.kill()


@pytest.fixture
def reader(process: BrokerProcess) -> Iterator[RawClient]:
    with RawClient(process.port) as made:
        yield made


@pytest.fixture
def writer(process: BrokerProcess, topic: str) -> Iterator[RawClient]:
    with RawClient(process.port) as made:
        create_topic(made, topic)
        yield made


def batch(value: bytes) -> bytes:
    return bytes(build_batch([Record(b"k", value, int(time.time() * 1000))]))


def waiting_fetch(topic: str, min_bytes: int, max_wait_ms: int = LONG_MS) -> bytes:
    request = fetch_request(topic, 0, max_wait_ms)
    request.min_bytes = min_bytes
    return encoded(request, FETCH_VERSION)


def is_waiting(reader: RawClient) -> bool:
    return not select.select([reader.socket], [], [], A_MOMENT_S)[0]


def answer(reader: RawClient) -> FetchResponse:
    frame = memoryview(reader.read_frame())
    return decode_response(frame, FetchRequest.API_KEY, FETCH_VERSION, FetchResponse)[1]


def offsets_in(told: FetchResponse) -> list[int]:
    (part,) = told.responses[0].partitions
    assert part.error_code == 0 and part.records is not None
    return [header.base_offset for header, _ in iter_batches(memoryview(part.records))]


# Waiting.


def test_a_fetch_at_the_end_waits_for_what_comes(reader: RawClient, writer: RawClient, topic: str) -> None:
    reader.send(waiting_fetch(topic, min_bytes=1))
    assert is_waiting(reader)
    assert produce(writer, topic, batch(b"first")) == (0, 0)
    assert offsets_in(answer(reader)) == [0]


def test_a_fetch_waits_until_there_is_as_much_as_it_wants(
    reader: RawClient, writer: RawClient, topic: str
) -> None:
    small, large = batch(b"small"), batch(bytes(5000))
    reader.send(waiting_fetch(topic, min_bytes=len(small) + len(large)))
    assert produce(writer, topic, small) == (0, 0)
    assert is_waiting(reader)
    assert produce(writer, topic, large) == (0, 1)
    assert offsets_in(answer(reader)) == [0, 1]


def test_a_fetch_waits_no_longer_than_it_says(reader: RawClient, writer: RawClient, topic: str) -> None:
    assert produce(writer, topic, batch(b"too little")) == (0, 0)
    reader.send(waiting_fetch(topic, min_bytes=1 << 20, max_wait_ms=50))
    assert offsets_in(answer(reader)) == [0]


def test_requests_behind_a_fetch_that_waits_are_answered_after_it(
    reader: RawClient, writer: RawClient, topic: str
) -> None:
    reader.send(waiting_fetch(topic, min_bytes=1))
    reader.send(encoded(fetch_request(topic, 0), FETCH_VERSION, correlation_id=8))
    assert is_waiting(reader)
    assert produce(writer, topic, batch(b"first")) == (0, 0)
    frames = [memoryview(reader.read_frame()) for _ in range(2)]
    ids = [decode_response(each, FetchRequest.API_KEY, FETCH_VERSION, FetchResponse)[0] for each in frames]
    assert ids == [7, 8]


def test_a_fetch_that_waits_learns_that_its_topic_is_gone(
    reader: RawClient, writer: RawClient, topic: str
) -> None:
    reader.send(waiting_fetch(topic, min_bytes=1))
    assert is_waiting(reader)
    deleted = writer.ask(DeleteTopicsRequest(topic_names=[topic], timeout_ms=1000), 4, DeleteTopicsResponse)
    assert deleted.responses[0].error_code == 0
    (part,) = answer(reader).responses[0].partitions
    assert part.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


# How much.


def test_a_batch_larger_than_what_is_asked_for_is_given_whole_if_it_is_the_first(
    reader: RawClient, writer: RawClient, topic: str
) -> None:
    """KIP-74: a reader must get past it."""
    for n in range(2):
        assert produce(writer, topic, batch(bytes(10_000))) == (0, n)
    told = reader.ask(fetch_request(topic, 0, max_bytes=100), FETCH_VERSION, FetchResponse)
    assert offsets_in(told) == [0]


def test_what_is_left_of_max_bytes_goes_to_the_partitions_in_turn(
    reader: RawClient, writer: RawClient, topic: str
) -> None:
    other = f"{topic}-other"
    create_topic(writer, other)
    for name in (topic, other):
        for n in range(3):
            assert produce(writer, name, batch(bytes(10_000))) == (0, n)
    request = FetchRequest(
        max_wait_ms=0, min_bytes=1, max_bytes=25_000, topics=[topic_of(name) for name in (topic, other)]
    )
    told = reader.ask(request, FETCH_VERSION, FetchResponse)
    sizes = [len(part.records or b"") for each in told.responses for part in each.partitions]
    assert sum(sizes) <= 25_000
    assert sizes[0] > 20_000


# Sessions (KIP-227).


def topic_of(name: str, partitions: int = 1, offset: int = 0) -> FetchTopic:
    parts = [
        FetchPartition(partition=n, fetch_offset=offset, partition_max_bytes=1 << 20)
        for n in range(partitions)
    ]
    return FetchTopic(topic=name, partitions=parts)


def ask_in_session(
    reader: RawClient, session_id: int, epoch: int, *topics: FetchTopic, forgotten: str = ""
) -> FetchResponse:
    request = FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=1 << 20,
        session_id=session_id,
        session_epoch=epoch,
        topics=list(topics),
        forgotten_topics_data=[ForgottenTopic(topic=forgotten, partitions=[0])] if forgotten else [],
    )
    return reader.ask(request, FETCH_VERSION, FetchResponse)


def told_of(told: FetchResponse) -> list[tuple[str, int]]:
    def partitions(each: FetchableTopicResponse) -> list[tuple[str, int]]:
        return [(each.topic, part.partition_index) for part in each.partitions]

    return [where for each in told.responses for where in partitions(each)]


def test_a_session_tells_of_what_is_new_and_of_nothing_else(
    reader: RawClient, writer: RawClient, topic: str
) -> None:
    many = CreatableTopic(name=f"{topic}-many", num_partitions=20, replication_factor=1)
    writer.ask(CreateTopicsRequest(topics=[many], timeout_ms=1000), 5, CreateTopicsResponse)
    opened = ask_in_session(reader, NO_SESSION, NEW_SESSION, topic_of(topic), topic_of(many.name, 20))
    assert opened.session_id != NO_SESSION
    assert len(told_of(opened)) == 21
    assert told_of(ask_in_session(reader, opened.session_id, 1)) == []
    assert produce(writer, topic, batch(b"news")) == (0, 0)
    assert told_of(ask_in_session(reader, opened.session_id, 2)) == [(topic, 0)]
    moved = ask_in_session(reader, opened.session_id, 3, topic_of(topic, offset=1))
    assert told_of(moved) == []
    assert produce(writer, topic, batch(b"not for who forgot it")) == (0, 1)
    assert told_of(ask_in_session(reader, opened.session_id, 4, forgotten=topic)) == []


def test_a_session_that_is_not_known_or_out_of_step_is_refused(
    reader: RawClient, writer: RawClient, topic: str
) -> None:
    opened = ask_in_session(reader, NO_SESSION, NEW_SESSION, topic_of(topic))
    strange = ask_in_session(reader, opened.session_id + 1, ANSWERED)
    assert strange.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    ahead = ask_in_session(reader, opened.session_id, ANSWERED + 4)
    assert ahead.error_code == ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert ask_in_session(reader, opened.session_id, ANSWERED).error_code == 0, "it goes on where it was"
