"""Every generated message, found through the table of APIs, and valid values of it made from a seed."""

from __future__ import annotations

import importlib
import random
import re
import sys
import types
import typing
from dataclasses import dataclass
from typing import Any

from message_hints import field_hints
from semel.wire.apis import APIS
from semel.wire.primitives import ZERO_UUID, MessageStruct, Splices


@dataclass(frozen=True)
class MessageVersion:
    """One message in one version; `kind` as kio names the module that holds it."""

    module: str
    kind: str
    message_type: Any
    version: int

    def __str__(self) -> str:
        return f"{self.message_type.__name__}-v{self.version}"


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _named() -> list[tuple[str, str, str]]:
    names = [(snake(api.name), kind, api.name + kind.capitalize()) for api in APIS.values() for kind in KINDS]
    return names + [(snake(name), "data", name) for name in EMBEDDED]


KINDS = ("request", "response")
EMBEDDED = ("ConsumerProtocolSubscription", "ConsumerProtocolAssignment")
MESSAGE_TYPES = [
    (module, kind, getattr(importlib.import_module(f"semel.wire.messages.{module}"), name))
    for module, kind, name in _named()
]
MESSAGES = [
    [
        MessageVersion(module, kind, message_type, version)
        for version in range(message_type.MIN_VERSION, message_type.MAX_VERSION + 1)
    ]
    for module, kind, message_type in MESSAGE_TYPES
]
"""Every message, in all its versions: five hundred tests would take longer to begin than to run."""
MESSAGE_VERSIONS = [version for versions in MESSAGES for version in versions]


def message_name(versions: list[MessageVersion]) -> str:
    return str(versions[0].message_type.__name__)


def encoded(message: Any, version: int) -> bytes:
    """The message as it is sent, record sets included."""
    out = bytearray()
    splices: Splices = []
    message.encode(out, version, splices)
    for position, records in reversed(splices):
        out[position:position] = records  # type: ignore[call-overload]
    return bytes(out)


def field_types(message_type: Any) -> dict[str, Any]:
    """The fields of a generated class and their types, as its constructor states them."""
    names = vars(sys.modules[message_type.__module__])
    return {name: eval(hint, names) for name, hint in field_hints(message_type).items()}


def random_message(message_type: Any, dice: random.Random) -> Any:
    """A message with something in every field, valid in every version."""
    zero = message_type()
    return message_type(
        **{
            name: _random_value(hint, getattr(zero, name), dice)
            for name, hint in field_types(message_type).items()
        }
    )


def _random_value(hint: Any, zero: Any, dice: random.Random) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(part for part in hint.__args__ if part is not type(None))
    if typing.get_origin(hint) is list:
        (element,) = typing.get_args(hint)
        return [_random_value(element, None, dice) for _ in range(dice.randint(0, 3))]
    if issubclass(hint, MessageStruct):
        return random_message(hint, dice)
    if hint is bool:
        return dice.random() < 0.5
    if hint is int:
        return dice.choice((0, 1, 7, 100))
    if hint is float:
        return dice.random()
    if hint is str:
        return dice.choice(("", "orders", "größe", "x" * 200))
    if zero == ZERO_UUID:
        return dice.randbytes(16)
    return dice.randbytes(dice.choice((0, 5, 200)))
