"""What idempotent producers sent and what the broker acknowledged, held against what is in the log.

Each record says who sent it and as the how manieth to its partition. So the claims can be checked from
content alone: everything acknowledged is there, at the offset that was acknowledged, nothing is there twice,
and what one producer sent to one partition is in the order of sending.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from itertools import pairwise
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from row_checks import about_rows

FINISH_TIMEOUT_S: Final = 60.0
READ_TIMEOUT_S: Final = 30.0
QUEUED_RECORDS: Final = 2000
"""How many records a producer has under way at most."""

Sender = tuple[int, int]
"""A producer and a partition."""


class SteadyProducer:
    """Sends numbered records, without regard to the fate of the broker, until it is told to stop."""

    def __init__(
        self,
        bootstrap: str,
        number: int,
        topics: dict[str, int],
        *,
        seed: int,
        value_bytes: int,
        pause_s: float = 0.001,
        codec: str = "none",
    ) -> None:
        self.number = number
        self.acknowledged: dict[tuple[str, int, int], int] = {}
        """(topic, partition, number) to the offset."""
        self.sent: dict[tuple[str, int], int] = defaultdict(int)
        self.failures: list[KafkaError] = []
        self._keys: dict[tuple[str, int, int], bytes] = {}
        self._topics = topics
        self._dice = random.Random(f"{seed}/{number}")
        self._value_bytes = value_bytes
        self._pause_s = pause_s
        self._stopping = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "client.id": f"steady-{number}",
                "enable.idempotence": True,
                "compression.type": codec,
                "linger.ms": 1,
                "message.timeout.ms": 120_000,
                "retry.backoff.ms": 20,
                "retry.backoff.max.ms": 100,
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 50,
                "queue.buffering.max.messages": QUEUED_RECORDS,
                "log_level": 0,
                "error_cb": self._failed,
            }
        )
        self._thread = threading.Thread(target=self._run, name=f"steady-{number}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            topic = self._dice.choice(list(self._topics))
            partition = self._dice.randrange(self._topics[topic])
            self._send(topic, partition)
            self._producer.poll(self._pause_s)

    def _send(self, topic: str, partition: int) -> None:
        number = self.sent[topic, partition]
        filler = self._dice.randbytes(self._dice.randrange(self._value_bytes))
        value = b"%d/%d/%d/" % (self.number, partition, number) + filler
        key = b"%d/%d" % (self.number, self._dice.randrange(20))
        while not self._stopping.is_set():
            try:
                self._producer.produce(topic, value, key, partition=partition, on_delivery=self._delivered)
                self.sent[topic, partition] = number + 1
                self._keys[topic, partition, number] = key
                return
            except BufferError:
                self._producer.poll(0.01)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failures.append(error)
            return
        value, topic, offset = message.value(), message.topic(), message.offset()
        assert value is not None and topic is not None and offset is not None
        _, partition, number = numbers_in(value)
        self.acknowledged[topic, partition, number] = offset

    def newest_of_key(self, topic: str, partition: int) -> dict[bytes, int]:
        """For each key the offset of the last record that was acknowledged."""
        return {
            self._keys[sent]: offset
            for sent, offset in sorted(self.acknowledged.items())
            if sent[:2] == (topic, partition)
        }

    def _failed(self, error: KafkaError) -> None:
        if error.fatal():
            self.failures.append(error)

    def finish(self) -> None:
        """Send no more, and wait until all that was sent is acknowledged."""
        self._stopping.set()
        self._thread.join()
        left = self._producer.flush(FINISH_TIMEOUT_S)
        assert not self.failures, f"producer {self.number} met {self.failures[:3]}"
        assert not left, f"producer {self.number} still waits for {left} acknowledgements"


def numbers_in(value: bytes) -> tuple[int, int, int]:
    """Producer, partition and number of a record."""
    producer, partition, number, _ = value.split(b"/", 3)
    return int(producer), int(partition), int(number)


def read_all(bootstrap: str, topic: str, partition: int, *, reset: str = "error") -> list[Message]:
    """Everything in a partition from its beginning to its end at the time of asking.

    `reset` is what to do when the log begins later than it just did: "earliest" where there is retention.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "auto.offset.reset": reset,
            "enable.partition.eof": True,
            "check.crcs": True,
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
    )
    try:
        position, high = _watermarks(consumer, topic, partition)
        consumer.assign([TopicPartition(topic, partition, position)])
        messages: list[Message] = []
        deadline = time.monotonic() + READ_TIMEOUT_S
        while position < high:
            assert time.monotonic() < deadline, (
                f"{topic}-{partition} cannot be read beyond {position} of {high}"
            )
            for message in consumer.consume(10_000, timeout=0.2):
                error, offset = message.error(), message.offset()
                assert offset is not None
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    position = max(position, offset)
                    continue
                assert error is None, error
                messages.append(message)
                position = offset + 1
        return messages
    finally:
        consumer.close()


def _watermarks(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """The ends of a log; a broker that has just been restarted may need a moment to be found again."""
    deadline = time.monotonic() + READ_TIMEOUT_S
    while True:
        try:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=5)
            return low, high
        except KafkaException:
            assert time.monotonic() < deadline, "the broker does not answer"


@about_rows()
def check_log(
    messages: list[Message],
    producers: list[SteadyProducer],
    acknowledged: list[dict[tuple[str, int, int], int]],
    topic: str,
    partition: int,
    *,
    complete: bool = True,
) -> None:
    """Hold a partition against what was acknowledged before it was read.

    Where retention or compaction take records away, `complete` is false, and absent records are no failure.
    """
    numbers: dict[int, list[int]] = defaultdict(list)
    offsets: dict[tuple[int, int], int] = {}
    last_offset = -1
    for message in messages:
        value, offset = message.value(), message.offset()
        assert value is not None and offset is not None
        producer, meant_for, number = numbers_in(value)
        assert meant_for == partition
        assert offset > last_offset, f"{topic}-{partition}: offset {offset} follows {last_offset}"
        last_offset = offset
        numbers[producer].append(number)
        offsets[producer, number] = offset
    for producer, seen in numbers.items():
        for before, after in pairwise(seen):
            assert before < after, f"{topic}-{partition}: {after} of producer {producer} follows {before}"
            assert not complete or after == before + 1, f"{topic}-{partition}: {producer} lacks {before + 1}"
    first_offset = messages[0].offset() if messages else None
    for producer, told in zip(producers, acknowledged, strict=True):
        for (name, index, number), offset in told.items():
            if (name, index) == (topic, partition):
                found = offsets.get((producer.number, number))
                what = f"{topic}-{partition}: record {number} of producer {producer.number}"
                assert found is None or found == offset, f"{what} is at {found}, acknowledged at {offset}"
                assert found is not None or not complete, f"{what}, acknowledged at {offset}, is lost"
    assert not complete or first_offset in (None, 0)
