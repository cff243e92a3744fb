"""Assignors: who of a group gets which partitions, decided by the broker (KIP-848).

`uniform` gives every member as many partitions as its subscription allows, give or take one, and moves as few
as it can. `range` gives each member a run of each topic, so that members who read two topics with equally
many partitions get the same numbers of both.

Every partition of every topic that a member subscribes to gets exactly one member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, TypeAlias

TopicPartition: TypeAlias = tuple[bytes, int]
"""A topic's id and the number of a partition."""
Partitions: TypeAlias = frozenset[TopicPartition]
Subscriptions: TypeAlias = Mapping[str, frozenset[bytes]]
"""For each member the ids of the topics that it reads, in the order in which ties are decided."""
Assignment: TypeAlias = dict[str, Partitions]
Assignor: TypeAlias = Callable[[Subscriptions, Mapping[bytes, int], Mapping[str, Partitions]], Assignment]
"""From subscriptions, partition counts of the topics, and the assignment so far, to the next one."""


def assign_uniformly(
    subscriptions: Subscriptions, partition_counts: Mapping[bytes, int], before: Mapping[str, Partitions]
) -> Assignment:
    return _Uniform(subscriptions, partition_counts).assign(before)


def assign_ranges(
    subscriptions: Subscriptions, partition_counts: Mapping[bytes, int], before: Mapping[str, Partitions]
) -> Assignment:
    given: dict[str, set[TopicPartition]] = {member: set() for member in subscriptions}
    for topic_id in sorted(_subscribed(subscriptions, partition_counts)):
        readers = sorted(member for member, topics in subscriptions.items() if topic_id in topics)
        share, extra = divmod(partition_counts[topic_id], len(readers))
        first = 0
        for place, member in enumerate(readers):
            end = first + share + (1 if place < extra else 0)
            given[member].update((topic_id, index) for index in range(first, end))
            first = end
    return {member: frozenset(partitions) for member, partitions in given.items()}


DEFAULT_ASSIGNOR: Final = "uniform"
ASSIGNORS: Final[dict[str, Assignor]] = {"uniform": assign_uniformly, "range": assign_ranges}


def _subscribed(subscriptions: Subscriptions, partition_counts: Mapping[bytes, int]) -> set[bytes]:
    return {
        topic_id for topics in subscriptions.values() for topic_id in topics if topic_id in partition_counts
    }


class _Uniform:
    """Members are kept as equal as their subscriptions allow.

    Topics with the same readers are treated as one pool. Within a pool partitions go from the member who has
    most in all to the one who has least, until they differ by one at most; and that again for every pool, as
    long as anything moves. Each move makes the sum of squares of all loads smaller, so that comes to an end.
    """

    def __init__(self, subscriptions: Subscriptions, partition_counts: Mapping[bytes, int]) -> None:
        self._subscriptions = subscriptions
        self._partition_counts = partition_counts
        self._given: dict[str, set[TopicPartition]] = {member: set() for member in subscriptions}
        self._rank = {member: rank for rank, member in enumerate(sorted(subscriptions))}
        self._pools: dict[tuple[str, ...], list[bytes]] = {}
        readers: dict[bytes, list[str]] = {}
        for member in sorted(subscriptions):
            for topic_id in subscriptions[member]:
                if topic_id in partition_counts:
                    readers.setdefault(topic_id, []).append(member)
        for topic_id in sorted(readers):
            self._pools.setdefault(tuple(readers[topic_id]), []).append(topic_id)

    def assign(self, before: Mapping[str, Partitions]) -> Assignment:
        taken = self._keep(before)
        # Those with few readers first: they have the least choice.
        pools = sorted(self._pools.items(), key=lambda pool: (len(pool[0]), pool[1]))
        for readers, topic_ids in pools:
            self._hand_out(readers, topic_ids, taken)
        is_moving = True
        while is_moving:
            is_moving = False
            for readers, topic_ids in pools:
                is_moving |= self._even_out(readers, topic_ids)
        return {member: frozenset(partitions) for member, partitions in self._given.items()}

    def _keep(self, before: Mapping[str, Partitions]) -> set[TopicPartition]:
        """Let everybody keep what they have and still read."""
        taken: set[TopicPartition] = set()
        for member, given in self._given.items():
            topics = self._subscriptions[member]
            for partition in before.get(member, ()):
                topic_id, index = partition
                exists = index < self._partition_counts.get(topic_id, 0)
                if topic_id in topics and exists and partition not in taken:
                    taken.add(partition)
                    given.add(partition)
        return taken

    def _hand_out(self, readers: tuple[str, ...], topic_ids: list[bytes], taken: set[TopicPartition]) -> None:
        """Give what nobody has to whoever has least."""
        heap = [(len(self._given[member]), self._rank[member], member) for member in readers]
        heapify(heap)
        for topic_id in topic_ids:
            for index in range(self._partition_counts[topic_id]):
                if (topic_id, index) not in taken:
                    load, rank, member = heappop(heap)
                    self._given[member].add((topic_id, index))
                    heappush(heap, (load + 1, rank, member))

    def _even_out(self, readers: tuple[str, ...], topic_ids: list[bytes]) -> bool:
        """Move partitions of one pool from those who have most to those who have least."""
        pool = set(topic_ids)
        movable = {
            member: sorted(partition for partition in self._given[member] if partition[0] in pool)
            for member in readers
        }
        rich = [
            (-len(self._given[member]), self._rank[member], member) for member in readers if movable[member]
        ]
        poor = [(len(self._given[member]), self._rank[member], member) for member in readers]
        heapify(rich)
        heapify(poor)
        has_moved = False
        while rich:
            load, rank, giver = heappop(rich)
            if -load != len(self._given[giver]):
                continue  # It has received or given something since.
            while poor[0][0] != len(self._given[poor[0][2]]):
                heappop(poor)
            least, _, taker = poor[0]
            if -load - least < 2:
                break
            partition = movable[giver].pop()
            self._given[giver].remove(partition)
            self._given[taker].add(partition)
            has_moved = True
            heappush(poor, (-load - 1, rank, giver))
            heappush(poor, (least + 1, self._rank[taker], taker))
            if movable[giver]:
                heappush(rich, (load + 1, rank, giver))
        return has_moved
