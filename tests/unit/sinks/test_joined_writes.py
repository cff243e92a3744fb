"""Writes of several types: what a row comes to does not depend on the writes beside its own."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from semel.sinks.joining import join

EXACT = Decimal("0.1234567890123456789")


def joined(*columns: list[Any]) -> list[list[Any]]:
    tables = [pa.table({"x": column}) for column in columns]
    return [table.column("x").to_pylist() for table in join(tables)]


@pytest.mark.parametrize(
    "columns",
    [
        ([1], [2.5]),
        ([1], [None], [2]),
        ([None], [[1]]),
        ([Decimal("1.25")], [Decimal("123456.5")]),
        ([b"a"], ["b"]),
    ],
)
def test_writes_that_have_a_type_in_common_are_joined(columns: tuple[list[Any], ...]) -> None:
    (whole,) = joined(*columns)
    assert len(whole) == len(columns)


@pytest.mark.parametrize(
    "columns",
    [
        ([Decimal("1.25")], [2]),
        (["a"], [1]),
        ([2**60 + 1], [1.5]),
        ([[EXACT]], [[0.5]]),
        ([{"a": 1}], [{"b": 2}]),
    ],
)
def test_others_follow_each_other_unaltered(columns: tuple[list[Any], ...]) -> None:
    assert joined(*columns) == list(columns)


def test_what_fits_together_beside_what_does_not_is_joined_all_the_same() -> None:
    assert joined(["a"], ["b"], [1], [2]) == [["a", "b"], [1, 2]]
    assert joined() == []
