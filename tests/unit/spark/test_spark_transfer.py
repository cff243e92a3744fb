"""Which rows are guarded against being too large, and how, without a Spark."""

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import StructType

from semel.sinks.errors import WriteFailed
from semel.spark.transfer import (
    FIELD_BYTES,
    LARGE_ROW,
    MAX_BYTES,
    MAX_RECORDS,
    UNBOUNDED,
    Transfer,
    guarded_columns,
)

ROW_BYTES = 6_000


class Settings(dict[str, str]):
    """A session's, as `spark.conf` has them."""

    def set(self, name: str, value: str) -> None:
        self[name] = value


class Batch:
    """A frame with one text column, in a session with these settings."""

    def __init__(self, max_bytes: str = "64m", max_records: str = "10000") -> None:
        self.schema = StructType().add("value", "string")
        self.settings = Settings({MAX_BYTES: max_bytes, MAX_RECORDS: max_records})
        utils = SimpleNamespace(byteStringAsBytes=lambda text: int(text[:-1]) << 20)
        network = SimpleNamespace(util=SimpleNamespace(JavaUtils=utils))
        apache = SimpleNamespace(spark=SimpleNamespace(network=network))
        jvm = SimpleNamespace(org=SimpleNamespace(apache=apache))
        self.sparkSession = SimpleNamespace(conf=self.settings, sparkContext=SimpleNamespace(_jvm=jvm))

    def selectExpr(self, *columns: str) -> tuple[str, ...]:
        return columns


def test_spark_measures_nothing_within_a_job_whose_rows_are_guarded_and_again_after_it() -> None:
    batch: Any = Batch()
    with Transfer(has_python=False).prepared(batch) as prepared:
        assert prepared == tuple(guarded_columns({"value": "string"}, (64 << 20) // 10_000) or ())
        assert batch.settings[MAX_BYTES] == UNBOUNDED
    assert batch.settings[MAX_BYTES] == "64m"


def test_after_a_large_row_the_batches_are_measured_for_ever() -> None:
    batch: Any = Batch()
    transfer = Transfer(has_python=False)
    with pytest.raises(WriteFailed) as caught, transfer.prepared(batch):
        raise RuntimeError(f"[USER_RAISED_EXCEPTION] {LARGE_ROW}")
    assert not caught.value.is_permanent
    assert batch.settings[MAX_BYTES] == "64m"
    with transfer.prepared(batch) as prepared:
        assert prepared is batch
        assert batch.settings[MAX_BYTES] == "64m"


def test_another_failure_is_raised_as_it_is_and_changes_nothing() -> None:
    batch: Any = Batch()
    transfer = Transfer(has_python=False)
    with pytest.raises(ZeroDivisionError), transfer.prepared(batch):
        raise ZeroDivisionError
    assert batch.settings[MAX_BYTES] == "64m"
    with transfer.prepared(batch) as prepared:
        assert prepared is not batch


def test_where_the_query_has_python_of_its_own_nothing_is_changed() -> None:
    batch: Any = Batch()
    with Transfer(has_python=True).prepared(batch) as prepared:
        assert prepared is batch
        assert batch.settings[MAX_BYTES] == "64m"


@pytest.mark.parametrize("settings", [{"max_records": "0"}, {"max_bytes": "2048m"}], ids=["records", "bytes"])
def test_a_session_without_a_bound_is_left_as_it_is(settings: dict[str, str]) -> None:
    batch: Any = Batch(**settings)
    with Transfer(has_python=False).prepared(batch) as prepared:
        assert prepared is batch


def test_the_sizes_of_all_texts_of_a_row_are_added_up() -> None:
    columns = guarded_columns({"id": "bigint", "key": "binary", "value": "string"}, ROW_BYTES)
    assert columns is not None
    identity, key, value = columns
    assert (identity, value) == ("`id`", "`value`")
    size = "coalesce(octet_length(`key`), 0) + coalesce(octet_length(`value`), 0)"
    limit = ROW_BYTES - 3 * FIELD_BYTES
    assert key == f"CASE WHEN {size} <= {limit} THEN `key` ELSE raise_error('{LARGE_ROW}') END AS `key`"


def test_rows_of_numbers_need_no_guard() -> None:
    types = {"id": "bigint", "amount": "decimal(38,2)", "at": "timestamp"}
    assert guarded_columns(types, ROW_BYTES) == ["`id`", "`amount`", "`at`"]


@pytest.mark.parametrize(
    "types",
    [
        {"value": "string", "headers": "array<struct<key:string,value:binary>>"},
        {"value": "map<string,string>"},
        {"value": "variant"},
        {"value": "string", "Value": "string"},
        {f"number {i}": "int" for i in range(ROW_BYTES)},
    ],
    ids=["array", "map", "variant", "names that differ by case", "too many fields"],
)
def test_where_sizes_cannot_be_told_nothing_is_changed(types: dict[str, str]) -> None:
    assert guarded_columns(types, ROW_BYTES) is None


def test_without_a_bound_on_records_nothing_is_changed() -> None:
    assert guarded_columns({"value": "string"}, 0) is None


def test_collations_and_lengths_do_not_make_another_type() -> None:
    assert (
        guarded_columns({"value": "string collate UTF8_LCASE", "code": "varchar(3)"}, ROW_BYTES) is not None
    )


def test_names_are_quoted() -> None:
    columns = guarded_columns({"a`b c": "binary"}, ROW_BYTES)
    assert columns is not None and columns[0].endswith("AS `a``b c`")
