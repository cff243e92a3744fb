"""The groups that have subscribers on a gateway: one `Subscription` each, shared by all of their streams.

The first subscriber of a group starts its subscription, and its settings hold; when the last has gone, it
lives on for a little while, so that a subscriber that comes back causes no rebalance, and is closed.

**Suspects.** When a stream is lost that had one delivery open, that delivery is charged with a failed
attempt: it may be what killed its subscriber. When it had several, nobody knows which of them did it, so none
is charged, and each of them is from now on given to a subscriber that has nothing else open, until it has
come back once.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Final

from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.errors import SemelError
from semel.subscriptions.delivery import Dealt
from semel.subscriptions.errors import SubscriptionClosedError
from semel.subscriptions.grpc.subscriptions_pb2 import Setup
from semel.subscriptions.grpc.terms import check_setup, differences, options_of
from semel.subscriptions.options import SubscriptionOptions
from semel.subscriptions.subscription import Subscription

log = logging.getLogger("semel.gateway")

LINGER_S: Final = 5.0
"""How long a group without subscribers keeps its partitions."""
MAX_GROUPS: Final = 1_000
MAX_FIRST_ID: Final = 1 << 52
"""Delivery ids stay below 2^53, which is what a number can hold in JavaScript."""

Place = tuple[str, int, int]
"""Topic, partition and offset of a record."""


class GatewayGroup:
    """One group on this gateway."""

    def __init__(
        self, bootstrap: str, connection: ConnectionOptions | None, setup: Setup, options: SubscriptionOptions
    ) -> None:
        self.group_id = setup.group
        self.topics = sorted(set(setup.topics))
        self.cluster = Cluster(bootstrap, connection)
        self.subscription = Subscription(self.cluster, self.topics, setup.group, options)
        self.streams = 0
        self.started: asyncio.Task[None] = asyncio.create_task(self._start(), name=f"start of {setup.group}")
        self.linger: asyncio.TimerHandle | None = None
        self._suspected: dict[Place, int] = {}
        self._works: set[asyncio.Task[None]] = set()

    async def _start(self) -> None:
        await self.cluster.connect()
        await self.subscription.start()

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Work for a delivery: it goes on when the stream that asked for it is gone."""
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._works.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the gateway failed: this is a bug", exc_info=error)

    # Suspects

    def suspicion(self, dealt: Dealt) -> int:
        """How often a delivery was open on a stream that was lost with several."""
        if not self._suspected:
            return 0
        return max(self._suspected.get(place, 0) for place in _places(dealt))

    def suspect(self, deliveries: Iterable[Dealt]) -> None:
        for dealt in deliveries:
            for place in _places(dealt):
                self._suspected[place] = self._suspected.get(place, 0) + 1

    def clear(self, dealt: Dealt) -> None:
        """It has come back alive, or was charged by itself."""
        if self._suspected:
            for place in _places(dealt):
                self._suspected.pop(place, None)

    async def close(self) -> None:
        self.started.cancel()
        await asyncio.gather(self.started, return_exceptions=True)
        await self.subscription.close()
        await self.cluster.close()


def _places(dealt: Dealt) -> list[Place]:
    return [(dealt.topic, dealt.partition, held.offset) for held in dealt.held]


class Gateway:
    """Every group of a gateway, by its name."""

    def __init__(
        self,
        bootstrap: str,
        connection: ConnectionOptions | None = None,
        defaults: SubscriptionOptions | None = None,
    ) -> None:
        self.delivery_ids: Iterator[int] = itertools.count(random.randrange(1, MAX_FIRST_ID))
        self._bootstrap = bootstrap
        self._connection = connection
        self._defaults = defaults or SubscriptionOptions()
        self._groups: dict[str, GatewayGroup] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._is_closing = False

    async def join(self, setup: Setup) -> tuple[GatewayGroup, list[str]]:
        """The group of a new stream, and what holds there other than it asked for. `leave` it again."""
        check_setup(setup)
        options = options_of(setup, self._defaults)
        while setup.group in self._closing:
            await asyncio.wait([self._closing[setup.group]])
        if self._is_closing:
            raise SubscriptionClosedError("the gateway stops")
        group = self._groups.get(setup.group)
        differing: list[str] = []
        if group is not None:
            differing = differences(setup, group.topics, group.subscription.options)
        else:
            if len(self._groups) >= MAX_GROUPS:
                raise SubscriptionClosedError(f"the gateway has {MAX_GROUPS} groups, and takes no more")
            group = GatewayGroup(self._bootstrap, self._connection, setup, options)
            self._groups[setup.group] = group
        group.streams += 1
        if group.linger is not None:
            group.linger.cancel()
            group.linger = None
        try:
            await asyncio.shield(group.started)
        except BaseException as error:
            self.leave(group, is_failed=isinstance(error, SemelError))
            raise
        return group, differing

    def leave(self, group: GatewayGroup, *, is_failed: bool = False) -> None:
        """A stream has ended. What has failed is not shared with newcomers."""
        group.streams -= 1
        is_failed = is_failed or group.subscription.failure is not None
        if is_failed:
            self._forget(group)
        if group.streams or self._is_closing:
            return
        if is_failed:
            self._close(group)
        else:
            group.linger = asyncio.get_running_loop().call_later(LINGER_S, self._close, group)

    def _forget(self, group: GatewayGroup) -> None:
        if self._groups.get(group.group_id) is group:
            del self._groups[group.group_id]

    def _close(self, group: GatewayGroup) -> None:
        self._forget(group)
        closing = asyncio.create_task(self._close_group(group), name=f"end of {group.group_id}")
        self._closing[group.group_id] = closing

    async def _close_group(self, group: GatewayGroup) -> None:
        try:
            with suppress(SemelError):  # whoever takes the partitions over finds all that was decided
                await group.close()
        finally:
            if self._closing.get(group.group_id) is asyncio.current_task():
                del self._closing[group.group_id]

    async def close(self) -> None:
        """Takes back what is open, commits what is acknowledged, and leaves every group."""
        self._is_closing = True
        for group in list(self._groups.values()):
            if group.linger is not None:
                group.linger.cancel()
            self._close(group)
        await asyncio.gather(*self._closing.values(), return_exceptions=True)
