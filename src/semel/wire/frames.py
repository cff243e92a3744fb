"""Frames: the size, the header and the message, as they travel.

A request header has two forms: v2 ends with tagged fields, v1 does not; both hold the client id as a
classic string. A response header is the correlation id, followed by tagged fields in v1. Which form
applies follows from the API and its version, with one exception: the answer to ApiVersions has a v0
header always, since a client that asks does not know yet what the broker speaks.

An encoded frame is a list of buffers. Large record sets stand in it as they were given, uncopied; all
else is views of one bytearray.
"""

from __future__ import annotations

from struct import Struct
from typing import ClassVar, Final, Protocol, TypeAlias, TypeVar

from semel.wire.apis import APIS, ApiKey
from semel.wire.primitives import (
    MALFORMED,
    NEVER,
    DecodeError,
    MessageStruct,
    RecordsField,
    Splices,
    malformed,
    skip_tags,
    write_nullable_string,
)

SIZE_BYTES: Final = 4

FrameBuffer: TypeAlias = bytes | bytearray | memoryview | RecordsField
"""One piece of a frame: bytes to write, or a record set that is sent by other means."""

_SIZE = Struct(">i")
_REQUEST_PREFIX = Struct(">hhih")
_REQUEST_START = Struct(">ihhi")
_RESPONSE_V0 = Struct(">ii")
_RESPONSE_V1 = Struct(">iiB")


class Message(Protocol):
    """What all generated requests and responses have in common."""

    API_KEY: ClassVar[int]
    FLEXIBLE_FROM: ClassVar[int]

    def encode(self, out: bytearray, version: int, splices: Splices) -> None: ...


M_co = TypeVar("M_co", covariant=True)


class Decodable(Protocol[M_co]):
    """A generated class, seen as something that decodes."""

    def decode(self, buf: memoryview, pos: int, version: int) -> tuple[M_co, int]: ...


class RequestHeader(MessageStruct):
    """What comes before every request. No dataclass, as the messages are none."""

    __slots__ = ("api_key", "api_version", "client_id", "correlation_id")
    FIELDS = ("api_key", "api_version", "correlation_id", "client_id")

    def __init__(self, api_key: int, api_version: int, correlation_id: int, client_id: str | None) -> None:
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id


def decode_request_header(buf: memoryview, pos: int = 0) -> tuple[RequestHeader, int]:
    """Read the header that fits the API and version it names.

    Unknown keys are read as v1, versions above ours like the newest: enough to answer with the
    correlation id that the client waits for.
    """
    client_id: str | None = None
    try:
        api_key, api_version, correlation_id, length = _REQUEST_PREFIX.unpack_from(buf, pos)
        pos += 10
        if length >= 0:
            client_id = buf[pos : pos + length].tobytes().decode()
            pos += length
        elif length != -1:
            raise DecodeError(f"the client id in a request header has the length {length}")
        api = APIS.get(api_key)
        if api is not None and api_version >= api.flexible_from:
            tags = buf[pos]
            pos += 1
            if tags:
                pos = skip_tags(buf, pos, tags)
    except MALFORMED as error:
        raise malformed("RequestHeader", 2, error) from None
    if pos > len(buf):
        raise DecodeError("the client id in a request header is longer than the request")
    return RequestHeader(api_key, api_version, correlation_id, client_id), pos


def request_frame(
    request: Message, version: int, correlation_id: int, client_id: str | None
) -> list[FrameBuffer]:
    """The whole request, size first."""
    out = bytearray(_REQUEST_START.pack(0, request.API_KEY, version, correlation_id))
    write_nullable_string(out, client_id)
    if version >= request.FLEXIBLE_FROM:
        out.append(0)
    splices: Splices = []
    request.encode(out, version, splices)
    return _sealed(out, splices)


def response_frame(api_key: int, version: int, correlation_id: int, response: Message) -> list[FrameBuffer]:
    """The whole response, size first."""
    if version >= response.FLEXIBLE_FROM and api_key != ApiKey.API_VERSIONS:
        out = bytearray(_RESPONSE_V1.pack(0, correlation_id, 0))
    else:
        out = bytearray(_RESPONSE_V0.pack(0, correlation_id))
    splices: Splices = []
    response.encode(out, version, splices)
    return _sealed(out, splices)


def _sealed(out: bytearray, splices: Splices) -> list[FrameBuffer]:
    """Write the size into the frame's first bytes, and put the record sets where they belong."""
    if not splices:
        _SIZE.pack_into(out, 0, len(out) - SIZE_BYTES)
        return [out]
    size = len(out) - SIZE_BYTES
    for _, records in splices:
        size += len(records)
    _SIZE.pack_into(out, 0, size)
    view = memoryview(out)
    buffers: list[FrameBuffer] = []
    start = 0
    for end, records in splices:
        if end > start:
            buffers.append(view[start:end])
        buffers.append(records)
        start = end
    if start < len(out):
        buffers.append(view[start:])
    return buffers


def decode_response_header(buf: memoryview, api_key: int, version: int) -> tuple[int, int]:
    """The correlation id, and where the response itself begins (`buf` starts after the size)."""
    api = APIS.get(api_key)
    flexible_from = NEVER if api is None or api_key == ApiKey.API_VERSIONS else api.flexible_from
    try:
        correlation_id: int = _SIZE.unpack_from(buf, 0)[0]
        pos = 4
        if version >= flexible_from:
            tags = buf[pos]
            pos += 1
            if tags:
                pos = skip_tags(buf, pos, tags)
    except MALFORMED as error:
        raise malformed("ResponseHeader", 1, error) from None
    return correlation_id, pos


def decode_response(
    buf: memoryview, api_key: int, version: int, response_type: Decodable[M_co]
) -> tuple[int, M_co]:
    """The correlation id and the response of a frame (`buf` starts after the size)."""
    correlation_id, pos = decode_response_header(buf, api_key, version)
    response, _ = response_type.decode(buf, pos, version)
    return correlation_id, response
