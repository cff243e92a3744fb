"""By which connections producers of version 1 are heard, so that what they have given up ends nothing.

Version 1 keeps its epoch from one transaction to the next. So an EndTxn that was held up on its way, was sent
again, and arrives in the middle of the next transaction looks like the end of that one. What tells them apart
is the connection: a client that gives up waiting opens another one, and goes on there.

The rule: a request that begins or ends a transaction, or sets its offsets, and that comes by a connection
which is older than the newest one that the producer was heard by, is told to ask again, once a transaction
and connection. A client that keeps several connections does so, and is heard. What was left behind on a
connection has nobody who would.
"""

from __future__ import annotations

from typing import Final

MAX_OLDER: Final = 16
"""Older connections remembered for one producer; one that has more is told to ask again more often."""


class Heard:
    """The connections by which each transactional id was heard; a later connection has a higher number."""

    __slots__ = ("_newest", "_older")

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._older: dict[str, set[int]] = {}
        """Those besides the newest that have spoken for the open transaction."""

    def hear(self, transactional_id: str, connection: int) -> bool:
        """Note that an id speaks by a connection; False if it may have left that long since."""
        if connection >= self._newest.get(transactional_id, 0):
            self._newest[transactional_id] = connection
            return True
        older = self._older.setdefault(transactional_id, set())
        if connection in older:
            return True
        if len(older) >= MAX_OLDER:
            older.clear()
        older.add(connection)
        return False

    def ended(self, transactional_id: str) -> None:
        self._older.pop(transactional_id, None)

    def forget(self, transactional_id: str) -> None:
        self._newest.pop(transactional_id, None)
        self._older.pop(transactional_id, None)


class Hearing:
    """Of all transactional ids. Not state: no connection outlives the process that has it."""

    __slots__ = ("coordination", "offsets")

    def __init__(self) -> None:
        self.coordination = Heard()
        """AddPartitionsToTxn, AddOffsetsToTxn, EndTxn."""
        self.offsets = Heard()
        """TxnOffsetCommit: it goes to the group's coordinator, by another connection perhaps."""

    def ended(self, transactional_id: str) -> None:
        """The transaction has ended: the next one is spoken for anew."""
        self.coordination.ended(transactional_id)
        self.offsets.ended(transactional_id)

    def forget(self, transactional_id: str) -> None:
        """The id has another epoch, or is no more: whatever was left behind is fenced."""
        self.coordination.forget(transactional_id)
        self.offsets.forget(transactional_id)
