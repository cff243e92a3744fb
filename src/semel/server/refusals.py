"""Answers for requests that the disk kept us from serving: errors that clients retry.

Produce gets KAFKA_STORAGE_ERROR, coordinators are NOT_COORDINATOR or not available, the controller is busy. A
request that has no such answer here is met by closing its connection, which every client retries, too.
Metadata is one: an answer without brokers would be believed, and clients would forget the only one there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.frames import Message
from semel.wire.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from semel.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
)
from semel.wire.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    ResponseEntryData,
)
from semel.wire.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
)
from semel.wire.messages.consumer_group_describe import DescribedGroup as DescribedConsumerGroup
from semel.wire.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from semel.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopicResult,
)
from semel.wire.messages.create_topics import CreatableTopicResult, CreateTopicsRequest, CreateTopicsResponse
from semel.wire.messages.delete_groups import DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse
from semel.wire.messages.delete_records import (
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from semel.wire.messages.delete_topics import DeletableTopicResult, DeleteTopicsRequest, DeleteTopicsResponse
from semel.wire.messages.describe_groups import DescribedGroup, DescribeGroupsRequest, DescribeGroupsResponse
from semel.wire.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    TransactionState,
)
from semel.wire.messages.end_txn import EndTxnRequest, EndTxnResponse
from semel.wire.messages.find_coordinator import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from semel.wire.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.join_group import JoinGroupRequest, JoinGroupResponse
from semel.wire.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse
from semel.wire.messages.list_groups import ListGroupsRequest, ListGroupsResponse
from semel.wire.messages.list_transactions import ListTransactionsRequest, ListTransactionsResponse
from semel.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from semel.wire.messages.offset_delete import OffsetDeleteRequest, OffsetDeleteResponse
from semel.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponseTopic,
)
from semel.wire.messages.produce import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from semel.wire.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from semel.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
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


def _find_coordinator(request: FindCoordinatorRequest) -> Message:
    return FindCoordinatorResponse(
        error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE,
        error_message=WHY,
        node_id=-1,
        port=-1,
        coordinators=[
            Coordinator(
                key=key,
                node_id=-1,
                port=-1,
                error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE,
                error_message=WHY,
            )
            for key in request.coordinator_keys
        ],
    )


def _init_producer_id(request: InitProducerIdRequest) -> Message:
    return InitProducerIdResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, producer_epoch=-1)


def _add_partitions_to_txn(request: AddPartitionsToTxnRequest) -> Message:
    def refused(topics: list[AddPartitionsToTxnTopic]) -> list[AddPartitionsToTxnTopicResult]:
        return [
            AddPartitionsToTxnTopicResult(
                name=topic.name,
                results_by_partition=[
                    AddPartitionsToTxnPartitionResult(
                        partition_index=index, partition_error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE
                    )
                    for index in topic.partitions
                ],
            )
            for topic in topics
        ]

    return AddPartitionsToTxnResponse(
        results_by_topic_v3_and_below=refused(request.v3_and_below_topics),
        results_by_transaction=[
            AddPartitionsToTxnResult(
                transactional_id=wanted.transactional_id, topic_results=refused(wanted.topics)
            )
            for wanted in request.transactions
        ],
    )


def _add_offsets_to_txn(request: AddOffsetsToTxnRequest) -> Message:
    return AddOffsetsToTxnResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _end_txn(request: EndTxnRequest) -> Message:
    return EndTxnResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _describe_transactions(request: DescribeTransactionsRequest) -> Message:
    return DescribeTransactionsResponse(
        transaction_states=[
            TransactionState(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, transactional_id=name)
            for name in request.transactional_ids
        ]
    )


def _list_transactions(request: ListTransactionsRequest) -> Message:
    return ListTransactionsResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _txn_offset_commit(request: TxnOffsetCommitRequest) -> Message:
    return TxnOffsetCommitResponse(
        topics=[
            TxnOffsetCommitResponseTopic(
                name=topic.name,
                partitions=[
                    TxnOffsetCommitResponsePartition(
                        partition_index=part.partition_index, error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE
                    )
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
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


def _join_group(request: JoinGroupRequest) -> Message:
    return JoinGroupResponse(
        error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, member_id=request.member_id, protocol_name=""
    )


def _sync_group(request: SyncGroupRequest) -> Message:
    return SyncGroupResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _heartbeat(request: HeartbeatRequest) -> Message:
    return HeartbeatResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _leave_group(request: LeaveGroupRequest) -> Message:
    return LeaveGroupResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _offset_commit(request: OffsetCommitRequest) -> Message:
    return OffsetCommitResponse(
        topics=[
            OffsetCommitResponseTopic(
                topic_id=topic.topic_id,
                name=topic.name,
                partitions=[
                    OffsetCommitResponsePartition(
                        partition_index=part.partition_index, error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE
                    )
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


def _offset_fetch(request: OffsetFetchRequest) -> Message:
    """Version 1 has an error for each partition only, later ones for the whole, version 8 for each group."""
    return OffsetFetchResponse(
        error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE,
        topics=[
            OffsetFetchResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetFetchResponsePartition(
                        partition_index=index,
                        committed_offset=-1,
                        metadata="",
                        error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE,
                    )
                    for index in topic.partition_indexes
                ],
            )
            for topic in request.topics or ()
        ],
        groups=[
            OffsetFetchResponseGroup(group_id=group.group_id, error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)
            for group in request.groups
        ],
    )


def _offset_delete(request: OffsetDeleteRequest) -> Message:
    return OffsetDeleteResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _list_groups(request: ListGroupsRequest) -> Message:
    return ListGroupsResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)


def _describe_groups(request: DescribeGroupsRequest) -> Message:
    return DescribeGroupsResponse(
        groups=[
            DescribedGroup(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, group_id=group_id)
            for group_id in request.groups
        ]
    )


def _consumer_group_heartbeat(request: ConsumerGroupHeartbeatRequest) -> Message:
    return ConsumerGroupHeartbeatResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, error_message=WHY)


def _consumer_group_describe(request: ConsumerGroupDescribeRequest) -> Message:
    return ConsumerGroupDescribeResponse(
        groups=[
            DescribedConsumerGroup(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, group_id=group_id)
            for group_id in request.group_ids
        ]
    )


def _delete_groups(request: DeleteGroupsRequest) -> Message:
    return DeleteGroupsResponse(
        results=[
            DeletableGroupResult(group_id=group_id, error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)
            for group_id in request.groups_names
        ]
    )


def _alter_client_quotas(request: AlterClientQuotasRequest) -> Message:
    return AlterClientQuotasResponse(
        entries=[
            ResponseEntryData(error_code=ErrorCode.NOT_CONTROLLER, error_message=WHY, entity=entry.entity)
            for entry in request.entries
        ]
    )


_REFUSALS: Final[dict[int, Callable[..., Message | None]]] = {
    ApiKey.PRODUCE: refuse_produce,
    ApiKey.FIND_COORDINATOR: _find_coordinator,
    ApiKey.INIT_PRODUCER_ID: _init_producer_id,
    ApiKey.ADD_PARTITIONS_TO_TXN: _add_partitions_to_txn,
    ApiKey.ADD_OFFSETS_TO_TXN: _add_offsets_to_txn,
    ApiKey.END_TXN: _end_txn,
    ApiKey.TXN_OFFSET_COMMIT: _txn_offset_commit,
    ApiKey.DESCRIBE_TRANSACTIONS: _describe_transactions,
    ApiKey.LIST_TRANSACTIONS: _list_transactions,
    ApiKey.CREATE_TOPICS: _create_topics,
    ApiKey.DELETE_TOPICS: _delete_topics,
    ApiKey.CREATE_PARTITIONS: _create_partitions,
    ApiKey.DELETE_RECORDS: _delete_records,
    ApiKey.JOIN_GROUP: _join_group,
    ApiKey.SYNC_GROUP: _sync_group,
    ApiKey.HEARTBEAT: _heartbeat,
    ApiKey.LEAVE_GROUP: _leave_group,
    ApiKey.OFFSET_COMMIT: _offset_commit,
    ApiKey.OFFSET_FETCH: _offset_fetch,
    ApiKey.OFFSET_DELETE: _offset_delete,
    ApiKey.LIST_GROUPS: _list_groups,
    ApiKey.DESCRIBE_GROUPS: _describe_groups,
    ApiKey.DELETE_GROUPS: _delete_groups,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: _consumer_group_heartbeat,
    ApiKey.CONSUMER_GROUP_DESCRIBE: _consumer_group_describe,
    ApiKey.ALTER_CLIENT_QUOTAS: _alter_client_quotas,
}


def can_refuse(api_key: int) -> bool:
    return api_key in _REFUSALS


def refusal(request: Message) -> Message | None:
    """The answer that tells the client to try again."""
    return _REFUSALS[request.API_KEY](request)
