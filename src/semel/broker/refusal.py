"""How a handler says no to one part of a request."""

from __future__ import annotations

from collections.abc import Sequence


class Refused(Exception):  # noqa: N818 - an answer, not an accident
    """Something asked for is not granted: the error code and the reason for the client."""

    def __init__(self, code: int, reason: str, bad_records: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.bad_records = bad_records
        """Which records of a batch are to blame, by their place in it; none: the batch as a whole is."""
