"""Receipts: all of one run and epoch, and one a task."""

from __future__ import annotations

import pickle

import pytest

from semel.sinks.errors import CommitFailed, WriteFailed
from semel.sinks.receipts import Place, Receipt, check_receipts

PLACE = Place("run", 3, 1)


def receipt(task: int, place: Place = PLACE) -> Receipt:
    return Receipt(place, task, "0", 10, 100, parts={"topic-0": 10})


def test_receipts_come_out_in_the_order_of_tasks() -> None:
    assert check_receipts(PLACE, [receipt(2), receipt(0), receipt(1)]) == [receipt(0), receipt(1), receipt(2)]
    assert check_receipts(PLACE, []) == []


@pytest.mark.parametrize(
    "place", [Place("run", 2, 1), Place("run", 4, 1), Place("other", 3, 1), Place("run", 3, 2)]
)
def test_a_receipt_of_another_run_epoch_or_turn_is_refused(place: Place) -> None:
    with pytest.raises(CommitFailed, match=f"of {place}; this is run run, epoch 3, turn 1"):
        check_receipts(PLACE, [receipt(0), receipt(1, place)])


def test_two_receipts_of_one_task_are_refused() -> None:
    with pytest.raises(CommitFailed, match="task 1 gave two receipts"):
        check_receipts(PLACE, [receipt(1), receipt(0), receipt(1)])


def test_receipts_and_failures_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(receipt(1))) == receipt(1)
    failure = pickle.loads(pickle.dumps(WriteFailed("row 7", is_permanent=True)))
    assert (str(failure), failure.is_permanent) == ("row 7", True)
