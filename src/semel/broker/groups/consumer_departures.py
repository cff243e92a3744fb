"""Members leave a consumer group: by themselves, removed by a tool, or because nothing was heard of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.broker.decision import Decision, Now
from semel.broker.groups.consumer import ConsumerMembership, MemberState
from semel.broker.groups.consumer_step import ConsumerStep
from semel.broker.groups.group import Group
from semel.broker.groups.migration import downgraded
from semel.broker.groups.rebalance import Rebalance
from semel.broker.topics import Catalog

if TYPE_CHECKING:
    from semel.broker.groups.registry import Groups


def depart(groups: Groups, group: Group, member_ids: list[str], catalog: Catalog, now: Now) -> Decision:
    """Take these members out. If only those of the classic protocol are left, they go on among themselves."""
    membership = group.membership
    assert isinstance(membership, ConsumerMembership)
    step = ConsumerStep(membership, catalog)
    for member_id in member_ids:
        groups.consumer_sessions.cancel((group.group_id, member_id))
        step.remove(member_id)
    entries = step.entries(now.wall_ms)
    remaining = list(step.members.values())
    if not remaining or any(member.classic is None for member in remaining):
        return Decision(None, entries)
    # At the epoch before: those who were up to date shall learn that there is a rebalance, and not be fenced.
    classic = group.membership = downgraded(groups, membership, remaining, membership.epoch, catalog)
    rebalance = Rebalance(groups, classic, now)
    for member in classic.members.values():
        rebalance.touch(member)
    decision = rebalance.continue_without()
    decision.entries[:0] = entries
    return decision


def expire_member(
    groups: Groups, key: tuple[str, str], epoch: int | None, catalog: Catalog, now: Now
) -> Decision | None:
    """Nothing was heard of a member, or (with the epoch it was at) it has not given up what it should."""
    group_id, member_id = key
    group = groups.by_id.get(group_id)
    membership = None if group is None else group.membership
    if group is None or not isinstance(membership, ConsumerMembership):
        return None
    member = membership.members.get(member_id)
    if member is None:
        return None
    if epoch is not None:
        is_late = member.state is MemberState.REVOKING or (
            member.classic is not None and membership.must_rejoin(member)
        )
        if member.epoch != epoch or not is_late:
            return None
    return depart(groups, group, [member_id], catalog, now)
