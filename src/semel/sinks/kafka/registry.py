"""Looking at the sinks of a cluster, and setting a marker by hand: what `semel sink` does.

A sink is known by its marker, so a sink whose marker has expired is not listed. Whoever sets or removes a
marker takes the sink first, as `open` does: an owner that is alive is fenced, and its transaction aborted.
"""

from dataclasses import dataclass

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.group_offsets import fetch_offsets
from semel.client.groups import delete_group, list_groups
from semel.client.shared_transaction import SharedTransaction
from semel.errors import ConfigError
from semel.sinks.errors import InitFailed
from semel.sinks.kafka.markers import (
    MARKER_GROUP_SUFFIX,
    MARKER_PARTITION,
    MarkerStore,
    has_open_transaction,
    is_alive,
    marker_group_of,
    parse_marker,
    transactional_id_of,
)
from semel.sinks.marker import ANY_QUERY, BY_HAND, Marker, Owner


@dataclass(slots=True, frozen=True)
class KafkaSinkStatus:
    """A sink as its marker tells; `is_alive` where it has a transaction open, or its process is seen here."""

    sink_id: str
    topic: str
    marker: Marker
    owner: Owner
    is_alive: bool


class KafkaRegistry:
    """The sinks of one cluster. `topic` is where the marker of a sink is put that has none yet."""

    def __init__(self, cluster: Cluster, topic: str | None = None) -> None:
        self._cluster = cluster
        self._topic = topic

    async def sinks(self) -> list[KafkaSinkStatus]:
        """All of them, by name."""
        names = [
            group.group_id.removesuffix(MARKER_GROUP_SUFFIX)
            for group in await list_groups(self._cluster)
            if group.group_id.endswith(MARKER_GROUP_SUFFIX)
        ]
        found = [await self.read(sink_id) for sink_id in names if sink_id]
        return [status for status in found if status is not None]

    async def read(self, sink_id: str) -> KafkaSinkStatus | None:
        """One of them; None where there is no marker, or the group is not a sink's."""
        group_id = marker_group_of(sink_id)
        for where, committed in (
            await fetch_offsets(self._cluster, group_id, None, require_stable=False)
        ).items():
            if where.partition != MARKER_PARTITION:
                continue
            try:
                marker, owner = parse_marker(group_id, committed)
            except InitFailed:
                continue
            alive = is_alive(owner) or await has_open_transaction(self._cluster, sink_id)
            return KafkaSinkStatus(sink_id, where.topic, marker, owner, alive)
        return None

    async def adopt(self, sink_id: str, epoch: int, query_id: str = ANY_QUERY) -> None:
        """Sets the marker, fencing whoever has the sink open."""
        topic = await self._marker_topic(sink_id)
        owner = Owner.here(BY_HAND)
        async with SharedTransaction(self._cluster, transactional_id_of(sink_id)) as transaction:
            await transaction.begin()
            await MarkerStore(sink_id, topic).put(transaction, Marker(epoch, query_id, ""), owner)
            await transaction.commit()

    async def _marker_topic(self, sink_id: str) -> str:
        status = await self.read(sink_id)
        topic = self._topic if status is None else status.topic
        if topic is None:
            raise ConfigError(
                f"sink {sink_id!r} has no marker yet: name its output topic with --topic, where it will look"
            )
        if status is not None and self._topic not in (None, status.topic):
            raise ConfigError(
                f"sink {sink_id!r} keeps its marker with topic {status.topic!r}, not {self._topic!r}: "
                "forget it first if the sink has moved"
            )
        await Admin(self._cluster).describe_topic(topic)
        return topic

    async def forget(self, sink_id: str) -> bool:
        """Removes the marker, fencing whoever has the sink open. False where there is none."""
        if await self.read(sink_id) is None:
            return False
        async with SharedTransaction(self._cluster, transactional_id_of(sink_id)):
            await delete_group(self._cluster, marker_group_of(sink_id))
        return True
