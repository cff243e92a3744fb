"""The examples of docs/sinks.md, as they stand there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from broker_process import BrokerProcess
from transaction_cases import make_topic, read_committed

from semel.client.cluster import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "sinks.md"


@pytest.fixture
def names() -> dict[str, Any]:
    """What the page's examples define."""
    found: dict[str, Any] = {"__name__": "docs"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), found)
    return found


async def test_the_examples_of_the_page_do_what_they_say(
    semel_broker: BrokerProcess, names: dict[str, Any]
) -> None:
    bootstrap = semel_broker.bootstrap
    async with Cluster(bootstrap) as cluster:
        await make_topic(cluster, "orders")
        await names["main"](bootstrap)
        await asyncio.to_thread(names["run"], bootstrap)
        await asyncio.to_thread(names["own"], bootstrap)
        assert await read_committed(cluster, "orders") == [[b"first", b"second"] * 3]
