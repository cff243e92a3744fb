"""The settings of a subscription, and their limits."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from semel.client.coordinator import VERSION_2
from semel.client.group_member import MemberOptions
from semel.errors import ConfigError
from semel.subscriptions.backoff import RedeliveryBackoff
from semel.subscriptions.entry import MAX_ATTEMPTS
from semel.wire.records import Record

MAX_IN_FLIGHT: Final = 400
"""Records of one partition that are out or held back: their marks and gaps have to fit one entry."""
MAX_STATEMENTS: Final = 100_000
"""Statements of one transaction."""
COMMIT_MARGIN_MS: Final = 30_000
"""What a transaction may take longer than its delivery: the wait for its turn, and the commit itself."""

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

Filter = Callable[[Record], bool]
Transform = Callable[[Record], Record]
OnStep = Callable[[str], None]


@dataclass(slots=True, frozen=True)
class SubscriptionOptions:
    """How deliveries are dealt. Everything but `dead_letter_topic` may differ between subscribers of a group.

    `max_in_flight` counts for each partition. `start` is where a group begins that has no offset yet.
    `filter` and `transform` see records before they are dealt; what they raise is a failed attempt.
    `max_transaction_version` 1 keeps to what brokers before Kafka 4 have.
    `on_step` is told each step of the owner's work (tests stop the process there).
    """

    max_in_flight: int = 16
    max_attempts: int = 5
    delivery_timeout_ms: int = 30_000
    batch_size: int = 1
    max_wait_ms: int = 50
    backoff: RedeliveryBackoff = field(default_factory=RedeliveryBackoff)
    dead_letter_topic: str | None = None
    start: str = EARLIEST
    filter: Filter | None = None
    transform: Transform | None = None
    drain_timeout_ms: int = 10_000
    max_transaction_version: int = VERSION_2
    heartbeat_interval_ms: int = 1_000
    member: MemberOptions = field(default_factory=MemberOptions)
    on_step: OnStep | None = None

    def __post_init__(self) -> None:
        _check("max_in_flight", self.max_in_flight, 1, MAX_IN_FLIGHT)
        _check("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
        _check("batch_size", self.batch_size, 1, MAX_IN_FLIGHT)
        if self.delivery_timeout_ms < 1:
            raise ConfigError(f"delivery_timeout_ms is {self.delivery_timeout_ms}: it must be above 0")
        if self.batch_size > self.max_in_flight:
            raise ConfigError(
                f"batch_size is {self.batch_size}, and max_in_flight {self.max_in_flight}: a batch is in "
                "flight as a whole, so raise max_in_flight or make batches smaller"
            )
        if self.start not in (EARLIEST, LATEST):
            raise ConfigError(f"start is {self.start!r}: it must be {EARLIEST!r} or {LATEST!r}")

    @property
    def transaction_timeout_ms(self) -> int:
        return self.delivery_timeout_ms + COMMIT_MARGIN_MS


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value}: it must be from {least} to {most}")


DEFAULTS: Final = SubscriptionOptions()
