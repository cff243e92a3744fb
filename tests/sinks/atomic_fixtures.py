"""Fixtures for tests of transactions over a topic and a database."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from atomic_cases import Target
from broker_process import BrokerProcess
from postgres_server import PostgresServer

TWO_PHASE = {"transaction.two.phase.commit.enable": "true"}


@pytest.fixture(scope="session")
def two_phase_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with two-phase commit; tests that kill it start it again."""
    process = BrokerProcess(tmp_path_factory.mktemp("two-phase") / "broker", TWO_PHASE).start()
    try:
        yield process
        assert "this is a bug" not in process.log, process.log
    finally:
        process.kill()


@pytest.fixture
async def target(two_phase_broker: BrokerProcess, postgres_cluster: PostgresServer) -> Target:
    """A topic and a database of this test's own."""
    label = f"atomic_{uuid.uuid4().hex[:10]}"
    postgres_cluster.query(f"CREATE DATABASE {label}")
    dsn = postgres_cluster.dsn.replace("dbname=postgres", f"dbname={label}")
    target = Target(two_phase_broker.bootstrap, dsn, label)
    await target.make()
    return target
