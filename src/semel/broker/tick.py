"""What has come due: the core has no clock, so whoever has one asks from time to time."""

from __future__ import annotations

from collections.abc import Iterator

from semel.broker.core import Broker
from semel.broker.decision import Decision, Now
from semel.broker.transactions.timeouts import abort_expired


def tick(broker: Broker, now: Now) -> Iterator[Decision]:
    """Decide what has come due. Each decision must be applied before the next one is asked for."""
    yield from broker.groups.tick(now, broker.catalog)
    yield from abort_expired(broker, now)
