"""Warnings that clients are refused: by a limit, or because of what they sent.

Clients decide how often they are refused, and must not decide how much is logged: each setting and each error
gets at most one warning an interval, and the next one tells how many refusals went unsaid.
"""

from __future__ import annotations

import logging
from typing import Final

from semel.broker.decision import Now
from semel.wire.errors import ErrorCode

log = logging.getLogger(__name__)

INTERVAL_MS: Final = 60_000


class LimitWarnings:
    """When each setting or error was last warned of. Not state: a restart may warn again."""

    __slots__ = ("_next_ms", "_unsaid")

    def __init__(self) -> None:
        self._next_ms: dict[str, int] = {}
        self._unsaid: dict[str, int] = {}

    def refused(self, setting: str, reason: str, now: Now) -> None:
        self._warn(f"refused by {setting}", reason, now)

    def bad_input(self, error: ErrorCode, reason: str, now: Now) -> None:
        self._warn(f"refused as {error.name}", reason, now)

    def _warn(self, what: str, reason: str, now: Now) -> None:
        if now.monotonic_ms < self._next_ms.get(what, now.monotonic_ms):
            self._unsaid[what] += 1
            return
        unsaid = self._unsaid.get(what, 0)
        more = f" ({unsaid} more such refusals since the last warning)" if unsaid else ""
        log.warning("%s: %s%s", what, reason, more)
        self._next_ms[what] = now.monotonic_ms + INTERVAL_MS
        self._unsaid[what] = 0
