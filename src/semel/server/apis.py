"""The API table: for each key, how its request is decoded and who handles it.

Most handlers are decisions of the core: they look at the state, and what they decide is journaled before
the answer leaves. Those that read files or answer from the shell are methods of the node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from semel.broker.acls import create_acls, delete_acls, describe_acls
from semel.broker.alter_configs import alter_configs, incremental_alter_configs
from semel.broker.client_quotas import alter_client_quotas, describe_client_quotas
from semel.broker.config_resources import list_config_resources
from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.describe_configs import describe_configs
from semel.broker.elections import (
    alter_partition_reassignments,
    elect_leaders,
    list_partition_reassignments,
)
from semel.broker.features import FEATURES, update_features
from semel.broker.groups.consumer_group_describe import consumer_group_describe
from semel.broker.groups.consumer_group_heartbeat import consumer_group_heartbeat
from semel.broker.groups.group_admin import delete_groups, describe_groups, list_groups
from semel.broker.groups.heartbeat import heartbeat
from semel.broker.groups.join_group import join_group
from semel.broker.groups.leave_group import leave_group
from semel.broker.groups.offset_commit import offset_commit
from semel.broker.groups.offset_delete import offset_delete
from semel.broker.groups.offset_fetch import offset_fetch
from semel.broker.groups.sync_group import sync_group
from semel.broker.leader_epochs import offset_for_leader_epoch
from semel.broker.metadata import describe_cluster, describe_topic_partitions, find_coordinator, metadata
from semel.broker.produce import produce
from semel.broker.recompression import Recompression, recompressions
from semel.broker.scram_credentials import alter_user_scram_credentials, describe_user_scram_credentials
from semel.broker.topic_admin import create_partitions, create_topics, delete_records, delete_topics
from semel.broker.transactions.describing import (
    describe_producers,
    describe_transactions,
    list_transactions,
)
from semel.broker.transactions.end_txn import end_txn
from semel.broker.transactions.init_producer_id import init_producer_id
from semel.broker.transactions.joining import add_offsets_to_txn, add_partitions_to_txn
from semel.broker.transactions.lifeline import Lifeline
from semel.broker.transactions.markers import write_txn_markers
from semel.broker.transactions.txn_offset_commit import txn_offset_commit
from semel.server.connection import Slot
from semel.wire.apis import APIS, Api, ApiKey
from semel.wire.lifeline import LIFELINE_SOFTWARE_NAME
from semel.wire.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from semel.wire.messages.add_partitions_to_txn import AddPartitionsToTxnRequest
from semel.wire.messages.alter_client_quotas import AlterClientQuotasRequest
from semel.wire.messages.alter_configs import AlterConfigsRequest
from semel.wire.messages.alter_partition_reassignments import AlterPartitionReassignmentsRequest
from semel.wire.messages.alter_replica_log_dirs import AlterReplicaLogDirsRequest
from semel.wire.messages.alter_user_scram_credentials import AlterUserScramCredentialsRequest
from semel.wire.messages.api_versions import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)
from semel.wire.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from semel.wire.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from semel.wire.messages.create_acls import CreateAclsRequest
from semel.wire.messages.create_partitions import CreatePartitionsRequest
from semel.wire.messages.create_topics import CreateTopicsRequest
from semel.wire.messages.delete_acls import DeleteAclsRequest
from semel.wire.messages.delete_groups import DeleteGroupsRequest
from semel.wire.messages.delete_records import DeleteRecordsRequest
from semel.wire.messages.delete_topics import DeleteTopicsRequest
from semel.wire.messages.describe_acls import DescribeAclsRequest
from semel.wire.messages.describe_client_quotas import DescribeClientQuotasRequest
from semel.wire.messages.describe_cluster import DescribeClusterRequest
from semel.wire.messages.describe_configs import DescribeConfigsRequest
from semel.wire.messages.describe_groups import DescribeGroupsRequest
from semel.wire.messages.describe_log_dirs import DescribeLogDirsRequest
from semel.wire.messages.describe_producers import DescribeProducersRequest
from semel.wire.messages.describe_quorum import DescribeQuorumRequest
from semel.wire.messages.describe_topic_partitions import DescribeTopicPartitionsRequest
from semel.wire.messages.describe_transactions import DescribeTransactionsRequest
from semel.wire.messages.describe_user_scram_credentials import DescribeUserScramCredentialsRequest
from semel.wire.messages.elect_leaders import ElectLeadersRequest
from semel.wire.messages.end_txn import EndTxnRequest
from semel.wire.messages.fetch import FetchRequest
from semel.wire.messages.find_coordinator import FindCoordinatorRequest
from semel.wire.messages.heartbeat import HeartbeatRequest
from semel.wire.messages.incremental_alter_configs import IncrementalAlterConfigsRequest
from semel.wire.messages.init_producer_id import InitProducerIdRequest
from semel.wire.messages.join_group import JoinGroupRequest
from semel.wire.messages.leave_group import LeaveGroupRequest
from semel.wire.messages.list_config_resources import ListConfigResourcesRequest
from semel.wire.messages.list_groups import ListGroupsRequest
from semel.wire.messages.list_offsets import ListOffsetsRequest
from semel.wire.messages.list_partition_reassignments import ListPartitionReassignmentsRequest
from semel.wire.messages.list_transactions import ListTransactionsRequest
from semel.wire.messages.metadata import MetadataRequest
from semel.wire.messages.offset_commit import OffsetCommitRequest
from semel.wire.messages.offset_delete import OffsetDeleteRequest
from semel.wire.messages.offset_fetch import OffsetFetchRequest
from semel.wire.messages.offset_for_leader_epoch import OffsetForLeaderEpochRequest
from semel.wire.messages.produce import ProduceRequest
from semel.wire.messages.sync_group import SyncGroupRequest
from semel.wire.messages.txn_offset_commit import TxnOffsetCommitRequest
from semel.wire.messages.update_features import UpdateFeaturesRequest
from semel.wire.messages.write_txn_markers import WriteTxnMarkersRequest

if TYPE_CHECKING:
    from semel.server.node import Node

Decode = Callable[[memoryview, int, int], tuple[Any, int]]
Decide = Callable[[Broker, Any, Caller, Now], Decision]
Serve = Callable[["Node", Slot, Any], None]
Prepare = Callable[[Broker, Any, int], list[Recompression]]


@dataclass(slots=True, frozen=True)
class ServedApi:
    """One API: exactly one of `decide` (the core) and `serve` (the shell) handles it."""

    api: Api
    decode: Decode
    decide: Decide | None = None
    serve: Serve | None = None
    reads_only: bool = False
    """May be answered from the old state while the broker recovers from a failed write."""
    prepare: Prepare | None = None
    """What has to be done first that takes too long for the loop."""


def _decided(key: ApiKey, decode: Decode, decide: Decide, *, reads_only: bool = False) -> ServedApi:
    return ServedApi(APIS[key], decode, decide=decide, reads_only=reads_only)


def _served(key: ApiKey, decode: Decode, serve: Serve) -> ServedApi:
    return ServedApi(APIS[key], decode, serve=serve)


def _answer_api_versions(node: Node, slot: Slot, request: ApiVersionsRequest) -> None:
    if request.client_software_name == LIFELINE_SOFTWARE_NAME and slot.connection.lifeline is None:
        slot.connection.lifeline = Lifeline()
    slot.answer(api_versions(node.apis, 0))


def served_apis() -> dict[int, ServedApi]:
    """Everything that this broker answers."""
    table = (
        ServedApi(APIS[ApiKey.PRODUCE], ProduceRequest.decode, decide=produce, prepare=recompressions),
        _served(ApiKey.FETCH, FetchRequest.decode, lambda node, slot, request: node.fetch(slot, request)),
        _served(
            ApiKey.LIST_OFFSETS,
            ListOffsetsRequest.decode,
            lambda node, slot, request: node.list_offsets(slot, request),
        ),
        _decided(ApiKey.METADATA, MetadataRequest.decode, metadata, reads_only=True),
        _decided(ApiKey.OFFSET_COMMIT, OffsetCommitRequest.decode, offset_commit),
        _decided(ApiKey.OFFSET_FETCH, OffsetFetchRequest.decode, offset_fetch),
        _decided(ApiKey.FIND_COORDINATOR, FindCoordinatorRequest.decode, find_coordinator, reads_only=True),
        _decided(ApiKey.JOIN_GROUP, JoinGroupRequest.decode, join_group),
        _decided(ApiKey.HEARTBEAT, HeartbeatRequest.decode, heartbeat),
        _decided(ApiKey.LEAVE_GROUP, LeaveGroupRequest.decode, leave_group),
        _decided(ApiKey.SYNC_GROUP, SyncGroupRequest.decode, sync_group),
        _decided(ApiKey.DESCRIBE_GROUPS, DescribeGroupsRequest.decode, describe_groups),
        _decided(ApiKey.LIST_GROUPS, ListGroupsRequest.decode, list_groups),
        _served(
            ApiKey.API_VERSIONS,
            ApiVersionsRequest.decode,
            _answer_api_versions,
        ),
        _decided(ApiKey.CREATE_TOPICS, CreateTopicsRequest.decode, create_topics),
        _decided(ApiKey.DELETE_TOPICS, DeleteTopicsRequest.decode, delete_topics),
        _decided(ApiKey.DELETE_RECORDS, DeleteRecordsRequest.decode, delete_records),
        _decided(ApiKey.INIT_PRODUCER_ID, InitProducerIdRequest.decode, init_producer_id),
        _decided(
            ApiKey.OFFSET_FOR_LEADER_EPOCH,
            OffsetForLeaderEpochRequest.decode,
            offset_for_leader_epoch,
            reads_only=True,
        ),
        _decided(ApiKey.ADD_PARTITIONS_TO_TXN, AddPartitionsToTxnRequest.decode, add_partitions_to_txn),
        _decided(ApiKey.ADD_OFFSETS_TO_TXN, AddOffsetsToTxnRequest.decode, add_offsets_to_txn),
        _decided(ApiKey.END_TXN, EndTxnRequest.decode, end_txn),
        _decided(ApiKey.WRITE_TXN_MARKERS, WriteTxnMarkersRequest.decode, write_txn_markers),
        _decided(ApiKey.TXN_OFFSET_COMMIT, TxnOffsetCommitRequest.decode, txn_offset_commit),
        _decided(ApiKey.DESCRIBE_PRODUCERS, DescribeProducersRequest.decode, describe_producers),
        _decided(ApiKey.DESCRIBE_TRANSACTIONS, DescribeTransactionsRequest.decode, describe_transactions),
        _decided(ApiKey.LIST_TRANSACTIONS, ListTransactionsRequest.decode, list_transactions),
        _decided(ApiKey.DESCRIBE_ACLS, DescribeAclsRequest.decode, describe_acls, reads_only=True),
        _decided(ApiKey.CREATE_ACLS, CreateAclsRequest.decode, create_acls, reads_only=True),
        _decided(ApiKey.DELETE_ACLS, DeleteAclsRequest.decode, delete_acls, reads_only=True),
        _decided(ApiKey.DESCRIBE_CONFIGS, DescribeConfigsRequest.decode, describe_configs, reads_only=True),
        _decided(ApiKey.ALTER_CONFIGS, AlterConfigsRequest.decode, alter_configs),
        _served(
            ApiKey.ALTER_REPLICA_LOG_DIRS,
            AlterReplicaLogDirsRequest.decode,
            lambda node, slot, request: node.alter_replica_log_dirs(slot, request),
        ),
        _served(
            ApiKey.DESCRIBE_LOG_DIRS,
            DescribeLogDirsRequest.decode,
            lambda node, slot, request: node.describe_log_dirs(slot, request),
        ),
        _decided(ApiKey.CREATE_PARTITIONS, CreatePartitionsRequest.decode, create_partitions),
        _decided(ApiKey.DELETE_GROUPS, DeleteGroupsRequest.decode, delete_groups),
        _decided(
            ApiKey.INCREMENTAL_ALTER_CONFIGS, IncrementalAlterConfigsRequest.decode, incremental_alter_configs
        ),
        _decided(ApiKey.ELECT_LEADERS, ElectLeadersRequest.decode, elect_leaders, reads_only=True),
        _decided(
            ApiKey.ALTER_PARTITION_REASSIGNMENTS,
            AlterPartitionReassignmentsRequest.decode,
            alter_partition_reassignments,
            reads_only=True,
        ),
        _decided(
            ApiKey.LIST_PARTITION_REASSIGNMENTS,
            ListPartitionReassignmentsRequest.decode,
            list_partition_reassignments,
            reads_only=True,
        ),
        _decided(ApiKey.OFFSET_DELETE, OffsetDeleteRequest.decode, offset_delete),
        _decided(
            ApiKey.DESCRIBE_CLIENT_QUOTAS,
            DescribeClientQuotasRequest.decode,
            describe_client_quotas,
            reads_only=True,
        ),
        _decided(ApiKey.ALTER_CLIENT_QUOTAS, AlterClientQuotasRequest.decode, alter_client_quotas),
        _decided(
            ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
            DescribeUserScramCredentialsRequest.decode,
            describe_user_scram_credentials,
            reads_only=True,
        ),
        _decided(
            ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
            AlterUserScramCredentialsRequest.decode,
            alter_user_scram_credentials,
            reads_only=True,
        ),
        _served(
            ApiKey.DESCRIBE_QUORUM,
            DescribeQuorumRequest.decode,
            lambda node, slot, request: node.describe_quorum(slot, request),
        ),
        _decided(ApiKey.UPDATE_FEATURES, UpdateFeaturesRequest.decode, update_features, reads_only=True),
        _decided(ApiKey.DESCRIBE_CLUSTER, DescribeClusterRequest.decode, describe_cluster, reads_only=True),
        _decided(
            ApiKey.LIST_CONFIG_RESOURCES,
            ListConfigResourcesRequest.decode,
            list_config_resources,
            reads_only=True,
        ),
        _decided(
            ApiKey.CONSUMER_GROUP_HEARTBEAT, ConsumerGroupHeartbeatRequest.decode, consumer_group_heartbeat
        ),
        _decided(
            ApiKey.CONSUMER_GROUP_DESCRIBE, ConsumerGroupDescribeRequest.decode, consumer_group_describe
        ),
        _decided(
            ApiKey.DESCRIBE_TOPIC_PARTITIONS,
            DescribeTopicPartitionsRequest.decode,
            describe_topic_partitions,
            reads_only=True,
        ),
    )
    return {served.api.key: served for served in table}


FINALIZED_FEATURES_EPOCH: Final = 0


def api_versions(apis: dict[int, ServedApi], error_code: int) -> ApiVersionsResponse:
    """ApiVersions (18): what this broker answers, and in which versions."""
    return ApiVersionsResponse(
        error_code=error_code,
        api_keys=[
            ApiVersion(
                api_key=served.api.key,
                min_version=served.api.advertised_min_version,
                max_version=served.api.max_version,
            )
            for served in apis.values()
        ],
        supported_features=[
            SupportedFeatureKey(name=name, min_version=0, max_version=level)
            for name, level in FEATURES.items()
        ],
        finalized_features_epoch=FINALIZED_FEATURES_EPOCH,
        finalized_features=[
            FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
            for name, level in FEATURES.items()
        ],
    )
