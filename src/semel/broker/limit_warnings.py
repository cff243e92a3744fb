"""Warnings that a limit refuses clients.

Clients decide how often they are refused, and must not decide how much is logged: each setting gets at most
one warning an interval, and the next one tells how many refusals went unsaid.
"""

from __future__ import annotations

import logging
from typing import Final

from semel.broker.decision import Now

log = logging.getLogger(__name__)

INTERVAL_MS: Final = 60_000


class LimitWarnings:
    """When each setting was last warned of. Not state: a restart may warn again."""

    __slots__ = ("_next_ms", "_unsaid")

    def __init__(self) -> None:
        self._next_ms: dict[str, int] = {}
        self._unsaid: dict[str, int] = {}

    def refused(self, setting: str, reason: str, now: Now) -> None:
        if now.monotonic_ms < self._next_ms.get(setting, now.monotonic_ms):
            self._unsaid[setting] += 1
            return
        unsaid = self._unsaid.get(setting, 0)
        more = f" ({unsaid} more such refusals since the last warning)" if unsaid else ""
        log.warning("refused by %s: %s%s", setting, reason, more)
        self._next_ms[setting] = now.monotonic_ms + INTERVAL_MS
        self._unsaid[setting] = 0
