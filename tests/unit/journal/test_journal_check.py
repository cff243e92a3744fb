"""Examining and repairing a journal."""

from pathlib import Path

import pytest
from journal_cases import DIRECTORY, Life, journal_files

from semel.errors import ConfigError, CorruptionError
from semel.journal.chain import Chain
from semel.journal.check import check, repair
from semel.journal.format import FILE_HEADER_BYTES
from semel.journal.snapshot import SnapshotWriter, load_newest, snapshot_path
from semel.testing.simdisk import SimDisk

SNAPSHOTS = Path("/snapshots")
SALT = 0xFEED_FACE_CAFE_BEEF


def three_files(seed: int) -> tuple[SimDisk, list[int]]:
    """A journal with groups of 9,000 bytes, three to a file, closed."""
    disk = SimDisk(seed)
    disk.mkdir(SNAPSHOTS)
    life = Life(disk)
    ends = [0] + [life.write(bytes([number]) * 9000) for number in range(8)]
    life.writer.close()
    return disk, ends


def take_snapshot(disk: SimDisk, generation: int, stamp: int, horizon: int) -> None:
    snapshot = SnapshotWriter(disk, SNAPSHOTS, generation=generation)
    snapshot.add(stamp, [b"state at %d" % stamp])
    snapshot.finish(horizon, generation=generation, synced=stamp)


def test_a_whole_journal_is_reported_as_such() -> None:
    disk, ends = three_files(1)
    take_snapshot(disk, 1, ends[3], ends[2])
    before = disk.faults.counts["any"]
    report = check(disk, DIRECTORY, snapshots=SNAPSHOTS)
    assert disk.faults.counts["any"] == before  # it changes nothing
    assert report.ok
    assert [(file.generation, file.base, file.groups) for file in report.files] == [
        (1, 0, 3),
        (1, ends[3], 3),
        (1, ends[6], 3),  # two, and the claim
    ]
    assert (report.start, report.groups, report.generation, report.torn) == (0, 9, 1, None)
    assert [(snapshot.parts, snapshot.horizon) for snapshot in report.snapshots] == [(1, ends[2])]
    assert repair(disk, DIRECTORY, snapshots=SNAPSHOTS, accept_loss=True, salt=SALT) is None


def test_an_empty_directory_is_whole() -> None:
    disk = SimDisk(1)
    disk.mkdir(DIRECTORY)
    disk.mkdir(SNAPSHOTS)
    report = check(disk, DIRECTORY, snapshots=SNAPSHOTS)
    assert (report.ok, report.end, report.generation) == (True, 0, 0)


def test_a_torn_tail_is_reported_and_needs_no_repair() -> None:
    disk = SimDisk(2)
    disk.mkdir(SNAPSHOTS)
    life = Life(disk)
    end = life.write(b"one")
    life.write(b"two")
    disk.corrupt(journal_files(disk)[0], FILE_HEADER_BYTES + end + 45)
    report = check(disk, DIRECTORY, snapshots=SNAPSHOTS)
    assert report.ok
    assert report.torn is not None
    assert (report.torn.position, report.end) == (end, end)


@pytest.mark.parametrize("group", range(8))
def test_corruption_is_located_and_cut_on_request(group: int) -> None:
    disk, ends = three_files(3)
    disk.corrupt(
        journal_files(disk)[group // 3], FILE_HEADER_BYTES + ends[group] - ends[group // 3 * 3] + 500
    )
    report = check(disk, DIRECTORY, snapshots=SNAPSHOTS)
    assert not report.ok
    assert (report.corrupt_at, report.end) == (ends[group], ends[group])
    with pytest.raises(ConfigError, match=f"at or beyond journal position {ends[group]}"):
        repair(disk, DIRECTORY, snapshots=SNAPSHOTS, accept_loss=False, salt=SALT)
    done = repair(disk, DIRECTORY, snapshots=SNAPSHOTS, accept_loss=True, salt=SALT)
    assert done is not None
    assert (done.cut_at, done.generation) == (ends[group], 2)
    assert check(disk, DIRECTORY, snapshots=SNAPSHOTS).ok
    disk.crash()
    life = Life(disk)
    assert life.found() == [bytes([number]) * 9000 for number in range(group)]
    assert life.writer.generation == 3
    life.write(b"goes on")
    disk.crash()
    assert Life(disk).found()[-1] == b"goes on"


def test_a_damaged_file_header_is_located_and_cut() -> None:
    disk, ends = three_files(4)
    disk.corrupt(journal_files(disk)[1], 9)
    report = check(disk, DIRECTORY, snapshots=SNAPSHOTS)
    assert report.corrupt_at == ends[3]
    assert "checksum is wrong" in str(report.files[1].problem)
    repair(disk, DIRECTORY, snapshots=SNAPSHOTS, accept_loss=True, salt=SALT)
    assert Life(disk).found() == [bytes([number]) * 9000 for number in range(3)]


def test_repair_removes_snapshots_that_reach_beyond_the_cut() -> None:
    disk, ends = three_files(5)
    take_snapshot(disk, 1, ends[2], ends[1])
    take_snapshot(disk, 1, ends[7], ends[6])
    disk.corrupt(journal_files(disk)[1], FILE_HEADER_BYTES + 500)
    done = repair(disk, DIRECTORY, snapshots=SNAPSHOTS, accept_loss=True, salt=SALT)
    assert done is not None
    assert done.removed_snapshots == [snapshot_path(SNAPSHOTS, 2)]
    snapshot = load_newest(disk, SNAPSHOTS, Chain.open(disk, DIRECTORY))
    assert snapshot is not None
    assert snapshot.highest_stamp == ends[2]


def test_a_repair_that_crashed_half_way_leaves_no_snapshot_of_what_was_cut() -> None:
    disk, ends = three_files(6)
    take_snapshot(disk, 1, ends[7], ends[6])
    content = disk.content(snapshot_path(SNAPSHOTS, 1))
    disk.corrupt(journal_files(disk)[1], FILE_HEADER_BYTES + 500)
    repair(disk, DIRECTORY, snapshots=SNAPSHOTS, accept_loss=True, salt=SALT)
    disk.put(snapshot_path(SNAPSHOTS, 1), content)
    assert load_newest(disk, SNAPSHOTS, Chain.open(disk, DIRECTORY)) is None


def test_a_journal_without_any_state_to_go_on_from_cannot_be_repaired() -> None:
    disk, ends = three_files(7)
    life = Life(disk)
    take_snapshot(disk, 2, ends[8], ends[7])
    life.writer.delete_before(ends[3])
    life.run()
    assert check(disk, DIRECTORY, snapshots=SNAPSHOTS).ok
    disk.corrupt(journal_files(disk)[0], FILE_HEADER_BYTES + 500)
    report = check(disk, DIRECTORY, snapshots=SNAPSHOTS)
    assert (report.start, report.corrupt_at) == (ends[3], ends[3])
    with pytest.raises(CorruptionError, match="cannot be repaired"):
        repair(disk, DIRECTORY, snapshots=SNAPSHOTS, accept_loss=True, salt=SALT)


def test_a_journal_that_begins_late_and_has_no_snapshot_is_not_whole() -> None:
    disk, ends = three_files(8)
    life = Life(disk)
    life.writer.delete_before(ends[3])
    life.run()
    assert not check(disk, DIRECTORY, snapshots=SNAPSHOTS).ok


def test_damaged_snapshots_are_reported() -> None:
    disk, ends = three_files(9)
    take_snapshot(disk, 1, ends[2], ends[1])
    disk.corrupt(snapshot_path(SNAPSHOTS, 1), 50)
    report = check(disk, DIRECTORY, snapshots=SNAPSHOTS)
    assert not report.ok
    assert "is damaged at byte 28" in str(report.snapshots[0].problem)
