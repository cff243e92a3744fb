"""Where consumers begin: a committed offset, the policy where there is none or it is gone, or a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, Final, Protocol, TypeVar

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioTopicPartition
from aiokafka.errors import NoOffsetForPartitionError as AioNoOffset
from aiokafka.errors import OffsetOutOfRangeError as AioOutOfRange
from client_confluent import Confluent
from confluent_kafka import Consumer, KafkaError
from confluent_kafka import TopicPartition as ConfluentPartition
from interop_cases import BASE_MS, FETCH_WAIT_MS, TIMEOUT_S, Record
from kafka import KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError

from semel.embedded import Broker

LIBRARIES: Final = ("kafka-python", "aiokafka")
COUNT: Final = 30
START: Final = 12
"""Where the log begins after some of it was deleted."""
STEP_MS: Final = 10

T = TypeVar("T")


class Reader(Protocol):
    """A consumer of one partition, in a group that nobody else is in."""

    refusals: tuple[type[Exception], ...]
    """What it raises when it may not choose where to begin."""

    def position(self) -> int: ...

    def commit(self, offset: int) -> None: ...

    def read(self) -> int:
        """The offset of the next record."""

    def seek_to_time(self, timestamp_ms: int) -> None: ...

    def close(self) -> None: ...


class KafkaPythonReader:
    refusals = (NoOffsetForPartitionError, OffsetOutOfRangeError)

    def __init__(self, bootstrap: str, topic: str, reset: str) -> None:
        self._consumer: Any = KafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=f"{topic}-group",
            auto_offset_reset=reset,
            enable_auto_commit=False,
            fetch_max_wait_ms=FETCH_WAIT_MS,
        )
        self._partition = TopicPartition(topic, 0)
        self._consumer.assign([self._partition])

    def position(self) -> int:
        return int(self._consumer.position(self._partition))

    def commit(self, offset: int) -> None:
        self._consumer.commit({self._partition: OffsetAndMetadata(offset, "", -1)})

    def read(self) -> int:
        polled = self._consumer.poll(int(TIMEOUT_S * 1000), max_records=1)
        return int(polled[self._partition][0].offset)

    def seek_to_time(self, timestamp_ms: int) -> None:
        found = self._consumer.offsets_for_times({self._partition: timestamp_ms})[self._partition]
        self._consumer.seek(self._partition, found.offset)

    def close(self) -> None:
        self._consumer.close()


class AioKafkaReader:
    refusals = (AioNoOffset, AioOutOfRange)

    def __init__(self, bootstrap: str, topic: str, reset: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._partition = AioTopicPartition(topic, 0)
        self._consumer = self._run(self._start(bootstrap, topic, reset))

    async def _start(self, bootstrap: str, topic: str, reset: str) -> Any:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=f"{topic}-group",
            auto_offset_reset=reset,
            enable_auto_commit=False,
            fetch_max_wait_ms=FETCH_WAIT_MS,
        )
        await consumer.start()
        consumer.assign([self._partition])
        return consumer

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, TIMEOUT_S))

    def position(self) -> int:
        return int(self._run(self._consumer.position(self._partition)))

    def commit(self, offset: int) -> None:
        self._run(self._consumer.commit({self._partition: offset}))

    def read(self) -> int:
        return int(self._run(self._consumer.getone()).offset)

    def seek_to_time(self, timestamp_ms: int) -> None:
        found = self._run(self._consumer.offsets_for_times({self._partition: timestamp_ms}))
        self._consumer.seek(self._partition, found[self._partition].offset)

    def close(self) -> None:
        self._run(self._consumer.stop())
        self._loop.close()


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with Broker() as broker:
        yield broker.bootstrap


@pytest.fixture
def writer(bootstrap: str, topic: str) -> Confluent:
    """Has written records `STEP_MS` apart."""
    writer = Confluent(bootstrap)
    writer.create_topic(topic)
    writer.produce(topic, [Record(b"k", b"v", BASE_MS + STEP_MS * n) for n in range(COUNT)])
    return writer


def open_reader(library: str, bootstrap: str, topic: str, reset: str) -> Reader:
    if library == "kafka-python":
        return KafkaPythonReader(bootstrap, topic, reset)
    return AioKafkaReader(bootstrap, topic, reset)


def write_one_more(writer: Confluent, topic: str) -> None:
    assert writer.produce(topic, [Record(b"k", b"new", BASE_MS + STEP_MS * COUNT)]) == [COUNT]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_new_group_begins_where_its_policy_says(
    library: str, bootstrap: str, topic: str, writer: Confluent
) -> None:
    earliest = open_reader(library, bootstrap, topic, "earliest")
    assert (earliest.position(), earliest.read()) == (0, 0)
    latest = open_reader(library, bootstrap, topic, "latest")
    assert latest.position() == COUNT
    write_one_more(writer, topic)
    assert latest.read() == COUNT
    for reader in (earliest, latest):
        reader.close()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("reset", ("earliest", "latest", "none"))
def test_a_group_goes_on_where_it_was_whatever_its_policy(
    library: str, reset: str, bootstrap: str, topic: str, writer: Confluent
) -> None:
    first = open_reader(library, bootstrap, topic, "earliest")
    first.commit(7)
    first.close()
    again = open_reader(library, bootstrap, topic, reset)
    assert (again.position(), again.read()) == (7, 7)
    again.close()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("reset", ("earliest", "latest"))
def test_an_offset_that_is_gone_is_reset_by_the_policy(
    library: str, reset: str, bootstrap: str, topic: str, writer: Confluent
) -> None:
    reader = open_reader(library, bootstrap, topic, reset)
    reader.commit(3)
    writer.delete_records(topic, 0, START)
    reader.close()
    reader = open_reader(library, bootstrap, topic, reset)
    assert reader.position() == 3
    if reset == "earliest":
        assert reader.read() == START
    else:
        # It goes to the end as soon as it is told that the offset is gone; what comes then is read.
        wait_for_position(reader, COUNT)
        write_one_more(writer, topic)
        assert reader.read() == COUNT
    reader.close()


def wait_for_position(reader: Reader, offset: int) -> None:
    """Until a poll that finds no record has moved the reader there."""
    for _ in range(200):
        poll_briefly(reader)
        if reader.position() == offset:
            return
    raise AssertionError(f"the reader is at {reader.position()}, not at {offset}")


def poll_briefly(reader: Reader) -> None:
    if isinstance(reader, KafkaPythonReader):
        assert reader._consumer.poll(20) == {}
    else:
        assert isinstance(reader, AioKafkaReader)
        assert reader._run(reader._consumer.getmany(timeout_ms=20)) == {}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("is_new", (True, False))
def test_without_a_policy_the_application_is_told(
    library: str, is_new: bool, bootstrap: str, topic: str, writer: Confluent
) -> None:
    if not is_new:
        before = open_reader(library, bootstrap, topic, "earliest")
        before.commit(3)
        before.close()
        writer.delete_records(topic, 0, START)
    reader = open_reader(library, bootstrap, topic, "none")
    with pytest.raises(reader.refusals):
        reader.read()
    reader.close()


@pytest.mark.parametrize(
    ("reset", "committed", "first"),
    [
        ("earliest", None, START),
        ("latest", None, COUNT),
        ("earliest", START - 1, START),
        ("latest", START - 1, COUNT),
        ("earliest", START + 1, START + 1),
        ("latest", START + 1, START + 1),
    ],
)
def test_librdkafka_begins_where_its_policy_says(
    reset: str, committed: int | None, first: int, bootstrap: str, topic: str, writer: Confluent
) -> None:
    writer.delete_records(topic, 0, START)
    consumer = open_librdkafka(bootstrap, topic, reset, committed)
    event = consumer.poll(TIMEOUT_S)
    assert event is not None and event.offset() == first
    if first == COUNT:
        assert event.error().code() == KafkaError._PARTITION_EOF
        write_one_more(writer, topic)
        event = consumer.poll(TIMEOUT_S)
        assert event is not None and event.offset() == COUNT
    assert event.error() is None
    consumer.close()


@pytest.mark.parametrize("committed", (None, START - 1))
def test_librdkafka_is_told_where_it_has_no_policy(
    committed: int | None, bootstrap: str, topic: str, writer: Confluent
) -> None:
    writer.delete_records(topic, 0, START)
    consumer = open_librdkafka(bootstrap, topic, "error", committed)
    event = consumer.poll(TIMEOUT_S)
    assert event is not None and event.error().code() == KafkaError._AUTO_OFFSET_RESET
    consumer.close()


def open_librdkafka(bootstrap: str, topic: str, reset: str, committed: int | None) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"{topic}-group",
            "auto.offset.reset": reset,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": FETCH_WAIT_MS,
        }
    )
    if committed is not None:
        consumer.commit(offsets=[ConfluentPartition(topic, 0, committed)], asynchronous=False)
    consumer.assign([ConfluentPartition(topic, 0)])
    return consumer


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_reader_goes_back_to_a_time(library: str, bootstrap: str, topic: str, writer: Confluent) -> None:
    reader = open_reader(library, bootstrap, topic, "latest")
    assert reader.position() == COUNT
    reader.seek_to_time(BASE_MS + 17 * STEP_MS - 1)
    assert [reader.read(), reader.read()] == [17, 18]
    reader.seek_to_time(BASE_MS)
    assert reader.read() == 0
    reader.close()
