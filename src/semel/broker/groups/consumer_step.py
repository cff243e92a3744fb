"""One step of a group under the consumer protocol: what a request or a deadline changes, gathered into one
entry.
"""

from __future__ import annotations

from semel.broker.entries import Entry
from semel.broker.group_messages import ConsumerGroupChanged, ConsumerRoster, Target
from semel.broker.groups.assignors import ASSIGNORS, Partitions, TopicPartition
from semel.broker.groups.consumer import (
    NOTHING,
    ConsumerMember,
    ConsumerMembership,
    by_topic,
    preferred_assignor,
    reconciled,
    subscribed_topic_ids,
)
from semel.broker.topics import Catalog


class ConsumerStep:
    """The group as it will be; the group as it is stays as it is until the entry is applied."""

    __slots__ = (
        "_before",
        "_catalog",
        "_changed_targets",
        "_removed",
        "_replaces",
        "epoch",
        "members",
        "target_epoch",
        "targets",
    )

    def __init__(self, before: ConsumerMembership, catalog: Catalog, *, replaces: bool = False) -> None:
        """`replaces`: the journal does not know the group as `before` says yet."""
        self._before = before
        self._catalog = catalog
        self._replaces = replaces
        self.epoch = before.epoch
        self.target_epoch = before.target_epoch
        self.members = dict(before.members)
        self.targets = dict(before.targets)
        self._removed: set[str] = set()
        self._changed_targets: set[str] = set()

    def move(self, member: ConsumerMember, owned: Partitions | None) -> ConsumerMember:
        """Take in what a member says, and bring it a step closer to what it shall have."""
        known = self.members.get(member.member_id)
        self.members[member.member_id] = member
        if known is None or not known.subscribes_like(member) or self._has_topics_changed():
            self.epoch += 1
        if self.epoch > self.target_epoch:
            self._assign()
        following = reconciled(
            member,
            self.targets.get(member.member_id, NOTHING),
            self.target_epoch,
            owned,
            self._held_by_others(member.member_id),
        )
        self.members[member.member_id] = following
        return following

    def remove(self, member_id: str) -> None:
        """The member is gone. The others get its share with their next heartbeats."""
        del self.members[member_id]
        self.targets.pop(member_id, None)
        self._removed.add(member_id)
        self.epoch += 1

    def rename(self, member: ConsumerMember, member_id: str) -> ConsumerMember:
        """A static member is back under another id, and takes over what it had."""
        twin = member.copy(member_id)
        del self.members[member.member_id]
        self._removed.add(member.member_id)
        self.members[member_id] = twin
        self.targets[member_id] = self.targets.pop(member.member_id, NOTHING)
        self._changed_targets.add(member_id)
        return twin

    def entries(self, now_ms: int) -> list[Entry]:
        """What to journal: nothing, if nothing has changed."""
        before = self._before
        changed = [
            member.stored()
            for member_id, member in self.members.items()
            if self._replaces
            or (known := before.members.get(member_id)) is None
            or (known is not member and not known.is_same(member))
        ]
        removed = sorted(self._removed)
        moved = (self.epoch, self.target_epoch) != (before.epoch, before.target_epoch)
        if not (changed or removed or moved or self._replaces or self._changed_targets):
            return []
        targets = self.targets if self._replaces else self._changed_targets
        return [
            ConsumerGroupChanged(
                group_id=before.group_id,
                replaces=self._replaces,
                change=ConsumerRoster(
                    epoch=self.epoch,
                    target_epoch=self.target_epoch,
                    changed_at_ms=now_ms,
                    members=changed,
                    removed=[] if self._replaces else removed,
                    targets=[
                        Target(member_id=member_id, partitions=by_topic(self.targets[member_id]))
                        for member_id in sorted(targets)
                        if member_id in self.targets
                    ],
                ),
            )
        ]

    # Targets.

    def _has_topics_changed(self) -> bool:
        """Whether the targets do not cover exactly what the members read, since topics have come, gone or
        grown.
        """
        before = self._before
        if before.catalog_seen == self._catalog.version:
            return False
        before.catalog_seen = self._catalog.version
        covered = {partition for target in before.targets.values() for partition in target}
        return covered != self._all_partitions()

    def _all_partitions(self) -> set[TopicPartition]:
        topic_ids = {
            topic_id
            for member in self.members.values()
            for topic_id in subscribed_topic_ids(member, self._catalog)
        }
        return {
            (topic_id, index)
            for topic_id in topic_ids
            for index in range(len(self._catalog.by_id[topic_id].partitions))
        }

    def _assign(self) -> None:
        subscriptions = {
            member_id: subscribed_topic_ids(member, self._catalog)
            for member_id, member in self.members.items()
        }
        counts = {
            topic_id: len(self._catalog.by_id[topic_id].partitions)
            for topics in subscriptions.values()
            for topic_id in topics
        }
        assignor = ASSIGNORS[preferred_assignor(self.members.values())]
        targets = assignor(subscriptions, counts, self.targets)
        for member_id, target in targets.items():
            if self.targets.get(member_id) != target:
                self._changed_targets.add(member_id)
        self.targets = targets
        self.target_epoch = self.epoch

    def _held_by_others(self, member_id: str) -> Partitions:
        owners = self._before.owners
        return frozenset(
            partition
            for partition in self.targets.get(member_id, NOTHING)
            if (owner := owners.get(partition, member_id)) != member_id and owner not in self._removed
        )
