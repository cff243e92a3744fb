"""The short memory of epochs."""

from __future__ import annotations

from semel.sinks.tracker import REMEMBERED_EPOCHS, EpochTracker, Fate


def test_each_attempt_at_an_epoch_has_its_fate() -> None:
    tracker = EpochTracker()
    tracker.begun(0)
    assert [tracked.epoch for tracked in tracker.in_flight] == [0]
    tracker.aborted("a reason")
    tracker.begun(0)
    tracker.committed(0, 5, 50)
    tracker.skipped(0)
    tracker.begun(1)
    tracker.failed("silence")
    assert [(tracked.epoch, tracked.fate) for tracked in tracker.epochs] == [
        (0, Fate.ABORTED),
        (0, Fate.COMMITTED),
        (0, Fate.SKIPPED),
        (1, Fate.FAILED),
    ]
    assert [tracked.reason for tracked in tracker.epochs] == ["a reason", "", "", "silence"]
    assert [tracked.rows for tracked in tracker.epochs] == [0, 5, 0, 0]
    assert tracker.in_flight == []
    assert tracker.last_committed == 0
    assert all(tracked.ended is not None for tracked in tracker.epochs)


def test_a_failure_between_epochs_is_no_epochs_fate() -> None:
    tracker = EpochTracker()
    tracker.begun(0)
    tracker.committed(0, 1, 1)
    tracker.failed("fenced while idle")
    assert [tracked.fate for tracked in tracker.epochs] == [Fate.COMMITTED]


def test_only_the_last_epochs_are_remembered() -> None:
    tracker = EpochTracker()
    for epoch in range(REMEMBERED_EPOCHS + 1):
        tracker.begun(epoch)
        tracker.committed(epoch, 1, 1)
    assert len(tracker.epochs) == REMEMBERED_EPOCHS
    assert tracker.epochs[0].epoch == 1
