from __future__ import annotations

import subprocess
import sys

import pytest
from kio.schema.errors import ErrorCode as KioErrorCode
from wire_messages import MESSAGE_TYPES

from semel.wire.apis import APIS, ApiKey
from semel.wire.errors import ErrorCode, error_name, retriable

# What Kafka 4.3.1 advertises, and InitProducerId v6, which it implements but hides.
ADVERTISED = {
    0: (0, 13), 1: (4, 18), 2: (1, 11), 3: (0, 13), 8: (2, 10), 9: (1, 10), 10: (0, 6), 11: (0, 9),
    12: (0, 4), 13: (0, 5), 14: (0, 5), 15: (0, 6), 16: (0, 5), 17: (0, 1), 18: (0, 4), 19: (2, 7),
    20: (1, 6), 21: (0, 2), 22: (0, 6), 23: (2, 4), 24: (0, 5), 25: (0, 4), 26: (0, 5), 27: (1, 2),
    28: (0, 5), 29: (1, 3), 30: (1, 3), 31: (1, 3), 32: (1, 4), 33: (0, 2), 34: (1, 2), 35: (1, 5),
    36: (0, 2), 37: (0, 3), 42: (0, 2), 43: (0, 2), 44: (0, 1), 45: (0, 1), 46: (0, 0), 47: (0, 0),
    48: (0, 1), 49: (0, 1), 50: (0, 0), 51: (0, 0), 55: (0, 2), 57: (0, 2), 60: (0, 2), 61: (0, 0),
    65: (0, 0), 66: (0, 2), 68: (0, 1), 69: (0, 1), 74: (0, 1), 75: (0, 0),
}  # fmt: skip


def test_the_advertised_versions_are_those_of_kafka() -> None:
    assert {api.key: (api.advertised_min_version, api.max_version) for api in APIS.values()} == ADVERTISED


def test_only_produce_is_advertised_below_what_is_served() -> None:
    wider = [api.key for api in APIS.values() if api.advertised_min_version != api.min_version]
    assert wider == [ApiKey.PRODUCE]
    assert not APIS[0].serves(2)
    assert APIS[0].serves(3)
    assert APIS[0].serves(13)
    assert not APIS[0].serves(14)


def test_the_table_and_the_messages_agree() -> None:
    for _, kind, message_type in MESSAGE_TYPES:
        if kind != "data":
            api = APIS[message_type.API_KEY]
            assert message_type.__name__ == api.name + kind.capitalize()
            assert (api.min_version, api.max_version) == (message_type.MIN_VERSION, message_type.MAX_VERSION)
            assert api.flexible_from == message_type.FLEXIBLE_FROM


def test_importing_the_table_imports_no_message() -> None:
    program = (
        "import sys, semel.wire.apis, semel.wire.errors, semel.wire.frames;"
        "sys.exit(any('.messages' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode == 0


def test_error_codes_and_what_is_retriable_are_those_of_kafka() -> None:
    theirs = {code.name.upper(): (int(code), code.retriable) for code in KioErrorCode}
    assert {code.name: (int(code), retriable(code)) for code in ErrorCode} == theirs


@pytest.mark.parametrize(
    ("code", "name"), [(0, "NONE"), (47, "INVALID_PRODUCER_EPOCH"), (999, "UNKNOWN_ERROR_CODE_999")]
)
def test_every_error_code_has_a_name_to_print(code: int, name: str) -> None:
    assert error_name(code) == name
