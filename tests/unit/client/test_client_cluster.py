"""Finding brokers, leaders and coordinators, and asking again."""

from typing import Any

import pytest
from fake_broker import NODE_ID, FakeBroker, hang_up

from semel.client import cluster as cluster_module
from semel.client.admin import LATEST, Admin
from semel.client.cluster import GROUP_COORDINATOR, TRANSACTION_COORDINATOR, Cluster
from semel.client.errors import UnreachableError
from semel.client.metadata import Address, TopicPartition, parse_addresses
from semel.errors import ConfigError, FatalError, FencedError, RetriableError
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.messages.create_topics import CreatableTopicResult, CreateTopicsResponse
from semel.wire.messages.find_coordinator import FindCoordinatorResponse
from semel.wire.messages.metadata import MetadataResponse


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("localhost", [("localhost", 9092)]),
        ("a:1,b:2", [("a", 1), ("b", 2)]),
        (" a:1 , b ,", [("a", 1), ("b", 9092)]),
        ("[::1]:5,[fe80::1]", [("::1", 5), ("fe80::1", 9092)]),
    ],
)
def test_addresses_are_read(text: str, addresses: list[tuple[str, int]]) -> None:
    assert parse_addresses(text) == [Address(host, port) for host, port in addresses]


@pytest.mark.parametrize(
    "text", ["", ",", "a:", ":1", "a:b", "a:0", "a:65536", "a:1:2", "[::1", "[::1]5", "a:-1"]
)
def test_what_is_no_address_is_refused_as_the_users_mistake(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_addresses(text)


def test_an_address_with_colons_is_shown_in_brackets() -> None:
    assert str(Address("::1", 5)) == "[::1]:5"


async def test_the_next_bootstrap_address_is_tried_when_one_is_dead() -> None:
    async with FakeBroker() as gone:
        dead = gone.bootstrap
    async with FakeBroker() as broker, Cluster(f"{dead},{broker.bootstrap}") as cluster:
        assert (await cluster.view()).cluster_id == "fake"


async def test_when_nobody_answers_every_address_is_named() -> None:
    async with FakeBroker() as one, FakeBroker() as other:
        dead = f"{one.bootstrap},{other.bootstrap}"
    with pytest.raises(UnreachableError) as caught:
        await Cluster(dead).connect()
    for address in dead.split(","):
        assert address in str(caught.value)


async def test_metadata_is_asked_for_once_and_again_when_it_was_wrong() -> None:
    async with FakeBroker({"t": 3}) as broker, Cluster(broker.bootstrap) as cluster:
        before = len(broker.seen(ApiKey.METADATA))
        for partition in range(3):
            assert await cluster.leader_id(TopicPartition("t", partition)) == NODE_ID
        assert len(broker.seen(ApiKey.METADATA)) == before + 1
        cluster.forget_topic("t")
        await cluster.leader_id(TopicPartition("t", 0))
        assert len(broker.seen(ApiKey.METADATA)) == before + 2


async def test_a_partition_that_does_not_exist_is_named_with_their_number() -> None:
    async with FakeBroker({"t": 3}) as broker, Cluster(broker.bootstrap) as cluster:
        with pytest.raises(RetriableError, match="no partition 3, it has 3"):
            await cluster.leader_id(TopicPartition("t", 3))


def without_leader(broker: FakeBroker, request: Any) -> MetadataResponse:
    response = broker.metadata(request)
    for topic in response.topics:
        for partition in topic.partitions:
            partition.leader_id = -1
    return response


async def test_a_leader_that_is_missing_for_a_moment_is_waited_for() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(ApiKey.METADATA, without_leader, without_leader)
        found = await Admin(cluster).list_offsets({TopicPartition("t", 0): LATEST})
        assert found[TopicPartition("t", 0)].offset == 0


async def test_an_unknown_topic_is_believed_after_a_short_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "UNKNOWN_TOPIC_PATIENCE_MS", 100)
    async with FakeBroker() as broker, Cluster(broker.bootstrap) as cluster:
        with pytest.raises(RetriableError, match="'t' cannot be used") as caught:
            await Admin(cluster).describe_topic("t")
        assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert "semel topic list" in str(caught.value)
        assert len(broker.seen(ApiKey.METADATA)) > 2


async def test_a_topic_just_created_elsewhere_is_found_on_the_second_look() -> None:
    async with FakeBroker({"t": 2}) as broker, Cluster(broker.bootstrap) as cluster:
        hidden = broker.topics.pop("t")

        def appear(fake: FakeBroker, request: Any) -> MetadataResponse:
            response = fake.metadata(request)
            fake.topics["t"] = hidden
            return response

        broker.misbehave(ApiKey.METADATA, appear)
        assert len((await Admin(cluster).describe_topic("t")).partitions) == 2


async def test_coordinators_are_looked_up_once_per_key_and_kind() -> None:
    async with FakeBroker() as broker, Cluster(broker.bootstrap) as cluster:
        for _ in range(2):
            await cluster.coordinator(GROUP_COORDINATOR, "g")
            await cluster.coordinator(TRANSACTION_COORDINATOR, "g")
        asked = [(request.key, request.key_type) for request in broker.seen(ApiKey.FIND_COORDINATOR)]
        assert asked == [("g", GROUP_COORDINATOR), ("g", TRANSACTION_COORDINATOR)]
        cluster.forget_coordinator(GROUP_COORDINATOR, "g")
        await cluster.coordinator(GROUP_COORDINATOR, "g")
        assert len(broker.seen(ApiKey.FIND_COORDINATOR)) == 3


async def test_a_coordinator_that_is_still_loading_is_an_error_to_retry() -> None:
    async with FakeBroker() as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(
            ApiKey.FIND_COORDINATOR,
            lambda _broker, _request: FindCoordinatorResponse(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE),
        )
        with pytest.raises(RetriableError, match="no coordinator was found for 'g'"):
            await cluster.coordinator(GROUP_COORDINATOR, "g")


def refuse_creation(code: int) -> Any:
    def refuse(broker: FakeBroker, request: Any) -> CreateTopicsResponse:
        return CreateTopicsResponse(
            topics=[CreatableTopicResult(name=topic.name, error_code=code) for topic in request.topics]
        )

    return refuse


async def test_the_wrong_controller_is_asked_again_later() -> None:
    async with FakeBroker() as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(ApiKey.CREATE_TOPICS, refuse_creation(ErrorCode.NOT_CONTROLLER))
        await Admin(cluster).create_topic("t", partitions=4)
        assert len(broker.topics["t"]) == 4


async def test_a_change_whose_answer_was_lost_is_not_repeated() -> None:
    async with FakeBroker() as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(ApiKey.CREATE_TOPICS, hang_up)
        with pytest.raises(UnreachableError):
            await Admin(cluster).create_topic("t")
        assert len(broker.seen(ApiKey.CREATE_TOPICS)) == 1


async def test_a_question_whose_answer_was_lost_is_repeated() -> None:
    async with FakeBroker({"t": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(ApiKey.METADATA, hang_up)
        assert [topic.name for topic in await Admin(cluster).list_topics()] == ["t"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.INVALID_CONFIG, FatalError),
        (ErrorCode.TOPIC_ALREADY_EXISTS, FatalError),
        (ErrorCode.PRODUCER_FENCED, FencedError),
        (999, FatalError),
    ],
)
async def test_what_cannot_pass_is_raised_at_once(code: int, kind: type[Exception]) -> None:
    async with FakeBroker() as broker, Cluster(broker.bootstrap) as cluster:
        broker.misbehave(ApiKey.CREATE_TOPICS, refuse_creation(code))
        with pytest.raises(kind, match="topic 't' was not created"):
            await Admin(cluster).create_topic("t")
        assert len(broker.seen(ApiKey.CREATE_TOPICS)) == 1


async def test_internal_topics_are_listed_only_on_request() -> None:
    async with FakeBroker({"b": 1, "__x": 1, "a": 1}) as broker, Cluster(broker.bootstrap) as cluster:
        admin = Admin(cluster)
        assert [topic.name for topic in await admin.list_topics()] == ["a", "b"]
        everything = await admin.list_topics(include_internal=True)
        assert [topic.name for topic in everything] == ["__x", "a", "b"]
