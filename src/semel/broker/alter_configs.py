"""IncrementalAlterConfigs (44) and AlterConfigs (33): change what a topic's owner has set."""

from __future__ import annotations

from enum import IntEnum

from semel.broker.configs import TOPIC_CONFIGS, ConfigType, check_topic_configs
from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.broker.describe_configs import ResourceType
from semel.broker.entries import Entry
from semel.broker.journal_messages import Config, TopicConfigured
from semel.broker.refusal import Refused
from semel.broker.topics import Topic
from semel.errors import ConfigError
from semel.wire.errors import ErrorCode
from semel.wire.messages import alter_configs as replacing
from semel.wire.messages import incremental_alter_configs as incremental


class Operation(IntEnum):
    """What to do with one setting."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


def incremental_alter_configs(
    broker: Broker, request: incremental.IncrementalAlterConfigsRequest, caller: Caller, now: Now
) -> Decision:
    entries: list[Entry] = []
    responses = []
    for wanted in request.resources:
        code, reason = 0, None
        try:
            if not _removes_from_broker(broker, wanted):
                topic = _topic(broker, wanted.resource_type, wanted.resource_name)
                configs = dict(topic.configs)
                for change in wanted.configs:
                    _change(broker, configs, change)
                entries.append(_configured(topic, configs))
        except Refused as refused:
            code, reason = refused.code, refused.reason
        responses.append(
            incremental.AlterConfigsResourceResponse(
                error_code=code,
                error_message=reason,
                resource_type=wanted.resource_type,
                resource_name=wanted.resource_name,
            )
        )
    reply = incremental.IncrementalAlterConfigsResponse(responses=responses)
    return Decision(reply, [] if request.validate_only else entries)


def alter_configs(
    broker: Broker, request: replacing.AlterConfigsRequest, caller: Caller, now: Now
) -> Decision:
    entries: list[Entry] = []
    responses = []
    for wanted in request.resources:
        code, reason = 0, None
        try:
            topic = _topic(broker, wanted.resource_type, wanted.resource_name)
            configs = {config.name: config.value for config in wanted.configs if config.value is not None}
            entries.append(_configured(topic, configs))
        except Refused as refused:
            code, reason = refused.code, refused.reason
        responses.append(
            replacing.AlterConfigsResourceResponse(
                error_code=code,
                error_message=reason,
                resource_type=wanted.resource_type,
                resource_name=wanted.resource_name,
            )
        )
    reply = replacing.AlterConfigsResponse(responses=responses)
    return Decision(reply, [] if request.validate_only else entries)


def _removes_from_broker(broker: Broker, wanted: incremental.AlterConfigsResource) -> bool:
    """Whether this takes back what was set on the running broker: it has been done, since nothing can be set.

    The tool that moves partitions ends with it, throttle or no throttle.
    """
    return (
        wanted.resource_type == ResourceType.BROKER
        and wanted.resource_name in ("", str(broker.identity.node_id))
        and all(change.config_operation == Operation.DELETE for change in wanted.configs)
    )


def _topic(broker: Broker, resource_type: int, name: str) -> Topic:
    if resource_type != ResourceType.TOPIC:
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            "only topics can be altered while the broker runs; change its own settings in its file",
        )
    topic = broker.catalog.by_name.get(name)
    if topic is None:
        raise Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic '{name}'")
    return topic


def _change(broker: Broker, configs: dict[str, str], change: incremental.AlterableConfig) -> None:
    if change.config_operation == Operation.DELETE:
        configs.pop(change.name, None)
        return
    if change.value is None:
        raise Refused(ErrorCode.INVALID_REQUEST, f"{change.name} needs a value")
    if change.config_operation == Operation.SET:
        configs[change.name] = change.value
        return
    definition = TOPIC_CONFIGS.get(change.name)
    if definition is None or definition.kind != ConfigType.LIST:
        raise Refused(ErrorCode.INVALID_CONFIG, f"{change.name} is not a list; set it instead")
    current = configs.get(change.name) or broker.catalog.defaults.get(change.name) or definition.default
    words = [word for word in current.split(",") if word]
    given = change.value.split(",")
    if change.config_operation == Operation.APPEND:
        words += [word for word in given if word not in words]
    elif change.config_operation == Operation.SUBTRACT:
        words = [word for word in words if word not in given]
    else:
        raise Refused(ErrorCode.INVALID_REQUEST, f"{change.config_operation} is no operation on a setting")
    configs[change.name] = ",".join(words)


def _configured(topic: Topic, configs: dict[str, str]) -> TopicConfigured:
    try:
        check_topic_configs(configs)
    except ConfigError as error:
        raise Refused(ErrorCode.INVALID_CONFIG, str(error)) from None
    return TopicConfigured(
        topic_id=topic.topic_id, configs=[Config(name=name, value=value) for name, value in configs.items()]
    )
