"""Damaged bytes: whatever a decoder is given, it answers with a message or with DecodeError, and soon.

TEST_FUZZ_SEED repeats a failure; TEST_FUZZ_ROUNDS and TEST_FUZZ_EXAMPLES dig deeper. For days on end there is
`tests/fuzz`, which needs atheris.
"""

from __future__ import annotations

import os
import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import MESSAGE_VERSIONS, MESSAGES, MessageVersion, encoded, message_name, random_message

from semel.wire.frames import decode_request_header, decode_response_header
from semel.wire.messages.fetch import FetchRequest
from semel.wire.messages.metadata import MetadataRequest
from semel.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from semel.wire.primitives import DecodeError

SEED = int(os.environ.get("TEST_FUZZ_SEED", "1"))
ROUNDS = int(os.environ.get("TEST_FUZZ_ROUNDS", "60"))
EXAMPLES = int(os.environ.get("TEST_FUZZ_EXAMPLES", "200"))
PREFIXES = 300
# What attackers write where a length is expected.
LENGTHS = [
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xfe",
    b"\xff\xff\xff\xff",
    b"\x7f\xff",
    b"\xff\xfe",
    b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\xff\x0f",
    b"\xff" * 11,
    b"\x80" * 5,
    b"\x00",
]


def mutated(valid: bytes, dice: random.Random) -> bytes:
    damaged = bytearray(valid)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(damaged) + 1)
        match dice.randrange(5):
            case 0 if at < len(damaged):
                damaged[at] = dice.randrange(256)
            case 1 if at < len(damaged):
                damaged[at] ^= 1 << dice.randrange(8)
            case 2:
                lengths = dice.choice(LENGTHS)
                damaged[at : at + len(lengths)] = lengths
            case 3:
                del damaged[at : at + dice.randint(1, 8)]
            case _:
                damaged[at:at] = dice.randbytes(dice.randint(1, 8))
    return bytes(damaged)


@pytest.mark.parametrize("versions", MESSAGES, ids=message_name)
def test_damaged_bytes_give_a_decode_error_and_nothing_else(versions: list[MessageVersion]) -> None:
    for message in versions:
        check_damaged(message)


def check_damaged(message: MessageVersion) -> None:
    dice = random.Random(f"{SEED} {message}")
    valid = encoded(random_message(message.message_type, dice), message.version)
    for round_number in range(ROUNDS):
        damaged = mutated(valid, dice)
        try:
            message.message_type.decode(memoryview(damaged), 0, message.version)
        except DecodeError:
            pass
        except Exception as error:
            pytest.fail(f"{message}, seed {SEED}, round {round_number}: {error!r} from {damaged.hex()}")


@pytest.mark.parametrize("versions", MESSAGES, ids=message_name)
def test_no_part_of_a_message_passes_for_the_whole(versions: list[MessageVersion]) -> None:
    for message in versions:
        check_parts(message)


def check_parts(message: MessageVersion) -> None:
    dice = random.Random(f"{SEED} {message}")
    valid = encoded(random_message(message.message_type, dice), message.version)
    _, end = message.message_type.decode(memoryview(valid), 0, message.version)
    assert end == len(valid), message
    cuts = range(len(valid)) if len(valid) <= PREFIXES else sorted(dice.sample(range(len(valid)), PREFIXES))
    for cut in cuts:
        try:
            message.message_type.decode(memoryview(valid)[:cut], 0, message.version)
        except DecodeError:
            continue
        pytest.fail(f"{message}, seed {SEED}: {cut} bytes of {len(valid)} were taken for the whole")


@pytest.mark.parametrize("versions", MESSAGES, ids=message_name)
def test_what_is_decoded_is_what_was_encoded(versions: list[MessageVersion]) -> None:
    for message in versions:
        check_round_trip(message)


def check_round_trip(message: MessageVersion) -> None:
    first, _ = message.message_type.decode(
        memoryview(encoded(random_message(message.message_type, random.Random(SEED)), message.version)),
        0,
        message.version,
    )
    padded = b"before" + encoded(first, message.version) + b"after"
    again, end = message.message_type.decode(memoryview(padded), 6, message.version)
    assert (again, end) == (first, len(padded) - 5), message


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    message=st.sampled_from(MESSAGE_VERSIONS),
    content=st.integers(0, 2**32),
    damage=st.lists(
        st.tuples(st.integers(0, 4000), st.integers(0, 8), st.binary(max_size=4) | st.sampled_from(LENGTHS)),
        min_size=1,
        max_size=4,
    ),
)
def test_what_is_read_of_damaged_bytes_can_be_written_and_read_again(
    message: MessageVersion, content: int, damage: list[tuple[int, int, bytes]]
) -> None:
    """Some bytes of a valid message are replaced by others, fewer or more."""
    valid = random_message(message.message_type, random.Random(content))
    damaged = bytearray(encoded(valid, message.version))
    for somewhere, length, replacement in damage:
        at = somewhere % (len(damaged) + 1)
        damaged[at : at + length] = replacement
    try:
        read, end = message.message_type.decode(memoryview(damaged), 0, message.version)
    except DecodeError:
        return
    assert end <= len(damaged)
    written = encoded(read, message.version)
    again, end = message.message_type.decode(memoryview(written), 0, message.version)
    # As bytes: a float that is not a number is not equal to itself.
    assert end == len(written) and encoded(again, message.version) == written


def test_damaged_headers_give_a_decode_error_and_nothing_else() -> None:
    dice = random.Random(SEED)
    valid = bytes.fromhex("0001000c00000007000573656d656c00")
    for _ in range(5_000):
        damaged = memoryview(mutated(valid, dice))
        for decode in (decode_request_header, lambda buf: decode_response_header(buf, 1, 12)):
            try:
                decode(damaged)
            except DecodeError:
                pass


COUNT_MAX = b"\x7f\xff\xff\xff"
UVARINT_MAX = b"\xff\xff\xff\xff\x07"


@pytest.mark.parametrize(
    ("decode", "version", "damaged"),
    [
        pytest.param(MetadataRequest.decode, 1, COUNT_MAX + b"\0" * 1000, id="classic-array"),
        pytest.param(MetadataRequest.decode, 9, UVARINT_MAX + b"\0" * 1000, id="compact-array"),
        pytest.param(ProduceRequest.decode, 3, b"\xff\xff\0\0\0\0\0\0" + COUNT_MAX, id="classic-topics"),
        pytest.param(ProduceRequest.decode, 9, b"\0\0\0\0\0\0\0" + UVARINT_MAX, id="compact-topics"),
        pytest.param(ProduceRequest.decode, 9, b"\xff\xff\xff\xff\x0f" + b"\0" * 1000, id="compact-string"),
        pytest.param(
            MetadataRequest.decode, 9, b"\x01\x00\x00\x00" + UVARINT_MAX + b"\0" * 9, id="tag-count"
        ),
        pytest.param(FetchRequest.decode, 12, b"\xff" * 40 + UVARINT_MAX * 100, id="everything"),
    ],
)
def test_a_claimed_size_allocates_nothing(decode, version: int, damaged: bytes) -> None:  # type: ignore[no-untyped-def]
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(DecodeError):
            decode(memoryview(damaged), 0, version)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    assert time.process_time() - started < 0.5


def test_memory_stays_in_proportion_to_the_bytes_received() -> None:
    # The most that one byte can buy: a request of nothing but the smallest structs.
    count = 20_000
    damaged = b"\0\0\0\0\0\0\0" + b"\xa1\x9c\x01" + b"\x01\x01\x00" * (count - 1)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            ProduceRequest.decode(memoryview(damaged), 0, 9)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 80 * len(damaged)


def test_records_are_a_view_of_the_request() -> None:
    request = ProduceRequest(
        topic_data=[TopicProduceData(name="t", partition_data=[PartitionProduceData(0, b"r" * 2000)])]
    )
    received = bytearray(encoded(request, 9))
    decoded, _ = ProduceRequest.decode(memoryview(received), 0, 9)
    records = decoded.topic_data[0].partition_data[0].records
    assert isinstance(records, memoryview)
    assert records.obj is received
