"""Claims about leader epochs: where each one ended, also when the beginning of the log is gone."""

import pytest

from semel.log.partition import EpochStart, PartitionLog
from semel.wire.batch import read_header
from semel.wire.records import Record, build_batch


def log_with(*epochs: tuple[int, int]) -> PartitionLog:
    """A log to which each epoch, in turn, added so many records, all of them durable."""
    log = PartitionLog()
    for epoch, count in epochs:
        batch = build_batch(
            [Record(b"k", b"v", 1) for _ in range(count)], base_offset=log.end_offset, leader_epoch=epoch
        )
        log.append(read_header(batch))
    log.reveal(log.end_offset)
    return log


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (1, EpochStart(1, 5)),  # ended where the next one began
        (2, EpochStart(1, 5)),  # nothing was written under it: the one before answers
        (3, EpochStart(3, 12)),
        (7, EpochStart(7, 15)),  # the newest ends at the high watermark
        (9, EpochStart(7, 15)),
        (-1, EpochStart(-1, -1)),
    ],
)
def test_an_epoch_ends_where_the_next_one_begins(asked: int, answer: EpochStart) -> None:
    assert log_with((1, 5), (3, 7), (7, 3)).end_of_epoch(asked) == answer


def test_an_epoch_older_than_the_log_ended_where_the_log_begins() -> None:
    log = log_with((1, 5), (3, 5))
    log.move_start(5)
    log.reveal_start(5)
    assert [known.epoch for known in log.epochs] == [3]
    assert log.end_of_epoch(1) == EpochStart(1, 5)


def test_an_empty_log_knows_no_epoch() -> None:
    assert PartitionLog().end_of_epoch(1) == EpochStart(-1, -1)


def test_what_is_not_durable_is_in_no_epoch_yet() -> None:
    log = log_with((1, 5))
    batch = build_batch([Record(b"k", b"v", 1)], base_offset=5, leader_epoch=1)
    log.append(read_header(batch))
    assert log.end_of_epoch(1) == EpochStart(1, 5)


def test_each_record_has_the_epoch_it_was_written_under() -> None:
    log = log_with((1, 5), (3, 5))
    assert [log.epoch_at(offset) for offset in (0, 4, 5, 9)] == [1, 1, 3, 3]
