"""Rows that were lost or doubled: an error of its own, as no second try makes up for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

# What pytest ends with where it was met once: `script/test` tries everything else again.
ROWS_DIFFER_CODE: Final = 10
SHOWN: Final = 5


class RowsDiffer(AssertionError):  # noqa: N818 - says what is the case
    """There are rows that should not be there, or there are none that should."""


def check_rows(found: Iterable[Hashable], wanted: Iterable[Hashable], where: object = "the target") -> None:
    """By content: nothing is missing, and nothing is there twice."""
    is_there, is_to_be = Counter(found), Counter(wanted)
    wrong = {"lost": is_to_be - is_there, "doubled, or never written": is_there - is_to_be}
    told = [f"{what}: {few(rows)}" for what, rows in wrong.items() if rows]
    if told:
        raise RowsDiffer(f"{where}, of {is_to_be.total()} rows, {'; '.join(told)}")


def few(rows: Counter[Hashable]) -> str:
    some = ", ".join(f"{row!r}" for row in list(rows)[:SHOWN])
    return some if len(rows) <= SHOWN else f"{some} and {len(rows) - SHOWN} others"


@contextmanager
def about_rows() -> Iterator[None]:
    """What is asserted in here is asserted of rows. A decorator, too."""
    try:
        yield
    except AssertionError as error:
        raise RowsDiffer(str(error)) from error
