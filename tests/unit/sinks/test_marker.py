"""The one rule that decides between write, skip and error."""

from __future__ import annotations

import pytest

from semel.sinks.errors import MarkerMismatch
from semel.sinks.marker import (
    ANY_QUERY,
    NO_MARKER,
    Marker,
    Owner,
    Start,
    Verdict,
    decode_marker,
    judge,
    require_fit,
)
from semel.sinks.receipts import NO_ORIGIN, Origin

ORIGIN = Origin("query", "digest")
FOUR = Marker(4, "query", "digest")


@pytest.mark.parametrize(
    ("marker", "epoch", "origin", "verdict"),
    [
        (NO_MARKER, 0, ORIGIN, Verdict.NEXT),
        (NO_MARKER, 0, NO_ORIGIN, Verdict.NEXT),
        (FOUR, 5, ORIGIN, Verdict.NEXT),
        (FOUR, 5, Origin("query", "other"), Verdict.NEXT),
        (FOUR, 4, ORIGIN, Verdict.COMMITTED),
        (Marker(4, "", ""), 4, NO_ORIGIN, Verdict.COMMITTED),
        (Marker(4, ANY_QUERY, ""), 4, ORIGIN, Verdict.COMMITTED),
        (Marker(4, ANY_QUERY, ""), 5, ORIGIN, Verdict.NEXT),
    ],
)
def test_an_epoch_is_next_or_committed(marker: Marker, epoch: int, origin: Origin, verdict: Verdict) -> None:
    assert judge("sink", marker, epoch, origin) is verdict


@pytest.mark.parametrize(
    ("marker", "epoch", "origin", "reason"),
    [
        (NO_MARKER, 3, ORIGIN, "it has no marker"),
        (FOUR, 4, Origin("query", "other"), "from other source offsets"),
        (FOUR, 3, ORIGIN, "rolled back"),
        (FOUR, 0, ORIGIN, "rolled back"),
        (FOUR, 6, ORIGIN, "the epochs between were never committed here"),
        (FOUR, 0, Origin("another", "digest"), "of another query"),
        (FOUR, 4, Origin("another", "digest"), "of another query"),
        (FOUR, 5, Origin("another", "digest"), "of another query"),
        (Marker(4, ANY_QUERY, ""), 6, ORIGIN, "never committed here"),
        (Marker(4, ANY_QUERY, ""), 3, ORIGIN, "rolled back"),
    ],
)
def test_anything_else_is_for_a_person(marker: Marker, epoch: int, origin: Origin, reason: str) -> None:
    with pytest.raises(MarkerMismatch, match=reason) as failure:
        judge("sink", marker, epoch, origin)
    assert "'sink'" in str(failure.value)
    assert "`semel sink adopt`" in str(failure.value)


def test_a_marker_survives_its_text_with_whoever_signed_it() -> None:
    owner = Owner("host", 7, "run", "2026-01-01T00:00:00+00:00")
    text = FOUR.encode(owner)
    assert decode_marker(text) == (FOUR, owner)
    assert len(text) < 400  # a note of an offset may have 4,096 bytes


@pytest.mark.parametrize(
    ("marker", "start"),
    [
        (NO_MARKER, Start(0, "", is_planned=False)),
        (NO_MARKER, Start(0, "query", is_planned=True)),
        (Marker(4, "query", "its"), Start(4, "query", is_planned=True)),
        (Marker(4, "query", "its"), Start(4, "query", is_planned=False)),
        (Marker(4, "query", "its"), Start(5, "query", is_planned=False)),
        (Marker(4, ANY_QUERY, ""), Start(4, "query", is_planned=True)),
        (Marker(4, ANY_QUERY, ""), Start(5, "query", is_planned=False)),
    ],
)
def test_what_may_be_next_is_let_through_before_it_is_known_what_it_reads(
    marker: Marker, start: Start
) -> None:
    require_fit("sink", marker, start)


@pytest.mark.parametrize(
    ("marker", "start", "reason"),
    [
        (NO_MARKER, Start(3, "query", is_planned=False), "has no marker"),
        (Marker(4, "query", ""), Start(3, "query", is_planned=True), "rolled back"),
        (Marker(4, "query", ""), Start(6, "query", is_planned=False), "the epochs between"),
        (Marker(4, "query", ""), Start(0, "", is_planned=False), "another query"),
        # Skipped, it would take along whatever rows there are by the time that it is planned.
        (Marker(4, ANY_QUERY, ""), Start(4, "query", is_planned=False), "in the target: 3, or less"),
    ],
)
def test_what_cannot_be_next_is_refused_before_there_is_a_batch(
    marker: Marker, start: Start, reason: str
) -> None:
    with pytest.raises(MarkerMismatch, match=reason):
        require_fit("sink", marker, start)
