"""The cluster that a query reads from, where its offsets are committed for tools that show lag."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from semel.client.connection import ConnectionOptions
from semel.errors import ConfigError
from semel.spark.source_options import BOOTSTRAP
from semel.spark.source_security import read_security

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


class SourceCluster(NamedTuple):
    """Where it is, and how it is reached: None where only Java can (its key stores)."""

    bootstrap: str
    connection: ConnectionOptions | None


def cluster_of(df: "DataFrame") -> SourceCluster | None:
    """The one cluster that all sources of a streaming frame are in; None where there is no one."""
    return one_cluster([source.options for source in sources_of(df)])


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


def sources_of(df: "DataFrame") -> list[Source]:
    """The streaming sources of the plan that show their options (V2; file sources do not)."""
    leaves: Any = df._jdf.queryExecution().analyzed().collectLeaves().iterator()
    found: list[Source] = []
    while leaves.hasNext():
        leaf = leaves.next()
        if leaf.getClass().getSimpleName() == "StreamingRelationV2":
            options = leaf.extraOptions().asCaseSensitiveMap()
            lowered = {str(name).lower(): str(value) for name, value in options.items()}
            found.append(Source(str(leaf.sourceName()), lowered))
    return found
