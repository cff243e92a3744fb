"""A broker without a shell, and requests to it: for tests of the pure core."""

from __future__ import annotations

from collections.abc import Sequence

from semel.broker.core import Broker, Identity, Limits
from semel.broker.decision import Caller, Decision, Endpoint, Now
from semel.broker.journal_messages import Config, TopicCreated
from semel.broker.produce import produce
from semel.wire.frames import Message
from semel.wire.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

NOW_MS = 1_700_000_000_000
TOPIC_ID = bytes(range(16))


class Nobody:
    """A client whose answer nobody looks at."""

    def answer(self, response: Message | None) -> None:
        pass

    def refuse(self) -> None:
        pass


def new_broker(**limits: object) -> Broker:
    ids = iter(range(1, 1 << 20))
    return Broker(
        3,
        identity=Identity("cluster", 1),
        limits=Limits(**limits),  # type: ignore[arg-type]
        topic_defaults={},
        settings=[],
        new_id=lambda: next(ids).to_bytes(16),
    )


def with_topic(broker: Broker, name: str = "t", partitions: int = 1, **configs: str) -> Broker:
    broker.apply(
        TopicCreated(
            topic_id=TOPIC_ID,
            name=name,
            partitions=partitions,
            configs=[Config(name=key.replace("_", "."), value=value) for key, value in configs.items()],
        )
    )
    return broker


def caller(version: int) -> Caller:
    return Caller(version, "test", "127.0.0.1", Endpoint("127.0.0.1", 9092), Nobody())


def now(ms: int = 0) -> Now:
    return Now(NOW_MS + ms, ms)


def apply(broker: Broker, decision: Decision) -> None:
    for entry in decision.entries:
        broker.apply(entry)


def batch(
    count: int = 1,
    *,
    producer_id: int = -1,
    epoch: int = -1,
    sequence: int = -1,
    transactional: bool = False,
    key: bytes | None = b"k",
    timestamp: int = NOW_MS,
) -> bytearray:
    records = [Record(key, b"v%d" % i, timestamp) for i in range(count)]
    return build_batch(
        records,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )


def request(
    *batches: bytes | bytearray, topic: str = "t", acks: int = -1, partitions: Sequence[int] | None = None
) -> ProduceRequest:
    """One batch for each partition: 0, 1, ... unless others are given."""
    indexes = range(len(batches)) if partitions is None else partitions
    data = [
        PartitionProduceData(index=index, records=memoryview(bytearray(item)))
        for index, item in zip(indexes, batches, strict=True)
    ]
    return ProduceRequest(acks=acks, topic_data=[TopicProduceData(name=topic, partition_data=data)])


def send(broker: Broker, asked: ProduceRequest, version: int = 9) -> list[PartitionProduceResponse]:
    """Decide and apply a produce; the answers for its partitions."""
    decision = produce(broker, asked, caller(version), now())
    apply(broker, decision)
    assert isinstance(decision.reply, ProduceResponse)
    return decision.reply.responses[0].partition_responses
