"""Batches in the codec that their topic asks for.

Opening a batch and packing it again takes milliseconds, too long for the loop. So whoever runs the core asks
for what there is to do (`recompressions`), has it done elsewhere, and hands in the request after that. The
core itself recompresses only what comes to it in another codec all the same: where the topic's settings have
changed meanwhile, or where there is no elsewhere, in a simulation.
"""

from __future__ import annotations

from semel.broker.core import Broker
from semel.broker.refusal import Refused
from semel.broker.topics import Topic
from semel.wire.batch import HEADER_BYTES, BatchHeader, InvalidBatch, check_batch, read_header
from semel.wire.errors import ErrorCode
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.primitives import RecordsField
from semel.wire.records import recompress_batch

_BY_ID = 13
MAX_OPENED_BYTES = 32 * 1024 * 1024
"""A batch for a topic with compaction or a codec may not decompress to more."""


class Recompression:
    """One batch of a request, to be replaced by the same records in another codec."""

    __slots__ = ("_part", "_topic")

    def __init__(self, topic: Topic, part: PartitionProduceData) -> None:
        self._topic = topic
        self._part = part

    def run(self) -> None:
        """In any thread. A batch that cannot be opened stays as it is: the core says what is wrong."""
        batch = self._part.records
        assert isinstance(batch, memoryview)
        try:
            header = check_batch(batch)
            check_size(self._topic, header.size)
            self._part.records = recompressed(self._topic, batch, header)
        except (InvalidBatch, Refused):
            pass


def find_topic(broker: Broker, data: TopicProduceData, version: int) -> tuple[Topic | None, ErrorCode]:
    """The topic that a part of a Produce request is for, and what to say if there is none."""
    if version >= _BY_ID:
        return broker.catalog.by_id.get(data.topic_id), ErrorCode.UNKNOWN_TOPIC_ID
    return broker.catalog.by_name.get(data.name), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def recompressions(broker: Broker, request: ProduceRequest, version: int) -> list[Recompression]:
    """What has to be done to a request before it is decided; mostly nothing."""
    found: list[Recompression] = []
    for data in request.topic_data:
        topic, _ = find_topic(broker, data, version)
        if topic is not None and topic.settings.codec is not None:
            for part in data.partition_data:
                if _is_in_another_codec(part.records, topic.settings.codec):
                    found.append(Recompression(topic, part))
    return found


def _is_in_another_codec(batch: RecordsField | None, codec: int) -> bool:
    if not isinstance(batch, memoryview) or len(batch) < HEADER_BYTES:
        return False
    return read_header(batch).codec != codec


def recompressed(topic: Topic, batch: memoryview, header: BatchHeader) -> memoryview:
    """The batch in the codec that the topic asks for: it may have become larger."""
    codec = topic.settings.codec
    if codec is None or codec == header.codec:
        return batch
    try:
        packed = recompress_batch(batch, header, codec, MAX_OPENED_BYTES)
    except InvalidBatch as invalid:
        raise Refused(invalid.code, str(invalid)) from None
    check_size(topic, len(packed))
    return memoryview(packed)


def check_size(topic: Topic, size: int) -> None:
    limit = topic.settings.max_message_bytes
    if size > limit:
        raise Refused(
            ErrorCode.MESSAGE_TOO_LARGE, f"the batch has {size} bytes, above max.message.bytes of {limit}"
        )
