"""Rows as dead letters show them."""

import json
from datetime import date

import pyarrow as pa
import pytest

from semel.sinks.sql.json_texts import row_text

# In days, and in microseconds, after 1970.
YEAR_10183, YEAR_26059 = 3_000_000, 3 * 253_402_300_800_000_000
FAR_DATE = pa.array([YEAR_10183], pa.date32())


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([date(2026, 1, 2)]), "2026-01-02"),
        (pa.array([None], pa.date32()), None),
        (FAR_DATE, "10183-09-21"),
        (pa.array([YEAR_26059], pa.timestamp("us")), "26059-12-31 00:00:00.000000"),
        (pa.array([YEAR_26059], pa.timestamp("us", "UTC")), "26059-12-31 00:00:00.000000Z"),
    ],
    ids=["a date", "null", "a far date", "a far time", "a far moment"],
)
def test_a_row_can_be_shown_though_python_has_no_such_date(column: pa.Array, text: str | None) -> None:
    assert json.loads(row_text(pa.table({"id": [7], "at": column}))) == {"id": 7, "at": text}


def test_what_is_within_a_value_is_shown_as_well() -> None:
    nested = pa.StructArray.from_arrays([pa.array(["x"]), FAR_DATE], ["name", "at"])
    shown = row_text(pa.table({"nested": nested}))
    assert "x" in shown
    assert "10183-09-21" in shown
