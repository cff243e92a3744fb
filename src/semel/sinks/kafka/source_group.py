"""The group of a sink at its source, where the source is another cluster: for tools that show lag.

Nothing depends on these offsets. So a source that does not answer holds up a commit for a moment and never
fails it. One that is far away is waited for in the background, where it is not asked for more meanwhile; one
that fails is left alone for a while. It is asked with its own credentials, never with the sink's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

from semel.client.cluster import Cluster
from semel.client.group_offsets import CommittedOffset, GroupMetadata, commit_offsets
from semel.client.metadata import TopicPartition
from semel.errors import SemelError
from semel.sinks.sink import SourceOffsets

LOGGER: Final = logging.getLogger(__name__)

Work: TypeAlias = Callable[[Cluster], Awaitable[None]]

# How long a commit waits for the source, how long it may take in the background, and how long a source that
# failed is left alone.
PATIENCE_S: Final = 1.0
LIMIT_S: Final = 30.0
REST_S: Final = 60.0


class SourceGroup:
    """One source, for one run of a sink. A connection is kept from commit to commit: close it."""

    def __init__(self, group_id: str, source: SourceOffsets, home: Cluster, home_id: str | None) -> None:
        self.bootstrap = source.bootstrap
        self._connection = source.connection
        self._group = GroupMetadata(group_id)
        self._home_id = home_id
        self._is_ours = True if source.bootstrap == home.bootstrap else None
        self._cluster: Cluster | None = None
        self._working: asyncio.Task[None] | None = None
        self._rests_until = 0.0

    async def is_ours(self) -> bool:
        """Whether source and sink are one cluster: asked until it is known. Who is silent is another."""
        if self._is_ours is None:
            await self._attend(self._ask)
        return self._is_ours is True

    async def commit(self, offsets: dict[TopicPartition, CommittedOffset]) -> None:
        """Commits them if the source is another cluster, and answers."""
        if self._is_ours is False:
            await self._attend(partial(commit_offsets, group=self._group, offsets=offsets))

    async def close(self) -> None:
        """Idempotent."""
        if self._working is not None:
            working, self._working = self._working, None
            working.cancel()
            await asyncio.wait({working})
        await self._hang_up()

    async def _hang_up(self) -> None:
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            await cluster.close()

    async def _ask(self, cluster: Cluster) -> None:
        self._is_ours = (await cluster.connect()).cluster_id == self._home_id
        if self._is_ours:
            await self._hang_up()

    async def _attend(self, work: Work) -> None:
        """Not for longer than a moment, and not at all while something else is under way."""
        is_busy = self._working is not None and not self._working.done()
        if is_busy or asyncio.get_running_loop().time() < self._rests_until:
            return
        self._working = asyncio.create_task(self._try(work))
        await asyncio.wait({self._working}, timeout=PATIENCE_S)

    async def _try(self, work: Work) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                if self._cluster is None:
                    self._cluster = Cluster(self.bootstrap, self._connection)
                await work(self._cluster)
        except (SemelError, OSError) as error:
            self._rests_until = asyncio.get_running_loop().time() + REST_S
            await self._hang_up()
            LOGGER.warning(
                "the offsets of group %r are not committed at the source, %s, and it is asked again in %g s. "
                "Only tools that show lag look at them: %s",
                self._group.group_id,
                self.bootstrap,
                REST_S,
                str(error) or f"no answer within {LIMIT_S:g} s",
            )
