"""What is looked at while a Kafka sink is opened: whose it is, what its broker does, what is to be mended."""

import logging
from typing import Final

from semel.client.admin import Admin, config_value
from semel.client.cluster import Cluster
from semel.errors import AbortableError, BrokerError, ConfigError, SemelError
from semel.sinks.errors import InitFailed
from semel.sinks.kafka.markers import MarkerStore, has_open_transaction, is_alive
from semel.wire.errors import ErrorCode

log = logging.getLogger(__name__)

MAX_TIMEOUT_SETTING: Final = "transaction.max.timeout.ms"

# What a broker answers to settings that somebody has to mend: there, or here.
WRONG_SETTINGS: Final = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
        ErrorCode.INVALID_TRANSACTION_TIMEOUT,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.SASL_AUTHENTICATION_FAILED,
        ErrorCode.UNSUPPORTED_VERSION,
    }
)


async def require_no_owner(cluster: Cluster, markers: MarkerStore) -> None:
    """For those who would rather not fence: a transaction that is open has an owner, dead or alive."""
    if await has_open_transaction(cluster, markers.sink_id):
        raise InitFailed(
            f"sink {markers.sink_id!r} has a transaction open, so it may have an owner, and fence_on_open is "
            "off. Stop that one, or wait for its transaction to time out",
            is_permanent=False,
        )
    found = await markers.read(cluster)
    if found is not None and is_alive(found[1]):
        raise InitFailed(
            f"sink {markers.sink_id!r} is open in {found[1]}, and fence_on_open is off. Stop that one first",
            is_permanent=False,
        )


async def warn_unless_verified(cluster: Cluster, sink_id: str) -> None:
    """Version 2 always verifies that a transaction is open; before it, Kafka does from 3.6 on."""
    try:
        verifies = await _broker_setting(cluster, "transaction.partition.verification.enable")
    except BrokerError as error:
        if error.code != ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
            raise
        verifies = None
    if verifies != "true":
        log.warning(
            "the broker at %s does not verify, or does not say, that a transaction is open before it "
            "takes a batch (Semel does, and Kafka from 3.6 on): a writer of sink %r that wakes up late "
            "may not be fenced",
            cluster.bootstrap,
            sink_id,
        )


async def refused_timeout(cluster: Cluster, sink_id: str, timeout_s: float) -> InitFailed:
    """The error for a broker that takes no transaction of this length, with its maximum if it tells it."""
    try:
        max_timeout_ms = await _broker_setting(cluster, MAX_TIMEOUT_SETTING)
    except SemelError:
        max_timeout_ms = None  # not everybody may read it, and what is wrong is known without it
    most = f"at most {int(max_timeout_ms) / 1000:g} s" if max_timeout_ms else "less"
    return InitFailed(
        f"sink {sink_id!r} cannot be opened: its transaction_timeout is {timeout_s:g} s, and the broker "
        f"takes {most} (INVALID_TRANSACTION_TIMEOUT; the broker's {MAX_TIMEOUT_SETTING}). Give the sink a "
        "lower transaction_timeout, or raise the broker's maximum"
    )


async def _broker_setting(cluster: Cluster, name: str) -> str | None:
    admin = Admin(cluster)
    broker = (await admin.describe_cluster()).brokers[0]
    return config_value(await admin.broker_configs(broker.node_id), name)


def is_wrong_setting(error: BaseException) -> bool:
    """Whether a sink that could not be opened for this cannot be opened until somebody mends something."""
    if isinstance(error, AbortableError) and error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return False  # the topic was found, and the coordinator has not heard of it yet
    if isinstance(error, BrokerError):
        return error.code in WRONG_SETTINGS
    return isinstance(error, ConfigError)
