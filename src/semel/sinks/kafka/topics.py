"""What a writer has to know of the topics that it writes to."""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from semel.client.admin import Admin, config_value
from semel.client.cluster import Cluster
from semel.errors import BrokerError, SemelError
from semel.wire.columns import DEFAULT_MAX_BATCH_BYTES
from semel.wire.errors import ErrorCode

log = logging.getLogger(__name__)

NOT_THERE: Final = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION})
# How long a sink that is opened, or a query that is started, waits for topics that nobody knows yet.
NEW_TOPIC_PATIENCE_S: Final = 3.0
# What Kafka allows.
TOPIC_NAME: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")


@dataclass(slots=True, frozen=True)
class TopicShape:
    """How many partitions a topic has, and the most bytes that a batch may have there."""

    partition_count: int
    max_batch_bytes: int


class TopicShapes:
    """The topics of a sink, counted once an epoch, so that all of its writers put a key in the same place."""

    def __init__(self, cluster: Cluster, own: Sequence[str]) -> None:
        self._cluster = cluster
        self._own = own
        # None: there is no such topic.
        self._found: dict[str, TopicShape | None] = {}

    @property
    def known(self) -> dict[str, TopicShape]:
        return {topic: shape for topic, shape in self._found.items() if shape is not None}

    async def open(self) -> None:
        """The sink's own topics must be there."""
        self._found = {topic: await await_shape(self._cluster, topic) for topic in self._own}

    async def count_again(self) -> None:
        """Partitions that were added are used from the next epoch on; within one, a key has one place."""
        try:
            self._found = {topic: await read_shape(self._cluster, topic) for topic in self._own}
        except SemelError as error:
            self._found = dict(self.known)
            log.warning("%s: going on with the partitions that are known: %s", ", ".join(self._own), error)

    async def find(self, topic: str) -> TopicShape | None:
        """Of a topic that only the rows name: looked for once for all writers of an epoch."""
        if topic not in self._found:
            found = await find_shape(self._cluster, topic)
            self._found.setdefault(topic, found)  # another may have asked meanwhile
        return self._found[topic]


async def read_shape(cluster: Cluster, topic: str) -> TopicShape:
    """A topic's shape; where its configs may not be read, batches keep below Kafka's default limit."""
    admin = Admin(cluster)
    described = await admin.describe_topic(topic)
    max_batch_bytes = DEFAULT_MAX_BATCH_BYTES
    try:
        limit = config_value(await admin.topic_configs(topic), "max.message.bytes")
        if limit is not None:
            max_batch_bytes = int(limit)
    except BrokerError as error:
        if error.code != ErrorCode.TOPIC_AUTHORIZATION_FAILED:
            raise
    return TopicShape(len(described.partitions), max_batch_bytes)


async def await_shape(cluster: Cluster, topic: str) -> TopicShape:
    """The same, once it is there; raises what the broker says of it, after a while where that may change.

    A topic that was just made is not known to every broker at once, nor is any to a broker that just started.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + NEW_TOPIC_PATIENCE_S
    while True:
        try:
            return await read_shape(cluster, topic)
        except BrokerError as error:
            is_unknown = error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            if not is_unknown or loop.time() >= give_up_at:
                raise


async def find_shape(cluster: Cluster, topic: str) -> TopicShape | None:
    """The same, or None where there is no such topic."""
    try:
        return await read_shape(cluster, topic)
    except BrokerError as error:
        if error.code in NOT_THERE:
            return None
        raise
