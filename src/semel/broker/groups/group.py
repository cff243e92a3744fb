"""One group: its offsets, and its members under the protocol that they use."""

from __future__ import annotations

from semel.broker.group_messages import GroupPart
from semel.broker.groups.classic import ClassicMembership
from semel.broker.groups.offsets import GroupOffsets


class Group:
    """A group. One that nobody joined, with offsets only, is called simple."""

    __slots__ = ("group_id", "membership", "offsets")

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.offsets = GroupOffsets()
        self.membership = ClassicMembership(group_id)

    @property
    def is_journaled(self) -> bool:
        """Whether a restart would bring it back."""
        return self.membership.roster is not None or bool(self.offsets)

    @property
    def is_idle(self) -> bool:
        """Nobody is in it or about to be."""
        return self.membership.is_empty and not self.membership.pending

    def part(self) -> GroupPart:
        return GroupPart(
            group_id=self.group_id,
            roster=self.membership.roster,
            writes=self.offsets.writes,
            offsets=self.offsets.stored(),
            pending=self.offsets.stored_pending(),
        )

    def load(self, part: GroupPart) -> None:
        self.offsets.load(part.writes, part.offsets, part.pending)
        if part.roster is not None:
            self.membership.settle(part.roster)
