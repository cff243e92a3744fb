"""Members of a consumer group, one for each client library, each polling in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.structs import TopicPartition as AioTopicPartition
from confluent_kafka import Consumer, TopicPartition
from kafka import KafkaConsumer

SESSION_MS: Final = 6_000
HEARTBEAT_MS: Final = 200
POLL_S: Final = 0.05
KAFKA_PYTHON_POLL_MS: Final = 500
"""A poll of kafka-python 3.0 that times out in the moment a rebalance ends loses the assignment."""
JOIN_S: Final = 20.0


class GroupMember:
    """Subscribes to one topic, keeps what it receives, and commits when it is asked to or closed."""

    def __init__(
        self,
        bootstrap: str,
        group: str,
        topic: str,
        *,
        instance_id: str | None = None,
        sticky: bool = False,
        assigned_by_broker: bool = False,
    ) -> None:
        """`assigned_by_broker`: the consumer protocol of KIP-848, where the library has it."""
        self.bootstrap = bootstrap
        self.group = group
        self.topic = topic
        self.instance_id = instance_id
        self.sticky = sticky
        self.assigned_by_broker = assigned_by_broker
        self.received: list[tuple[int, int]] = []
        """Partition and offset of every record."""
        self.assignment: frozenset[int] = frozenset()
        self.rebalances = 0
        self.failure: BaseException | None = None
        self._closing = threading.Event()
        self._commit = threading.Event()
        self._committed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> GroupMember:
        self._thread.start()
        return self

    def commit(self) -> None:
        """Commit the position, and wait until that is done."""
        self._committed.clear()
        self._commit.set()
        assert self._committed.wait(JOIN_S), f"no commit: {self.failure}"

    def close(self) -> None:
        self._closing.set()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            self._poll_all()
        except BaseException as failure:
            self.failure = failure

    def _poll_all(self) -> None:
        raise NotImplementedError

    def _assigned(self, partitions: set[int]) -> None:
        if partitions != self.assignment:
            self.assignment = frozenset(partitions)
            self.rebalances += 1


class ConfluentMember(GroupMember):
    def _poll_all(self) -> None:
        settings: dict[str, Any] = {
            "bootstrap.servers": self.bootstrap,
            "group.id": self.group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        if self.assigned_by_broker:
            settings["group.protocol"] = "consumer"
        else:
            settings["session.timeout.ms"] = SESSION_MS
            settings["heartbeat.interval.ms"] = HEARTBEAT_MS
            settings["partition.assignment.strategy"] = "cooperative-sticky" if self.sticky else "range"
        if self.instance_id is not None:
            settings["group.instance.id"] = self.instance_id
        consumer = Consumer(settings)
        consumer.subscribe([self.topic])
        while not self._closing.is_set():
            message = consumer.poll(POLL_S)
            if message is not None and message.error() is None:
                self.received.append((message.partition(), message.offset()))
            self._assigned({part.partition for part in consumer.assignment()})
            if self._commit.is_set():
                owned = [TopicPartition(self.topic, partition) for partition in self.assignment]
                consumer.commit(offsets=consumer.position(owned), asynchronous=False)
                self._commit.clear()
                self._committed.set()
        consumer.close()


class KafkaPythonMember(GroupMember):
    def _poll_all(self) -> None:
        consumer = KafkaConsumer(
            self.topic,
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            group_instance_id=self.instance_id,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
        )
        while not self._closing.is_set():
            for records in consumer.poll(timeout_ms=KAFKA_PYTHON_POLL_MS).values():
                self.received += [(record.partition, record.offset) for record in records]
            self._assigned({part.partition for part in consumer.assignment()})
            if self._commit.is_set():
                consumer.commit()
                self._commit.clear()
                self._committed.set()
        consumer.close()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, assigned: Callable[[set[int]], None]) -> None:
        self._assigned = assigned

    async def on_partitions_revoked(self, revoked: set[AioTopicPartition]) -> None:
        self._assigned(set())

    async def on_partitions_assigned(self, assigned: set[AioTopicPartition]) -> None:
        self._assigned({part.partition for part in assigned})


class AioKafkaMember(GroupMember):
    def _poll_all(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            group_instance_id=self.instance_id,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            partition_assignment_strategy=(RangePartitionAssignor,),
        )
        consumer.subscribe([self.topic], listener=_Listener(self._assigned))
        await consumer.start()
        while not self._closing.is_set():
            for records in (await consumer.getmany(timeout_ms=int(POLL_S * 1000))).values():
                self.received += [(record.partition, record.offset) for record in records]
            if self._commit.is_set():
                await consumer.commit()
                self._commit.clear()
                self._committed.set()
        await consumer.stop()


MEMBERS: Final[dict[str, type[GroupMember]]] = {
    "confluent-kafka": ConfluentMember,
    "kafka-python": KafkaPythonMember,
    "aiokafka": AioKafkaMember,
}


def wait_until(what: str, condition: Callable[[], bool], *members: GroupMember) -> None:
    deadline = time.monotonic() + JOIN_S
    while not condition():
        for member in members:
            if member.failure is not None:
                raise member.failure
        shares = [sorted(member.assignment) for member in members]
        assert time.monotonic() < deadline, f"{what}: not within {JOIN_S} s; assignments {shares}"
        time.sleep(0.01)


def share_all(partitions: int, *members: GroupMember) -> bool:
    """Whether these members have all partitions among them, each one once, and everybody has some."""
    shares = [member.assignment for member in members]
    return (
        all(shares)
        and sum(len(share) for share in shares) == partitions
        and frozenset[int]().union(*shares) == frozenset(range(partitions))
    )
