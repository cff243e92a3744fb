"""Pytest fixtures: a broker for the session, and a topic for each test.

semel_broker    a broker in memory, on a free port; `semel_broker.bootstrap` is all a client needs
semel_topic     the name of a fresh topic with one partition, deleted after the test
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from semel.embedded import Broker

_REWRITING = "_pytest.assertion.rewrite"


@contextmanager
def _as_compiled() -> Iterator[None]:
    """Imports take modules as they are compiled.

    pytest rewrites the assertions in all modules of a package that brings a plugin. For a broker that takes
    a second the first time, and half of its start every time.
    """
    finders = list(sys.meta_path)
    sys.meta_path[:] = [finder for finder in finders if type(finder).__module__ != _REWRITING]
    try:
        yield
    finally:
        sys.meta_path[:] = finders


@pytest.fixture(scope="session")
def semel_broker() -> Iterator[Broker]:
    """A broker in memory that all tests of the session share."""
    with _as_compiled():
        from semel.client import admin, cluster  # noqa: F401 - for the topics, later
        from semel.embedded import Broker

        broker = Broker().start()
    yield broker
    broker.stop()


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
