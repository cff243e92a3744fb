"""Expiry: offsets that nobody has needed for long are forgotten, and groups that have nothing left.

An offset counts from its commit, or from when the last member left the group if that was later. It never
expires while the group has members, nor while an open transaction may still move it. Offsets of deleted
topics go at the next look. Groups are looked at a few at a time, so that many of them do not keep the loop.
"""

from __future__ import annotations

from typing import Final

from semel.broker.entries import Entry
from semel.broker.group_messages import GroupDeleted, OffsetsRemoved, TopicPartitions
from semel.broker.groups.group import Group
from semel.broker.groups.offsets import NO_EXPIRY, CommittedOffset
from semel.broker.topics import Catalog

GROUPS_PER_LOOK: Final = 100


def expired(group: Group, catalog: Catalog, now_ms: int, retention_ms: int) -> Entry | None:
    """What to journal about this group: offsets to remove, or the group if nothing would be left of it."""
    removed = [
        TopicPartitions(topic_id=topic_id, indexes=indexes)
        for topic_id, offsets in group.offsets.committed.items()
        if (
            indexes := [
                index
                for index, offset in offsets.items()
                if topic_id not in catalog.by_id
                or (group.is_idle and _is_expired(group, offset, now_ms, retention_ms))
                if not group.offsets.is_pending(topic_id, index)
            ]
        )
    ]
    gone = sum(len(topic.indexes) for topic in removed)
    there = sum(len(offsets) for offsets in group.offsets.committed.values())
    if group.is_idle and not group.offsets.pending and gone == there:
        return GroupDeleted(group_id=group.group_id)
    return OffsetsRemoved(group_id=group.group_id, topics=removed) if removed else None


def _is_expired(group: Group, offset: CommittedOffset, now_ms: int, retention_ms: int) -> bool:
    if offset.expires_at_ms != NO_EXPIRY:
        return now_ms >= offset.expires_at_ms
    settled_at_ms = group.membership.settled_at_ms
    since_ms = offset.committed_at_ms if settled_at_ms is None else max(offset.committed_at_ms, settled_at_ms)
    return now_ms - since_ms >= retention_ms
