"""What an `Atomic` that could not be opened leaves behind: nothing."""

from __future__ import annotations

import asyncio
import socket
import sys
import traceback
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "client"))

from fake_broker import FakeBroker

from semel.client.cluster import Cluster
from semel.errors import ConfigError
from semel.sinks.atomic import Atomic, transaction
from semel.sinks.errors import ConnectionLost, InitFailed
from semel.wire.apis import ApiKey

LATEST_WITHOUT_TWO_PHASE = 5
PATIENCE_S = 10.0


@pytest.fixture
def nowhere() -> str:
    """A database that is not there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"host=127.0.0.1 port={taken.getsockname()[1]} dbname=none"


async def all_hung_up(broker: FakeBroker) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while broker._writers:  # noqa: ASYNC110 - it happens in the network
            await asyncio.sleep(0.01)


async def test_nothing_stays_connected_to_a_broker_that_is_refused(nowhere: str) -> None:
    async with FakeBroker() as broker:
        broker.versions[ApiKey.INIT_PRODUCER_ID] = (0, LATEST_WITHOUT_TWO_PHASE)
        payments = transaction(kafka=broker.bootstrap, postgres=nowhere, name="payments")
        with pytest.raises(InitFailed, match="no two-phase commit"):
            async with payments:
                pass
        await all_hung_up(broker)


async def test_nothing_stays_connected_where_the_database_is_not_there(nowhere: str) -> None:
    async with FakeBroker() as broker:
        payments = Atomic(broker.bootstrap, nowhere, "payments")
        with pytest.raises(ConnectionLost, match="the database cannot be reached"):
            await payments.open()
        await all_hung_up(broker)


@pytest.mark.parametrize("wrong", ["foo=bar", "password=my secret", "connect_timeout=soon"])
async def test_a_dsn_that_cannot_be_read_is_said_without_what_is_in_it(wrong: str) -> None:
    async with FakeBroker() as broker:
        payments = Atomic(broker.bootstrap, f"host=127.0.0.1 port=1 {wrong}", "payments")
        with pytest.raises(ConfigError, match="connection string") as caught:
            await payments.open()
        assert "secret" not in "".join(traceback.format_exception(caught.value))
        await all_hung_up(broker)


async def test_a_cluster_that_was_given_stays_connected(nowhere: str) -> None:
    async with FakeBroker() as broker, Cluster(broker.bootstrap) as cluster:
        with pytest.raises(ConnectionLost):
            await Atomic(cluster, nowhere, "payments").open()
        assert broker._writers
