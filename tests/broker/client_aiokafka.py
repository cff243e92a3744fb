"""aiokafka as a stock client, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from interop_cases import FETCH_WAIT_MS, TIMEOUT_S, Record, Stored

LARGE_BYTES = 8 * 1024 * 1024
LOG_APPEND_TIME = 1

T = TypeVar("T")


class AioKafka:
    """The asyncio client."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._admin = self._run(self._start_admin())

    def create_topic(self, name: str, partitions: int = 1, configs: dict[str, str] | None = None) -> None:
        topic = NewTopic(name, partitions, 1, topic_configs=configs or {})
        answer = self._run(self._admin.create_topics([topic]))
        assert [error[1] for error in answer.topic_errors] == [0], answer

    def delete_topic(self, name: str) -> None:
        answer = self._run(self._admin.delete_topics([name]))
        assert [error[1] for error in answer.topic_error_codes] == [0], answer

    def topics(self) -> set[str]:
        return set(self._run(self._admin.list_topics()))

    def produce(self, topic: str, records: list[Record], codec: str = "none") -> list[int]:
        return self._run(self._produce(topic, records, codec))

    def consume(self, topic: str, partition: int, start: int, count: int) -> list[Stored]:
        return self._run(self._consume(topic, partition, start, count))

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        return self._run(self._watermarks(TopicPartition(topic, partition)))

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        return self._run(self._offset_for_time(TopicPartition(topic, partition), timestamp_ms))

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        wanted = {TopicPartition(topic, partition): RecordsToDelete(before_offset)}
        assert self._run(self._admin.delete_records(wanted)) == {
            TopicPartition(topic, partition): before_offset
        }

    def configs(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        (answer,) = self._run(self._admin.describe_configs([resource]))
        (found,) = answer.resources
        assert found[0] == 0, found
        return {entry[0]: entry[1] for entry in found[4]}

    def alter_config(self, topic: str, name: str, value: str) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {name: value})
        (answer,) = self._run(self._admin.alter_configs([resource]))
        assert [altered[0] for altered in answer.resources] == [0], answer

    def close(self) -> None:
        self._run(self._admin.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, TIMEOUT_S), self._loop).result()

    async def _start_admin(self) -> AIOKafkaAdminClient:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
        await admin.start()
        return admin

    async def _produce(self, topic: str, records: list[Record], codec: str) -> list[int]:
        producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            enable_idempotence=True,
            compression_type=None if codec == "none" else codec,
            linger_ms=5,
            max_request_size=LARGE_BYTES,
        )
        await producer.start()
        try:
            sent = [
                await producer.send(
                    topic,
                    record.value,
                    record.key,
                    record.partition,
                    record.timestamp_ms,
                    list(record.headers),
                )
                for record in records
            ]
            return [(await future).offset for future in sent]
        finally:
            await producer.stop()

    async def _consumer(self, partition: TopicPartition) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap, enable_auto_commit=False, fetch_max_wait_ms=FETCH_WAIT_MS
        )
        await consumer.start()
        consumer.assign([partition])
        return consumer

    async def _consume(self, topic: str, partition: int, start: int, count: int) -> list[Stored]:
        assigned = TopicPartition(topic, partition)
        consumer = await self._consumer(assigned)
        try:
            consumer.seek(assigned, start)
            return [_stored(await consumer.getone()) for _ in range(count)]
        finally:
            await consumer.stop()

    async def _watermarks(self, partition: TopicPartition) -> tuple[int, int]:
        consumer = await self._consumer(partition)
        try:
            first = await consumer.beginning_offsets([partition])
            last = await consumer.end_offsets([partition])
            return first[partition], last[partition]
        finally:
            await consumer.stop()

    async def _offset_for_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        consumer = await self._consumer(partition)
        try:
            found = (await consumer.offsets_for_times({partition: timestamp_ms}))[partition]
            return None if found is None else int(found.offset)
        finally:
            await consumer.stop()


def _stored(message: Any) -> Stored:
    record = Record(message.key, message.value, message.timestamp, tuple(message.headers), message.partition)
    return Stored(record, message.offset, message.timestamp_type == LOG_APPEND_TIME)
