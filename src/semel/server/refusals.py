"""Answers for requests that the disk kept us from serving: errors that clients retry.

Produce gets KAFKA_STORAGE_ERROR, coordinators are NOT_COORDINATOR or not available, the controller is busy. A
request that has no such answer here is met by closing its connection, which every client retries, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.frames import Message
from semel.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopicResult,
)
from semel.wire.messages.create_topics import CreatableTopicResult, CreateTopicsRequest, CreateTopicsResponse
from semel.wire.messages.delete_records import (
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from semel.wire.messages.delete_topics import DeletableTopicResult, DeleteTopicsRequest, DeleteTopicsResponse
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.metadata import MetadataRequest, MetadataResponse, MetadataResponseTopic
from semel.wire.messages.produce import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)

WHY: Final = "the broker's disk does not take writes at the moment; it recovers by itself, try again"


def refuse_produce(request: ProduceRequest, why: str = WHY) -> ProduceResponse | None:
    if request.acks == 0:
        return None
    return ProduceResponse(
        responses=[
            TopicProduceResponse(
                topic_id=topic.topic_id,
                name=topic.name,
                partition_responses=[
                    PartitionProduceResponse(
                        index=part.index,
                        error_code=ErrorCode.KAFKA_STORAGE_ERROR,
                        base_offset=-1,
                        error_message=why,
                    )
                    for part in topic.partition_data
                ],
            )
            for topic in request.topic_data
        ]
    )


def _init_producer_id(request: InitProducerIdRequest) -> Message:
    return InitProducerIdResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, producer_epoch=-1)


def _metadata(request: MetadataRequest) -> Message:
    return MetadataResponse(
        topics=[
            MetadataResponseTopic(
                error_code=ErrorCode.LEADER_NOT_AVAILABLE, name=topic.name or "", topic_id=topic.topic_id
            )
            for topic in request.topics or ()
        ]
    )


def _create_topics(request: CreateTopicsRequest) -> Message:
    return CreateTopicsResponse(
        topics=[
            CreatableTopicResult(name=topic.name, error_code=ErrorCode.NOT_CONTROLLER, error_message=WHY)
            for topic in request.topics
        ]
    )


def _delete_topics(request: DeleteTopicsRequest) -> Message:
    names = [topic.name for topic in request.topics] or [*request.topic_names]
    return DeleteTopicsResponse(
        responses=[
            DeletableTopicResult(name=name, error_code=ErrorCode.NOT_CONTROLLER, error_message=WHY)
            for name in names
        ]
    )


def _create_partitions(request: CreatePartitionsRequest) -> Message:
    return CreatePartitionsResponse(
        results=[
            CreatePartitionsTopicResult(
                name=topic.name, error_code=ErrorCode.NOT_CONTROLLER, error_message=WHY
            )
            for topic in request.topics
        ]
    )


def _delete_records(request: DeleteRecordsRequest) -> Message:
    return DeleteRecordsResponse(
        topics=[
            DeleteRecordsTopicResult(
                name=topic.name,
                partitions=[
                    DeleteRecordsPartitionResult(
                        partition_index=part.partition_index,
                        low_watermark=-1,
                        error_code=ErrorCode.KAFKA_STORAGE_ERROR,
                    )
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


_REFUSALS: Final[dict[int, Callable[..., Message | None]]] = {
    ApiKey.PRODUCE: refuse_produce,
    ApiKey.METADATA: _metadata,
    ApiKey.INIT_PRODUCER_ID: _init_producer_id,
    ApiKey.CREATE_TOPICS: _create_topics,
    ApiKey.DELETE_TOPICS: _delete_topics,
    ApiKey.CREATE_PARTITIONS: _create_partitions,
    ApiKey.DELETE_RECORDS: _delete_records,
}


def can_refuse(api_key: int) -> bool:
    return api_key in _REFUSALS


def refusal(request: Message) -> Message | None:
    """The answer that tells the client to try again."""
    return _REFUSALS[request.API_KEY](request)
