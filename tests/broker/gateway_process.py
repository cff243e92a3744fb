"""A gateway that dies at a given step of its owners' work: run by the tests as a process of its own.

TEST_DIE_AT is a step and a number, as for `subscriber_process`: `offsets-sent:3` dies by SIGKILL when that
step is taken for the third time.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from subscriber_process import Fate
from subscription_cases import quick

from semel.subscriptions.grpc.server import GatewayServer


async def main(bootstrap: str, address: str) -> None:
    options = quick(max_in_flight=8, on_step=Fate("TEST_DIE_AT", signal.SIGKILL))
    async with GatewayServer(bootstrap, address, defaults=options):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
