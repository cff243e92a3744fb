"""confluent-kafka (librdkafka) as a stock client."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from interop_cases import FETCH_WAIT_MS, TIMEOUT_S, Record, Stored

LARGE_BYTES = 8 * 1024 * 1024


class Confluent:
    """librdkafka, through its Python binding."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = {"bootstrap.servers": bootstrap, "log_level": 0}
        self._admin = AdminClient(dict(self._bootstrap))

    def create_topic(self, name: str, partitions: int = 1, configs: dict[str, str] | None = None) -> None:
        self._done(self._admin.create_topics([NewTopic(name, partitions, config=configs or {})]))

    def delete_topic(self, name: str) -> None:
        self._done(self._admin.delete_topics([name]))

    def topics(self) -> set[str]:
        return set(self._admin.list_topics(timeout=TIMEOUT_S).topics)

    def produce(self, topic: str, records: list[Record], codec: str = "none") -> list[int]:
        producer = Producer(
            {
                **self._bootstrap,
                "enable.idempotence": True,
                "compression.type": codec,
                "linger.ms": 5,
                "message.max.bytes": LARGE_BYTES,
            }
        )
        acknowledged: list[int] = []
        refused: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is None:
                offset = message.offset()
                assert offset is not None
                acknowledged.append(offset)
            else:
                refused.append(error)

        for record in records:
            producer.produce(
                topic,
                record.value,
                record.key,
                partition=record.partition,
                timestamp=record.timestamp_ms,
                headers=list(record.headers),
                on_delivery=delivered,
            )
            producer.poll(0)
        left = producer.flush(TIMEOUT_S)
        assert not left and not refused, f"{left} records not acknowledged, refused: {refused}"
        return acknowledged

    def consume(self, topic: str, partition: int, start: int, count: int) -> list[Stored]:
        consumer = self._consumer()
        try:
            consumer.assign([TopicPartition(topic, partition, start)])
            messages: list[Message] = []
            while len(messages) < count:
                batch = consumer.consume(count - len(messages), timeout=TIMEOUT_S)
                assert batch, f"only {len(messages)} of {count} records came"
                messages += batch
            return [_stored(message) for message in messages]
        finally:
            consumer.close()

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        consumer = self._consumer()
        try:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=TIMEOUT_S)
            return low, high
        finally:
            consumer.close()

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        consumer = self._consumer()
        try:
            asked = [TopicPartition(topic, partition, timestamp_ms)]
            (found,) = consumer.offsets_for_times(asked, timeout=TIMEOUT_S)
            assert found.error is None
            return found.offset if found.offset >= 0 else None
        finally:
            consumer.close()

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        self._done(self._admin.delete_records([TopicPartition(topic, partition, before_offset)]))

    def configs(self, topic: str) -> dict[str, str]:
        (answer,) = self._done(self._admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]))
        return {name: entry.value for name, entry in answer.items()}

    def alter_config(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        self._done(self._admin.incremental_alter_configs([resource]))

    def close(self) -> None:
        pass

    def _consumer(self) -> Consumer:
        return Consumer(
            {
                **self._bootstrap,
                "group.id": "unused",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": FETCH_WAIT_MS,
            }
        )

    def _done(self, futures: dict[Any, Future[Any]]) -> list[Any]:
        return [future.result(TIMEOUT_S) for future in futures.values()]


def _stored(message: Message) -> Stored:
    assert message.error() is None, message.error()
    kind, timestamp_ms = message.timestamp()
    offset, partition = message.offset(), message.partition()
    assert offset is not None and partition is not None
    record = Record(message.key(), message.value(), timestamp_ms, tuple(message.headers() or ()), partition)
    return Stored(record, offset, kind == TIMESTAMP_LOG_APPEND_TIME)
