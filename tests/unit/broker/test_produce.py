"""Claims about Produce: what is accepted, what is refused and why, and where a batch goes."""

import pytest
from broker_cases import NOW_MS, apply, batch, caller, new_broker, now, request, send, with_topic

from semel.broker.configs import CODECS
from semel.broker.produce import MAX_NAMED_RECORDS, produce
from semel.wire.batch import check_batch, read_header, write_crc
from semel.wire.compression import Codec
from semel.wire.errors import ErrorCode
from semel.wire.records import Record, build_batch, read_records


def test_batches_get_offsets_in_the_order_of_their_requests() -> None:
    broker = with_topic(new_broker())
    assert [send(broker, request(batch(3)))[0].base_offset for _ in range(3)] == [0, 3, 6]


def test_a_batch_is_placed_and_not_re_encoded() -> None:
    broker = with_topic(new_broker())
    send(broker, request(batch(2)))
    original = batch(5)
    decision = produce(broker, request(original), caller(9), now())
    (entry,) = decision.entries
    header = read_header(entry.batch)  # type: ignore[union-attr]
    assert (header.base_offset, header.leader_epoch) == (2, broker.leader_epoch)
    assert bytes(entry.batch[16:]) == bytes(original[16:])  # type: ignore[union-attr]


def test_a_refused_request_changes_nothing() -> None:
    broker = with_topic(new_broker())
    damaged = batch(3)
    damaged[-1] ^= 1
    decision = produce(broker, request(damaged), caller(9), now())
    assert decision.entries == []
    assert broker.catalog.by_name["t"].partitions[0].log.end_offset == 0


def test_one_bad_partition_does_not_harm_the_others() -> None:
    broker = with_topic(new_broker(), partitions=2)
    damaged = batch(1)
    damaged[20] ^= 1
    bad, good = send(broker, request(damaged, batch(1)))
    assert bad.error_code == ErrorCode.CORRUPT_MESSAGE
    assert (good.error_code, good.base_offset) == (0, 0)


def test_two_batches_for_one_partition_in_one_request_are_refused() -> None:
    broker = with_topic(new_broker())
    first, second = send(broker, request(batch(1), batch(1), partitions=(0, 0)))
    assert (first.error_code, second.error_code) == (0, ErrorCode.INVALID_REQUEST)
    assert broker.catalog.by_name["t"].partitions[0].log.end_offset == 1


def test_unknown_topics_are_named_by_the_words_of_the_version() -> None:
    broker = with_topic(new_broker())
    assert send(broker, request(batch(1), topic="no"))[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert send(broker, request(batch(1)), version=13)[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID


def test_a_batch_above_the_limit_is_too_large() -> None:
    broker = with_topic(new_broker(), max_message_bytes="80")
    assert send(broker, request(batch(1)))[0].error_code == 0
    assert send(broker, request(batch(2)))[0].error_code == ErrorCode.MESSAGE_TOO_LARGE


def test_acks_are_all_one_or_none() -> None:
    broker = with_topic(new_broker())
    assert send(broker, request(batch(1), acks=2))[0].error_code == ErrorCode.INVALID_REQUIRED_ACKS
    assert send(broker, request(batch(1), acks=1))[0].error_code == 0


def test_a_producer_that_wants_no_answer_is_cut_off_when_it_fails() -> None:
    broker = with_topic(new_broker())
    good = produce(broker, request(batch(1), acks=0), caller(9), now())
    assert (good.reply, good.hang_up, len(good.entries)) == (None, None, 1)
    bad = produce(broker, request(batch(1), topic="no", acks=0), caller(9), now())
    assert bad.reply is None
    assert bad.hang_up is not None and "no partition 0 of topic 'no'" in bad.hang_up


def test_a_compacted_topic_needs_keys() -> None:
    broker = with_topic(new_broker(), cleanup_policy="compact")
    assert send(broker, request(batch(1, key=None)))[0].error_code == ErrorCode.INVALID_RECORD
    assert send(broker, request(batch(1, key=b"k")))[0].error_code == 0


@pytest.mark.parametrize("sent", Codec)
@pytest.mark.parametrize(("kept", "codec"), CODECS.items())
def test_a_topic_keeps_batches_in_the_codec_that_it_asks_for(sent: Codec, kept: str, codec: Codec) -> None:
    broker = with_topic(new_broker(), compression_type=kept)
    records = [Record(b"k%d" % n, b"value" * n, NOW_MS + n, (("h", b"x"),)) for n in range(50)]
    original = build_batch(records, codec=sent, producer_id=7, producer_epoch=1, base_sequence=0)
    decision = produce(broker, request(original), caller(9), now())
    (entry,) = decision.entries
    assert check_batch(entry.batch).codec == codec  # type: ignore[union-attr]
    assert read_records(entry.batch) == read_records(original)  # type: ignore[union-attr]
    apply(broker, decision)
    assert produce(broker, request(original), caller(9), now()).entries == [], "the second one is a duplicate"


def test_a_batch_that_grows_beyond_the_limit_when_it_is_recompressed_is_refused() -> None:
    broker = with_topic(new_broker(), compression_type="uncompressed", max_message_bytes="1000")
    small = build_batch([Record(None, bytes(5_000), NOW_MS)], codec=Codec.GZIP)
    assert send(broker, request(small))[0].error_code == ErrorCode.MESSAGE_TOO_LARGE


def test_a_body_that_is_no_gzip_is_refused_where_it_must_be_opened() -> None:
    broker = with_topic(new_broker(), compression_type="zstd")
    claimed = batch(3)
    claimed[22] |= Codec.GZIP
    write_crc(claimed)
    assert send(broker, request(claimed))[0].error_code == ErrorCode.CORRUPT_MESSAGE


def test_records_without_a_key_are_named_and_the_others_are_not() -> None:
    broker = with_topic(new_broker(), cleanup_policy="compact")
    keys = (b"a", None, b"c", None)
    mixed = build_batch([Record(key, b"v", NOW_MS) for key in keys])
    (refused,) = send(broker, request(mixed))
    assert [error.batch_index for error in refused.record_errors] == [1, 3]


def test_a_batch_of_very_many_bad_records_is_bad_as_a_whole() -> None:
    broker = with_topic(new_broker(), cleanup_policy="compact")
    many = build_batch([Record(None, None, NOW_MS)] * (MAX_NAMED_RECORDS + 1))
    (refused,) = send(broker, request(many))
    assert (refused.error_code, refused.record_errors) == (ErrorCode.INVALID_RECORD, [])


def test_append_time_is_the_brokers() -> None:
    broker = with_topic(new_broker(), message_timestamp_type="LogAppendTime")
    decision = produce(broker, request(batch(2, timestamp=5)), caller(9), now(ms=77))
    apply(broker, decision)
    header = read_header(decision.entries[0].batch)  # type: ignore[union-attr]
    assert header.has_append_time
    assert header.max_timestamp == NOW_MS + 77
    assert decision.reply.responses[0].partition_responses[0].log_append_time_ms == NOW_MS + 77  # type: ignore[union-attr]


def test_times_too_far_from_now_are_refused() -> None:
    broker = with_topic(
        new_broker(), message_timestamp_before_max_ms="1000", message_timestamp_after_max_ms="1000"
    )
    for offset_ms, code in ((0, 0), (1000, 0), (1001, 32), (-1000, 0), (-1001, 32)):
        assert send(broker, request(batch(1, timestamp=NOW_MS + offset_ms)))[0].error_code == code


class TestIdempotence:
    def test_a_duplicate_gets_the_offset_it_had(self) -> None:
        broker = with_topic(new_broker())
        first = send(broker, request(batch(3, producer_id=7, epoch=0, sequence=0)))[0]
        send(broker, request(batch(2, producer_id=7, epoch=0, sequence=3)))
        again = send(broker, request(batch(3, producer_id=7, epoch=0, sequence=0)))[0]
        assert (again.error_code, again.base_offset) == (0, first.base_offset)
        assert broker.catalog.by_name["t"].partitions[0].log.end_offset == 5
        assert broker.counters.duplicates == 1

    def test_the_same_first_sequence_with_another_length_is_no_duplicate(self) -> None:
        broker = with_topic(new_broker())
        send(broker, request(batch(3, producer_id=7, epoch=0, sequence=0)))
        again = send(broker, request(batch(2, producer_id=7, epoch=0, sequence=0)))[0]
        assert again.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def test_five_batches_are_remembered_and_older_ones_are_duplicates_without_an_offset(self) -> None:
        broker = with_topic(new_broker())
        for sequence in range(7):
            send(broker, request(batch(1, producer_id=7, epoch=0, sequence=sequence)))
        codes = [
            send(broker, request(batch(1, producer_id=7, epoch=0, sequence=sequence)))[0].error_code
            for sequence in range(7)
        ]
        assert codes == [ErrorCode.DUPLICATE_SEQUENCE_NUMBER] * 2 + [0] * 5

    def test_a_gap_is_out_of_order(self) -> None:
        broker = with_topic(new_broker())
        send(broker, request(batch(1, producer_id=7, epoch=0, sequence=0)))
        ahead = send(broker, request(batch(1, producer_id=7, epoch=0, sequence=2)))[0]
        assert ahead.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def test_sequences_wrap(self) -> None:
        broker = with_topic(new_broker())
        top = 2**31 - 1
        assert send(broker, request(batch(2, producer_id=7, epoch=0, sequence=top - 1)))[0].error_code == 0
        assert send(broker, request(batch(1, producer_id=7, epoch=0, sequence=0)))[0].error_code == 0
        across = send(broker, request(batch(2, producer_id=7, epoch=0, sequence=top - 1)))[0]
        assert (across.error_code, across.base_offset) == (0, 0)

    def test_a_batch_may_itself_wrap(self) -> None:
        broker = with_topic(new_broker())
        top = 2**31 - 1
        send(broker, request(batch(4, producer_id=7, epoch=0, sequence=top - 1)))
        assert send(broker, request(batch(1, producer_id=7, epoch=0, sequence=2)))[0].error_code == 0

    def test_an_unknown_producer_may_begin_anywhere(self) -> None:
        broker = with_topic(new_broker())
        assert send(broker, request(batch(1, producer_id=7, epoch=3, sequence=41)))[0].error_code == 0

    def test_a_higher_epoch_begins_at_zero_and_fences_the_lower(self) -> None:
        broker = with_topic(new_broker())
        send(broker, request(batch(1, producer_id=7, epoch=0, sequence=0)))
        early = send(broker, request(batch(1, producer_id=7, epoch=1, sequence=1)))[0]
        assert early.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert send(broker, request(batch(1, producer_id=7, epoch=5, sequence=0)))[0].error_code == 0
        late = send(broker, request(batch(1, producer_id=7, epoch=0, sequence=1)))[0]
        assert late.error_code == ErrorCode.INVALID_PRODUCER_EPOCH
