"""A cluster as its clients see it: which broker to ask, how to reach it, and when to ask again.

Rules:

- The first contact goes to the bootstrap addresses; after that the brokers named by metadata are used, and
  the bootstrap addresses again if none of those answers.
- Connections are opened on first use and shared, one per broker and *lane*. A broker answers a connection in
  order, so whoever waits long (a fetch) has a lane of its own and does not hold up the others.
- What was learned (topics, leaders, coordinators) is kept until someone reports it wrong with `forget_topic`
  or `forget_coordinator`, or a retry begins.
- Only `RetriableError` is retried, with growing pauses, until the caller's time is up; the last error is then
  raised. A topic that nobody knows may just have been made, but that is waited for only briefly. What may not
  be done twice is not retried when the connection was lost, because the broker may have done it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from semel.client.connection import Connection, ConnectionOptions
from semel.client.errors import UnreachableError, broker_error, check
from semel.client.metadata import (
    NO_NODE,
    Address,
    Broker,
    ClusterView,
    Partition,
    Topic,
    TopicPartition,
    cluster_view,
    parse_addresses,
    topic_view,
)
from semel.errors import RetriableError
from semel.wire.errors import ErrorCode
from semel.wire.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from semel.wire.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse

T = TypeVar("T")

FIRST_PAUSE_MS: Final = 50
MAX_PAUSE_MS: Final = 1_000
# The markers of a transaction that has just ended are written within milliseconds.
FIRST_MARKER_PAUSE_MS: Final = 2
MAX_MARKER_PAUSE_MS: Final = 100
DEFAULT_RETRY_TIMEOUT_MS: Final = 30_000
# How long a new topic may take to be known to every broker.
UNKNOWN_TOPIC_PATIENCE_MS: Final = 500

GROUP_COORDINATOR: Final = 0
TRANSACTION_COORDINATOR: Final = 1
# Later versions ask for many keys at once; one key is all we ever need.
FIND_COORDINATOR_VERSION: Final = 3

DEFAULT_LANE: Final = ""


def waits_for_markers(error: RetriableError) -> bool:
    """The last transaction is being ended still; the broker is the right one, and will be ready at once."""
    return error.code == ErrorCode.CONCURRENT_TRANSACTIONS


class Backoff:
    """Growing pauses between attempts, spread so that many clients do not come back at once."""

    __slots__ = ("_marker_pause_ms", "_pause_ms")

    def __init__(self) -> None:
        self._pause_ms = FIRST_PAUSE_MS
        self._marker_pause_ms = FIRST_MARKER_PAUSE_MS

    def reset(self) -> None:
        """Something succeeded: the next failure is a first one again."""
        self._pause_ms = FIRST_PAUSE_MS
        self._marker_pause_ms = FIRST_MARKER_PAUSE_MS

    def next_pause_s(self, error: RetriableError | None = None) -> float:
        """How long to wait after this failure."""
        if error is not None and waits_for_markers(error):
            pause_ms = self._marker_pause_ms
            self._marker_pause_ms = min(pause_ms * 2, MAX_MARKER_PAUSE_MS)
        else:
            pause_ms = self._pause_ms
            self._pause_ms = min(pause_ms * 2, MAX_PAUSE_MS)
        return pause_ms * (0.5 + random.random() / 2) / 1000


class Cluster:
    """The way to a cluster's brokers. Close it, or use it as an async context manager."""

    def __init__(self, bootstrap: str, options: ConnectionOptions | None = None) -> None:
        self.options = options or ConnectionOptions()
        self.bootstrap = bootstrap
        self._bootstrap = parse_addresses(bootstrap)
        self._view = ClusterView(None, NO_NODE, ())
        self._brokers: dict[int, Broker] = {}
        self._topics: dict[str, Topic] = {}
        self._coordinators: dict[tuple[int, str], int] = {}
        self._connections: dict[tuple[Address, str], Connection] = {}
        self._dialing: dict[tuple[Address, str], asyncio.Lock] = {}

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> ClusterView:
        """First contact, tried once: a wrong address shows at once and not after many retries."""
        await self.metadata(())
        return self._view

    async def close(self) -> None:
        connections = list(self._connections.values())
        self._connections.clear()
        for connection in connections:
            connection.close()

    # Connections

    async def any_connection(self) -> Connection:
        """A connection to whichever broker can be reached."""
        for connection in self._connections.values():
            if not connection.is_closed:
                return connection
        known = [broker.address for broker in self._brokers.values()]
        failures: list[str] = []
        for address in dict.fromkeys((*known, *self._bootstrap)):
            try:
                return await self._connection_to(address, DEFAULT_LANE)
            except UnreachableError as error:
                failures.append(str(error))
        raise UnreachableError("; ".join(failures))

    async def connection(self, node_id: int, lane: str = DEFAULT_LANE) -> Connection:
        """The connection to one broker."""
        if node_id not in self._brokers:
            await self.metadata(())
        broker = self._brokers.get(node_id)
        if broker is None:
            raise broker_error(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {node_id} is not part of the cluster")
        return await self._connection_to(broker.address, lane)

    async def _connection_to(self, address: Address, lane: str) -> Connection:
        key = (address, lane)
        connection = self._connections.get(key)
        if connection is not None and not connection.is_closed:
            return connection
        async with self._dialing.setdefault(key, asyncio.Lock()):
            connection = self._connections.get(key)  # whoever came first may have opened it
            if connection is None or connection.is_closed:
                connection = await Connection.open(address.host, address.port, self.options)
                self._connections[key] = connection
            return connection

    # Metadata

    async def metadata(self, topics: Sequence[str] | None, *, create: bool = False) -> MetadataResponse:
        """Asks for the cluster and for these topics (None: all of them), and remembers the answer."""
        connection = await self.any_connection()
        asked = None if topics is None else [MetadataRequestTopic(name=name) for name in topics]
        request = MetadataRequest(topics=asked, allow_auto_topic_creation=create)
        response = await connection.request(request, MetadataResponse)
        check(response.error_code, "the cluster's metadata could not be read")
        self._view = cluster_view(response)
        self._brokers = {broker.node_id: broker for broker in self._view.brokers}
        for topic in response.topics:
            if topic.error_code == ErrorCode.NONE and topic.name is not None:
                self._topics[topic.name] = topic_view(topic)
        return response

    async def view(self) -> ClusterView:
        """The brokers as of now."""
        await self.metadata(())
        return self._view

    async def topic(self, name: str) -> Topic:
        """What is known of a topic, asking if nothing is."""
        if (known := self._topics.get(name)) is not None:
            return known
        for answer in (await self.metadata((name,))).topics:
            if answer.name == name:
                check(answer.error_code, f"topic {name!r} cannot be used")
        if (known := self._topics.get(name)) is None:
            raise broker_error(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r} cannot be used")
        return known

    async def leader_id(self, topic_partition: TopicPartition) -> int:
        """The broker that takes writes and reads of a partition."""
        topic = await self.topic(topic_partition.topic)
        partition = _find_partition(topic, topic_partition.partition)
        if partition.leader_id == NO_NODE:
            self.forget_topic(topic.name)
            raise broker_error(ErrorCode.LEADER_NOT_AVAILABLE, f"partition {topic_partition} has no leader")
        return partition.leader_id

    async def controller(self) -> Connection:
        """The connection to the broker that changes topics."""
        if self._view.controller_id == NO_NODE:
            await self.metadata(())
        if self._view.controller_id == NO_NODE:
            return await self.any_connection()
        return await self.connection(self._view.controller_id)

    async def coordinator(self, kind: int, key: str) -> Connection:
        """The connection to the coordinator of a group or of a transactional id."""
        return await self.connection(await self.coordinator_id(kind, key))

    async def coordinator_id(self, kind: int, key: str) -> int:
        """The broker that coordinates a group or a transactional id."""
        node_id = self._coordinators.get((kind, key))
        if node_id is None:
            node_id = self._coordinators[(kind, key)] = await self._find_coordinator(kind, key)
        return node_id

    async def _find_coordinator(self, kind: int, key: str) -> int:
        connection = await self.any_connection()
        request = FindCoordinatorRequest(key=key, key_type=kind)
        response = await connection.request(
            request, FindCoordinatorResponse, max_version=FIND_COORDINATOR_VERSION
        )
        check(response.error_code, f"no coordinator was found for {key!r}", response.error_message)
        if response.node_id not in self._brokers:
            self._brokers[response.node_id] = Broker(
                response.node_id, Address(response.host, response.port), None
            )
        return response.node_id

    def forget_topic(self, name: str) -> None:
        """What is known of the topic turned out to be wrong: ask again next time."""
        self._topics.pop(name, None)

    def forget_coordinator(self, kind: int, key: str) -> None:
        self._coordinators.pop((kind, key), None)

    def forget_all(self) -> None:
        self._topics.clear()
        self._coordinators.clear()
        self._view = ClusterView(self._view.cluster_id, NO_NODE, self._view.brokers)

    # Retries

    async def retry(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        timeout_ms: int = DEFAULT_RETRY_TIMEOUT_MS,
        repeatable: bool = True,
    ) -> T:
        """Runs the attempt until it succeeds, fails for good, or the time is up."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        backoff = Backoff()
        while True:
            try:
                return await attempt()
            except RetriableError as error:
                pause_s = backoff.next_pause_s(error)
                waited_ms = (loop.time() + pause_s - began) * 1000
                if waited_ms > _patience_ms(error, timeout_ms, repeatable):
                    raise
                if not waits_for_markers(error):
                    self.forget_all()
            await asyncio.sleep(pause_s)


def _patience_ms(error: RetriableError, timeout_ms: int, repeatable: bool) -> int:
    if isinstance(error, UnreachableError) and not repeatable:
        return 0
    if error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return min(timeout_ms, UNKNOWN_TOPIC_PATIENCE_MS)
    return timeout_ms


def _find_partition(topic: Topic, partition: int) -> Partition:
    for candidate in topic.partitions:
        if candidate.partition == partition:
            return candidate
    raise broker_error(
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        f"topic {topic.name!r} has no partition {partition}, it has {len(topic.partitions)}",
    )
