"""kafka-python 3 as a stock client."""

from __future__ import annotations

from typing import Any

from interop_cases import FETCH_WAIT_MS, TIMEOUT_S, Record, Stored
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType

LARGE_BYTES = 8 * 1024 * 1024
LOG_APPEND_TIME = 1


class KafkaPython:
    """The pure Python client."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._admin = KafkaAdminClient(bootstrap_servers=bootstrap)

    def create_topic(self, name: str, partitions: int = 1, configs: dict[str, str] | None = None) -> None:
        wanted = {"num_partitions": partitions, "replication_factor": 1, "configs": configs or {}}
        self._admin.create_topics({name: wanted})

    def delete_topic(self, name: str) -> None:
        self._admin.delete_topics([name])

    def topics(self) -> set[str]:
        return set(self._admin.list_topics())

    def produce(self, topic: str, records: list[Record], codec: str = "none") -> list[int]:
        producer = KafkaProducer(
            bootstrap_servers=self._bootstrap,
            enable_idempotence=True,
            compression_type=None if codec == "none" else codec,
            linger_ms=5,
            max_request_size=LARGE_BYTES,
        )
        try:
            sent = [
                producer.send(
                    topic,
                    record.value,
                    record.key,
                    list(record.headers),
                    record.partition,
                    record.timestamp_ms,
                )
                for record in records
            ]
            return [future.get(TIMEOUT_S).offset for future in sent]
        finally:
            producer.close()

    def consume(self, topic: str, partition: int, start: int, count: int) -> list[Stored]:
        consumer = self._consumer(topic, partition)
        try:
            consumer.seek(TopicPartition(topic, partition), start)
            messages: list[Any] = []
            while len(messages) < count:
                polled = consumer.poll(int(TIMEOUT_S * 1000), max_records=count - len(messages))
                assert polled, f"only {len(messages)} of {count} records came"
                for batch in polled.values():
                    messages += batch
            return [_stored(message) for message in messages]
        finally:
            consumer.close()

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        consumer = self._consumer(topic, partition)
        try:
            asked = TopicPartition(topic, partition)
            return consumer.beginning_offsets([asked])[asked], consumer.end_offsets([asked])[asked]
        finally:
            consumer.close()

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        consumer = self._consumer(topic, partition)
        try:
            asked = TopicPartition(topic, partition)
            found = consumer.offsets_for_times({asked: timestamp_ms})[asked]
            return None if found is None else found.offset
        finally:
            consumer.close()

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        self._admin.delete_records({TopicPartition(topic, partition): before_offset})

    def configs(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        described = self._admin.describe_configs([resource], config_filter="all")["topic"][topic]
        return {name: entry["value"] for name, entry in described.items()}

    def alter_config(self, topic: str, name: str, value: str) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {name: value})
        assert self._admin.alter_configs([resource]) == {"topic": {topic: "OK"}}

    def close(self) -> None:
        self._admin.close()

    def _consumer(self, topic: str, partition: int) -> Any:
        consumer = KafkaConsumer(
            bootstrap_servers=self._bootstrap, enable_auto_commit=False, fetch_max_wait_ms=FETCH_WAIT_MS
        )
        consumer.assign([TopicPartition(topic, partition)])
        return consumer


def _stored(message: Any) -> Stored:
    record = Record(message.key, message.value, message.timestamp, tuple(message.headers), message.partition)
    return Stored(record, message.offset, message.timestamp_type == LOG_APPEND_TIME)
