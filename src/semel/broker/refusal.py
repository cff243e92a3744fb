"""How a handler says no to one part of a request."""

from __future__ import annotations


class Refused(Exception):  # noqa: N818 - an answer, not an accident
    """Something asked for is not granted: the error code and the reason for the client."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
