"""The examples of docs/client.md, as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broker_process import StartBroker
from transaction_cases import read_committed

from semel.client.cluster import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "client.md"


@pytest.fixture
def bootstrap(start_broker: StartBroker) -> Iterator[str]:
    yield start_broker(in_memory=True, transaction_two_phase_commit_enable="true").bootstrap


@pytest.fixture
def names() -> dict[str, Any]:
    """What the page's examples define."""
    found: dict[str, Any] = {"__name__": "docs"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), found)
    return found


async def test_the_examples_of_the_client_page_do_what_they_say(
    bootstrap: str, names: dict[str, Any]
) -> None:
    await names["main"](bootstrap)
    async with Cluster(bootstrap) as cluster:
        first = await read_committed(cluster, "orders")
        assert sorted(value for values in first for value in values) == [b"first", b"second"]
        await names["own"](cluster)
        second = await read_committed(cluster, "orders")
        assert [values[-1:] for values in second[:2]] == [[b"value"], [b"value"]]


async def test_the_two_phase_example_publishes_and_recovers(bootstrap: str, names: dict[str, Any]) -> None:
    async with Cluster(bootstrap) as cluster:
        await names["main"](bootstrap)
        before = sum(map(len, await read_committed(cluster, "orders")))
        database: dict[str, str] = {}
        await names["publish"](cluster, database)
        assert list(database) == ["outbox"]
        await names["recover"](cluster, database)
        assert sum(map(len, await read_committed(cluster, "orders"))) == before + 1
