"""Fixtures for tests of a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from broker_fixtures import broker, kafka_broker, output, start_broker, topic  # noqa: F401
from broker_process import BrokerProcess

from semel.client.cluster import Cluster
from semel.embedded import Broker


@pytest.fixture(scope="session", params=["serve", "embedded"])
def bootstrap(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One broker for all tests of clients: a durable process on uvloop, or in memory on asyncio's loop."""
    if request.param == "embedded":
        with Broker() as embedded:
            yield embedded.bootstrap
        return
    process = BrokerProcess(tmp_path_factory.mktemp("interop") / "broker").start()
    try:
        yield process.bootstrap
        assert "this is a bug" not in process.log, process.log
        assert process.stop() == 0, process.log
    finally:
        process.kill()


@pytest.fixture(scope="module")
def semel_broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """Semel, one for each module of tests that are held to the same claims as Kafka."""
    process = BrokerProcess(tmp_path_factory.mktemp(request.module.__name__) / "broker").start()
    try:
        yield process
        assert "this is a bug" not in process.log, process.log
    finally:
        process.kill()


@pytest.fixture
async def cluster(bootstrap: str) -> AsyncIterator[Cluster]:
    """A client of the broker that the test is about."""
    async with Cluster(bootstrap) as connected:
        yield connected
