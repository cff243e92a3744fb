"""What a subscriber asks for in its Setup, as options of a subscription, and what holds as Settings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from semel.errors import ConfigError
from semel.subscriptions.backoff import RedeliveryBackoff
from semel.subscriptions.grpc.subscriptions_pb2 import (
    START_EARLIEST,
    START_LATEST,
    START_UNSPECIFIED,
    Settings,
    Setup,
)
from semel.subscriptions.options import EARLIEST, LATEST, SubscriptionOptions

MAX_TOPICS: Final = 100
MAX_NAME_CHARACTERS: Final = 249
"""Of topics, as Kafka has it, and of groups and client ids, so that they fit a log line."""
MAX_CREDITS: Final = 1_000
"""Deliveries that are open on one stream."""

STARTS: Final = {START_EARLIEST: EARLIEST, START_LATEST: LATEST}
# What two subscribers of one group cannot differ in.
BINDING: Final = ("dead_letter_topic",)


class OtherTermsError(ConfigError):
    """Others of the group have something that a newcomer cannot have otherwise."""


def check_setup(setup: Setup) -> None:
    """Raises ConfigError for a Setup that makes no sense by itself."""
    _check_name("group", setup.group)
    if not 1 <= len(setup.topics) <= MAX_TOPICS:
        raise ConfigError(
            f"Setup has {len(setup.topics)} topics: from 1 to {MAX_TOPICS} can be subscribed to"
        )
    for topic in setup.topics:
        _check_name("topic", topic)
    if len(setup.client_id) > MAX_NAME_CHARACTERS:
        raise ConfigError(f"Setup's client_id is longer than {MAX_NAME_CHARACTERS} characters")


def _check_name(what: str, name: str) -> None:
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise ConfigError(f"a {what} of Setup has {len(name)} characters: from 1 to {MAX_NAME_CHARACTERS}")


def options_of(setup: Setup, defaults: SubscriptionOptions) -> SubscriptionOptions:
    """The defaults with what this Setup asks for; raises ConfigError where a limit does not allow it."""
    asked = settings_of(defaults)
    asked.MergeFrom(setup.settings)
    if asked.start not in STARTS:
        raise ConfigError(f"Setup's start is {asked.start}: it must be START_EARLIEST or START_LATEST")
    batch_size = max(setup.batch_size, 1)
    return replace(
        defaults,
        max_in_flight=max(asked.max_in_flight, batch_size),
        max_attempts=asked.max_attempts,
        delivery_timeout_ms=asked.delivery_timeout_ms,
        backoff=RedeliveryBackoff(asked.backoff_first_ms, asked.backoff_max_ms, defaults.backoff.jitter),
        dead_letter_topic=asked.dead_letter_topic or None,
        start=STARTS[asked.start],
        max_wait_ms=asked.max_wait_ms,
    )


def settings_of(options: SubscriptionOptions) -> Settings:
    settings = Settings(
        max_in_flight=options.max_in_flight,
        max_attempts=options.max_attempts,
        delivery_timeout_ms=options.delivery_timeout_ms,
        backoff_first_ms=options.backoff.first_ms,
        backoff_max_ms=options.backoff.max_ms,
        start=START_LATEST if options.start == LATEST else START_EARLIEST,
        max_wait_ms=options.max_wait_ms,
    )
    if options.dead_letter_topic is not None:
        settings.dead_letter_topic = options.dead_letter_topic
    return settings


def differences(setup: Setup, topics: Sequence[str], options: SubscriptionOptions) -> list[str]:
    """What a subscriber asks for and does not get, because others of its group hold something else.

    Raises OtherTermsError where they could not share the group's deliveries.
    """
    if set(setup.topics) != set(topics):
        raise OtherTermsError(
            f"group {setup.group!r} has subscribers of {', '.join(sorted(topics))} on this gateway: one of "
            f"{', '.join(sorted(setup.topics))} needs another group"
        )
    held = settings_of(options)
    differing = []
    for field, asked in setup.settings.ListFields():
        if asked == START_UNSPECIFIED and field.name == "start":
            continue
        if asked == getattr(held, field.name):
            continue
        if field.name in BINDING:
            raise OtherTermsError(
                f"group {setup.group!r} has another {field.name} on this gateway: "
                f"{getattr(held, field.name)!r}, and not {asked!r}"
            )
        differing.append(
            f"{field.name} is {getattr(held, field.name)} and not {asked} while others of group "
            f"{setup.group!r} are connected that came first"
        )
    return differing
