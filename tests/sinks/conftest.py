"""Fixtures for tests of sinks on real servers."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "broker"))

from atomic_fixtures import target, two_phase_broker  # noqa: F401
from broker_process import BrokerProcess, StartBroker
from kafka_process import KafkaProcess, why_no_kafka
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


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaProcess]:
    """Apache Kafka, one for all tests that hold it to the same claims."""
    missing = why_no_kafka()
    if missing is not None:
        pytest.skip(missing)
    process = KafkaProcess(tmp_path_factory.mktemp("kafka") / "broker")
    try:
        yield process.start()
    finally:
        process.kill()


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """Start broker processes of one's own; they are killed and their logs shown when the test is over."""
    started: list[BrokerProcess] = []

    def start(directory: Path | None = None, **settings: object) -> BrokerProcess:
        named = {name.replace("_", "."): str(value) for name, value in settings.items()}
        name = f"broker-{len(started)}"
        process = BrokerProcess(directory or tmp_path / name, named, log_path=tmp_path / f"{name}.log")
        started.append(process)
        return process.start()

    yield start
    for process in started:
        process.kill()
        print(f"--- log of {process.directory.name} ---\n{process.log}")


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
def topic() -> str:
    """A topic name of this test's own."""
    return f"topic-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def sink_id() -> str:
    """A sink of this test's own."""
    return f"sink-{uuid.uuid4().hex[:12]}"
