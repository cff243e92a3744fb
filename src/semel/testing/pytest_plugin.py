"""Pytest fixtures: a broker for the session, and a topic for each test.

semel_broker    a broker in memory, on a free port; `semel_broker.bootstrap` is all a client needs
semel_topic     the name of a fresh topic with one partition, deleted after the test
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from semel.embedded import Broker


@pytest.fixture(scope="session")
def semel_broker() -> Iterator[Broker]:
    """A broker in memory that all tests of the session share."""
    from semel.embedded import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture
def semel_topic(semel_broker: Broker) -> Iterator[str]:
    """A fresh topic with one partition."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    asyncio.run(_create(semel_broker.bootstrap, name))
    yield name
    asyncio.run(_delete(semel_broker.bootstrap, name))


async def _create(bootstrap: str, name: str) -> None:
    from semel.client.admin import Admin
    from semel.client.cluster import Cluster

    async with Cluster(bootstrap) as cluster:
        await Admin(cluster).create_topic(name)


async def _delete(bootstrap: str, name: str) -> None:
    from semel.client.admin import Admin
    from semel.client.cluster import Cluster

    async with Cluster(bootstrap) as cluster:
        await Admin(cluster).delete_topics([name])
