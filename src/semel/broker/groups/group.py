"""One group: its offsets, and its members under the protocol that they use."""

from __future__ import annotations

from typing import TypeAlias

from semel.broker.group_messages import ConsumerGroupChanged, GroupPart, GroupSettled
from semel.broker.groups.classic import ClassicMembership
from semel.broker.groups.consumer import ConsumerMembership
from semel.broker.groups.offsets import GroupOffsets

Membership: TypeAlias = ClassicMembership | ConsumerMembership


class Group:
    """A group. One that nobody joined, with offsets only, is called simple.

    A group can go from one protocol to the other. On the way to the classic one it works as a classic group
    already, while the journal knows it as a consumer group until its first rebalance has finished.
    """

    __slots__ = ("group_id", "journaled", "membership", "offsets")

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.offsets = GroupOffsets()
        self.membership: Membership = ClassicMembership(group_id)
        self.journaled: Membership = self.membership
        """What a restart would bring back."""

    @property
    def is_journaled(self) -> bool:
        """Whether a restart would bring it back at all."""
        journaled = self.journaled
        return isinstance(journaled, ConsumerMembership) or journaled.roster is not None or bool(self.offsets)

    @property
    def is_idle(self) -> bool:
        """Nobody is in it or about to be."""
        return self.membership.is_idle

    # The journal.

    def settle(self, entry: GroupSettled) -> None:
        membership = self.membership
        if not isinstance(membership, ClassicMembership):
            membership = ClassicMembership(self.group_id)
        membership.settle(entry.roster)
        self.membership = self.journaled = membership

    def change(self, entry: ConsumerGroupChanged) -> None:
        membership = self.journaled
        if entry.replaces or not isinstance(membership, ConsumerMembership):
            membership = self.membership = self.journaled = ConsumerMembership(self.group_id)
        membership.change(entry.change)

    def part(self) -> GroupPart:
        journaled = self.journaled
        return GroupPart(
            group_id=self.group_id,
            roster=None if isinstance(journaled, ConsumerMembership) else journaled.roster,
            consumer=journaled.whole() if isinstance(journaled, ConsumerMembership) else None,
            writes=self.offsets.writes,
            offsets=self.offsets.stored(),
            pending=self.offsets.stored_pending(),
        )

    def load(self, part: GroupPart) -> None:
        self.offsets.load(part.writes, part.offsets, part.pending)
        if part.roster is not None:
            self.settle(GroupSettled(group_id=self.group_id, roster=part.roster))
        elif part.consumer is not None:
            self.change(ConsumerGroupChanged(group_id=self.group_id, replaces=True, change=part.consumer))
