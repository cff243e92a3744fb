"""Records as text and back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.cli.formats import parse_format, parse_json, parse_line, render_json
from semel.client.metadata import TopicPartition
from semel.errors import ConfigError
from semel.wire.records import Record

HERE = TopicPartition("orders", 3)
RECORD = Record(b"k", b"v", 1_700_000_000_123, [("a", b"1"), ("b", None)], 42)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("%k %v\\n", b"k v\n"),
        ("%t/%p/%o@%T", b"orders/3/42@1700000000123"),
        ("%h", b"a=1,b="),
        ("%%k %k", b"%k k"),
        ("100%% \\x00\\xff\\\\%v\\t\\r\\0", b"100% \x00\xff\\v\t\r\0"),
        ("é%v", "é".encode() + b"v"),
        ("%v%v", b"vv"),
    ],
)
def test_a_template_is_filled_in(template: str, shown: bytes) -> None:
    assert parse_format(template)(HERE, RECORD) == shown


def test_null_keys_and_values_print_as_nothing_in_a_template() -> None:
    assert parse_format("[%k|%v|%h]")(HERE, Record(None, None)) == b"[||]"


def test_binary_values_come_out_untouched() -> None:
    value = bytes(range(256))
    assert parse_format("raw")(HERE, Record(None, value)) == value + b"\n"
    assert parse_format("%v")(HERE, Record(None, value)) == value


@pytest.mark.parametrize("template", ["%q", "%", "%v\\", "%v\\q", "%v\\xg0", "%v\\x1", "plain", ""])
def test_what_is_no_format_is_refused_with_what_is(template: str) -> None:
    with pytest.raises(ConfigError):
        parse_format(template)


def test_json_tells_null_text_and_bytes_apart() -> None:
    record = Record(None, b"\xff\x00", 5, [("text", b"x"), ("null", None), ("bytes", b"\x80")], 7)
    assert json.loads(render_json(HERE, record)) == {
        "topic": "orders",
        "partition": 3,
        "offset": 7,
        "timestamp": 5,
        "key": None,
        "value": {"base64": "/wA="},
        "headers": [["text", "x"], ["null", None], ["bytes", {"base64": "gA=="}]],
    }


def test_json_is_one_line_whatever_the_value_holds() -> None:
    rendered = render_json(HERE, Record(b"a\nb", "ü\r\n\u2028".encode()))
    assert rendered.count(b"\n") == 1
    assert rendered.endswith(b"\n")


blobs = st.none() | st.binary(max_size=20) | st.text(max_size=20).map(str.encode)


@given(
    key=blobs,
    value=blobs,
    headers=st.lists(st.tuples(st.text(max_size=5), blobs), max_size=3),
    timestamp=st.integers(0, 2**62),
)
def test_what_is_printed_as_json_is_read_back_the_same(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]], timestamp: int
) -> None:
    parsed = parse_json(render_json(HERE, Record(key, value, timestamp, headers, 9)))
    assert (parsed.key, parsed.value, list(parsed.headers)) == (key, value, headers)
    assert (parsed.partition, parsed.timestamp_ms) == (HERE.partition, timestamp)


def test_headers_may_be_an_object() -> None:
    assert parse_json(b'{"value": "v", "headers": {"a": "1", "b": null}}').headers == [
        ("a", b"1"),
        ("b", None),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[1]", "a record is an object"),
        (b'{"value": 1}', "value must be a string"),
        (b'{"key": {"a": 1}}', "key must be a string"),
        (b'{"value": {"base64": "?"}}', "value is not valid base64"),
        (b'{"valeu": "v"}', "unknown field 'valeu'"),
        (b'{"partition": "1"}', "partition must be a whole number"),
        (b'{"timestamp": true}', "timestamp must be a whole number"),
        (b'{"headers": "x"}', "headers must be"),
        (b'{"headers": [["a"]]}', "a header must be"),
    ],
)
def test_a_line_that_is_no_record_says_why(line: bytes, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_json(line)


def test_a_line_is_split_at_the_first_separator() -> None:
    assert parse_line(b"k:v:w", b":")[:2] == (b"k", b"v:w")
    assert parse_line(b":v", b":")[:2] == (b"", b"v")
    assert parse_line(b"k->", b"->")[:2] == (b"k", b"")
    assert parse_line(b"k:v", None)[:2] == (None, b"k:v")


def test_a_line_without_the_separator_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not contain the separator ':'"):
        parse_line(b"value", b":")
