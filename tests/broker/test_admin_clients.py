"""Stock clients administer the broker, and meet the unusual: 2 MB messages, empty topics, 200 partitions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from client_aiokafka import AioKafka
from client_confluent import Confluent
from client_java import Java
from client_kafka_python import KafkaPython
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    ElectionType,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
)
from interop_cases import BASE_MS, Record, StockClient, Stored
from kafka import KafkaAdminClient
from kafka import TopicPartition as KafkaPythonPartition
from kafka.errors import InvalidReplicationAssignmentError

from semel.embedded import Broker

CLIENTS: dict[str, Callable[[str], StockClient]] = {
    "confluent": Confluent,
    "kafka-python": KafkaPython,
    "aiokafka": AioKafka,
    "java": Java,
}
MANY = 200


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with Broker() as broker:
        yield broker.bootstrap


@pytest.fixture(scope="module", params=CLIENTS)
def client(request: pytest.FixtureRequest, bootstrap: str) -> Iterator[StockClient]:
    if request.param == "java" and Java.missing() is not None:
        pytest.skip(f"no Java client: {Java.missing()}")
    client = CLIENTS[request.param](bootstrap)
    yield client
    client.close()


def test_messages_of_two_megabytes_come_back(client: StockClient, topic: str) -> None:
    client.create_topic(topic, configs={"max.message.bytes": "3000000"})
    records = [Record(b"large", random.Random(n).randbytes(2_000_000), BASE_MS + n) for n in range(2)]
    client.produce(topic, records)
    assert client.consume(topic, 0, 0, 2) == [Stored(record, n) for n, record in enumerate(records)]


def test_an_empty_topic_is_empty(client: StockClient, topic: str) -> None:
    client.create_topic(topic)
    assert client.watermarks(topic, 0) == (0, 0)
    assert client.offset_for_time(topic, 0, BASE_MS) is None


def test_two_hundred_partitions_are_told_apart(client: StockClient, topic: str) -> None:
    client.create_topic(topic, partitions=MANY)
    records = [Record(None, b"%d" % n, BASE_MS, partition=n) for n in range(MANY)]
    assert client.produce(topic, records) == [0] * MANY
    for partition in (0, 1, 99, MANY - 1):
        assert client.consume(topic, partition, 0, 1) == [Stored(records[partition], 0)]


def test_librdkafka_learns_which_records_a_compacted_topic_cannot_take(bootstrap: str, topic: str) -> None:
    client = AdminClient({"bootstrap.servers": bootstrap})
    client.create_topics([NewTopic(topic, 1, config={"cleanup.policy": "compact"})])[topic].result()
    # They wait for each other, and so travel in one batch.
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 60_000, "batch.num.messages": 4})
    told: dict[bytes, str] = {}

    def learn(error: KafkaError, message: Message) -> None:
        told[message.value() or b""] = error.name()

    for key, value in ((b"k", b"good"), (None, b"bad"), (None, b"as bad"), (b"k", b"as good")):
        producer.produce(topic, value, key, on_delivery=learn)
    assert producer.flush(20) == 0
    assert told == {
        b"good": "_INVALID_DIFFERENT_RECORD",
        b"bad": "INVALID_RECORD",
        b"as bad": "INVALID_RECORD",
        b"as good": "_INVALID_DIFFERENT_RECORD",
    }


@pytest.fixture
def admin(bootstrap: str, topic: str) -> AdminClient:
    """librdkafka's admin client, with 10 records in a topic of one partition."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1)])[topic].result()
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(10):
        producer.produce(topic, str(number).encode())
    assert producer.flush(20) == 0
    return admin


def test_confluent_resets_and_lists_offsets(admin: AdminClient, bootstrap: str, topic: str) -> None:
    group = f"group-of-{topic}"
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 4)])
    admin.alter_consumer_group_offsets([wanted])[group].result()
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False})
    consumer.subscribe([topic])
    message = consumer.poll(20)
    assert message is not None and message.offset() == 4
    (refused,) = admin.alter_consumer_group_offsets([wanted])[group].result().topic_partitions
    assert refused.error.name() == "UNKNOWN_MEMBER_ID", "a group with members is not reset"
    consumer.close()
    (listed,) = (
        admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group]
        .result()
        .topic_partitions
    )
    assert (listed.topic, listed.offset) == (topic, 4)
    where = TopicPartition(topic, 0)
    assert admin.list_offsets({where: OffsetSpec.latest()})[where].result().offset == 10
    described = admin.describe_cluster().result()
    assert [node.id for node in described.nodes] == [described.controller.id]


def test_confluent_asks_for_elections_acls_and_settings(admin: AdminClient, topic: str) -> None:
    where = TopicPartition(topic, 0)
    results = admin.elect_leaders(ElectionType.PREFERRED, [where]).result()
    assert results[where].name() == "ELECTION_NOT_NEEDED"
    rule = (ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:ann", "*")
    acl = AclBinding(*rule, AclOperation.READ, AclPermissionType.ALLOW)
    with pytest.raises(KafkaException, match="SECURITY_DISABLED"):
        admin.create_acls([acl])[acl].result()
    assert admin.describe_user_scram_credentials().result() == {}
    broker = ConfigResource(ResourceType.BROKER, "1")
    assert admin.describe_configs([broker])[broker].result()["num.partitions"].value == "1"


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_confluent_learns_that_it_may_do_everything(
    admin: AdminClient, bootstrap: str, topic: str, protocol: str
) -> None:
    everywhere = {AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS, AclOperation.ALTER_CONFIGS}
    described = admin.describe_topics(TopicCollection([topic]), include_authorized_operations=True)
    assert set(described[topic].result().authorized_operations) == everywhere | {
        *(AclOperation.READ, AclOperation.WRITE, AclOperation.CREATE),
        *(AclOperation.DELETE, AclOperation.ALTER),
    }
    cluster = admin.describe_cluster(include_authorized_operations=True).result()
    assert set(cluster.authorized_operations) == everywhere | {
        *(AclOperation.CREATE, AclOperation.ALTER),
        *(AclOperation.CLUSTER_ACTION, AclOperation.IDEMPOTENT_WRITE),
    }
    group = f"{protocol}-group-of-{topic}"
    settings = {"bootstrap.servers": bootstrap, "group.id": group, "group.protocol": protocol}
    consumer = Consumer({**settings, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    assert consumer.poll(20) is not None
    groups = admin.describe_consumer_groups([group], include_authorized_operations=True)
    operations = groups[group].result().authorized_operations
    assert set(operations) == everywhere | {AclOperation.READ, AclOperation.DELETE}
    assert admin.describe_cluster().result().authorized_operations is None
    consumer.close()


def test_kafka_python_asks_for_what_only_many_brokers_have(
    admin: AdminClient, bootstrap: str, topic: str
) -> None:
    client = KafkaAdminClient(bootstrap_servers=bootstrap)
    where = KafkaPythonPartition(topic, 0)
    assert not client.list_partition_reassignments()
    refused = client.alter_partition_reassignments({where: [1, 2]})
    assert refused[where] is InvalidReplicationAssignmentError
    assert topic in str(client.describe_log_dirs())
    assert "transaction.version" in str(client.describe_features())
    assert "__cluster_metadata" in str(client.describe_metadata_quorum())
    assert topic in str(client.list_config_resources())
    client.close()
