"""How records look as text: templates and JSON lines, written by `semel consume`, read by `semel produce`.

In JSON a key, a value or a header's value is a string where its bytes are UTF-8, null where there is none,
and `{"base64": "..."}` where it is binary. What `consume --format json` prints, `produce --format json`
takes.
"""

import json
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from semel.client.metadata import TopicPartition
from semel.errors import ConfigError
from semel.wire.records import Headers, Record

Render: TypeAlias = Callable[[TopicPartition, Record], bytes]

ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
JSON_FIELDS: Final = frozenset({"topic", "partition", "offset", "timestamp", "key", "value", "headers"})


class InputRecord(NamedTuple):
    """A record as a line of input gives it."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    partition: int | None
    timestamp_ms: int | None


# Writing


def render_raw(where: TopicPartition, record: Record) -> bytes:
    return (record.value or b"") + b"\n"


def render_json(where: TopicPartition, record: Record) -> bytes:
    shown = {
        "topic": where.topic,
        "partition": where.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": _to_json(record.key),
        "value": _to_json(record.value),
        "headers": [[name, _to_json(value)] for name, value in record.headers],
    }
    return json.dumps(shown, ensure_ascii=False).encode() + b"\n"


class Template:
    """A format such as `%k %v\\n`: literal bytes and fields, told apart once and not for every record."""

    def __init__(self, template: str) -> None:
        self._parts = _parse_template(template)

    def __call__(self, where: TopicPartition, record: Record) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part(where, record) for part in self._parts)


def parse_format(text: str) -> Render:
    """`raw`, `json`, or a template."""
    if text == "raw":
        return render_raw
    if text == "json":
        return render_json
    if "%" not in text:
        raise ConfigError(
            f"{text!r} is no format: use raw, json, or a template with %k (key), %v (value), %o (offset), "
            "%p (partition), %t (topic), %T (timestamp) or %h (headers)"
        )
    return Template(text)


def _parse_template(template: str) -> list[bytes | Render]:
    parts: list[bytes | Render] = []
    literal = bytearray()
    at = 0
    while at < len(template):
        char, following = template[at], template[at + 1 : at + 2]
        at += 2
        if char == "%" and following in FIELDS:
            parts.append(bytes(literal))
            parts.append(FIELDS[following])
            literal.clear()
        elif char == "%" and following == "%":
            literal += b"%"
        elif char == "\\" and following in ESCAPES:
            literal += ESCAPES[following]
        elif char == "\\" and following == "x":
            literal.append(_parse_hex(template[at : at + 2]))
            at += 2
        elif char in "%\\":
            raise ConfigError(
                f"{char + following!r} has no meaning in a format: there are %{' %'.join(FIELDS)} and %%, "
                "and the escapes \\n \\t \\r \\0 \\\\ and \\xFF"
            )
        else:
            literal += char.encode()
            at -= 1
    parts.append(bytes(literal))
    return [part for part in parts if part != b""]


def _parse_hex(digits: str) -> int:
    try:
        return bytes.fromhex(digits)[0]
    except (ValueError, IndexError):
        raise ConfigError(f"\\x{digits} in a format is no byte: write two hexadecimal digits") from None


def _key(where: TopicPartition, record: Record) -> bytes:
    return record.key or b""


def _value(where: TopicPartition, record: Record) -> bytes:
    return record.value or b""


def _offset(where: TopicPartition, record: Record) -> bytes:
    return b"%d" % record.offset


def _partition(where: TopicPartition, record: Record) -> bytes:
    return b"%d" % where.partition


def _topic(where: TopicPartition, record: Record) -> bytes:
    return where.topic.encode()


def _timestamp(where: TopicPartition, record: Record) -> bytes:
    return b"%d" % record.timestamp


def _headers(where: TopicPartition, record: Record) -> bytes:
    return b",".join(name.encode() + b"=" + (value or b"") for name, value in record.headers)


FIELDS: Final[dict[str, Render]] = {
    "k": _key,
    "v": _value,
    "o": _offset,
    "p": _partition,
    "t": _topic,
    "T": _timestamp,
    "h": _headers,
}


def _to_json(value: bytes | None) -> object:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


# Reading


def parse_json(line: bytes) -> InputRecord:
    """Reads one line of JSON; raises ConfigError where it is no record."""
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"not valid JSON ({error})") from None
    if not isinstance(given, dict):
        raise ConfigError('a record is an object, such as {"key": "k", "value": "v"}')
    if unknown := given.keys() - JSON_FIELDS:
        raise ConfigError(f"unknown field {min(unknown)!r}: a record has {', '.join(sorted(JSON_FIELDS))}")
    return InputRecord(
        key=_from_json("key", given.get("key")),
        value=_from_json("value", given.get("value")),
        headers=_headers_from_json(given.get("headers")),
        partition=_number("partition", given.get("partition")),
        timestamp_ms=_number("timestamp", given.get("timestamp")),
    )


def parse_line(line: bytes, key_separator: bytes | None) -> InputRecord:
    """Reads a line of text: the value, or key and value around the separator."""
    if key_separator is None:
        return InputRecord(None, line, (), None, None)
    key, separator, value = line.partition(key_separator)
    if not separator:
        raise ConfigError(f"no key: the line does not contain the separator {key_separator.decode()!r}")
    return InputRecord(key, value, (), None, None)


def _from_json(field: str, value: object) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(value["base64"], str):
        try:
            return b64decode(value["base64"], validate=True)
        except Base64Error:
            raise ConfigError(f"{field} is not valid base64") from None
    raise ConfigError(f'{field} must be a string, null, or {{"base64": "..."}}')


def _headers_from_json(value: object) -> Headers:
    if value is None:
        return ()
    if isinstance(value, dict):
        pairs: list[object] = [list(item) for item in value.items()]
    elif isinstance(value, list):
        pairs = value
    else:
        raise ConfigError("headers must be an object, or a list of [name, value] pairs")
    headers: list[tuple[str, bytes | None]] = []
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ConfigError("a header must be a [name, value] pair")
        headers.append((pair[0], _from_json(f"header {pair[0]!r}", pair[1])))
    return headers


def _number(field: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigError(f"{field} must be a whole number")
