"""Which of the rows' columns goes where, and what is said of those that go nowhere."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from semel.sinks.errors import InitFailed
from semel.sinks.postgres import PostgresSink
from semel.sinks.sql.columns import TableColumn, lay_out

TOTALS = [TableColumn("minute", "timestamp without time zone"), TableColumn("total", "bigint")]
SCHEMA = pa.schema({"minute": pa.timestamp("us"), "total": pa.int64()})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"keys": ["minut"], "schema": SCHEMA},
            "keys= names 'minut', and the rows for totals have no such column. They have 'minute', 'total'",
        ),
        ({"keys": ["minut"]}, "'minut' is not written to totals; .* columns 'minute', 'total'"),
        (
            {"keys": ["total"], "schema": SCHEMA, "columns": {"minute": "minute"}},
            "'total' is not written to totals; .* columns 'minute'",
        ),
        (
            {"keys": ["minute"], "order_by": "totl", "schema": SCHEMA},
            "order_by= names 'totl', and the rows .* have 'minute', 'total'",
        ),
        ({"keys": ["minute"], "order_by": "lsn"}, "its type is not known. Give schema="),
    ],
    ids=[
        "a key, misspelt",
        "rows that are not known",
        "a key that is left out",
        "order_by",
        "an order in no table",
    ],
)
def test_a_column_that_is_not_there_is_named_with_those_that_are(options: dict[str, Any], says: str) -> None:
    sink = PostgresSink("dbname=d", "totals", mode="upsert", **options)
    with pytest.raises(InitFailed, match=says):
        lay_out(sink.target, TOTALS, sink._dialect)
