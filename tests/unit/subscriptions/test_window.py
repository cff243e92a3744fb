"""The window of one partition: what may be dealt when, and that nothing is lost or repeated."""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.subscriptions.backoff import RedeliveryBackoff
from semel.subscriptions.entry import MAX_RANGES, NOTE_LIMIT_BYTES, SPAN_OFFSETS, Entry, Mark, parse_entry
from semel.subscriptions.window import NOT_DUE, Held, Window
from semel.wire.records import Record

FRESH = Entry(0, is_released=True)


def record(offset: int, key: bytes | None = None) -> Held:
    return Held(key, b"v%d" % offset, offset=offset)


def window_of(count: int, keys: str = "", *, entry: Entry = FRESH, max_in_flight: int = 16) -> Window:
    """A window with records 0 to count - 1; `keys` are their keys, one letter each."""
    window = Window(entry, max_in_flight, 3)
    for offset in range(count):
        assert window.has_room(offset)
        window.admit(record(offset, keys[offset].encode() if keys else None))
    return window


def offsets(held: list[Held]) -> list[int]:
    return [each.offset for each in held]


def take_all(window: Window, now_ms: int = 1) -> list[Held]:
    taken: list[Held] = []
    while more := window.take(1, now_ms):
        taken += more
    return taken


def commit(window: Window, held: list[Held]) -> Entry:
    entry = window.entry(held, 3)
    window.committed(entry)
    window.acknowledge(held)
    return entry


def test_records_without_keys_are_dealt_in_order_and_in_parallel() -> None:
    assert offsets(take_all(window_of(4))) == [0, 1, 2, 3]


def test_a_record_is_shown_as_it_is_unless_something_else_is_to_be() -> None:
    held = record(0)
    assert held.shown is held
    held.show(held)
    assert not [each for each in gc.get_referrers(held) if each is held], "it would never be freed"
    other = Record(None, b"other")
    held.show(other)
    assert held.shown is other


def test_only_the_first_of_a_key_is_dealt() -> None:
    window = window_of(5, "aabab")
    taken = take_all(window)
    assert offsets(taken) == [0, 2]
    commit(window, taken[:1])
    assert offsets(take_all(window)) == [1]


def test_a_failed_record_holds_back_its_key_and_nothing_else() -> None:
    window = window_of(4, "abab")
    first, second = take_all(window)
    window.fail([first], "no")
    window.give_back([first], due_ms=100)
    commit(window, [second])
    assert offsets(take_all(window, now_ms=50)) == [3]
    assert offsets(take_all(window, now_ms=100)) == [0]
    assert window.next_due_ms() is None


def test_seven_before_five_is_in_the_entry() -> None:
    window = window_of(9)
    taken = take_all(window)
    commit(window, taken[:5])
    entry = commit(window, [taken[7]])
    assert (entry.offset, entry.acknowledged) == (5, ((7, 8),))
    after = Window(entry, 16, 3)
    assert [after.admit(record(offset)) for offset in (5, 6, 7, 8)] == [True, True, False, True]


def test_what_is_not_decided_is_in_no_other_entry() -> None:
    window = window_of(3)
    first, second, _ = take_all(window)
    undecided = window.entry([first], 3)
    assert undecided.offset == 1
    assert window.entry([second], 3).offset == 0, "the first may yet be rolled back"


def test_gaps_count_as_acknowledged() -> None:
    window = Window(FRESH, 16, 3)
    for offset in (0, 2, 4, 6):
        window.admit(record(offset))
    taken = take_all(window)
    assert commit(window, taken[1:3]).acknowledged == ((1, 6),)
    assert commit(window, taken[:1]).offset == 6


def test_at_most_so_many_are_held() -> None:
    window = window_of(4, max_in_flight=4)
    assert not window.has_room(4)
    commit(window, take_all(window)[3:])
    assert window.has_room(4)


def test_nothing_far_above_the_committed_offset_is_admitted() -> None:
    window = window_of(1)
    assert not window.has_room(SPAN_OFFSETS)
    assert not window.needs_commit(SPAN_OFFSETS)
    commit(window, take_all(window))
    assert window.has_room(SPAN_OFFSETS)
    assert window.needs_commit(SPAN_OFFSETS + 1)
    window.skip_to(SPAN_OFFSETS + 1)
    commit(window, [])
    assert window.has_room(SPAN_OFFSETS + 1)


def test_a_batch_holds_several_of_a_key_in_order() -> None:
    window = window_of(6, "aabbac")
    assert offsets(window.take(4, 1)) == [0, 1, 2, 3]
    assert offsets(window.take(4, 1)) == [5]


def test_a_failed_batch_comes_back_one_by_one() -> None:
    window = window_of(4, "aabb")
    batch = window.take(4, 1)
    window.fail(batch, "no")
    window.give_back(batch, NOT_DUE)
    assert offsets(window.take(4, 1)) == [0]
    assert offsets(window.take(4, 1)) == [2]


def test_failures_are_in_the_entry_in_the_order_of_the_log_whenever_they_came() -> None:
    window = window_of(4)
    for held in reversed(take_all(window)):
        window.fail([held], "x")
        window.give_back([held], NOT_DUE)
    assert window.entry((), 1).marks == tuple(Mark(offset, offset + 1, 1, False) for offset in range(4))
    window.acknowledge(window.take(1, 1))
    assert [mark.start for mark in window.entry((), 1).marks] == [1, 2, 3]


def test_a_record_that_came_back_is_dealt_once_when_a_later_one_of_its_key_is_given_up() -> None:
    window = window_of(2, "aa")
    first, second = window.take(2, 1)
    window.give_back([first], NOT_DUE)
    window.acknowledge([second])
    assert offsets(take_all(window)) == [0]


def test_a_shared_failure_is_nobodys_last() -> None:
    window = Window(FRESH, 16, 1)
    for offset in range(2):
        window.admit(record(offset))
    batch = window.take(2, 1)
    window.fail(batch, "no")
    assert [held.attempts for held in batch] == [0, 0]
    window.give_back(batch, NOT_DUE)
    alone = window.take(2, 1)
    window.fail(alone, "no")
    assert [held.attempts for held in alone] == [1]


def test_suspects_go_out_alone_and_marked() -> None:
    window = window_of(4, entry=Entry(0, max_in_flight=2, suspect_end=4))
    assert window.must_mark
    (first,) = window.take(8, 1)
    assert (first.attempt, first.is_marked) == (2, True)
    assert window.take(1, 1) == []
    assert window.entry((), 3).marks == (Mark(0, 1, 0, True),)
    commit(window, [first])
    (second,) = window.take(1, 1)
    assert second.attempt == 2
    commit(window, [second])
    (third,) = window.take(1, 1)
    assert third.attempt == 1, "only two can have been out"


def test_dealing_in_parallel_waits_for_an_entry_without_suspects() -> None:
    window = window_of(3, entry=Entry(0, max_in_flight=1, suspect_end=1))
    (suspect,) = window.take(1, 1)
    still_suspect = window.entry([suspect], 3)
    window.committed(still_suspect)
    window.acknowledge([suspect])
    assert not window.must_mark, "an offset past the last suspect says so too"

    window = window_of(3, entry=Entry(0, max_in_flight=1, suspect_end=1))
    (suspect,) = window.take(1, 1)
    window.fail([suspect], "no")
    window.give_back([suspect], due_ms=100)
    assert window.must_mark, "no entry says yet that suspicion is over"
    (second,) = window.take(1, 1)
    window.committed(window.entry((), 3))
    assert not window.must_mark
    assert offsets(take_all(window)) == [2]
    assert second.is_marked


def test_marks_of_records_that_are_not_read_yet_are_kept() -> None:
    window = Window(Entry(0, marks=(Mark(2, 6, 1, False),), is_released=True), 16, 3)
    for offset in range(4):
        window.admit(record(offset))
    assert [held.attempts for held in take_all(window)] == [0, 0, 1, 1]
    entry = window.entry((), 3)
    assert parse_entry(0, entry.note()) == Entry(0, marks=(Mark(2, 6, 1, False),), slots=3, max_in_flight=16)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_no_order_of_events_loses_or_repeats_an_acknowledgement(seed: int) -> None:
    """Random deals, acks, failures, gaps and crashes: every record is acknowledged once, its key in order."""
    chosen = random.Random(seed)
    log: list[Record] = []
    at = 0
    for _ in range(chosen.randrange(1, 60)):
        at += chosen.choice((0, 0, 1, 5, 700))
        log.append(record(at, chosen.choice((None, b"a", b"b", b"c"))))
        at += 1
    max_in_flight = chosen.choice((1, 2, 7, 30))
    acknowledged: list[Record] = []
    entry = FRESH
    for _ in range(200):
        entry = run_until_crash(chosen, log, at, entry, max_in_flight, acknowledged)
        if len(acknowledged) == len(log):
            break
    assert sorted(each.offset for each in acknowledged) == [each.offset for each in log], f"seed {seed}"
    for key in (b"a", b"b", b"c"):
        of_key = [each.offset for each in acknowledged if each.key == key]
        assert of_key == sorted(of_key), f"seed {seed}"


def run_until_crash(
    chosen: random.Random,
    log: list[Record],
    end: int,
    found: Entry,
    max_in_flight: int,
    acknowledged: list[Record],
) -> Entry:
    """One owner: takes over what was committed, works for a while, and dies; returns what it committed."""
    window = Window(found.after_crash(end), max_in_flight, 60)
    entry = window.entry((), 3)
    window.committed(entry)
    unread = [record(each.offset, each.key) for each in log if each.offset >= entry.offset]
    out: list[list[Held]] = []
    for now_ms in range(chosen.randrange(120)):
        while unread and window.has_room(unread[0].offset):
            window.admit(unread.pop(0))
        if unread and window.needs_commit(unread[0].offset):
            window.skip_to(unread[0].offset)
            entry = window.entry((), 3)
            window.committed(entry)
        action = chosen.randrange(4)
        if action < 2:
            taken = window.take(chosen.choice((1, 1, 4)), now_ms)
            assert not (taken and window.must_mark and window.out_count > 1)
            if taken:
                out.append(taken)
            if taken and taken[0].is_marked:
                entry = window.entry((), 3)
                window.committed(entry)
        elif out and action == 2:
            batch = out.pop(chosen.randrange(len(out)))
            attempted = window.entry(batch, 3)
            if chosen.random() < 0.8:
                entry = attempted
                window.committed(entry)
                window.acknowledge(batch)
                acknowledged += batch
            else:  # the transaction was refused
                window.give_back(batch, NOT_DUE)
        elif out:
            batch = out.pop()
            window.fail(batch, "no")
            window.give_back(batch, now_ms + chosen.randrange(10))
            entry = window.entry((), 3)
            window.committed(entry)
        note = entry.note()
        assert len(note) <= NOTE_LIMIT_BYTES
        reread = parse_entry(entry.offset, note)
        assert reread is not None
        entry = reread
    return entry


def test_a_full_entry_still_lets_the_lowest_record_through() -> None:
    runs = tuple((at, at + 1) for at in range(2, 2 * MAX_RANGES, 2))
    window = Window(Entry(0, runs, is_released=True), 16, 3)
    assert window.has_room(0)
    assert window.admit(record(0))
    assert not window.has_room(1)
    commit(window, take_all(window))
    assert window.has_room(1)


@pytest.mark.parametrize(("attempts", "expected"), [(1, 100), (2, 200), (3, 400), (10, 1_000), (60, 1_000)])
def test_pauses_double_up_to_their_limit(attempts: int, expected: int) -> None:
    backoff = RedeliveryBackoff(first_ms=100, max_ms=1_000, jitter=0.5)
    assert backoff.delay_ms(attempts, 0.5) == expected
    assert backoff.delay_ms(attempts, 0.0) == expected // 2
    assert backoff.delay_ms(attempts, 1.0) == expected * 3 // 2
