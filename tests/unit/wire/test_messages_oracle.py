"""Our codec against kio's, for every message in every version that both know.

Values are drawn for kio's classes. Its bytes must decode to the same values here, and encode again to the
same bytes; kio must read our bytes back as what it wrote. Every version has examples of its own: the
simplest, and others from a seed; TEST_ORACLE_EXAMPLES asks for more of these.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import io
import os
import types
import typing
import uuid
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode as KioErrorCode
from kio.serial import entity_reader, entity_writer
from wire_messages import MESSAGE_VERSIONS, MESSAGES, MessageVersion, encoded, message_name

from semel.wire.primitives import ZERO_UUID

EXAMPLES = int(os.environ.get("TEST_ORACLE_EXAMPLES", "2"))
SEED = int(os.environ.get("TEST_ORACLE_SEED", "20261116"))
UTC = datetime.UTC
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = datetime.timedelta(milliseconds=1)
MS_FIELDS = ("timedelta_i32", "timedelta_i64", "datetime_i64")
# The only field whose name kio cuts in another place.
RENAMED = {"enable2_pc": "enable_2pc"}


def signed(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def milliseconds(bits: int) -> st.SearchStrategy[datetime.timedelta]:
    # kio goes through floats: beyond this it no longer writes the millisecond that it was given.
    limit = min(1 << (bits - 1), 1 << 43) - 1
    return st.integers(-limit, limit).map(lambda ms: ms * MILLISECOND)


TEXT = st.one_of(st.text(max_size=6), st.sampled_from(["", "orders", "q" * 127, "ü" * 64, "z" * 300]))
BYTES = st.one_of(st.binary(max_size=6), st.sampled_from([b"", b"\0" * 127, b"r" * 20_000]))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int8": signed(8),
    "int16": signed(16),
    "uint16": st.integers(0, 65535),
    "int32": signed(32),
    "int64": signed(64),
    "float64": st.floats(allow_nan=False),
    "string": TEXT,
    "bytes": BYTES,
    "records": BYTES,
    "uuid": st.one_of(st.none(), st.uuids(version=4)),
    "error_code": st.sampled_from(list(KioErrorCode)),
    "timedelta_i32": milliseconds(32),
    "timedelta_i64": milliseconds(64),
    "datetime_i64": st.integers(0, 1 << 40).map(lambda ms: EPOCH + ms * MILLISECOND),
}
STRATEGIES: dict[type, st.SearchStrategy[Any]] = {}


def entities(entity_type: Any) -> st.SearchStrategy[Any]:
    if entity_type not in STRATEGIES:
        hints = typing.get_type_hints(entity_type)
        drawn = {spec.name: field_values(spec, hints[spec.name]) for spec in dataclasses.fields(entity_type)}
        STRATEGIES[entity_type] = st.builds(entity_type, **drawn)
    return STRATEGIES[entity_type]


def field_values(spec: Any, hint: Any) -> st.SearchStrategy[Any]:
    nullable = isinstance(hint, types.UnionType)
    if nullable:
        hint = next(part for part in hint.__args__ if part is not type(None))
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        strategy = st.lists(one_value(spec, element), max_size=3).map(tuple)
    else:
        strategy = one_value(spec, hint)
    if "tag" in spec.metadata and spec.default is not dataclasses.MISSING:
        strategy = st.one_of(st.just(spec.default), strategy)
    return st.one_of(st.none(), strategy) if nullable else strategy


def one_value(spec: Any, hint: Any) -> st.SearchStrategy[Any]:
    return entities(hint) if dataclasses.is_dataclass(hint) else VALUES[spec.metadata["kafka_type"]]


def our_name(spec: Any) -> str:
    if spec.metadata.get("kafka_type") in MS_FIELDS:
        return f"{spec.name}_ms"
    return RENAMED.get(spec.name, spec.name)


def in_our_terms(value: Any, spec: Any) -> Any:
    if value is None and spec.metadata.get("kafka_type") == "uuid":
        return ZERO_UUID
    if value is None and spec.metadata.get("kafka_type") == "datetime_i64":
        return -1
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, datetime.timedelta):
        return value // MILLISECOND
    if isinstance(value, datetime.datetime):
        return (value - EPOCH) // MILLISECOND
    return value


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    """Every field that kio has is ours with the same value; what it lacks has its default here."""
    named = {our_name(spec): spec for spec in dataclasses.fields(theirs)}
    defaults = type(ours)()
    for name in ours.FIELDS:
        mine = getattr(ours, name)
        spec = named.pop(name, None)
        if spec is None:
            assert mine == getattr(defaults, name), f"{where}.{name}"
            continue
        other = getattr(theirs, spec.name)
        if isinstance(other, tuple) and other and dataclasses.is_dataclass(other[0]):
            assert len(mine) == len(other), f"{where}.{name}"
            for index, pair in enumerate(zip(mine, other, strict=True)):
                assert_same(*pair, f"{where}.{name}[{index}]")
        elif isinstance(other, tuple):
            assert mine == list(other), f"{where}.{name}"
        elif dataclasses.is_dataclass(other):
            if mine is None:  # a tagged struct that says nothing
                assert other == spec.default, f"{where}.{name}"
            else:
                assert_same(mine, other, f"{where}.{name}")
        else:
            assert mine == in_our_terms(other, spec), f"{where}.{name}"
    assert not named, f"{where} lacks {sorted(named)}"


def kio_type(message: MessageVersion) -> Any:
    module = importlib.import_module(f"kio.schema.{message.module}.v{message.version}.{message.kind}")
    return getattr(module, message.message_type.__name__)


@pytest.mark.parametrize("versions", MESSAGES, ids=message_name)
def test_both_codecs_write_the_same_bytes_and_read_the_same_values(versions: list[MessageVersion]) -> None:
    for message in versions:
        check_codecs(message)


def check_codecs(message: MessageVersion) -> None:
    entity_type = kio_type(message)
    write, read = entity_writer(entity_type), entity_reader(entity_type)

    @seed(crc32(f"{SEED} {message}".encode()))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(entities(entity_type))
    def agree(theirs: Any) -> None:
        stream = io.BytesIO()
        write(stream, theirs)
        their_bytes = stream.getvalue()

        ours, end = message.message_type.decode(memoryview(their_bytes), 0, message.version)

        assert end == len(their_bytes), message
        assert_same(ours, theirs, str(message))
        our_bytes = encoded(ours, message.version)
        assert our_bytes == their_bytes, message
        assert read(our_bytes, 0) == (theirs, len(our_bytes))

    agree()


def test_kio_knows_every_message_and_version_that_we_have() -> None:
    assert len({kio_type(message) for message in MESSAGE_VERSIONS}) == len(MESSAGE_VERSIONS)


def test_flexible_versions_begin_where_kio_says() -> None:
    for message in MESSAGE_VERSIONS:
        is_flexible = message.version >= message.message_type.FLEXIBLE_FROM
        assert kio_type(message).__flexible__ == is_flexible, message
