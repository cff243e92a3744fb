"""The group of a sink at its source: for tools that show lag. Nothing depends on its offsets.

It has a name that no application gives to a group of its own (docs/decisions/0013).

Where source and sink are one cluster, the source's offsets join the sink's transaction. If they are not taken
there (the sink may not read the topic, or it is gone) that costs the epoch one attempt: from then on they are
committed as to another cluster.

That is afterwards, and with the source's own credentials, never with the sink's; so it is for every sink that
is no topic. A source that does not answer holds up a commit for a moment and never fails it. One that is far
away is waited for in the background, and gets the newest offsets next; one that fails is left alone for a
while.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.client.group_offsets import CommittedOffset, GroupMetadata, commit_offsets
from semel.client.metadata import TopicPartition
from semel.errors import SemelError

log = logging.getLogger(__name__)

# At the end of the sink's name.
SUFFIX: Final = ".source"

Work: TypeAlias = Callable[[Cluster], Awaitable[None]]

# How long a commit waits for the source, how long it may take in the background, and how long a source that
# failed is left alone.
PATIENCE_S: Final = 1.0
LIMIT_S: Final = 30.0
REST_S: Final = 60.0


def source_group_of(sink_id: str) -> str:
    """The group that a sink's source offsets go to."""
    return f"{sink_id}{SUFFIX}"


@dataclass(slots=True, frozen=True)
class SourceOffsets:
    """How far an epoch has read its source: the next offset, by topic and partition.

    `connection` is how the source is reached, which may take other credentials than the sink's. None: it
    cannot be reached from here, unless it is where the sink is.
    """

    bootstrap: str
    offsets: Mapping[str, Mapping[int, int]]
    connection: ConnectionOptions | None = field(default_factory=ConnectionOptions)

    def as_committed(self) -> dict[TopicPartition, CommittedOffset]:
        return {
            TopicPartition(topic, partition): CommittedOffset(offset)
            for topic, partitions in self.offsets.items()
            for partition, offset in partitions.items()
        }


@dataclass(slots=True, frozen=True)
class Home:
    """The cluster that a sink writes to."""

    bootstrap: str
    cluster_id: str | None


class SourceGroup:
    """For one run of a sink, and one source at a time. A connection is kept from commit to commit: close it.

    `home` is None where the sink is no topic: then no offsets join its transaction.
    """

    def __init__(self, sink_id: str, home: Home | None = None) -> None:
        self.group = GroupMetadata(source_group_of(sink_id))
        self._home = home
        self._bootstrap = ""
        self._connection: ConnectionOptions | None = None
        # None: whether source and sink are one cluster is not known yet, and asked for.
        self._joins: bool | None = False
        self._cluster: Cluster | None = None
        self._working: asyncio.Task[None] | None = None
        self._newest: dict[TopicPartition, CommittedOffset] = {}
        self._rests_until = 0.0

    async def joins(self, source: SourceOffsets) -> bool:
        """Whether its offsets join the sink's transaction: where source and sink are one cluster.

        Asks until the source has answered once; until then it counts as another cluster.
        """
        await self._turn_to(source)
        if self._joins is None:
            await self._attend(self._ask)
        return self._joins is True

    def leave_transaction(self, error: Exception) -> None:
        """Its offsets were not taken in the sink's transaction."""
        self._joins = False
        log.warning(
            "the offsets of group %r are not taken in the transaction of its sink, and %s from now on. Only "
            "tools that show lag look at them: %s",
            self.group.group_id,
            "are left out" if self._connection is None else "are committed after it",
            str(error) or "no answer",
        )

    async def commit(self, source: SourceOffsets) -> None:
        """Commits them if they do not join the transaction, and if the source answers."""
        await self._turn_to(source)
        if self._joins is False:
            self._newest = source.as_committed()
            await self._attend(self._commit_newest)

    async def close(self) -> None:
        """What is on its way is waited for, a moment. Idempotent."""
        working, self._working = self._working, None
        try:
            if working is not None and self._newest:
                await asyncio.wait({working}, timeout=PATIENCE_S)
        finally:
            if working is not None:
                working.cancel()
                await asyncio.wait({working})
            await self._hang_up()

    async def _turn_to(self, source: SourceOffsets) -> None:
        if source.bootstrap == self._bootstrap:
            return
        await self.close()
        self._bootstrap, self._connection = source.bootstrap, source.connection
        self._newest, self._rests_until = {}, 0.0
        # Where it is reached by another name it may be the same cluster still.
        is_home = self._home is not None and source.bootstrap == self._home.bootstrap
        self._joins = is_home if is_home or self._home is None else None

    async def _hang_up(self) -> None:
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            await cluster.close()

    async def _ask(self, cluster: Cluster) -> None:
        assert self._home is not None
        async with asyncio.timeout(LIMIT_S):
            self._joins = (await cluster.connect()).cluster_id == self._home.cluster_id
        if self._joins:
            await self._hang_up()

    async def _commit_newest(self, cluster: Cluster) -> None:
        """And those that have come meanwhile."""
        while self._newest:
            offsets = self._newest
            async with asyncio.timeout(LIMIT_S):
                await commit_offsets(cluster, self.group, offsets)
            if self._newest is offsets:
                self._newest = {}

    async def _attend(self, work: Work) -> None:
        """Runs the work in the background and waits at most `PATIENCE_S`.

        Does nothing while other work runs, or the source rests.
        """
        is_busy = self._working is not None and not self._working.done()
        is_resting = asyncio.get_running_loop().time() < self._rests_until
        if is_busy or is_resting or self._connection is None:
            return
        self._working = asyncio.create_task(self._try(work))
        await asyncio.wait({self._working}, timeout=PATIENCE_S)

    async def _try(self, work: Work) -> None:
        try:
            if self._cluster is None:
                self._cluster = Cluster(self._bootstrap, self._connection)
            await work(self._cluster)
        except (SemelError, OSError) as error:
            self._rests_until = asyncio.get_running_loop().time() + REST_S
            await self._hang_up()
            log.warning(
                "the offsets of group %r are not committed at the source, %s, and it is asked again in %g s. "
                "Only tools that show lag look at them: %s",
                self.group.group_id,
                self._bootstrap,
                REST_S,
                str(error) or f"no answer within {LIMIT_S:g} s",
            )
