"""ListConfigResources (74): what there is that has settings."""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.describe_configs import ResourceType
from semel.wire.errors import ErrorCode
from semel.wire.messages.list_config_resources import (
    ConfigResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)

_CLIENT_METRICS: Final = 16
_GROUP: Final = 32
_LISTED_TYPES: Final = (
    ResourceType.TOPIC,
    ResourceType.BROKER,
    ResourceType.BROKER_LOGGER,
    _CLIENT_METRICS,
    _GROUP,
)
_NAMES_TYPES_FROM: Final = 1
"""Before this version, only subscriptions to client metrics were asked for."""


def list_config_resources(
    broker: Broker, request: ListConfigResourcesRequest, caller: Caller, now: Now
) -> Decision:
    if caller.api_version < _NAMES_TYPES_FROM:
        return Decision(ListConfigResourcesResponse())
    types = list(dict.fromkeys(request.resource_types)) or [*_LISTED_TYPES]
    if any(kind not in _LISTED_TYPES for kind in types):
        return Decision(ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION))
    found = [
        ConfigResource(resource_name=name, resource_type=kind)
        for kind in types
        for name in _names(broker, kind)
    ]
    return Decision(ListConfigResourcesResponse(config_resources=found))


def _names(broker: Broker, kind: int) -> list[str]:
    """Loggers, client metrics and groups have no settings of their own here."""
    if kind == ResourceType.TOPIC:
        return list(broker.catalog.by_name)
    return [str(broker.identity.node_id)] if kind == ResourceType.BROKER else []
