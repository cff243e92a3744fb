"""Kafka's batches as Arrow batches, with the columns of Spark's own source."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from semel.client.metadata import TopicPartition
from semel.errors import ProtocolError
from semel.spark.source import SemelDataSource
from semel.spark.source_arrow import GROUP_BYTES, GROUP_RECORDS, SCHEMA, SCHEMA_WITH_HEADERS, to_arrow
from semel.spark.source_offsets import OffsetRange
from semel.spark.source_options import BOOTSTRAP, INCLUDE_HEADERS, SUBSCRIBE
from semel.wire.batch import BatchHeader, place_batch, read_header, stamp_append_time
from semel.wire.compression import Codec
from semel.wire.records import Record, build_batch

WHERE = TopicPartition("orders", 3)
ALL = OffsetRange(WHERE, 0, 2**40)


def placed(
    records: list[Record], base_offset: int, codec: Codec = Codec.NONE
) -> tuple[BatchHeader, memoryview]:
    batch = bytearray(build_batch(records, codec=codec))
    place_batch(batch, base_offset, 0)
    return read_header(batch), memoryview(batch)


def rows(
    batches: list[tuple[BatchHeader, memoryview]], wanted: OffsetRange = ALL, include_headers: bool = True
) -> list[dict[str, object]]:
    return [
        row for each in to_arrow(batches, wanted, include_headers=include_headers) for row in each.to_pylist()
    ]


def test_the_columns_are_what_spark_makes_of_the_declared_schema() -> None:
    for include_headers, schema in (("false", SCHEMA), ("true", SCHEMA_WITH_HEADERS)):
        options = {BOOTSTRAP: "localhost", SUBSCRIBE: "t", INCLUDE_HEADERS: include_headers}
        declared = SemelDataSource(options).schema()
        assert to_arrow_schema(declared, timezone="UTC").equals(schema), declared


def test_every_field_arrives_as_it_was_written() -> None:
    found = rows(
        [
            placed(
                [
                    Record(b"k", b"v", 1_700_000_000_123, [("a", b"1"), ("a", None), ("ü", b"")]),
                    Record(None, None, -1),
                    Record(b"", b"", 0),
                ],
                base_offset=41,
            )
        ]
    )
    common = {"topic": "orders", "partition": 3, "timestampType": 0}
    moment = datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)
    headers = [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "ü", "value": b""}]
    assert found == [
        {**common, "key": b"k", "value": b"v", "offset": 41, "timestamp": moment, "headers": headers},
        {
            **common,
            "key": None,
            "value": None,
            "offset": 42,
            "timestamp": datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC),
            "headers": None,
        },
        {
            **common,
            "key": b"",
            "value": b"",
            "offset": 43,
            "timestamp": datetime(1970, 1, 1, tzinfo=UTC),
            "headers": None,
        },
    ]


def test_append_time_is_told_apart() -> None:
    header, batch = placed([Record(b"k", b"v", 5), Record(b"k", b"v", 6)], 0)
    stamped = bytearray(batch)
    stamp_append_time(stamped, 9_000)
    found = rows([(read_header(stamped), memoryview(stamped))])
    assert [(row["timestampType"], row["timestamp"]) for row in found] == [
        (1, datetime(1970, 1, 1, 0, 0, 9, tzinfo=UTC))
    ] * 2
    assert header.has_append_time is False


def test_a_range_cuts_through_batches() -> None:
    batches = [placed([Record(None, b"%d" % (base + i), 0) for i in range(10)], base) for base in (0, 10, 20)]
    found = rows(batches, OffsetRange(WHERE, 7, 22))
    assert [row["offset"] for row in found] == list(range(7, 22))
    assert [row["value"] for row in found] == [b"%d" % i for i in range(7, 22)]


def test_small_batches_go_together_and_keep_their_order() -> None:
    batches = [placed([Record(b"k%d" % base, b"v", base)], base) for base in range(GROUP_RECORDS + 10)]
    arrow = list(to_arrow(batches, ALL, include_headers=False))
    assert [each.num_rows for each in arrow] == [GROUP_RECORDS, 10]
    assert pa.Table.from_batches(arrow)["offset"].to_pylist() == list(range(GROUP_RECORDS + 10))


def test_batches_go_together_by_what_is_in_them_and_not_by_how_well_it_was_packed() -> None:
    """Offsets in a column of Arrow's have 32 bits, and there is memory to think of."""
    size = GROUP_BYTES // 4
    batches = [placed([Record(None, b"x" * size, 0)], base, Codec.ZSTD) for base in range(10)]
    assert sum(len(batch) for _, batch in batches) < GROUP_BYTES
    arrow = list(to_arrow(batches, ALL, include_headers=False))
    assert [each.num_rows for each in arrow] == [4, 4, 2]


def test_batches_with_and_without_headers_mix() -> None:
    found = rows([placed([Record(b"", b"", 0)], 0), placed([Record(b"", b"", 0, [("h", b"x")])], 1)])
    assert [row["headers"] for row in found] == [None, [{"key": "h", "value": b"x"}]]


def test_headers_may_be_left_out() -> None:
    found = rows([placed([Record(b"", b"", 0, [("h", b"x")])], 0)], include_headers=False)
    assert "headers" not in found[0]


def test_a_name_of_a_header_that_is_no_text_is_read_as_java_reads_it() -> None:
    key = b"a\xff".decode("utf-8", "surrogateescape")
    found = rows([placed([Record(b"", b"", 0, [(key, b"x")])], 0)])
    assert found[0]["headers"] == [{"key": "a\ufffd", "value": b"x"}]


def test_a_timestamp_that_spark_cannot_hold_is_an_error_and_not_another_timestamp() -> None:
    with pytest.raises(ProtocolError, match="offset 8"):
        rows([placed([Record(b"", b"", 2**62)], 8)])
