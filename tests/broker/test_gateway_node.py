"""A subscriber in JavaScript, made from the .proto, takes part through the gateway.

The packages come from the npm registry once, into `.deps/grpc_client` of the checkout. Without Node.js, or
where they cannot be had, the test is skipped and says why.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from broker_process import BrokerProcess
from subscription_cases import entry_of, fill, quick, records
from transaction_cases import make_topic

from semel.client.cluster import Cluster
from semel.subscriptions.grpc.server import GatewayServer

CHECKOUT: Final = Path(__file__).parents[2]
SOURCES: Final = CHECKOUT / "tests" / "grpc_client"
PACKAGES: Final = CHECKOUT / ".deps" / "grpc_client"
PROTO: Final = CHECKOUT / "src" / "semel" / "subscriptions" / "grpc" / "subscriptions.proto"
INSTALL_TIMEOUT_S: Final = 300
RUN_TIMEOUT_S: Final = 60
COUNT: Final = 20


@cache
def why_no_packages() -> str | None:
    """Install the packages; the reason if that is not possible."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (apt install nodejs npm)"
    wanted = (SOURCES / "package.json").read_text()
    installed, complete = PACKAGES / "package.json", PACKAGES / "complete"
    if complete.exists() and installed.read_text() == wanted:
        return None
    PACKAGES.mkdir(parents=True, exist_ok=True)
    installed.write_text(wanted)
    fetched = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"],
        cwd=PACKAGES,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    if fetched.returncode != 0:
        return f"the packages cannot be installed: {fetched.stderr.strip()[-500:]}"
    complete.touch()
    return None


async def test_a_client_made_from_the_proto_copies_in_transactions(broker: BrokerProcess, topic: str) -> None:
    missing = await asyncio.to_thread(why_no_packages)
    if missing is not None:
        pytest.skip(missing)
    output = f"{topic}-out"
    async with Cluster(broker.bootstrap) as cluster:
        await fill(cluster, topic, COUNT, keys=7)
        await make_topic(cluster, output)
        async with GatewayServer(broker.bootstrap, "127.0.0.1:0", defaults=quick()) as gateway:
            done = await asyncio.to_thread(run_client, f"127.0.0.1:{gateway.port}", topic, output)
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
        copied = await records(cluster, output)
        assert sorted(int(record.value or b"") for record in copied) == list(range(COUNT))
        for record in copied:
            assert record.key == b"k%d" % (int(record.value or b"") % 7)
            assert list(record.headers) == [("by", b"node")]
        entry = await entry_of(cluster, topic, topic)
        assert entry is not None and (entry.offset, entry.acknowledged) == (COUNT, ())


def run_client(address: str, topic: str, output: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["node", str(SOURCES / "main.js"), str(PROTO), address, topic, output, str(COUNT)],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        env={**os.environ, "NODE_PATH": str(PACKAGES / "node_modules")},
    )
