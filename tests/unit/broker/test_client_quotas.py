"""Claims about client quotas: who may set which, how they are found, and which one counts for whom."""

from math import inf, nan

import pytest
from broker_cases import apply, caller, new_broker, now

from semel.broker.client_quotas import MatchType, alter_client_quotas, describe_client_quotas
from semel.broker.core import Broker
from semel.broker.entries import decode_entry, encode_entry
from semel.broker.quotas import MAX_ENTITIES, MAX_REMEMBERED, Quota, quota_set
from semel.server.parts import decode_part, encode_catalog, load_catalog
from semel.wire.errors import ErrorCode
from semel.wire.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    EntityData,
    OpData,
    RequestEntryData,
)
from semel.wire.messages.describe_client_quotas import (
    ComponentData,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
)

PRODUCE = "producer_byte_rate"
REQUESTS = "request_percentage"
Names = dict[str, str | None]


def entry(entity: Names, **values: float | None) -> RequestEntryData:
    """What to set for an entity; None removes."""
    return RequestEntryData(
        entity=[EntityData(entity_type=kind, entity_name=name) for kind, name in entity.items()],
        ops=[OpData(key=key, value=float(value or 0), remove=value is None) for key, value in values.items()],
    )


def alter(broker: Broker, *entries: RequestEntryData, validate_only: bool = False) -> list[int]:
    request = AlterClientQuotasRequest(entries=list(entries), validate_only=validate_only)
    decision = alter_client_quotas(broker, request, caller(1), now())
    apply(broker, decision)
    assert isinstance(decision.reply, AlterClientQuotasResponse)
    return [result.error_code for result in decision.reply.entries]


def describe(broker: Broker, *components: ComponentData, strict: bool = False) -> list[dict[str, object]]:
    request = DescribeClientQuotasRequest(components=list(components), strict=strict)
    reply = describe_client_quotas(broker, request, caller(1), now()).reply
    assert isinstance(reply, DescribeClientQuotasResponse)
    assert reply.error_code == 0, reply.error_message
    return [
        {part.entity_type: part.entity_name for part in found.entity}
        | {value.key: value.value for value in found.values}
        for found in reply.entries or ()
    ]


def exact(kind: str, name: str) -> ComponentData:
    return ComponentData(entity_type=kind, match_type=MatchType.EXACT, match=name)


def default(kind: str) -> ComponentData:
    return ComponentData(entity_type=kind, match_type=MatchType.DEFAULT, match=None)


def anything(kind: str) -> ComponentData:
    return ComponentData(entity_type=kind, match_type=MatchType.ANY, match=None)


@pytest.fixture
def broker() -> Broker:
    """One quota for each kind of entity, told apart by its value."""
    broker = new_broker()
    codes = alter(
        broker,
        entry({"user": "ann", "client-id": "etl"}, producer_byte_rate=1),
        entry({"user": "ann", "client-id": None}, producer_byte_rate=2),
        entry({"user": "ann"}, producer_byte_rate=3),
        entry({"user": None, "client-id": "etl"}, producer_byte_rate=4),
        entry({"user": None, "client-id": None}, producer_byte_rate=5),
        entry({"user": None}, producer_byte_rate=6),
        entry({"client-id": "etl"}, producer_byte_rate=7),
        entry({"client-id": None}, producer_byte_rate=8),
    )
    assert codes == [0] * 8
    return broker


def test_the_most_specific_quota_counts(broker: Broker) -> None:
    order: list[tuple[Names, str, str, Quota]] = [
        ({"user": "ann", "client-id": "etl"}, "ann", "etl", Quota(1, "ann", "etl")),
        ({"user": "ann", "client-id": None}, "ann", "etl", Quota(2, "ann", "etl")),
        ({"user": "ann"}, "ann", "etl", Quota(3, "ann", None)),
        ({"user": None, "client-id": "etl"}, "ann", "etl", Quota(4, "ann", "etl")),
        ({"user": None, "client-id": None}, "ann", "etl", Quota(5, "ann", "etl")),
        ({"user": None}, "ann", "etl", Quota(6, "ann", None)),
        ({"client-id": "etl"}, "ann", "etl", Quota(7, None, "etl")),
        ({"client-id": None}, "ann", "etl", Quota(8, None, "etl")),
    ]
    for entity, user, client_id, quota in order:
        assert broker.quotas.quota(PRODUCE, user, client_id) == quota
        assert alter(broker, entry(entity, producer_byte_rate=None)) == [0]
    assert broker.quotas.quota(PRODUCE, "ann", "etl") is None
    assert broker.quotas.by_entity == {}


def test_a_more_specific_entity_without_that_value_does_not_count(broker: Broker) -> None:
    alter(broker, entry({"client-id": None}, request_percentage=50))
    assert broker.quotas.quota(REQUESTS, "ann", "etl") == Quota(50, None, "etl")
    assert broker.quotas.quota(PRODUCE, "ann", "etl") == Quota(1, "ann", "etl")


def test_filters_find_by_name_default_and_type(broker: Broker) -> None:
    assert len(describe(broker)) == 8
    values = [found[PRODUCE] for found in describe(broker, exact("user", "ann"))]
    assert values == [1, 2, 3]
    assert [found[PRODUCE] for found in describe(broker, exact("user", "ann"), strict=True)] == [3]
    assert [found[PRODUCE] for found in describe(broker, default("user"), default("client-id"))] == [5]
    assert [found[PRODUCE] for found in describe(broker, anything("client-id"), strict=True)] == [7, 8]
    assert describe(broker, exact("user", "bob")) == []
    assert describe(broker, anything("ip")) == []
    assert describe(broker, strict=True) == []


@pytest.mark.parametrize(
    ("components", "code"),
    [
        ([anything("planet")], ErrorCode.UNSUPPORTED_VERSION),
        ([anything("user"), default("user")], ErrorCode.INVALID_REQUEST),
        ([ComponentData(entity_type="user", match_type=9, match=None)], ErrorCode.INVALID_REQUEST),
        ([ComponentData(entity_type="user", match_type=0, match=None)], ErrorCode.INVALID_REQUEST),
    ],
)
def test_filters_that_mean_nothing_are_refused(components: list[ComponentData], code: int) -> None:
    request = DescribeClientQuotasRequest(components=components)
    reply = describe_client_quotas(new_broker(), request, caller(1), now()).reply
    assert isinstance(reply, DescribeClientQuotasResponse)
    assert (reply.error_code, reply.entries) == (code, None)


@pytest.mark.parametrize(
    "refused",
    [
        entry({}, producer_byte_rate=1),
        entry({"ip": "10.0.0.1"}, producer_byte_rate=1),
        entry({"user": ""}, producer_byte_rate=1),
        entry({"user": "ann"}, controller_mutation_rate=1),
        entry({"user": "ann"}, producer_byte_rate=0.0),
        entry({"user": "ann"}, producer_byte_rate=-5),
        entry({"user": "ann"}, producer_byte_rate=1.5),
        entry({"user": "ann"}, request_percentage=nan),
        entry({"user": "ann"}, request_percentage=inf),
        RequestEntryData(entity=[EntityData("user", "a"), EntityData("user", "b")], ops=[]),
    ],
)
def test_what_is_no_quota_is_refused_and_the_rest_is_taken(refused: RequestEntryData) -> None:
    broker = new_broker()
    codes = alter(broker, refused, entry({"user": "bob"}, request_percentage=12.5))
    assert codes == [ErrorCode.INVALID_REQUEST, 0]
    assert describe(broker) == [{"user": "bob", REQUESTS: 12.5}]


def test_values_are_added_replaced_and_removed_one_by_one() -> None:
    broker = new_broker()
    alter(broker, entry({"user": "ann"}, producer_byte_rate=10, request_percentage=5))
    alter(broker, entry({"user": "ann"}, producer_byte_rate=20, consumer_byte_rate=7))
    alter(broker, entry({"user": "ann"}, request_percentage=None))
    assert describe(broker) == [{"user": "ann", PRODUCE: 20, "consumer_byte_rate": 7}]


def test_a_rehearsal_changes_nothing() -> None:
    broker = new_broker()
    assert alter(broker, entry({"user": "ann"}, producer_byte_rate=10), validate_only=True) == [0]
    assert describe(broker) == []


def test_an_entity_named_twice_in_a_request_is_taken_once() -> None:
    wanted = entry({"client-id": "a", "user": "b"}, producer_byte_rate=10)
    other = entry({"user": "b", "client-id": "a"}, producer_byte_rate=20)
    broker = new_broker()
    assert alter(broker, wanted, other) == [0, ErrorCode.INVALID_REQUEST]
    assert [found[PRODUCE] for found in describe(broker)] == [10]


def test_quotas_survive_in_the_journal_and_in_a_snapshot(broker: Broker) -> None:
    replayed, loaded = new_broker(), new_broker()
    for entity, values in broker.quotas.by_entity.items():
        stored = b"".join(bytes(piece) for piece in encode_entry(quota_set(entity, values)))
        replayed.apply(decode_entry(memoryview(stored)))
    part = decode_part(memoryview(encode_catalog(broker)))
    load_catalog(loaded, part)  # type: ignore[arg-type]
    assert replayed.quotas.by_entity == loaded.quotas.by_entity == broker.quotas.by_entity


def test_the_number_of_quotas_and_of_remembered_clients_is_limited() -> None:
    broker = new_broker()
    for number in range(MAX_ENTITIES):
        broker.apply(quota_set((("user", str(number)),), {PRODUCE: 1.0}))
    assert alter(broker, entry({"user": "more"}, producer_byte_rate=1)) == [ErrorCode.INVALID_REQUEST]
    assert alter(broker, entry({"user": "7"}, producer_byte_rate=None)) == [0]
    for number in range(MAX_REMEMBERED + 2):
        broker.quotas.quota(PRODUCE, "ANONYMOUS", f"client-{number}")
    assert broker.quotas.remembered <= MAX_REMEMBERED
