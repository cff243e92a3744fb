"""Claims about the catalog: topics come, grow, are configured and go, each judged on its own."""

import pytest
from broker_cases import TOPIC_ID, apply, batch, caller, new_broker, now, request, send, with_topic

from semel.broker.alter_configs import Operation, incremental_alter_configs
from semel.broker.core import Broker
from semel.broker.describe_configs import describe_configs
from semel.broker.metadata import describe_topic_partitions, find_coordinator, metadata
from semel.broker.topic_admin import create_partitions, create_topics, delete_records, delete_topics
from semel.broker.topics import RESERVED_NAMES
from semel.wire.errors import ErrorCode
from semel.wire.messages import incremental_alter_configs as incremental
from semel.wire.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from semel.wire.messages.create_topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from semel.wire.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from semel.wire.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from semel.wire.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from semel.wire.messages.describe_topic_partitions import DescribeTopicPartitionsRequest, TopicRequest
from semel.wire.messages.find_coordinator import FindCoordinatorRequest
from semel.wire.messages.metadata import MetadataRequest, MetadataRequestTopic


def create(broker: Broker, *topics: CreatableTopic, validate_only: bool = False) -> list[int]:
    decision = create_topics(
        broker, CreateTopicsRequest(topics=list(topics), validate_only=validate_only), caller(7), now()
    )
    apply(broker, decision)
    return [result.error_code for result in decision.reply.topics]  # type: ignore[union-attr]


def wanted(name: str, partitions: int = 1, factor: int = 1, **configs: str) -> CreatableTopic:
    return CreatableTopic(
        name=name,
        num_partitions=partitions,
        replication_factor=factor,
        configs=[
            CreatableTopicConfig(name=key.replace("_", "."), value=value) for key, value in configs.items()
        ],
    )


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a b", "ä", "x" * 250, "nul\0", *sorted(RESERVED_NAMES)]
)
def test_names_that_break_the_rules_are_refused(name: str) -> None:
    broker = new_broker()
    assert create(broker, wanted(name)) == [ErrorCode.INVALID_TOPIC_EXCEPTION]
    assert len(broker.catalog) == 0


def test_the_longest_and_the_oddest_legal_names_are_taken() -> None:
    assert create(new_broker(), wanted("x" * 249), wanted("..."), wanted("A-z_0.9")) == [0, 0, 0]


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        (wanted("t", 0), ErrorCode.INVALID_PARTITIONS),
        (wanted("t", 51), ErrorCode.INVALID_PARTITIONS),
        (wanted("t", 1, factor=3), ErrorCode.INVALID_REPLICATION_FACTOR),
        (wanted("t", nonsense="1"), ErrorCode.INVALID_CONFIG),
        (wanted("t", retention_ms="soon"), ErrorCode.INVALID_CONFIG),
        (wanted("t", retention_ms="-2"), ErrorCode.INVALID_CONFIG),
        (wanted("t", cleanup_policy="compact,burn"), ErrorCode.INVALID_CONFIG),
        (wanted("t", compression_type="brotli"), ErrorCode.INVALID_CONFIG),
        (wanted("t", min_cleanable_dirty_ratio="nan"), ErrorCode.INVALID_CONFIG),
        (wanted("t", -1, factor=-1), 0),
        (wanted("t", cleanup_policy="compact,delete", min_insync_replicas="2"), 0),
    ],
)
def test_what_a_topic_may_be(topic: CreatableTopic, code: int) -> None:
    assert create(new_broker(max_partitions=50), topic) == [code]


def test_a_topic_is_created_once_and_not_twice_in_one_request() -> None:
    broker = new_broker()
    assert create(broker, wanted("t"), wanted("u")) == [0, 0]
    assert create(broker, wanted("t")) == [ErrorCode.TOPIC_ALREADY_EXISTS]
    assert create(broker, wanted("v"), wanted("v")) == [ErrorCode.INVALID_REQUEST] * 2


def test_validating_creates_nothing() -> None:
    broker = new_broker()
    assert create(broker, wanted("t"), validate_only=True) == [0]
    assert len(broker.catalog) == 0


def test_assignments_must_name_the_only_broker_and_leave_no_gap() -> None:
    def assigned(*pairs: tuple[int, int]) -> CreatableTopic:
        return CreatableTopic(
            name="t",
            num_partitions=-1,
            replication_factor=-1,
            assignments=[
                CreatableReplicaAssignment(partition_index=index, broker_ids=[node]) for index, node in pairs
            ],
        )

    assert create(new_broker(), assigned((0, 1), (1, 1))) == [0]
    assert create(new_broker(), assigned((0, 1), (2, 1))) == [ErrorCode.INVALID_REPLICA_ASSIGNMENT]
    assert create(new_broker(), assigned((0, 2))) == [ErrorCode.INVALID_REPLICA_ASSIGNMENT]


def test_a_topic_made_anew_is_another_topic() -> None:
    broker = new_broker()
    create(broker, wanted("t"))
    first = broker.catalog.by_name["t"].topic_id
    send(broker, request(batch(3)))
    apply(broker, delete_topics(broker, DeleteTopicsRequest(topic_names=["t"]), caller(5), now()))
    create(broker, wanted("t"))
    assert broker.catalog.by_name["t"].topic_id != first
    assert broker.catalog.by_name["t"].partitions[0].log.end_offset == 0


def test_deleting_goes_by_name_or_by_id_and_not_by_both() -> None:
    broker = with_topic(new_broker())

    def delete(state: DeleteTopicState) -> int:
        decision = delete_topics(broker, DeleteTopicsRequest(topics=[state]), caller(6), now())
        apply(broker, decision)
        code: int = decision.reply.responses[0].error_code  # type: ignore[union-attr]
        return code

    assert delete(DeleteTopicState(name="t", topic_id=TOPIC_ID)) == ErrorCode.INVALID_REQUEST
    assert delete(DeleteTopicState(name="no")) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert delete(DeleteTopicState(name=None, topic_id=b"?" * 16)) == ErrorCode.UNKNOWN_TOPIC_ID
    assert delete(DeleteTopicState(name=None, topic_id=TOPIC_ID)) == 0
    assert len(broker.catalog) == 0


def test_partitions_only_grow() -> None:
    broker = with_topic(new_broker(max_partitions=10), partitions=3)

    def grow(count: int) -> int:
        asked = CreatePartitionsRequest(topics=[CreatePartitionsTopic(name="t", count=count)])
        decision = create_partitions(broker, asked, caller(3), now())
        apply(broker, decision)
        code: int = decision.reply.results[0].error_code  # type: ignore[union-attr]
        return code

    assert [grow(3), grow(2), grow(11)] == [ErrorCode.INVALID_PARTITIONS] * 3
    assert grow(5) == 0
    assert len(broker.catalog.by_name["t"].partitions) == 5


def test_records_are_deleted_up_to_what_readers_can_see() -> None:
    broker = with_topic(new_broker())
    send(broker, request(batch(10)))
    log = broker.catalog.by_name["t"].partitions[0].log
    log.reveal(6)

    def delete(offset: int) -> tuple[int, int]:
        asked = DeleteRecordsRequest(
            topics=[
                DeleteRecordsTopic(
                    name="t", partitions=[DeleteRecordsPartition(partition_index=0, offset=offset)]
                )
            ]
        )
        decision = delete_records(broker, asked, caller(2), now())
        apply(broker, decision)
        result = decision.reply.topics[0].partitions[0]  # type: ignore[union-attr]
        return result.error_code, result.low_watermark

    assert delete(7) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
    assert delete(4) == (0, 4)
    assert delete(2) == (0, 4)
    assert delete(-1) == (0, 6)
    assert log.log_start_offset == 6


def alter(broker: Broker, operation: Operation, name: str, value: str | None) -> int:
    asked = incremental.IncrementalAlterConfigsRequest(
        resources=[
            incremental.AlterConfigsResource(
                resource_type=2,
                resource_name="t",
                configs=[incremental.AlterableConfig(name=name, config_operation=operation, value=value)],
            )
        ]
    )
    decision = incremental_alter_configs(broker, asked, caller(1), now())
    apply(broker, decision)
    code: int = decision.reply.responses[0].error_code  # type: ignore[union-attr]
    return code


def described(broker: Broker, name: str) -> tuple[str | None, int]:
    asked = DescribeConfigsRequest(
        resources=[DescribeConfigsResource(resource_type=2, resource_name="t", configuration_keys=[name])]
    )
    config = describe_configs(broker, asked, caller(4), now()).reply.results[0].configs[0]  # type: ignore[union-attr]
    return config.value, config.config_source


def test_settings_take_effect_and_say_where_they_come_from() -> None:
    broker = with_topic(new_broker())
    assert described(broker, "retention.ms") == ("604800000", 5)
    assert alter(broker, Operation.SET, "retention.ms", "5") == 0
    assert described(broker, "retention.ms") == ("5", 1)
    assert broker.catalog.by_name["t"].settings.log.retention_ms == 5
    assert alter(broker, Operation.DELETE, "retention.ms", None) == 0
    assert described(broker, "retention.ms") == ("604800000", 5)


def test_lists_grow_and_shrink_and_nothing_else_does() -> None:
    broker = with_topic(new_broker())
    assert alter(broker, Operation.APPEND, "cleanup.policy", "compact") == 0
    assert described(broker, "cleanup.policy")[0] == "delete,compact"
    assert alter(broker, Operation.SUBTRACT, "cleanup.policy", "delete") == 0
    assert broker.catalog.by_name["t"].settings.compacted
    assert alter(broker, Operation.APPEND, "retention.ms", "1") == ErrorCode.INVALID_CONFIG
    assert alter(broker, Operation.SET, "retention.ms", "never") == ErrorCode.INVALID_CONFIG
    assert alter(broker, Operation.SET, "retention.ms", None) == ErrorCode.INVALID_REQUEST


def test_metadata_creates_what_it_is_asked_for_if_it_may() -> None:
    broker = new_broker(default_partitions=4)
    asked = MetadataRequest(topics=[MetadataRequestTopic(name="new")], allow_auto_topic_creation=True)
    decision = metadata(broker, asked, caller(12), now())
    apply(broker, decision)
    topic = decision.reply.topics[0]  # type: ignore[union-attr]
    assert (topic.error_code, len(topic.partitions)) == (0, 4)
    assert broker.catalog.by_name["new"].topic_id == topic.topic_id
    asked.allow_auto_topic_creation = False
    asked.topics = [MetadataRequestTopic(name="other"), MetadataRequestTopic(name="a/b")]
    decision = metadata(broker, asked, caller(12), now())
    assert [topic.error_code for topic in decision.reply.topics] == [  # type: ignore[union-attr]
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
    ]
    assert decision.entries == []


@pytest.mark.parametrize(("key_type", "name"), [(0, "__consumer_offsets"), (1, "__transaction_state")])
def test_who_looks_for_a_coordinator_brings_its_internal_topic_about(key_type: int, name: str) -> None:
    broker = new_broker()
    asked = FindCoordinatorRequest(key_type=key_type, coordinator_keys=["k"])
    apply(broker, find_coordinator(broker, asked, caller(4), now()))
    assert find_coordinator(broker, asked, caller(4), now()).entries == [], "it is there"
    (topic,) = metadata(broker, MetadataRequest(topics=None), caller(12), now()).reply.topics  # type: ignore[union-attr]
    assert (topic.name, topic.is_internal, len(topic.partitions)) == (name, True, 1)
    listed = describe_topic_partitions(broker, DescribeTopicPartitionsRequest(topics=[]), caller(0), now())
    assert [each.is_internal for each in listed.reply.topics] == [True]  # type: ignore[union-attr]
    assert create(broker, wanted(name)) == [ErrorCode.INVALID_TOPIC_EXCEPTION]
    (refused,) = send(broker, request(batch(), topic=name))
    assert refused.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_a_coordinator_is_found_where_there_is_no_room_for_its_topic() -> None:
    broker = new_broker(max_partitions=1)
    create(broker, wanted("t"))
    asked = FindCoordinatorRequest(key_type=0, coordinator_keys=["k"])
    decision = find_coordinator(broker, asked, caller(4), now())
    assert decision.entries == []
    assert [each.error_code for each in decision.reply.coordinators] == [0]  # type: ignore[union-attr]


def test_topics_are_described_page_by_page() -> None:
    broker = new_broker()
    create(broker, wanted("a", 3), wanted("b", 2), wanted("c", 1))
    seen: list[tuple[str | None, int]] = []
    cursor = None
    for _ in range(10):
        asked = DescribeTopicPartitionsRequest(
            topics=[TopicRequest(name=name) for name in ("c", "b", "a")],
            response_partition_limit=2,
            cursor=cursor,
        )
        reply = describe_topic_partitions(broker, asked, caller(0), now()).reply
        for topic in reply.topics:  # type: ignore[union-attr]
            seen += [(topic.name, partition.partition_index) for partition in topic.partitions]
        cursor = reply.next_cursor  # type: ignore[union-attr]
        if cursor is None:
            break
    assert seen == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("c", 0)]
