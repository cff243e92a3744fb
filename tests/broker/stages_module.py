"""Stages for the tests: doubles, and then drops what ends in 4."""

from __future__ import annotations

import os

from subscription_cases import QUICK

from semel.subscriptions import Delivery
from semel.subscriptions.stages import Out, stage

PREFIX = os.environ.get("TEST_PREFIX", "stages")


@stage(f"{PREFIX}-in", to=f"{PREFIX}-mid", group=f"{PREFIX}-double", options=QUICK)
def double(delivery: Delivery) -> bytes:
    return b"%d" % (2 * int(delivery.value or b""))


@stage(f"{PREFIX}-mid", to=f"{PREFIX}-out", group=f"{PREFIX}-split", options=QUICK)
async def split(delivery: Delivery) -> list[bytes | Out] | None:
    value = delivery.value or b""
    if value.endswith(b"4"):
        return None
    return [value, Out(b"copy of " + value, topic=f"{PREFIX}-copies")]
