"""Whether the topics that a query wants to read are there: looked at before a sink is opened."""

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from semel.client.cluster import Cluster
from semel.client.loop_thread import LoopThread
from semel.errors import BrokerError, ConfigError, RetriableError, SemelError
from semel.sinks.kafka.topics import NEW_TOPIC_PATIENCE_S
from semel.spark.source_cluster import sources_of
from semel.spark.source_options import FORMAT, SourceOptions
from semel.wire.errors import ErrorCode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

# A topic that was just made is not known to every broker at once.
NEW_TOPIC_POLL_S: Final = 0.1


def require_topics(df: "DataFrame") -> None:
    """Refuses to read topics that are not there. Whatever else may be wrong with them, the reader says.

    Brokers that are away are left to the reader, which waits for them.
    """
    thread = LoopThread("look for topics")
    try:
        for source in sources_of(df):
            if source.name == FORMAT:
                thread.run(_require_topics(SourceOptions.of(source.options)))
    finally:
        thread.close()


async def _require_topics(options: SourceOptions) -> None:
    give_up_at = asyncio.get_running_loop().time() + NEW_TOPIC_PATIENCE_S
    try:
        async with Cluster(options.bootstrap, options.connection) as cluster:
            for topic in options.topics:
                while not await _may_be_read(cluster, topic):
                    if asyncio.get_running_loop().time() >= give_up_at:
                        raise ConfigError(
                            f"there is no topic {topic!r} to read from at {options.bootstrap}: check the "
                            "name with `semel topic list`, or create it"
                        )
                    await asyncio.sleep(NEW_TOPIC_POLL_S)
    except RetriableError as error:
        log.warning("what is to be read is away, and its reader waits for it: %s", error)


async def _may_be_read(cluster: Cluster, topic: str) -> bool:
    try:
        await cluster.topic(topic)
    except BrokerError as error:
        return error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    except (SemelError, OSError):
        pass
    return True
