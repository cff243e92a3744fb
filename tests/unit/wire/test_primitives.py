from __future__ import annotations

import pytest
from wire_messages import encoded

from semel.errors import ProtocolError
from semel.wire.messages.api_versions import ApiVersionsRequest
from semel.wire.messages.describe_groups import DescribeGroupsRequest
from semel.wire.messages.fetch import FetchRequest, FetchResponse, LeaderIdAndEpoch, PartitionData
from semel.wire.messages.find_coordinator import FindCoordinatorRequest
from semel.wire.messages.join_group import JoinGroupResponse
from semel.wire.messages.metadata import MetadataRequest, MetadataRequestTopic
from semel.wire.messages.produce import PartitionProduceData
from semel.wire.primitives import (
    SPLICE_MIN_BYTES,
    ZERO_UUID,
    DecodeError,
    EncodeError,
    Splices,
    read_uvarint,
    uuid_from_text,
    uuid_text,
    write_uvarint,
)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2**31 - 1, 2**32 - 1])
def test_a_varint_comes_back(value: int) -> None:
    out = bytearray()
    write_uvarint(out, value)
    assert read_uvarint(memoryview(out), 0) == (value, len(out))


@pytest.mark.parametrize("damaged", [b"\xff\xff\xff\xff\x10", b"\x80" * 5 + b"\x00", b"\xff" * 10 + b"\x01"])
def test_a_varint_of_more_than_32_bits_or_five_bytes_is_refused(damaged: bytes) -> None:
    with pytest.raises(DecodeError, match="32 bits"):
        read_uvarint(memoryview(damaged), 0)


def test_a_null_where_none_is_allowed_is_refused_with_the_name_of_the_field() -> None:
    with pytest.raises(DecodeError, match=r"ApiVersionsRequest\.client_software_name is null.*v3"):
        ApiVersionsRequest.decode(memoryview(b"\x00\x01\x00"), 0, 3)
    with pytest.raises(DecodeError, match=r"DescribeGroupsRequest\.groups is null"):
        DescribeGroupsRequest.decode(memoryview(b"\xff\xff\xff\xff"), 0, 0)
    with pytest.raises(DecodeError, match=r"FindCoordinatorRequest\.key has the length -1"):
        FindCoordinatorRequest.decode(memoryview(b"\xff\xff"), 0, 0)


def test_a_field_that_may_be_null_only_later_refuses_null_before() -> None:
    with pytest.raises(DecodeError, match=r"MetadataRequest\.topics is null, which v0"):
        MetadataRequest.decode(memoryview(b"\xff\xff\xff\xff"), 0, 0)
    request, _ = MetadataRequest.decode(memoryview(b"\xff\xff\xff\xff"), 0, 1)
    assert request.topics is None
    # JoinGroupResponse.protocol_name: compact since v6, nullable since v7.
    v6 = bytearray(encoded(JoinGroupResponse(protocol_name=""), 6))
    assert v6[10] == 1
    v6[10] = 0
    with pytest.raises(DecodeError, match=r"protocol_name is null.*v6"):
        JoinGroupResponse.decode(memoryview(v6), 0, 6)


@pytest.mark.parametrize("count", [-2, -(2**31)])
def test_a_negative_count_is_refused_even_where_null_is_allowed(count: int) -> None:
    with pytest.raises(DecodeError, match="claims"):
        MetadataRequest.decode(memoryview(count.to_bytes(4, "big", signed=True)), 0, 1)


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(DecodeError, match="not UTF-8"):
        FindCoordinatorRequest.decode(memoryview(b"\x00\x02\xff\xfe"), 0, 0)


# Tagged fields: ApiVersionsRequest v3 is two empty strings, then the tags.


def test_unknown_tagged_fields_are_passed_over() -> None:
    buf = b"\x01\x01" + b"\x02" + b"\x05\x03abc" + b"\x87\x01\x00"
    assert ApiVersionsRequest.decode(memoryview(buf), 0, 3) == (ApiVersionsRequest(), len(buf))


def test_a_tag_that_a_later_version_gave_meaning_is_passed_over_before_it() -> None:
    # Tag 0 of a fetched partition is the replica's directory since v17.
    plain = encoded(FetchRequest(), 16)
    assert FetchRequest.decode(memoryview(plain), 0, 16)[0] == FetchRequest()
    tagged = plain[:-1] + b"\x01" + b"\x09\x02hi"
    assert FetchRequest.decode(memoryview(tagged), 0, 16) == (FetchRequest(), len(tagged))


@pytest.mark.parametrize(
    "tags", [b"\x02\x05\x00\x05\x00", b"\x02\x05\x00\x04\x00"], ids=["doubled", "descending"]
)
def test_tags_must_ascend(tags: bytes) -> None:
    with pytest.raises(DecodeError, match="ascend"):
        ApiVersionsRequest.decode(memoryview(b"\x01\x01" + tags), 0, 3)


def test_known_tags_may_not_be_doubled() -> None:
    plain = encoded(FetchRequest(), 12)
    doubled = plain[:-1] + b"\x02" + b"\x00\x02\x02a" + b"\x00\x02\x02b"
    with pytest.raises(DecodeError, match="ascend"):
        FetchRequest.decode(memoryview(doubled), 0, 12)


def test_a_tagged_field_may_not_reach_past_the_message() -> None:
    with pytest.raises(DecodeError, match="claims 9 bytes where 1 are left"):
        ApiVersionsRequest.decode(memoryview(b"\x01\x01" + b"\x01\x05\x09x"), 0, 3)


@pytest.mark.parametrize("content", [b"\x00\x01\x02a", b"\x00\x04\x02abc"], ids=["short", "long"])
def test_a_known_tagged_field_ends_where_its_size_says(content: bytes) -> None:
    plain = encoded(FetchRequest(), 12)
    with pytest.raises(DecodeError, match="does not end where its size says"):
        FetchRequest.decode(memoryview(plain[:-1] + b"\x01" + content), 0, 12)


def test_tags_are_sent_only_if_they_say_something() -> None:
    silent = encoded(PartitionData(), 12)
    assert encoded(PartitionData(current_leader=LeaderIdAndEpoch()), 12) == silent
    spoken = encoded(PartitionData(current_leader=LeaderIdAndEpoch(2, 5)), 12)
    assert spoken == silent[:-1] + b"\x01\x01\x09\x00\x00\x00\x02\x00\x00\x00\x05\x00"


def test_what_a_version_lacks_is_left_out() -> None:
    # current_leader came with v12, the session with v7.
    response = FetchResponse(session_id=9, error_code=3)
    assert encoded(response, 4) == b"\0\0\0\0" + b"\0\0\0\0"


# Encoding errors.


def test_encoding_a_null_that_a_version_cannot_carry_names_the_field() -> None:
    topics = [MetadataRequestTopic(name=None)]
    with pytest.raises(EncodeError, match=r"MetadataRequestTopic\.name is None, which v9 cannot carry"):
        encoded(MetadataRequest(topics=topics), 9)
    assert encoded(MetadataRequest(topics=topics), 12)
    with pytest.raises(EncodeError, match=r"MetadataRequest\.topics is None, which v0"):
        encoded(MetadataRequest(topics=None), 0)


def test_encoding_a_value_of_a_wrong_type_or_size_is_an_encode_error() -> None:
    with pytest.raises(EncodeError, match="FindCoordinatorRequest v0"):
        encoded(FindCoordinatorRequest(key=None), 0)  # type: ignore[arg-type]
    with pytest.raises(EncodeError, match="FindCoordinatorRequest v0"):
        encoded(FindCoordinatorRequest(key="k" * 40_000), 0)
    with pytest.raises(EncodeError, match="FindCoordinatorRequest v1"):
        encoded(FindCoordinatorRequest(key_type=300), 1)


# Record sets.


class Region:
    """A record set that is not in memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def test_a_large_record_set_is_spliced_and_a_small_one_copied() -> None:
    for size, spliced in ((SPLICE_MIN_BYTES - 1, False), (SPLICE_MIN_BYTES, True)):
        out, splices = bytearray(), Splices()
        records = b"r" * size
        PartitionProduceData(0, records).encode(out, 9, splices)
        assert [value is records for _, value in splices] == ([True] if spliced else [])
        assert (records in out) is not spliced


def test_a_region_that_is_not_in_memory_is_spliced_whatever_its_size() -> None:
    out, splices = bytearray(), Splices()
    region = Region(3)
    PartitionProduceData(0, region).encode(out, 3, splices)
    assert out == b"\0\0\0\0" + b"\0\0\0\x03"
    assert splices == [(8, region)]


# Ids.


def test_ids_are_printed_as_kafka_prints_them() -> None:
    assert uuid_text(ZERO_UUID) == "AAAAAAAAAAAAAAAAAAAAAA"
    uuid = bytes(range(240, 256))
    assert uuid_from_text(uuid_text(uuid)) == uuid
    assert "=" not in uuid_text(uuid)


@pytest.mark.parametrize("text", ["", "AAAA", "A" * 23, "not base64 at all, sorry"])
def test_a_text_that_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="not an id"):
        uuid_from_text(text)
