"""A subscriber over gRPC that dies at a given step: run by the tests as a process of its own.

Copies every delivery to another topic, up to three at a time. TEST_DIE_AT is what it has just received or
sent (ready, delivery, begun, stated, applied, acked, committed) and a number: it dies by SIGKILL then.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from gateway_cases import GrpcSubscriber
from subscriber_process import Fate


async def main(address: str, topic: str, output: str) -> None:
    step = Fate("TEST_DIE_AT", signal.SIGKILL)
    async with GrpcSubscriber(address) as subscriber:
        await subscriber.setup(topic, open_at_once=3)
        step("ready")
        while True:
            response = await subscriber.receive()
            kind = response.WhichOneof("message")
            print(kind, flush=True)
            step(str(kind))
            if kind == "delivery":
                delivery = response.delivery
                await subscriber.begin(delivery.delivery_id)
                step("begun")
                (record,) = delivery.records
                await subscriber.state(delivery.delivery_id, 1, output, record.value, key=record.key)
                step("stated")
            elif kind == "applied":
                await subscriber.ack(response.applied.delivery_id)
                step("acked")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
