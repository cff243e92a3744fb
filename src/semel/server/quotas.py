"""Client quotas enforced: what each client has used lately, and how long it waits when that was too much.

A client may save up what it does not use for `SAVED_S` seconds, as long as Kafka looks back by default.
What it uses beyond that is a debt, and the debt is paid in time: the answer goes out at once and names
the wait in `throttle_time_ms`, and for that long no further request of the connection is read (KIP-219).
Records that a client has not saved up for are not sent: its fetch is answered with none, and the wait is
until it may have them. All time is monotonic; nothing of this is journaled.

Three things are counted: bytes of Produce requests, bytes of records in Fetch answers, and the time that
the event loop spends on a client's requests, as a percentage of one core. The last is known only
afterwards, so it is the next request that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Final

from semel.broker.quotas import (
    CONSUMER_BYTE_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    Quota,
    Quotas,
)
from semel.server.connection import Slot
from semel.wire.frames import Message
from semel.wire.messages.produce import ProduceRequest

SAVED_S: Final = 10
MAX_REQUEST_THROTTLE_MS: Final = 1_000
"""A wait for loop time is cut here, as in Kafka: a heartbeat must get through."""
MAX_METERS: Final = 10_000
ANONYMOUS: Final = "ANONYMOUS"
_NS_PER_PERCENT: Final = 10_000_000
"""Of a second."""


class Meter:
    """What a client owes; what it has saved up is a debt below 0."""

    __slots__ = ("_at_ms", "_debt")

    def __init__(self, limit: float, now_ms: int) -> None:
        self._debt = -limit * SAVED_S
        self._at_ms = now_ms

    def charge(self, amount: float, limit: float, now_ms: int) -> int:
        """Use `amount` under a limit per second; the wait in ms until nothing is owed."""
        paid = self._debt - limit * (now_ms - self._at_ms) / 1000
        self._at_ms = now_ms
        self._debt = max(paid, -limit * SAVED_S) + amount
        return ceil(self._debt * 1000 / limit) if self._debt > 0 else 0

    def afford(self, amount: float, limit: float, now_ms: int) -> int:
        """Use `amount` if so much is saved up, or nothing; the wait in ms until it may be used.

        Whoever has saved up all that can be saved may use any amount: otherwise it could never have more.
        """
        self.charge(0, limit, now_ms)
        most = limit * SAVED_S
        missing = self._debt + min(amount, most)
        if missing > 0:
            return ceil(missing * 1000 / limit)
        self._debt += amount
        return 0


class ClientMeters:
    """The meters of all clients that have a quota."""

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        self._meters: dict[tuple[str, str | None, str | None], Meter] = {}

    def admit(self, quotas: Quotas, slot: Slot, request: Message) -> None:
        """A request was read: make its client wait if it is in debt."""
        quota = _quota(quotas, REQUEST_PERCENTAGE, slot)
        throttle_ms = 0
        if quota is not None:
            throttle_ms = min(self._charge(REQUEST_PERCENTAGE, quota, 0), MAX_REQUEST_THROTTLE_MS)
        if isinstance(request, ProduceRequest):
            quota = _quota(quotas, PRODUCER_BYTE_RATE, slot)
            if quota is not None:
                throttle_ms = max(throttle_ms, self._charge(PRODUCER_BYTE_RATE, quota, slot.size))
        if throttle_ms:
            slot.throttle(throttle_ms)

    def handled(self, quotas: Quotas, slot: Slot, elapsed_ns: int) -> None:
        """The event loop has spent this much time on a request."""
        quota = _quota(quotas, REQUEST_PERCENTAGE, slot)
        if quota is not None:
            self._charge(REQUEST_PERCENTAGE, quota, elapsed_ns / _NS_PER_PERCENT)

    def fetch_limit(self, quotas: Quotas, slot: Slot) -> int | None:
        """The most that one Fetch may read: with more the wait would be longer than a client looks back."""
        quota = _quota(quotas, CONSUMER_BYTE_RATE, slot)
        return None if quota is None else int(quota.limit * SAVED_S)

    def may_send(self, quotas: Quotas, slot: Slot, size: int) -> bool:
        """Whether a Fetch may be answered with this many bytes of records now; if not, its client waits."""
        quota = _quota(quotas, CONSUMER_BYTE_RATE, slot)
        if quota is not None:
            now_ms = self._monotonic_ms()
            throttle_ms = self._meter(CONSUMER_BYTE_RATE, quota, now_ms).afford(size, quota.limit, now_ms)
            if throttle_ms:
                slot.throttle(throttle_ms)
        return not slot.is_throttled

    def _charge(self, key: str, quota: Quota, amount: float) -> int:
        now_ms = self._monotonic_ms()
        return self._meter(key, quota, now_ms).charge(amount, quota.limit, now_ms)

    def _meter(self, key: str, quota: Quota, now_ms: int) -> Meter:
        name = (key, quota.user, quota.client_id)
        meter = self._meters.get(name)
        if meter is None:
            if len(self._meters) >= MAX_METERS:
                # The one that is there longest starts anew when it comes back, with nothing owed.
                del self._meters[next(iter(self._meters))]
            meter = self._meters[name] = Meter(quota.limit, now_ms)
        return meter


def _quota(quotas: Quotas, key: str, slot: Slot) -> Quota | None:
    return quotas.quota(key, ANONYMOUS, slot.header.client_id or "")
