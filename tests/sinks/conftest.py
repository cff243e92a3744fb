"""Fixtures for tests of sinks on real servers."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "broker"))

from atomic_fixtures import target, two_phase_broker  # noqa: F401
from broker_fixtures import kafka_broker, start_broker, topic  # noqa: F401
from broker_process import BrokerProcess
from kafka_process import KafkaProcess
from mariadb_server import mariadb, mariadb_server, sql_server  # noqa: F401
from postgres_server import postgres, postgres_cluster  # noqa: F401
from table_cases import make_table, table  # noqa: F401

from semel.client.cluster import Cluster


@pytest.fixture(scope="session")
def semel_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A durable broker, one for all tests that do not hurt it."""
    process = BrokerProcess(tmp_path_factory.mktemp("sinks") / "broker").start()
    try:
        yield process
        assert "this is a bug" not in process.log, process.log
    finally:
        process.kill()


@pytest.fixture(params=["semel", "kafka"])
def target_broker(request: pytest.FixtureRequest) -> BrokerProcess | KafkaProcess:
    """Semel, then Kafka."""
    process: BrokerProcess | KafkaProcess = request.getfixturevalue(f"{request.param}_broker")
    return process


@pytest.fixture
def bootstrap(target_broker: BrokerProcess | KafkaProcess) -> str:
    return target_broker.bootstrap


@pytest.fixture
async def cluster(bootstrap: str) -> AsyncIterator[Cluster]:
    async with Cluster(bootstrap) as connected:
        yield connected


@pytest.fixture
def sink_id() -> str:
    """A sink of this test's own."""
    return f"sink-{uuid.uuid4().hex[:12]}"
