"""DescribeConfigs (32): what every setting of a topic or of the broker is, and where its value comes from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import Final

from semel.broker.configs import TOPIC_CONFIGS, ConfigDefinition
from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.refusal import Refused
from semel.wire.errors import ErrorCode
from semel.wire.messages.create_topics import CreatableTopicConfigs
from semel.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)


class ResourceType(IntEnum):
    """What can have settings."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8


class ConfigSource(IntEnum):
    """Where a value comes from, as the protocol numbers it."""

    TOPIC = 1
    STATIC_BROKER = 4
    DEFAULT = 5


_UNKNOWN: Final = "only topics and this broker have settings here"


def describe_configs(broker: Broker, request: DescribeConfigsRequest, caller: Caller, now: Now) -> Decision:
    return Decision(
        DescribeConfigsResponse(results=[_describe(broker, request, wanted) for wanted in request.resources])
    )


def _describe(
    broker: Broker, request: DescribeConfigsRequest, wanted: DescribeConfigsResource
) -> DescribeConfigsResult:
    result = DescribeConfigsResult(
        error_code=0,
        error_message=None,
        resource_type=wanted.resource_type,
        resource_name=wanted.resource_name,
        configs=[],
    )
    keys = wanted.configuration_keys or None
    try:
        match wanted.resource_type:
            case ResourceType.TOPIC:
                result.configs = _topic_configs(broker, wanted.resource_name, keys)
            case ResourceType.BROKER:
                result.configs = _broker_configs(broker, wanted.resource_name, keys)
            case _:
                raise Refused(ErrorCode.INVALID_REQUEST, _UNKNOWN)
    except Refused as refused:
        result.error_code, result.error_message = refused.code, refused.reason
    for config in result.configs:
        if not request.include_synonyms:
            config.synonyms = []
        if not request.include_documentation:
            config.documentation = None
    return result


def _topic_configs(
    broker: Broker, name: str, keys: Collection[str] | None
) -> list[DescribeConfigsResourceResult]:
    topic = broker.catalog.by_name.get(name)
    if topic is None:
        raise Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic '{name}'")
    return [
        _topic_config(definition, topic.configs, broker.catalog.defaults)
        for definition in TOPIC_CONFIGS.values()
        if keys is None or definition.name in keys
    ]


def _topic_config(
    definition: ConfigDefinition, configs: Mapping[str, str], defaults: Mapping[str, str]
) -> DescribeConfigsResourceResult:
    synonyms = []
    if definition.name in configs:
        synonyms.append(
            DescribeConfigsSynonym(
                name=definition.name, value=configs[definition.name], source=ConfigSource.TOPIC
            )
        )
    if definition.name in defaults:
        synonyms.append(
            DescribeConfigsSynonym(
                name=definition.server_name,
                value=defaults[definition.name],
                source=ConfigSource.STATIC_BROKER,
            )
        )
    synonyms.append(
        DescribeConfigsSynonym(
            name=definition.server_name, value=definition.default, source=ConfigSource.DEFAULT
        )
    )
    return DescribeConfigsResourceResult(
        name=definition.name,
        value=synonyms[0].value,
        config_source=synonyms[0].source,
        synonyms=synonyms,
        config_type=definition.kind,
        documentation=definition.summary,
    )


def _broker_configs(
    broker: Broker, name: str, keys: Collection[str] | None
) -> list[DescribeConfigsResourceResult]:
    if name == "":
        return []  # What was changed for all brokers while they ran: nothing, since nothing can be.
    if name != str(broker.identity.node_id):
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"this is broker {broker.identity.node_id}; there is no broker '{name}'",
        )
    return [
        DescribeConfigsResourceResult(
            name=setting.name,
            value=setting.value,
            read_only=True,
            config_source=ConfigSource.STATIC_BROKER if setting.is_set else ConfigSource.DEFAULT,
            config_type=setting.kind,
            documentation=setting.summary,
        )
        for setting in broker.settings
        if keys is None or setting.name in keys
    ]


def created_topic_configs(broker: Broker, configs: Mapping[str, str]) -> list[CreatableTopicConfigs]:
    """The settings of a topic that is being created, as CreateTopics answers them."""
    described = [_topic_config(item, configs, broker.catalog.defaults) for item in TOPIC_CONFIGS.values()]
    return [
        CreatableTopicConfigs(name=item.name, value=item.value, config_source=item.config_source)
        for item in described
    ]
