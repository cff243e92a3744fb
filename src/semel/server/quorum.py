"""DescribeQuorum (55): a quorum of one, whose log is the journal."""

from __future__ import annotations

from typing import Final

from semel.broker.decision import Endpoint
from semel.server.life import Life
from semel.wire.errors import ErrorCode
from semel.wire.messages.describe_quorum import (
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    Listener,
    Node,
    ReplicaState,
    ResponsePartitionData,
    ResponseTopicData,
)

METADATA_TOPIC: Final = "__cluster_metadata"
METADATA_PARTITION: Final = 0
LISTENER_NAME: Final = "PLAINTEXT"


def describe_quorum(
    life: Life, endpoint: Endpoint, request: DescribeQuorumRequest, wall_ms: int
) -> DescribeQuorumResponse:
    node_id = life.broker.identity.node_id
    return DescribeQuorumResponse(
        topics=[
            ResponseTopicData(
                topic_name=topic.topic_name,
                partitions=[
                    _described(life, topic.topic_name, asked.partition_index, wall_ms)
                    for asked in topic.partitions
                ],
            )
            for topic in request.topics
        ],
        nodes=[
            Node(
                node_id=node_id,
                listeners=[Listener(name=LISTENER_NAME, host=endpoint.host, port=endpoint.port)],
            )
        ],
    )


def _described(life: Life, name: str, index: int, wall_ms: int) -> ResponsePartitionData:
    if (name, index) != (METADATA_TOPIC, METADATA_PARTITION):
        return ResponsePartitionData(
            partition_index=index,
            error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            error_message=f"only {METADATA_TOPIC}-{METADATA_PARTITION} has a quorum",
            leader_id=-1,
            leader_epoch=-1,
            high_watermark=-1,
        )
    node_id = life.broker.identity.node_id
    return ResponsePartitionData(
        partition_index=index,
        leader_id=node_id,
        leader_epoch=life.broker.leader_epoch,
        high_watermark=life.journal.released,
        current_voters=[
            ReplicaState(
                replica_id=node_id,
                log_end_offset=life.journal.end,
                last_fetch_timestamp=wall_ms,
                last_caught_up_timestamp=wall_ms,
            )
        ],
    )
