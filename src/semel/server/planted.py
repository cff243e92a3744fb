"""Faults on purpose: what `semel verify` and `semel simulate` must find, or they would be worth nothing.

A fault is a wrong part put in the place of a right one, where the broker is put together; nothing else knows
of it. A broker takes `testing.fault` only if the environment variable SEMEL_TESTING is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now, Waiter
from semel.broker.entries import Append
from semel.errors import ConfigError
from semel.server.apis import Decide, ServedApi
from semel.server.life import Life
from semel.wire.apis import ApiKey
from semel.wire.batch import read_header
from semel.wire.messages.produce import ProduceRequest

TESTING_VARIABLE: Final = "SEMEL_TESTING"
NO_FAULT: Final = "none"
FAULTS: Final = ("skip-marker", "lose-dedup", "show-past-lso", "show-before-durable")


def check_allowed(fault: str, environment: Mapping[str, str]) -> None:
    """Nobody gets a broken broker by accident."""
    if fault != NO_FAULT and environment.get(TESTING_VARIABLE) != "1":
        raise ConfigError(
            f"testing.fault={fault} makes the broker break its promises, for tests of its checkers; "
            f"unset it, or set {TESTING_VARIABLE}=1 as well"
        )


def planted_apis(fault: str, apis: dict[int, ServedApi]) -> dict[int, ServedApi]:
    """The API table, with the fault in it if it is one of a decision."""
    wrong: dict[str, tuple[ApiKey, Callable[..., Decision]]] = {
        "skip-marker": (ApiKey.END_TXN, _skip_marker),
        "lose-dedup": (ApiKey.PRODUCE, _lose_dedup),
    }
    if fault not in wrong:
        return apis
    key, decide = wrong[fault]
    return {**apis, key: replace(apis[key], decide=partial(decide, apis[key].decide))}


def planted_life(fault: str) -> type[Life]:
    """The class of lives, with the fault in it if it is one of showing."""
    return {"show-past-lso": ShowsPastLso, "show-before-durable": ShowsBeforeDurable}.get(fault, Life)


def _skip_marker(decide: Decide, broker: Broker, request: Any, caller: Caller, now: Now) -> Decision:
    """A transaction over several partitions ends in all of them but the last."""
    decision = decide(broker, request, caller, now)
    markers = [entry for entry in decision.entries if isinstance(entry, Append)]
    if len(markers) > 1:
        decision.entries.remove(markers[-1])
    return decision


def _lose_dedup(
    decide: Decide, broker: Broker, request: ProduceRequest, caller: Caller, now: Now
) -> Decision:
    """A partition forgets its producers, and takes a batch that comes again for a new one."""
    for topic in request.topic_data:
        known = broker.catalog.by_id.get(topic.topic_id) or broker.catalog.by_name.get(topic.name)
        for part in topic.partition_data:
            partition = None if known is None else known.partition(part.index)
            if partition is not None and isinstance(part.records, memoryview):
                partition.log.producers.pop(read_header(part.records).producer_id, None)
    return decide(broker, request, caller, now)


class ShowsPastLso(Life):
    """Readers see past the last stable offset: open transactions."""

    def submit(self, waiter: Waiter | None, decision: Decision) -> None:
        super().submit(waiter, decision)
        for entry in decision.entries:
            if isinstance(entry, Append):
                partition = self.broker.catalog.partition_by_id(entry.topic_id, entry.index)
                if partition is not None:
                    partition.log.unstable.clear()


class ShowsBeforeDurable(Life):
    """Readers see the end of a transaction as soon as it is decided, though it is not on disk yet."""

    def submit(self, waiter: Waiter | None, decision: Decision) -> None:
        ended = []
        for entry in decision.entries:
            if isinstance(entry, Append) and entry.header.is_control:
                partition = self.broker.catalog.partition_by_id(entry.topic_id, entry.index)
                if partition is not None:
                    first_offset = partition.log.open_transactions.get(entry.header.producer_id, -1)
                    ended.append((partition.log, first_offset))
        super().submit(waiter, decision)
        for log, first_offset in ended:
            log.reveal_end(first_offset)
