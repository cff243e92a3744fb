"""The cluster that a query reads from: its topics must be there; tools that show lag find offsets there."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.client.loop_thread import LoopThread
from semel.errors import BrokerError, ConfigError, RetriableError, SemelError
from semel.sinks.kafka.topics import NEW_TOPIC_PATIENCE_S
from semel.spark.source_options import BOOTSTRAP, FORMAT, SourceOptions
from semel.spark.source_security import read_security
from semel.wire.errors import ErrorCode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


log = logging.getLogger(__name__)

# A topic that was just made is not known to every broker at once.
NEW_TOPIC_POLL_S: Final = 0.1


class SourceCluster(NamedTuple):
    """Where it is, and how it is reached: None where only Java can (its key stores)."""

    bootstrap: str
    connection: ConnectionOptions | None


def cluster_of(df: "DataFrame") -> SourceCluster | None:
    """The one cluster that all sources of a streaming frame are in; None where there is no one."""
    return one_cluster([source.options for source in _sources(df)])


def require_topics(df: "DataFrame") -> None:
    """Refuses to read topics that are not there. Whatever else may be wrong with them, the reader says.

    It waits for brokers that are away, too.
    """
    thread = LoopThread("look for topics")
    try:
        for source in _sources(df):
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


def one_cluster(options: Sequence[Mapping[str, str]]) -> SourceCluster | None:
    """By the options of the sources."""
    found = {each.get(BOOTSTRAP, "") for each in options}
    bootstrap = found.pop() if len(found) == 1 else ""
    if not bootstrap:
        return None
    try:
        tls, sasl = read_security(options[0])
    except ConfigError as error:
        log.warning(
            "offsets are not committed at the source, %s, unless the sink is there, too. Only tools that "
            "show lag look at them: %s",
            bootstrap,
            error,
        )
        return SourceCluster(bootstrap, None)
    return SourceCluster(bootstrap, ConnectionOptions(tls=tls, sasl=sasl))


class Source(NamedTuple):
    """The name of its format, and its options."""

    name: str
    options: Mapping[str, str]


def _sources(df: "DataFrame") -> list[Source]:
    """Those that tell."""
    leaves: Any = df._jdf.queryExecution().analyzed().collectLeaves().iterator()
    found: list[Source] = []
    while leaves.hasNext():
        leaf = leaves.next()
        if leaf.getClass().getSimpleName() == "StreamingRelationV2":
            options = leaf.extraOptions().asCaseSensitiveMap()
            lowered = {str(name).lower(): str(value) for name, value in options.items()}
            found.append(Source(str(leaf.sourceName()), lowered))
    return found
