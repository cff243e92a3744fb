"""Applications that come back after the broker has forgotten them go on, and nothing is lost or doubled."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Final

import pytest
from broker_process import BrokerProcess
from client_java import Java
from raw_client import RawClient
from txn_cases import COMMITTED, LIBRARIES, Library, create_topic, values

from semel.wire.errors import ErrorCode
from semel.wire.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    TopicRequest,
)
from semel.wire.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)

SETTINGS: Final = {"log.retention.check.interval.ms": "100"}
SHORT_MS: Final = "300"
PATIENCE_S: Final = 20.0
PAUSE_S: Final = 0.05


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, broker_of_short_memory: BrokerProcess) -> Iterator[Library]:
    if request.param == "java" and Java.missing() is not None:
        pytest.skip(f"no Java client: {Java.missing()}")
    made = LIBRARIES[request.param](broker_of_short_memory.bootstrap)
    yield made
    made.close()


@pytest.fixture(scope="module", params=("producer.id.expiration.ms", "transactional.id.expiration.ms"))
def broker_of_short_memory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """It forgets idle producers, or idle transactional ids, within a second."""
    settings = {**SETTINGS, request.param: SHORT_MS}
    process = BrokerProcess(tmp_path_factory.mktemp("memory") / "broker", settings).start()
    yield process
    process.kill()
    assert "this is a bug" not in process.log, process.log


def is_forgotten(client: RawClient, process: BrokerProcess, name: str) -> bool:
    if "producer.id.expiration.ms" in process.settings:
        request = DescribeProducersRequest(topics=[TopicRequest(name=name, partition_indexes=[0])])
        (topic,) = client.ask(request, 0, DescribeProducersResponse).topics
        return not topic.partitions[0].active_producers
    asked = DescribeTransactionsRequest(transactional_ids=[name])
    (state,) = client.ask(asked, 0, DescribeTransactionsResponse).transaction_states
    return state.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


def wait_until_forgotten(process: BrokerProcess, name: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    with RawClient(process.port) as client:
        while not is_forgotten(client, process, name):
            assert time.monotonic() < give_up
            time.sleep(PAUSE_S)


def test_an_application_goes_on_after_it_was_forgotten(
    broker_of_short_memory: BrokerProcess, library: Library
) -> None:
    name = f"t-{uuid.uuid4().hex[:10]}"
    create_topic(broker_of_short_memory.bootstrap, name)
    producer = library.producer(name)
    producer.begin()
    producer.send(name, 0, "before-", 3)
    producer.commit()
    wait_until_forgotten(broker_of_short_memory, name)
    if "transactional.id.expiration.ms" in broker_of_short_memory.settings:
        # The id is another one now: as with Kafka, the next instance begins it anew.
        producer.close()
        producer = library.producer(name)
    producer.begin()
    producer.send(name, 0, "after-", 3)
    producer.commit()
    producer.close()
    assert library.read(name, 0, COMMITTED) == [*values("before-", 3), *values("after-", 3)]
