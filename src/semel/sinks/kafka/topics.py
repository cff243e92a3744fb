"""What a writer has to know of the topics that it writes to."""

import asyncio
import re
from dataclasses import dataclass
from typing import Final

from semel.client.admin import Admin, config_value
from semel.client.cluster import Cluster
from semel.errors import BrokerError
from semel.wire.columns import DEFAULT_MAX_BATCH_BYTES
from semel.wire.errors import ErrorCode

NOT_THERE: Final = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION})
# How long a sink that is opened waits for its topics.
NEW_TOPIC_PATIENCE_S: Final = 3.0
# What Kafka allows.
TOPIC_NAME: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")


@dataclass(slots=True, frozen=True)
class TopicShape:
    """Counted once, so that all writers of an epoch put a key in the same place."""

    partition_count: int
    max_batch_bytes: int


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
