from __future__ import annotations

import io

import pytest
from kio.schema.request_header.v1.header import RequestHeader as KioRequestHeaderV1
from kio.schema.request_header.v2.header import RequestHeader as KioRequestHeaderV2
from kio.schema.response_header.v0.header import ResponseHeader as KioResponseHeaderV0
from kio.schema.response_header.v1.header import ResponseHeader as KioResponseHeaderV1
from kio.serial import entity_writer
from wire_messages import MESSAGE_VERSIONS, MessageVersion

from semel.wire.apis import APIS
from semel.wire.frames import (
    RequestHeader,
    decode_request_header,
    decode_response,
    decode_response_header,
    request_frame,
    response_frame,
)
from semel.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from semel.wire.messages.fetch import FetchableTopicResponse, FetchResponse, PartitionData
from semel.wire.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.primitives import DecodeError


def kio_bytes(entity: object) -> bytes:
    stream = io.BytesIO()
    entity_writer(type(entity))(stream, entity)  # type: ignore[type-var]
    return stream.getvalue()


def joined(buffers: list) -> bytes:  # type: ignore[type-arg]
    return b"".join(bytes(buffer) for buffer in buffers)


def fetch_response(*record_sets: bytes) -> FetchResponse:
    partitions = [PartitionData(index, records=records) for index, records in enumerate(record_sets)]
    return FetchResponse(responses=[FetchableTopicResponse(topic="orders", partitions=partitions)])


@pytest.mark.parametrize("client_id", ["semel", "größe", "", None])
def test_request_headers_are_what_kio_writes(client_id: str | None) -> None:
    for version, header_type in ((3, KioRequestHeaderV1), (4, KioRequestHeaderV2)):
        expected = kio_bytes(
            header_type(
                request_api_key=12, request_api_version=version, correlation_id=77, client_id=client_id
            )
        )
        frame = joined(request_frame(HeartbeatRequest(), version, 77, client_id))
        assert frame[4 : 4 + len(expected)] == expected
        assert int.from_bytes(frame[:4]) == len(frame) - 4
        header, pos = decode_request_header(memoryview(frame)[4:])
        assert header == RequestHeader(12, version, 77, client_id)
        assert pos == len(expected)


def test_every_message_has_the_header_that_kio_gives_it() -> None:
    for message in MESSAGE_VERSIONS:
        if message.kind != "data":
            check_header(message)


def check_header(message: MessageVersion) -> None:
    name = f"kio.schema.{message.module}.v{message.version}.{message.kind}"
    kio_type = getattr(__import__(name, fromlist=["x"]), message.message_type.__name__)
    expected = int(kio_type.__header_schema__.__version__)
    api = APIS[message.message_type.API_KEY]
    if message.kind == "request":
        assert api.request_header_version(message.version) == expected, message
        frame = joined(request_frame(message.message_type(), message.version, 1, "c"))
        assert decode_request_header(memoryview(frame), 4)[1] == 4 + 8 + 3 + (expected == 2)
    else:
        assert api.response_header_version(message.version) == expected, message
        frame = joined(response_frame(api.key, message.version, 1, message.message_type()))
        assert decode_response_header(memoryview(frame)[4:], api.key, message.version) == (1, 4 + expected)


def test_response_headers_are_what_kio_writes() -> None:
    v0 = joined(response_frame(12, 3, 78, HeartbeatResponse()))
    v1 = joined(response_frame(12, 4, 78, HeartbeatResponse()))
    assert v0[4:8] == kio_bytes(KioResponseHeaderV0(correlation_id=78))
    assert v1[4:9] == kio_bytes(KioResponseHeaderV1(correlation_id=78))
    assert decode_response(memoryview(v1)[4:], 12, 4, HeartbeatResponse) == (78, HeartbeatResponse())


@pytest.mark.parametrize("version", [0, 3, 4])
def test_the_answer_to_api_versions_has_a_plain_header_in_every_version(version: int) -> None:
    frame = joined(response_frame(18, version, 5, ApiVersionsResponse(error_code=35)))
    assert frame[4:10] == b"\0\0\0\x05" + b"\0\x23"
    correlation_id, response = decode_response(memoryview(frame)[4:], 18, version, ApiVersionsResponse)
    assert (correlation_id, response.error_code) == (5, 35)


def test_a_request_of_an_unknown_api_still_tells_its_correlation_id() -> None:
    header, _ = decode_request_header(memoryview(b"\x03\xe7\x00\x09\x00\x00\x00\x2a\xff\xff"))
    assert header == RequestHeader(999, 9, 42, None)


def test_a_version_that_is_too_high_still_tells_its_correlation_id() -> None:
    frame = joined(request_frame(ApiVersionsRequest(), 99, 42, "new"))
    assert decode_request_header(memoryview(frame), 4)[0] == RequestHeader(18, 99, 42, "new")


def test_tags_in_headers_are_passed_over() -> None:
    header = b"\x00\x0c\x00\x04\x00\x00\x00\x01\xff\xff" + b"\x01\x07\x02hi"
    assert decode_request_header(memoryview(header))[1] == len(header)
    assert decode_response_header(memoryview(b"\0\0\0\x01" + b"\x01\x07\x02hi"), 12, 4) == (1, 9)


@pytest.mark.parametrize("size", [0, 1, 9, 10, 12])
def test_a_header_that_ends_early_is_refused(size: int) -> None:
    whole = b"\x00\x0c\x00\x04\x00\x00\x00\x01\x00\x05semel\x00"
    with pytest.raises(DecodeError):
        decode_request_header(memoryview(whole)[:size])


def test_a_client_id_of_negative_length_is_refused() -> None:
    with pytest.raises(DecodeError, match="length -2"):
        decode_request_header(memoryview(b"\x00\x0c\x00\x03\x00\x00\x00\x01\xff\xfe"))


def test_record_sets_are_sent_as_they_were_given_in_their_places() -> None:
    first, small, last = b"1" * 5_000, b"2" * 10, b"3" * 70_000
    buffers = response_frame(1, 12, 9, fetch_response(first, small, last))
    assert [buffer for buffer in buffers if isinstance(buffer, bytes)] == [first, last]
    assert any(buffer is first for buffer in buffers)
    frame = joined(buffers)
    assert int.from_bytes(frame[:4]) == len(frame) - 4
    correlation_id, response = decode_response(memoryview(frame)[4:], 1, 12, FetchResponse)
    assert correlation_id == 9
    assert [bytes(p.records or b"") for p in response.responses[0].partitions] == [first, small, last]  # type: ignore[arg-type]


def test_a_frame_without_large_record_sets_is_one_buffer() -> None:
    assert len(response_frame(1, 12, 9, fetch_response(b"small"))) == 1


def test_a_request_can_end_with_a_record_set() -> None:
    topics = [TopicProduceData(name="t", partition_data=[PartitionProduceData(0, b"r" * 1_000)])]
    buffers = request_frame(ProduceRequest(topic_data=topics), 3, 1, None)
    assert buffers[-1] == b"r" * 1_000
    frame = joined(buffers)
    assert int.from_bytes(frame[:4]) == len(frame) - 4
