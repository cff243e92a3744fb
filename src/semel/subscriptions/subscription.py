"""A subscription: a member of a group that owns partitions and deals their records to channels.

`subscribe` is the way in:

    async with subscribe("localhost:9092", "orders", group="billing") as deliveries:
        async for delivery in deliveries:
            async with delivery.transaction() as tx:
                await tx.publish("invoices", b"...", key=delivery.key)

A `Subscription` has three tasks (membership, fetching, and one for each partition that is being taken over or
released) and any number of channels. A channel takes deliveries; several tasks may take from one channel, and
a gateway has one for each of its clients.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, Self

from semel.client.admin import READ_COMMITTED
from semel.client.cluster import Backoff, Cluster
from semel.client.connection import ConnectionOptions
from semel.client.consumer import Consumer, ConsumerOptions, Start
from semel.client.group_member import Assignment, GroupMember, Standing
from semel.client.group_offsets import GroupMetadata
from semel.client.metadata import TopicPartition
from semel.errors import FatalError, FencedError, RetriableError, SemelError
from semel.subscriptions.backoff import RedeliveryBackoff
from semel.subscriptions.delivery import Batch, Dealt, Delivery
from semel.subscriptions.errors import DeliveryLostError, SubscriptionClosedError
from semel.subscriptions.gate import CommitGate
from semel.subscriptions.options import DEFAULTS, Filter, SubscriptionOptions, Transform
from semel.subscriptions.owner import OwnerState, PartitionOwner, is_hopeless
from semel.wire.errors import ErrorCode

log = logging.getLogger("semel.subscriptions")

PROTOCOL: Final = "semel"
"""The assignor that all members have: ordinary consumers have others, and are turned away."""
FETCH_WAIT_MS: Final = 100
CONNECTIONS: Final = 16
"""To each broker, for transactions, which end with them on Semel; opened when they are needed. Kafka handles
one request of a connection at a time; with many more, requests hardly ever share a read or a write here."""
POLL_MS: Final = 200
GATE_TIMEOUT_MS: Final = 2_000
METADATA_INTERVAL_S: Final = 30.0


class Waiter:
    """Somebody who waits for a delivery, or for a batch of at most `limit`."""

    __slots__ = ("channel", "done", "limit")

    def __init__(self, channel: "Channel", limit: int, done: "asyncio.Future[Dealt]") -> None:
        self.channel = channel
        self.limit = limit
        self.done = done


class Channel:
    """One consumer of a subscription's deliveries. Closing it gives back what it has not acknowledged."""

    def __init__(self, subscription: "Subscription") -> None:
        self.subscription = subscription
        self.open: set[Dealt] = set()
        self.is_closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        try:
            return await self.take()
        except SubscriptionClosedError:
            raise StopAsyncIteration from None

    async def take(self) -> Delivery:
        """The next delivery."""
        dealt = await self.subscription.wait_for(self, 1)
        assert isinstance(dealt, Delivery)
        return dealt

    async def take_batch(self, size: int | None = None) -> Batch:
        """The next records of one partition: `batch_size` of them, or what came within `max_wait_ms`."""
        dealt = await self.subscription.wait_for(
            self, size or self.subscription.options.batch_size, batch=True
        )
        assert isinstance(dealt, Batch)
        return dealt

    async def batches(self) -> AsyncIterator[Batch]:
        while True:
            try:
                batch = await self.take_batch()
            except SubscriptionClosedError:
                return
            yield batch

    async def run(self, handler: Callable[[Delivery], Awaitable[object]], *, concurrency: int = 1) -> None:
        """Calls the handler with every delivery, so many at a time, until the subscription is closed.

        What the handler leaves open is acknowledged; what it raises is logged, and the delivery comes again.
        """
        await run_all([self._work(handler) for _ in range(concurrency)])

    async def _work(self, handler: Callable[[Delivery], Awaitable[object]]) -> None:
        async for delivery in self:
            try:
                async with delivery.transaction():
                    await handler(delivery)
            except SemelError as error:
                log.warning("%s: %s", delivery, error)
            except Exception:
                log.exception("%s failed, and comes again", delivery)

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """What the subscription owns at the moment; empty while others have it all."""
        return self.subscription.partitions

    def close(self, reason: str = "its subscriber has gone", *, counts: bool = True) -> None:
        """Gives back everything that is not sealed. What is sealed is committed."""
        self.is_closed = True
        self.subscription.forget(self)
        for dealt in list(self.open):
            dealt.take_back(reason, counts=counts)

    def deal(self, dealt: Dealt) -> None:
        self.open.add(dealt)

    def discard(self, dealt: Dealt) -> None:
        self.open.discard(dealt)


class Subscription:
    """Use it as an async context manager, or `start` and `close` it."""

    def __init__(
        self,
        cluster: Cluster,
        topics: Iterable[str],
        group_id: str,
        options: SubscriptionOptions | None = None,
    ) -> None:
        self.options = options or SubscriptionOptions()
        self.group_id = group_id
        self.topics = frozenset(topics)
        self._cluster = cluster
        lifeline = replace(cluster.options, is_lifeline=True)
        self._writers = tuple(Cluster(cluster.bootstrap, lifeline) for _ in range(CONNECTIONS))
        self._member = GroupMember(cluster, group_id, self.topics, PROTOCOL, self.options.member)
        self._consumer = Consumer(
            cluster, ConsumerOptions(isolation_level=READ_COMMITTED, max_wait_ms=FETCH_WAIT_MS)
        )
        self._gate = CommitGate()
        self._assigned: frozenset[TopicPartition] = frozenset()
        self._owners: dict[TopicPartition, PartitionOwner] = {}
        self._changing: dict[TopicPartition, asyncio.Task[None]] = {}
        self._ready: deque[PartitionOwner] = deque()
        self._waiters: deque[Waiter] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._rejoin = asyncio.Event()
        self._joined = asyncio.Event()
        self._has_partitions = asyncio.Event()
        self._heard_s = 0.0
        self._looked_s = 0.0
        self._counts: dict[str, int] = {}
        self._is_dealing = False
        self._is_closing = False
        self._waits_loudly = False
        self._failure: SemelError | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        return frozenset(where for where, owner in self._owners.items() if owner.state is OwnerState.OWNING)

    @property
    def failure(self) -> SemelError | None:
        """Why the subscription has stopped, if it has."""
        return self._failure

    def channel(self) -> Channel:
        return Channel(self)

    async def start(self) -> None:
        for topic in sorted(self.topics):
            await self._cluster.retry(partial(self._cluster.topic, topic))
        self._tasks = [
            asyncio.create_task(self._guard(self._stay_member()), name=f"member of {self.group_id}"),
            asyncio.create_task(self._guard(self._fetch()), name=f"fetches of {self.group_id}"),
        ]

    async def close(self) -> None:
        """Takes back what is out, commits that the partitions are free, and leaves the group."""
        self._is_closing = True
        self._close_waiters(
            SubscriptionClosedError(f"the subscription of group {self.group_id!r} was closed")
        )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._gate.open()
        for change in list(self._changing.values()):
            change.cancel()
        await asyncio.gather(*self._changing.values(), return_exceptions=True)
        await asyncio.gather(*(owner.release(0) for owner in self._owners.values()), return_exceptions=True)
        self._owners.clear()
        await self._consumer.close()
        with suppress(SemelError):  # the group notices in time
            await self._member.leave()
        for cluster in self._writers:
            await cluster.close()

    async def _guard(self, work: Awaitable[None]) -> None:
        """An error that no retry mends stops the subscription, and whoever waits is told."""
        try:
            await work
        except SemelError as error:
            log.error("the subscription of group %r has failed: %s", self.group_id, error)
            self._fail(error)

    def _fail(self, error: SemelError) -> None:
        if self._failure is None:
            self._failure = error
        self._close_waiters(error)

    def _closed_error(self) -> SubscriptionClosedError:
        return SubscriptionClosedError(f"the subscription of group {self.group_id!r} was closed")

    def _close_waiters(self, error: SemelError) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done.done():
                waiter.done.set_exception(error)

    # Dealing

    async def wait_for(self, channel: Channel, limit: int, *, batch: bool = False) -> Dealt:
        """The next delivery, or batch, for a channel."""
        if self._failure is not None:
            raise self._failure
        if self._is_closing or channel.is_closed:
            raise self._closed_error()
        done: asyncio.Future[Dealt] = asyncio.get_running_loop().create_future()
        # A batch is asked for by a limit above 1, or below 0 for a batch of one.
        self._waiters.append(Waiter(channel, -limit if batch else limit, done))
        self._deal()
        try:
            return await done
        except asyncio.CancelledError:
            if done.done() and not done.cancelled() and done.exception() is None:
                done.result().take_back("nobody waited for it any more", counts=False)
            raise

    def forget(self, channel: Channel) -> None:
        """Deals nothing more to a channel."""
        for waiter in self._waiters:
            if waiter.channel is channel and not waiter.done.done():
                waiter.done.set_exception(SubscriptionClosedError("the channel was closed"))

    def _owner_ready(self, owner: PartitionOwner) -> None:
        if owner not in self._ready:
            self._ready.append(owner)
        self._deal()

    def _deal(self) -> None:
        if self._is_dealing:
            return  # what an owner does while it is asked for records may tell that it has some
        self._is_dealing = True
        try:
            self._deal_ready()
        finally:
            self._is_dealing = False

    def _deal_ready(self) -> None:
        while self._waiters and self._ready:
            waiter = self._waiters[0]
            if waiter.done.done():
                self._waiters.popleft()
                continue
            owner = self._ready[0]
            held = owner.take(abs(waiter.limit))
            if not held:
                self._ready.popleft()
                continue
            self._ready.rotate(-1)
            self._waiters.popleft()
            channel = waiter.channel
            kind = Batch if waiter.limit < 0 else Delivery
            dealt = kind(owner, held, channel.discard)
            channel.deal(dealt)
            waiter.done.set_result(dealt)
            self._resume(owner)

    # Fetching

    async def _fetch(self) -> None:
        while True:
            try:
                batches = await self._consumer.poll(POLL_MS)
            except RetriableError as error:
                log.warning("group %r cannot fetch for the time being: %s", self.group_id, error)
                continue
            except FatalError as error:
                if error.code != ErrorCode.OFFSET_OUT_OF_RANGE:
                    raise
                # Retention was faster. What else came with this answer is dropped, so all is taken over anew.
                self._lose_all(str(error))
                continue
            for batch in batches:
                owner = self._owners.get(batch.where)
                if owner is not None:
                    owner.feed(batch)
                    if owner.is_full:
                        self._consumer.pause(batch.where)
            if not batches:
                self._pass_gaps()

    def _pass_gaps(self) -> None:
        for where, owner in self._owners.items():
            if owner.state is OwnerState.OWNING:
                owner.reached(self._consumer.position(where))

    def _resume(self, owner: PartitionOwner) -> None:
        if owner.wants_records:
            self._consumer.resume(owner.where)

    # Membership

    async def _stay_member(self) -> None:
        while True:
            self._rejoin.clear()
            await self._join()
            await self._beat()

    async def _join(self) -> None:
        """Enters the next generation with what is owned; commits wait meanwhile."""
        if not await self._gate.close(GATE_TIMEOUT_MS):
            log.warning("group %r rebalances while a commit is under way", self.group_id)
        try:
            assignment = await self._join_at_last()
        finally:
            self._gate.open()
        self._heard_s = asyncio.get_running_loop().time()
        if not assignment.is_continuous:
            self._lose_all("the group went on without this member")
        self._apply(assignment)

    async def _join_at_last(self) -> Assignment:
        """However long the broker is away: what was owned is lost meanwhile, and this member comes back."""
        while True:
            try:
                return await self._member.join({*self._owners, *self._changing})
            except RetriableError as error:
                log.warning("group %r cannot be joined for the time being: %s", self.group_id, error)
                self._lose_all("the group could not be joined again in time")

    def _apply(self, assignment: Assignment) -> None:
        self._assigned = assignment.partitions
        for where in list(self._owners):
            if where not in self._assigned:
                self._change(where, self._release(where))
        for where in sorted(self._assigned):
            if where not in self._owners and where not in self._changing:
                self._change(where, self._take_over(where))
        self._joined.set()
        self._say_if_idle()

    def _say_if_idle(self) -> None:
        if not self._assigned and not self._waits_loudly:
            self._waits_loudly = True
            log.warning(
                "this subscriber of group %r waits: every partition of %s has an owner",
                self.group_id,
                ", ".join(sorted(self.topics)),
            )
        elif self._assigned:
            self._waits_loudly = False

    def _change(self, where: TopicPartition, work: Awaitable[None]) -> None:
        last = self._changing.get(where)
        self._changing[where] = asyncio.create_task(self._after(last, where, work), name=f"owner of {where}")

    async def _after(
        self, last: "asyncio.Task[None] | None", where: TopicPartition, work: Awaitable[None]
    ) -> None:
        """One change of a partition at a time; in the end it is as the group wants it."""
        if last is not None:
            await asyncio.wait([last])
        try:
            await self._guard(work)
        finally:
            if self._changing.get(where) is asyncio.current_task():
                del self._changing[where]
        if self._is_closing or self._failure is not None or where in self._changing:
            return
        if (where in self._owners) != (where in self._assigned):
            if where in self._assigned:
                self._change(where, self._take_over(where))
            else:
                self._change(where, self._release(where))

    async def _take_over(self, where: TopicPartition) -> None:
        backoff = Backoff()
        while where in self._assigned and where not in self._owners and not self._is_closing:
            owner = PartitionOwner(
                self._cluster,
                self._writers,
                where,
                self.options,
                self._member_metadata,
                self._gate,
                self._owner_ready,
                self._owner_lost,
            )
            try:
                offset = await owner.take_over()
            except BaseException as error:
                await owner.close()
                if owner.failure is not None and is_hopeless(owner.failure):
                    raise owner.failure from error
                if not isinstance(error, RetriableError | FencedError | DeliveryLostError):
                    raise
                log.warning("%s could not be taken over yet: %s", where, error)
                await asyncio.sleep(backoff.next_pause_s())
                if not await self._is_member():
                    return
                continue
            self._owners[where] = owner
            await self._consumer.assign([where], Start(offset=offset))
            log.info("%s of group %r is owned here, from offset %d", where, self.group_id, offset)

    async def _is_member(self) -> bool:
        try:
            standing = await self._member.heartbeat()
        except RetriableError:
            return True
        if standing is not Standing.STABLE:
            self._rejoin.set()
        return standing is not Standing.OUT

    def _owner_lost(self, owner: PartitionOwner, error: SemelError) -> None:
        """Its slots are somebody else's; if the group says that the partition is ours, it is taken anew."""
        if self._owners.get(owner.where) is not owner:
            return
        log.warning("%s of group %r was lost: %s", owner.where, self.group_id, error)
        del self._owners[owner.where]
        self._consumer.unassign([owner.where])
        if is_hopeless(error):
            self._fail(error)
        self._change(owner.where, self._retake(owner))

    async def _retake(self, owner: PartitionOwner) -> None:
        await owner.close()
        if await self._is_member():
            await self._take_over(owner.where)

    async def _release(self, where: TopicPartition) -> None:
        owner = self._owners.get(where)
        if owner is None:
            return
        self._consumer.unassign([where])
        await owner.release(self.options.drain_timeout_ms)  # cancelled, `close` goes on with it
        self._owners.pop(where, None)
        self._rejoin.set()
        log.info("%s of group %r is free", where, self.group_id)

    def _lose_all(self, reason: str) -> None:
        for owner in list(self._owners.values()):
            owner.lose(SubscriptionClosedError(reason))

    async def _beat(self) -> None:
        """Heartbeats, until it is time to join again."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.options.heartbeat_interval_ms / 1000):
                    await self._rejoin.wait()
                return
            try:
                standing = await self._member.heartbeat()
                await self._look_for_partitions()
            except RetriableError as error:
                self._member.forget_coordinator()
                if (loop.time() - self._heard_s) * 1000 > self.options.member.session_timeout_ms:
                    self._lose_all(f"no heartbeat was answered for a whole session: {error}")
                    return
                continue
            self._heard_s = loop.time()
            if standing is Standing.OUT:
                self._lose_all("this member is out of the group")
            if standing is not Standing.STABLE:
                return

    async def _look_for_partitions(self) -> None:
        """A topic that has grown is a reason to join again."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._looked_s < METADATA_INTERVAL_S:
            return
        self._looked_s = now_s
        response = await self._cluster.metadata(sorted(self.topics))
        counts = {topic.name or "": len(topic.partitions) for topic in response.topics}
        if self._counts and counts != self._counts:
            self._rejoin.set()
        self._counts = counts

    def _member_metadata(self) -> GroupMetadata:
        return self._member.metadata


async def run_all(works: Iterable[Coroutine[object, object, None]]) -> None:
    """Runs them side by side; the first error ends all of them, and is raised as it is."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Subscribing:
    """What `subscribe` returns: an async context manager for the deliveries."""

    def __init__(
        self,
        bootstrap: str,
        topics: Iterable[str],
        group_id: str,
        options: SubscriptionOptions,
        connection: ConnectionOptions | None,
    ) -> None:
        self._cluster = Cluster(bootstrap, connection)
        self._topics = list(topics)
        self._group_id = group_id
        self._options = options
        self._subscription: Subscription | None = None

    async def __aenter__(self) -> Channel:
        await self._cluster.connect()
        try:
            self._subscription = Subscription(self._cluster, self._topics, self._group_id, self._options)
            await self._subscription.start()
        except BaseException:
            await self._cluster.close()
            raise
        return self._subscription.channel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._subscription is not None:
            await self._subscription.close()
        await self._cluster.close()


def subscribe(
    bootstrap: str,
    topics: str | Iterable[str],
    *,
    group: str,
    max_in_flight: int = DEFAULTS.max_in_flight,
    max_attempts: int = DEFAULTS.max_attempts,
    delivery_timeout_ms: int = DEFAULTS.delivery_timeout_ms,
    batch_size: int = DEFAULTS.batch_size,
    max_wait_ms: int = DEFAULTS.max_wait_ms,
    backoff: RedeliveryBackoff | None = None,
    dead_letter_topic: str | None = None,
    start: str = DEFAULTS.start,
    filter: Filter | None = None,  # noqa: A002 - it is what everybody calls it
    transform: Transform | None = None,
    options: SubscriptionOptions | None = None,
    connection: ConnectionOptions | None = None,
) -> Subscribing:
    """Deliveries of these topics, for one group. `options` replaces all that have a default here."""
    chosen = options or SubscriptionOptions(
        max_in_flight=max(max_in_flight, batch_size),
        max_attempts=max_attempts,
        delivery_timeout_ms=delivery_timeout_ms,
        batch_size=batch_size,
        max_wait_ms=max_wait_ms,
        backoff=backoff or DEFAULTS.backoff,
        dead_letter_topic=dead_letter_topic,
        start=start,
        filter=filter,
        transform=transform,
    )
    names = [topics] if isinstance(topics, str) else list(topics)
    return Subscribing(bootstrap, names, group, chosen, connection)
