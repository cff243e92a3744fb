"""ApiVersions of this broker and of Apache Kafka: the same keys and ranges, but for what is named here."""

from __future__ import annotations

from typing import Final

from broker_process import BrokerProcess
from kafka_process import KafkaProcess
from raw_client import RawClient

from semel.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse

VERSION: Final = 4
INIT_PRODUCER_ID: Final = 22
NOT_SERVED: Final = {
    *(17, 36),  # SASL
    *(38, 39, 40, 41),  # delegation tokens
    *(64, 80, 81),  # brokers and Raft voters that come and go
    *(76, 77, 78, 79, 83, 84, 85, 86, 87, 90, 91, 92),  # share groups
    *(88, 89),  # streams groups
}


def ask(port: int) -> ApiVersionsResponse:
    with RawClient(port) as client:
        request = ApiVersionsRequest(client_software_name="test", client_software_version="1")
        return client.ask(request, VERSION, ApiVersionsResponse)


def ranges(answer: ApiVersionsResponse) -> dict[int, tuple[int, int]]:
    return {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}


def test_keys_and_ranges_are_those_of_kafka(broker: BrokerProcess, kafka_broker: KafkaProcess) -> None:
    ours, theirs = ranges(ask(broker.port)), ranges(ask(kafka_broker.port))
    expected = {key: versions for key, versions in theirs.items() if key not in NOT_SERVED}
    # Version 6 brings prepared transactions (KIP-939), which Kafka has but does not announce yet.
    expected[INIT_PRODUCER_ID] = (0, 6)
    assert ours == expected
    assert theirs.keys() > NOT_SERVED


def test_features_that_clients_act_on_are_at_the_levels_of_kafka(
    broker: BrokerProcess, kafka_broker: KafkaProcess
) -> None:
    def finalized(port: int) -> dict[str, int]:
        return {feature.name: feature.max_version_level for feature in ask(port).finalized_features}

    ours, theirs = finalized(broker.port), finalized(kafka_broker.port)
    acted_on = ("transaction.version", "group.version")
    assert {name: ours[name] for name in acted_on} == {name: theirs[name] for name in acted_on}
