"""The set of acknowledged offsets, and the entry that carries it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.errors import ConfigError
from semel.subscriptions.ackset import AckSet
from semel.subscriptions.entry import (
    MAX_ATTEMPTS,
    MAX_RANGES,
    NOTE_LIMIT_BYTES,
    SPAN_OFFSETS,
    Entry,
    Mark,
    parse_entry,
)

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=30)


@given(low=st.integers(0, 20), ranges=RANGES)
def test_an_ack_set_is_the_set_of_what_was_added(low: int, ranges: list[tuple[int, int]]) -> None:
    acks = AckSet(low)
    expected = set(range(low))
    for start, length in ranges:
        acks.add(start, start + length)
        expected |= set(range(start, start + length))
    assert {offset for offset in range(80) if offset in acks} == expected
    assert acks.low == next(offset for offset in range(100) if offset not in expected)
    runs = acks.runs()
    assert all(start < end for start, end in runs)
    above = [acks.low, *(edge for run in runs for edge in run)]
    assert above == sorted(set(above)), "runs are apart from each other and above low"


@given(ranges=RANGES, low=st.integers(0, 20))
def test_a_copy_of_an_ack_set_lives_on_its_own(ranges: list[tuple[int, int]], low: int) -> None:
    acks = AckSet(low, [(start, start + length) for start, length in ranges])
    before = (acks.low, acks.runs())
    acks.copy().add(low, 200)
    assert (acks.low, acks.runs()) == before


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    offset = draw(st.integers(0, 2**40))
    at = offset
    acknowledged: list[tuple[int, int]] = []
    marks: list[Mark] = []
    for kind in draw(st.lists(st.integers(0, 2), max_size=20)):
        start = at + draw(st.integers(1, 300))
        at = start + draw(st.integers(1, 300))
        if kind == 0:
            acknowledged.append((start, at))
        else:
            is_out = kind == 1
            marks.append(Mark(start, at, draw(st.integers(0 if is_out else 1, MAX_ATTEMPTS)), is_out))
    return Entry(
        offset=offset,
        acknowledged=tuple(acknowledged),
        marks=tuple(marks),
        slots=draw(st.integers(0, 500)),
        max_in_flight=draw(st.integers(0, 500)),
        is_released=draw(st.booleans()),
        suspect_end=draw(st.none() | st.integers(offset + 1, offset + SPAN_OFFSETS)),
    )


@given(entry=entries())
def test_an_entry_comes_back_as_it_was_written(entry: Entry) -> None:
    note = entry.note()
    assert note.isascii()
    assert parse_entry(entry.offset, note) == entry


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_the_fullest_entry_fits_the_note(seed: int) -> None:
    """As many ranges as may be, of any lengths that the span allows, each with the longest mark."""
    chosen = random.Random(seed)
    edges = sorted(chosen.sample(range(1, SPAN_OFFSETS), 2 * (MAX_RANGES + 2)))
    marks = [Mark(edges[i], edges[i + 1], MAX_ATTEMPTS, True) for i in range(0, len(edges), 2)]
    entry = Entry(2**62, marks=tuple(marks), slots=401, max_in_flight=400, suspect_end=2**62 + SPAN_OFFSETS)
    shifted = tuple(mark._replace(start=2**62 + mark.start, end=2**62 + mark.end) for mark in marks)
    entry = Entry(entry.offset, (), shifted, 401, 400, False, entry.suspect_end)
    assert len(entry.note()) <= NOTE_LIMIT_BYTES


@pytest.mark.parametrize("note", ["", "moved by hand", "semel2 AAAA", "semel"])
def test_the_note_of_another_tool_is_no_entry(note: str) -> None:
    assert parse_entry(7, note) is None


@pytest.mark.parametrize(
    "note",
    ["semel1 ", "semel1 !!!", "semel1 gICAgICAgICAgICA", "semel1 AwABAAE", "semel1 AwABAAEAAA", "semel1 é"],
)
def test_a_damaged_note_says_what_to_do(note: str) -> None:
    with pytest.raises(ConfigError, match="semel group reset"):
        parse_entry(7, note)


def test_adjacent_marks_of_one_kind_are_one_range() -> None:
    entry = Entry(0, marks=tuple(Mark(at, at + 1, 2, False) for at in range(1, 300)))
    assert parse_entry(0, entry.note()) == Entry(0, marks=(Mark(1, 300, 2, False),))


def test_a_crash_blames_who_was_out_alone() -> None:
    left = Entry(5, marks=(Mark(5, 6, 1, True), Mark(6, 8, 1, False)), max_in_flight=4, suspect_end=9)
    found = left.after_crash(100)
    assert found.marks == (Mark(5, 6, 2, False), Mark(6, 8, 1, False))
    assert found.suspect_end == 9


def test_a_crash_with_many_out_makes_suspects_of_what_is_there() -> None:
    left = Entry(5, max_in_flight=4)
    assert left.after_crash(100).suspect_end == 100
    assert left.after_crash(2 * SPAN_OFFSETS).suspect_end == 5 + SPAN_OFFSETS
    assert left.after_crash(5).suspect_end is None, "nothing was there that could have been out"


def test_a_clean_stop_leaves_no_suspects() -> None:
    assert Entry(5, max_in_flight=4, is_released=True).after_crash(100).suspect_end is None


def test_an_entry_below_the_log_moves_to_its_start() -> None:
    moved = Entry(5, ((7, 9), (12, 20)), (Mark(5, 6, 1, False), Mark(9, 12, 2, False))).moved_to(10)
    assert moved == Entry(10, ((12, 20),), (Mark(10, 12, 2, False),))
