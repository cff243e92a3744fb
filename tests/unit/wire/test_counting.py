"""Counting what a request names: as many as are decoded, and to the same end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from wire_messages import MESSAGES, MessageVersion, encoded, message_name, random_message

from semel.errors import ProtocolError
from semel.wire.counting import check_elements
from semel.wire.primitives import DecodeError, MessageStruct

REQUESTS = [versions for versions in MESSAGES if versions[0].kind == "request"]
MANY = 1 << 30
CUTS = 20


def elements(value: Any) -> int:
    """How many elements the arrays of a decoded message have."""
    if isinstance(value, list):
        return len(value) + sum(map(elements, value))
    if isinstance(value, MessageStruct):
        return sum(elements(getattr(value, name)) for name in value.FIELDS)
    return 0


@pytest.mark.parametrize("versions", REQUESTS, ids=message_name)
def test_what_is_counted_is_what_is_decoded(versions: list[MessageVersion]) -> None:
    for message in versions:
        api_key, version = message.message_type.API_KEY, message.version
        for seed in range(3):
            body = encoded(random_message(message.message_type, random.Random(f"{message} {seed}")), version)
            received = memoryview(b"before" + body)
            decoded, end = message.message_type.decode(received, 6, version)
            count = elements(decoded)
            assert check_elements(received, 6, api_key, version, count) == end, message
            if count:
                with pytest.raises(ProtocolError, match=f"names more than {count - 1} things"):
                    check_elements(received, 6, api_key, version, count - 1)


@pytest.mark.parametrize("versions", REQUESTS, ids=message_name)
def test_what_ends_early_is_malformed_or_left_to_the_decoder(versions: list[MessageVersion]) -> None:
    for message in versions:
        api_key, version = message.message_type.API_KEY, message.version
        body = memoryview(encoded(random_message(message.message_type, random.Random(1)), version))
        for cut in random.Random(1).sample(range(len(body)), min(len(body), CUTS)):
            try:
                end = check_elements(body[:cut], 0, api_key, version, MANY)
            except DecodeError:
                continue
            assert end > cut, message
