"""A subscriber that dies, or stops, at a given step: run by the tests as a process of its own.

Copies every delivery of a topic to another, key and value, with one transaction each. TEST_DIE_AT is a step
of the owner (`SubscriptionOptions.on_step`) and a number: `offsets-sent:3` dies by SIGKILL when that step is
taken for the third time. TEST_STOP_AT does the same with SIGSTOP. TEST_POISON is a value that kills the
process whenever it is delivered; TEST_NACK one that always fails. Each delivery that is handed to the program
is written to stdout, and flushed, before anything is done with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from subscription_cases import quick

from semel.client.cluster import Cluster
from semel.subscriptions import Delivery, Subscription


class Fate:
    """Ends or stops this process at a step."""

    def __init__(self, name: str, number: signal.Signals) -> None:
        step, _, count = os.environ.get(name, "").partition(":")
        self.step = step
        self.left = int(count or 1)
        self.number = number

    def __call__(self, step: str) -> None:
        if step == self.step:
            self.left -= 1
            if not self.left:
                print(f"end {step}", flush=True)
                os.kill(os.getpid(), self.number)


async def main(bootstrap: str, topic: str, group: str, output: str, concurrency: int) -> None:
    fates = (Fate("TEST_DIE_AT", signal.SIGKILL), Fate("TEST_STOP_AT", signal.SIGSTOP))
    poison = os.environ.get("TEST_POISON", "").encode()
    bad = os.environ.get("TEST_NACK", "").encode()

    def on_step(step: str) -> None:
        for fate in fates:
            fate(step)

    async def handle(delivery: Delivery) -> None:
        value = delivery.value or b""
        print("took", delivery.partition, delivery.offset, delivery.attempt, value.decode(), flush=True)
        if value == poison:
            os.kill(os.getpid(), signal.SIGKILL)
        tx = delivery.transaction()
        await tx.publish(output, value, key=delivery.key)
        if value == bad:
            raise ValueError("bad")
        on_step("handled")

    options = quick(
        max_in_flight=8,
        max_attempts=int(os.environ.get("TEST_MAX_ATTEMPTS", "3")),
        delivery_timeout_ms=int(os.environ.get("TEST_DELIVERY_TIMEOUT_MS", "30000")),
        max_transaction_version=int(os.environ.get("TEST_VERSION", "2")),
        on_step=on_step,
    )
    async with Cluster(bootstrap) as cluster, Subscription(cluster, [topic], group, options) as subscription:
        print("ready", flush=True)
        await subscription.channel().run(handle, concurrency=concurrency)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5], int(sys.argv[5])))
