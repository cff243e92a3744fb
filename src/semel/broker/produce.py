"""Produce (0): judge each batch, give it its place, and answer with its offset.

A batch is not re-encoded, unless its topic asks for another codec than the producer's. It is refused on its
own: the other partitions of the request go on. One batch a partition a request, as every client since message
format v2 sends it.
"""

from __future__ import annotations

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.entries import Append, Entry
from semel.broker.recompression import MAX_OPENED_BYTES, check_size, find_topic, recompressed
from semel.broker.refusal import Refused
from semel.broker.topics import Partition, Topic
from semel.broker.transactions.writing import Writer
from semel.wire.batch import (
    BatchHeader,
    InvalidBatch,
    check_batch,
    place_batch,
    read_header,
    stamp_append_time,
)
from semel.wire.errors import ErrorCode
from semel.wire.messages.produce import (
    BatchIndexAndErrorMessage,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from semel.wire.primitives import RecordsField
from semel.wire.records import scan_records

_ACKS = (-1, 0, 1)
_BAD_INPUT = frozenset(
    {
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.INVALID_RECORD,
        ErrorCode.MESSAGE_TOO_LARGE,
        ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    }
)
"""Somebody should look at the client that sends such a batch: it goes into the log as well."""
_SHOWN_CHARACTERS = 100
"""Of a client id, in the log."""
MAX_NAMED_RECORDS = 10_000
"""With more bad records than these in a batch, all of it is said to be bad."""


def produce(broker: Broker, request: ProduceRequest, caller: Caller, now: Now) -> Decision:
    entries: list[Entry] = []
    writer = Writer(broker, request.transactional_id, caller.api_version, now)
    taken: set[Partition] = set()
    responses = []
    for data in request.topic_data:
        topic, missing = find_topic(broker, data, caller.api_version)
        parts = []
        for part in data.partition_data:
            try:
                if request.acks not in _ACKS:
                    raise Refused(
                        ErrorCode.INVALID_REQUIRED_ACKS, f"acks must be -1, 0 or 1, not {request.acks}"
                    )
                partition = topic.partition(part.index) if topic is not None else None
                if partition is None:
                    raise Refused(missing, f"there is no partition {part.index} of {_label(data)}")
                if partition.topic.is_internal:
                    raise Refused(ErrorCode.INVALID_TOPIC_EXCEPTION, f"{_label(data)} is internal")
                if partition in taken:
                    raise Refused(ErrorCode.INVALID_REQUEST, "two batches for one partition in one request")
                taken.add(partition)
                parts.append(_append(broker, partition, part.records, writer, entries))
            except Refused as refused:
                if topic is not None and refused.code in _BAD_INPUT:
                    client = f"{caller.client_id[:_SHOWN_CHARACTERS]!r} at {caller.host}"
                    reason = f"a batch of {client} for {topic.name}-{part.index}: {refused.reason}"
                    broker.limit_warnings.bad_input(ErrorCode(refused.code), reason, now)
                parts.append(
                    PartitionProduceResponse(
                        index=part.index,
                        error_code=refused.code,
                        base_offset=-1,
                        record_errors=[BatchIndexAndErrorMessage(place) for place in refused.bad_records],
                        error_message=refused.reason,
                    )
                )
        responses.append(
            TopicProduceResponse(topic_id=data.topic_id, name=data.name, partition_responses=parts)
        )
    if request.acks != 0:
        return Decision(ProduceResponse(responses=responses), entries)
    decision = Decision(None, entries)
    refused_parts = [part for topic in responses for part in topic.partition_responses if part.error_code]
    if refused_parts:
        decision.hang_up = f"a produce without acknowledgement failed: {refused_parts[0].error_message}"
    return decision


def _label(data: TopicProduceData) -> str:
    return f"topic '{data.name}'" if data.name else f"topic id {data.topic_id.hex()}"


def _append(
    broker: Broker,
    partition: Partition,
    records: RecordsField | None,
    writer: Writer,
    entries: list[Entry],
) -> PartitionProduceResponse:
    if not isinstance(records, memoryview) or not records:
        raise Refused(ErrorCode.INVALID_RECORD, "the request has no batch for this partition")
    batch = records
    now_ms = writer.now.wall_ms
    header = _judge(partition.topic, batch, now_ms)
    log = partition.log
    joined: Entry | None = None
    if header.producer_id >= 0:
        transaction = writer.check(partition, header)
        duplicate = log.duplicate_of(header)
        if duplicate is not None:
            broker.counters.duplicates += 1
            return _placed(partition, duplicate.base_offset, duplicate.append_time_ms)
        error = log.refuses(header)
        if error is not None:
            raise Refused(error, _why(error, partition, header))
        joined = writer.join(partition, header, transaction)
    if partition.topic.settings.codec not in (None, header.codec):
        batch = recompressed(partition.topic, batch, header)
        header = read_header(batch)
    append_time_ms = -1
    if partition.topic.settings.append_time:
        append_time_ms = now_ms
        stamp_append_time(batch, now_ms)
        header = read_header(batch)
    base_offset = log.end_offset
    place_batch(batch, base_offset, broker.leader_epoch)
    # As the batch has it now, without reading it again.
    header.base_offset = base_offset
    header.leader_epoch = broker.leader_epoch
    if joined is not None:
        entries.append(joined)
    entries.append(Append(partition.topic.topic_id, partition.index, header, batch))
    return _placed(partition, base_offset, append_time_ms)


def _placed(partition: Partition, base_offset: int, append_time_ms: int) -> PartitionProduceResponse:
    return PartitionProduceResponse(
        index=partition.index,
        base_offset=base_offset,
        log_append_time_ms=append_time_ms,
        log_start_offset=partition.log.log_start_offset,
    )


def _judge(topic: Topic, batch: memoryview, now_ms: int) -> BatchHeader:
    """The header of a batch that is sound and within the topic's limits."""
    settings = topic.settings
    try:
        header = check_batch(batch)
    except InvalidBatch as invalid:
        raise Refused(invalid.code, str(invalid)) from None
    check_size(topic, header.size)
    if not settings.append_time:
        _check_times(topic, header, now_ms)
    if settings.compacted:
        _check_keys(batch)
    return header


def _check_times(topic: Topic, header: BatchHeader, now_ms: int) -> None:
    settings = topic.settings
    if header.max_timestamp - now_ms > settings.timestamp_after_max_ms:
        raise Refused(
            ErrorCode.INVALID_TIMESTAMP,
            f"timestamp {header.max_timestamp} is more than message.timestamp.after.max.ms "
            f"({settings.timestamp_after_max_ms}) in the future",
        )
    if header.base_timestamp >= 0 and now_ms - header.base_timestamp > settings.timestamp_before_max_ms:
        raise Refused(
            ErrorCode.INVALID_TIMESTAMP,
            f"timestamp {header.base_timestamp} is more than message.timestamp.before.max.ms "
            f"({settings.timestamp_before_max_ms}) in the past",
        )


def _check_keys(batch: memoryview) -> None:
    """Compaction goes by key, so every record must have one.

    The client is told which ones have none (KIP-467), so that it can send the others again.
    """
    try:
        scanned = enumerate(scan_records(batch, MAX_OPENED_BYTES))
        keyless = [place for place, record in scanned if record.key is None]
    except InvalidBatch as invalid:
        raise Refused(invalid.code, str(invalid)) from None
    if keyless:
        reason = "a compacted topic cannot accept a record without a key"
        named = keyless if len(keyless) <= MAX_NAMED_RECORDS else ()
        raise Refused(ErrorCode.INVALID_RECORD, reason, named)


def _why(error: ErrorCode, partition: Partition, header: BatchHeader) -> str:
    producer = partition.log.producers[header.producer_id]
    batch = f"producer {header.producer_id} epoch {header.producer_epoch} sequence {header.base_sequence}"
    where = f"{partition.topic.name}-{partition.index}"
    if error == ErrorCode.INVALID_PRODUCER_EPOCH:
        return f"{batch} is fenced on {where}: the epoch is {producer.epoch} now"
    last = f"epoch {producer.epoch} sequence {producer.last_sequence}"
    return f"{batch} is out of line on {where}: the last was {last}"
