"""What clients are told while the disk keeps the broker from serving them: to ask again."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from message_hints import field_hints
from semel.server.apis import served_apis
from semel.server.refusals import can_refuse, refusal
from semel.wire import messages
from semel.wire.apis import APIS, ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.frames import decode_response, response_frame
from semel.wire.messages.find_coordinator import FindCoordinatorRequest
from semel.wire.messages.produce import ProduceRequest
from semel.wire.primitives import MessageStruct

RETRIED = {
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.NOT_CONTROLLER,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
}
CUT_OFF = {
    ApiKey.ALTER_CONFIGS,
    ApiKey.INCREMENTAL_ALTER_CONFIGS,
    ApiKey.WRITE_TXN_MARKERS,
    ApiKey.DESCRIBE_PRODUCERS,
}
"""Those of tools, which ask again when their connection is closed."""


def request_types() -> dict[int, Any]:
    found = {}
    for module in iter_modules(messages.__path__):
        for kind in vars(import_module(f"{messages.__name__}.{module.name}")).values():
            if isinstance(kind, type) and kind.__name__.endswith("Request") and hasattr(kind, "API_KEY"):
                found[kind.API_KEY] = kind
    return found


REQUESTS = request_types()
REFUSED = [key for key in REQUESTS if can_refuse(key)]


def filled(kind: Any) -> Any:
    """A request that names one of everything."""
    made = kind()
    for name, hint in field_hints(kind).items():
        if isinstance(getattr(made, name), list):
            setattr(made, name, [element(kind, hint)])
        elif hint.startswith("str"):
            setattr(made, name, "x")
    if isinstance(made, ProduceRequest):
        made.acks = -1  # Without acknowledgements there is nobody to tell.
    return made


def element(kind: Any, hint: str) -> Any:
    """Something for a list: a struct of the same module if the hint says so, or a name, or a number."""
    hint = hint.removeprefix("list[").partition("]")[0]
    if hint in ("str", "int", "bytes"):
        return {"str": "x", "int": 0, "bytes": bytes(16)}[hint]
    return filled(getattr(import_module(kind.__module__), hint))


def error_codes(message: Any) -> Iterator[int]:
    for name in message.FIELDS:
        value = getattr(message, name)
        if name.endswith("error_code"):
            yield value
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, MessageStruct):
                yield from error_codes(inner)


@pytest.mark.parametrize("key", REFUSED, ids=lambda key: APIS[key].name)
def test_a_refusal_says_try_again_wherever_it_has_room_for_an_error(key: int) -> None:
    request = filled(REQUESTS[key])
    told = refusal(request)
    codes = set(error_codes(told))
    assert codes & RETRIED and codes <= RETRIED | {0}
    for version in range(APIS[key].min_version, APIS[key].max_version + 1):
        frame = b"".join(map(bytes, response_frame(key, version, 7, told)))
        assert decode_response(memoryview(frame)[4:], key, version, type(told))[0] == 7


def test_every_request_that_the_disk_can_keep_waiting_has_a_refusal_or_is_a_tools() -> None:
    for key, served in served_apis().items():
        if served.decide is not None and not served.reads_only:
            assert can_refuse(key) == (key not in CUT_OFF), served.api.name


def test_a_coordinator_that_is_looked_for_is_not_available_under_each_of_its_keys() -> None:
    told = refusal(FindCoordinatorRequest(coordinator_keys=["a", "b"]))
    assert [(each.key, each.error_code) for each in told.coordinators] == [
        ("a", ErrorCode.COORDINATOR_NOT_AVAILABLE),
        ("b", ErrorCode.COORDINATOR_NOT_AVAILABLE),
    ]
