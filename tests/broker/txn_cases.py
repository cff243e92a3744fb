"""Transactional producers and readers of every stock client, in one shape: each claim is written once.

Values are short texts. `read` reads a partition from its start to the end that the client is told, which
depends on its isolation level.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Coroutine
from typing import Any, Final, Protocol, TypeVar

import aiokafka
import kafka
from aiokafka.structs import OffsetAndMetadata as AioOffset
from aiokafka.structs import TopicPartition as AioPartition
from client_java import CLASSES, JARS, Java
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka import Producer as ConfluentKafkaProducer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.structs import OffsetAndMetadata as PythonOffset

TIMEOUT_S: Final = 30.0
LONG_MS: Final = 60_000
"""A transaction timeout that no test waits for."""
FETCH_WAIT_MS: Final = 10
COMMITTED: Final = "read_committed"
UNCOMMITTED: Final = "read_uncommitted"

T = TypeVar("T")


class Transactional(Protocol):
    """A producer with a transactional id. Whatever fails raises the library's own error."""

    def begin(self) -> None: ...

    def send(self, topic: str, partition: int, prefix: str, count: int = 1) -> None:
        """Send `prefix0`, `prefix1` ... and wait until they are acknowledged."""

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def transform(self, source: str, target: str, group: str, count: int) -> None:
        """Consume, transform, produce: each poll is one transaction, until so many records are through."""

    def close(self) -> None: ...


class Library(Protocol):
    """A client library, connected to one broker."""

    def producer(self, transactional_id: str, timeout_ms: int = LONG_MS) -> Transactional:
        """A producer that has initialised its transactions."""

    def read(self, topic: str, partition: int, isolation: str) -> list[str]: ...

    def close(self) -> None: ...


def create_topic(bootstrap: str, name: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.create_topics([NewTopic(name, partitions)]).values():
        future.result(TIMEOUT_S)


# confluent-kafka


class Confluent:
    def __init__(self, bootstrap: str) -> None:
        self.common: dict[str, Any] = {"bootstrap.servers": bootstrap, "log_level": 0}

    def producer(self, transactional_id: str, timeout_ms: int = LONG_MS) -> ConfluentProducer:
        return ConfluentProducer(self, transactional_id, timeout_ms)

    def consumer(self, isolation: str, group: str) -> Consumer:
        return Consumer(
            {
                **self.common,
                "group.id": group,
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": FETCH_WAIT_MS,
            }
        )

    def read(self, topic: str, partition: int, isolation: str) -> list[str]:
        consumer = Consumer(
            {
                **self.common,
                "group.id": "unused",
                "isolation.level": isolation,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": FETCH_WAIT_MS,
            }
        )
        try:
            consumer.assign([TopicPartition(topic, partition, 0)])
            values: list[str] = []
            while (message := consumer.poll(TIMEOUT_S)) is not None:
                if message.error() is not None:
                    return values
                value = message.value()
                assert value is not None
                values.append(value.decode())
            raise AssertionError(f"the end of {topic}-{partition} was not reached")
        finally:
            consumer.close()

    def close(self) -> None:
        pass


class ConfluentProducer:
    def __init__(self, library: Confluent, transactional_id: str, timeout_ms: int) -> None:
        self._library = library
        self._producer = ConfluentKafkaProducer(
            {
                **library.common,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": timeout_ms,
                "linger.ms": 1,
            }
        )
        self._producer.init_transactions(TIMEOUT_S)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, partition: int, prefix: str, count: int = 1) -> None:
        failures: list[Any] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                failures.append(error)

        for n in range(count):
            self._producer.produce(topic, f"{prefix}{n}", partition=partition, on_delivery=delivered)
        assert self._producer.flush(TIMEOUT_S) == 0
        if failures:
            raise KafkaException(failures[0])

    def send_offsets(self, topic: str, offset: int, membership: Any) -> None:
        """Commit the offset of partition 0 for a consumer with this membership (KIP-447)."""
        self._producer.send_offsets_to_transaction([TopicPartition(topic, 0, offset)], membership, TIMEOUT_S)

    def commit(self) -> None:
        self._producer.commit_transaction(TIMEOUT_S)

    def abort(self) -> None:
        self._producer.abort_transaction(TIMEOUT_S)

    def transform(self, source: str, target: str, group: str, count: int) -> None:
        consumer = self._library.consumer(COMMITTED, group)
        try:
            consumer.subscribe([source])
            done = 0
            while done < count:
                messages = consumer.consume(50, 0.2)
                if not messages:
                    continue
                self.begin()
                for message in messages:
                    value = message.value()
                    assert message.error() is None and value is not None
                    self._producer.produce(target, value.decode() + "'", partition=message.partition() or 0)
                offsets = consumer.position(consumer.assignment())
                self._producer.send_offsets_to_transaction(
                    offsets, consumer.consumer_group_metadata(), TIMEOUT_S
                )
                self.commit()
                done += len(messages)
        finally:
            consumer.close()

    def close(self) -> None:
        self._producer.purge()


# kafka-python


class KafkaPython:
    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    def producer(self, transactional_id: str, timeout_ms: int = LONG_MS) -> KafkaPythonProducer:
        return KafkaPythonProducer(self, transactional_id, timeout_ms)

    def consumer(self, isolation: str, group: str | None = None) -> Any:
        return kafka.KafkaConsumer(
            bootstrap_servers=self.bootstrap,
            group_id=group,
            isolation_level=isolation,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=FETCH_WAIT_MS,
        )

    def read(self, topic: str, partition: int, isolation: str) -> list[str]:
        consumer = self.consumer(isolation)
        where = kafka.TopicPartition(topic, partition)
        try:
            consumer.assign([where])
            consumer.seek_to_beginning(where)
            end = consumer.end_offsets([where])[where]
            values: list[str] = []
            give_up = time.monotonic() + TIMEOUT_S
            while consumer.position(where) < end:
                assert time.monotonic() < give_up, f"at {consumer.position(where)} of {end}"
                for records in consumer.poll(200).values():
                    values += [record.value.decode() for record in records]
            return values
        finally:
            consumer.close()

    def close(self) -> None:
        pass


class KafkaPythonProducer:
    def __init__(self, library: KafkaPython, transactional_id: str, timeout_ms: int) -> None:
        self._library = library
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=library.bootstrap,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            linger_ms=1,
        )
        self._producer.init_transactions()

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, partition: int, prefix: str, count: int = 1) -> None:
        sent = [
            self._producer.send(topic, f"{prefix}{n}".encode(), partition=partition) for n in range(count)
        ]
        self._producer.flush()
        for future in sent:
            future.get(TIMEOUT_S)

    def commit(self) -> None:
        self._producer.commit_transaction()

    def abort(self) -> None:
        self._producer.abort_transaction()

    def transform(self, source: str, target: str, group: str, count: int) -> None:
        consumer = self._library.consumer(COMMITTED, group)
        try:
            consumer.subscribe([source])
            done = 0
            while done < count:
                polled = consumer.poll(500)
                if not polled:
                    continue
                self.begin()
                offsets = {}
                for where, records in polled.items():
                    for record in records:
                        self._producer.send(target, record.value + b"'", partition=where.partition)
                    offsets[where] = PythonOffset(records[-1].offset + 1, "", -1)
                    done += len(records)
                self._producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
                self.commit()
        finally:
            consumer.close()

    def close(self) -> None:
        self._producer.close(timeout=0)


# aiokafka


class AioKafka:
    """On an event loop in a thread of its own."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, TIMEOUT_S), self._loop).result()

    def producer(self, transactional_id: str, timeout_ms: int = LONG_MS) -> AioKafkaProducer:
        return AioKafkaProducer(self, transactional_id, timeout_ms)

    async def consumer(self, isolation: str, topics: tuple[str, ...] = (), group: str | None = None) -> Any:
        consumer = aiokafka.AIOKafkaConsumer(
            *topics,
            bootstrap_servers=self.bootstrap,
            group_id=group,
            isolation_level=isolation,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=FETCH_WAIT_MS,
        )
        await consumer.start()
        return consumer

    def read(self, topic: str, partition: int, isolation: str) -> list[str]:
        return self.run(self._read(AioPartition(topic, partition), isolation))

    async def _read(self, where: AioPartition, isolation: str) -> list[str]:
        consumer = await self.consumer(isolation)
        try:
            consumer.assign([where])
            await consumer.seek_to_beginning(where)
            end = (await consumer.end_offsets([where]))[where]
            values: list[str] = []
            while await consumer.position(where) < end:
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    values += [record.value.decode() for record in records]
            return values
        finally:
            await consumer.stop()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


class AioKafkaProducer:
    def __init__(self, library: AioKafka, transactional_id: str, timeout_ms: int) -> None:
        self._library = library
        self._producer = library.run(self._start(transactional_id, timeout_ms))

    async def _start(self, transactional_id: str, timeout_ms: int) -> Any:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=self._library.bootstrap,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
        )
        await producer.start()
        return producer

    def begin(self) -> None:
        self._library.run(self._producer.begin_transaction())

    def send(self, topic: str, partition: int, prefix: str, count: int = 1) -> None:
        self._library.run(self._send(topic, partition, [f"{prefix}{n}".encode() for n in range(count)]))

    async def _send(self, topic: str, partition: int, values: list[bytes]) -> None:
        sent = [await self._producer.send(topic, value, partition=partition) for value in values]
        await asyncio.gather(*sent)

    def commit(self) -> None:
        self._library.run(self._producer.commit_transaction())

    def abort(self) -> None:
        self._library.run(self._producer.abort_transaction())

    def transform(self, source: str, target: str, group: str, count: int) -> None:
        self._library.run(self._transform(source, target, group, count))

    async def _transform(self, source: str, target: str, group: str, count: int) -> None:
        consumer = await self._library.consumer(COMMITTED, (source,), group)
        try:
            done = 0
            while done < count:
                polled = await consumer.getmany(timeout_ms=200)
                if not polled:
                    continue
                async with self._producer.transaction():
                    offsets = {}
                    for where, records in polled.items():
                        for record in records:
                            await self._producer.send(target, record.value + b"'", partition=where.partition)
                        offsets[where] = AioOffset(records[-1].offset + 1, "")
                        done += len(records)
                    await self._producer.send_offsets_to_transaction(offsets, group)
        finally:
            await consumer.stop()

    def close(self) -> None:
        async def drop() -> None:
            await self._producer.client.close()

        self._library.run(drop())


# Java's kafka-clients


class JavaClients:
    """`TransactionServant.java` with kafka-clients on its class path."""

    def __init__(self, bootstrap: str) -> None:
        missing = Java.missing()
        assert missing is None, missing
        self._names = 0
        self._process = subprocess.Popen(
            [
                "java",
                "-XX:TieredStopAtLevel=1",
                "-Xmx256m",
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=off",
                "-cp",
                f"{CLASSES}:{JARS}/*",
                "TransactionServant",
                bootstrap,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def producer(self, transactional_id: str, timeout_ms: int = LONG_MS) -> JavaProducer:
        self._names += 1
        return JavaProducer(self, f"producer-{self._names}", transactional_id, timeout_ms)

    def read(self, topic: str, partition: int, isolation: str) -> list[str]:
        return self.call("read", topic, partition, isolation)

    def call(self, *fields: object) -> list[str]:
        """Send a command and return the lines of its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\t".join(map(str, fields)) + "\n")
        self._process.stdin.flush()
        answer: list[str] = []
        while (line := self._process.stdout.readline().rstrip("\n")) != "ok":
            if line.startswith("error ") or not line:
                raise JavaError(line.removeprefix("error ") or "the virtual machine ended")
            answer.append(line.removeprefix(" "))
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


class JavaError(Exception):
    """What Java said went wrong."""


class JavaProducer:
    def __init__(self, library: JavaClients, name: str, transactional_id: str, timeout_ms: int) -> None:
        self._library = library
        self._name = name
        library.call("open", name, transactional_id, timeout_ms)

    def begin(self) -> None:
        self._library.call("begin", self._name)

    def send(self, topic: str, partition: int, prefix: str, count: int = 1) -> None:
        self._library.call("send", self._name, topic, partition, prefix, count)

    def commit(self) -> None:
        self._library.call("commit", self._name)

    def abort(self) -> None:
        self._library.call("abort", self._name)

    def transform(self, source: str, target: str, group: str, count: int) -> None:
        self._library.call("transform", self._name, source, target, group, count)

    def close(self) -> None:
        self._library.call("close", self._name)


LIBRARIES: Final[dict[str, type[Confluent] | type[KafkaPython] | type[AioKafka] | type[JavaClients]]] = {
    "confluent": Confluent,
    "kafka-python": KafkaPython,
    "aiokafka": AioKafka,
    "java": JavaClients,
}


def values(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]
