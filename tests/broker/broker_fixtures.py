"""Brokers as fixtures, for the conftests alone: a test module that imports them gets others of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker_process import BrokerProcess, StartBroker
from kafka_process import KafkaProcess, why_no_kafka


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """Start broker processes; they are killed and their logs shown when the test is over."""
    started: list[BrokerProcess] = []

    def start(directory: Path | None = None, *, in_memory: bool = False, **settings: object) -> BrokerProcess:
        named = {name.replace("_", "."): str(value) for name, value in settings.items()}
        name = f"broker-{len(started)}"
        broker = BrokerProcess(
            directory or tmp_path / name, named, in_memory=in_memory, log_path=tmp_path / f"{name}.log"
        )
        started.append(broker)
        return broker.start()

    yield start
    for broker in started:
        broker.kill()
        print(f"--- log of {broker.directory.name} ---\n{broker.log}")


@pytest.fixture
def broker(start_broker: StartBroker) -> BrokerProcess:
    """A durable broker process of this test's own, with the default settings."""
    return start_broker()


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaProcess]:
    """Apache Kafka, one for all tests that hold it to the same claims."""
    yield from run_kafka(tmp_path_factory.mktemp("kafka") / "broker")


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[KafkaProcess]:
    """Apache Kafka for one test, which may kill it."""
    yield from run_kafka(tmp_path / "kafka")


def run_kafka(directory: Path) -> Iterator[KafkaProcess]:
    missing = why_no_kafka()
    if missing is not None:
        pytest.skip(missing)
    process = KafkaProcess(directory)
    try:
        yield process.start()
    finally:
        process.kill()


@pytest.fixture
def topic() -> str:
    """A topic name of this test's own."""
    return f"topic-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def output(topic: str) -> str:
    """Another, for what is made of the first one's records."""
    return f"{topic}-out"
