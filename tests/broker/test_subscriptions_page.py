"""The examples of docs/subscriptions.md and docs/grpc.md, as they stand there."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from broker_process import StartBroker
from subscription_cases import fill, values
from transaction_cases import make_topic

from semel.client.cluster import Cluster
from semel.subscriptions.grpc.server import GatewayServer
from semel.subscriptions.stages import run_stages

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "subscriptions.md", DOCS / "grpc.md")
COUNT = 5


@pytest.fixture
def names() -> dict[str, Any]:
    """What the pages' examples define."""
    found: dict[str, Any] = {"__name__": "docs"}
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            exec(compile(block, str(page), "exec"), found)
    return found


async def wait_for_invoices(cluster: Cluster, topic: str, count: int = COUNT) -> list[bytes | None]:
    async with asyncio.timeout(60):
        while len(found := await values(cluster, topic)) < count:  # noqa: ASYNC110 - of other tasks
            await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("example", "prefix"),
    [("invoice_orders", b"invoice for "), ("invoice_in_parallel", b""), ("invoice_in_batches", b"")],
)
async def test_the_examples_of_the_page_run(
    start_broker: StartBroker, names: dict[str, Any], example: str, prefix: bytes
) -> None:
    broker = start_broker(in_memory=True)
    async with Cluster(broker.bootstrap) as cluster:
        await fill(cluster, "orders", COUNT, keys=2)
        await make_topic(cluster, "invoices")
        running = asyncio.create_task(names[example](broker.bootstrap))
        assert await wait_for_invoices(cluster, "invoices") == [
            prefix + b"%d" % number for number in range(COUNT)
        ]
        running.cancel()
        await asyncio.wait([running])


async def test_the_example_without_asyncio_runs(start_broker: StartBroker, names: dict[str, Any]) -> None:
    broker = start_broker(in_memory=True)
    async with Cluster(broker.bootstrap) as cluster:
        await fill(cluster, "orders", COUNT, keys=2)
        await make_topic(cluster, "invoices")
        arguments = (broker.bootstrap,)
        threading.Thread(target=names["invoice_orders_sync"], args=arguments, daemon=True).start()
        assert len(await wait_for_invoices(cluster, "invoices")) == COUNT


async def test_the_stages_of_the_page_run(start_broker: StartBroker, names: dict[str, Any]) -> None:
    broker = start_broker(in_memory=True)
    async with Cluster(broker.bootstrap) as cluster:
        await fill(cluster, "orders", COUNT, keys=2)
        await make_topic(cluster, "invoices")
        await make_topic(cluster, "mails")
        running = asyncio.create_task(run_stages(broker.bootstrap, [names["invoice"], names["mail"]]))
        assert await wait_for_invoices(cluster, "mails") == [
            b"invoice for %d" % number for number in range(COUNT)
        ]
        running.cancel()
        await asyncio.wait([running])


async def test_the_example_over_grpc_runs(start_broker: StartBroker, names: dict[str, Any]) -> None:
    broker = start_broker(in_memory=True)
    async with Cluster(broker.bootstrap) as cluster:
        await fill(cluster, "orders", COUNT, keys=2)
        await make_topic(cluster, "invoices")
        async with GatewayServer(broker.bootstrap, "127.0.0.1:0") as gateway:
            running = asyncio.create_task(names["invoice_by_grpc"](f"127.0.0.1:{gateway.port}"))
            found = await wait_for_invoices(cluster, "invoices")
            assert found == [b"%d" % number for number in range(COUNT)]
            running.cancel()
            await asyncio.wait([running])
