"""Snapshots: whole or not used, never ahead of the journal, and taken even on a full disk."""

import random

import pytest
from journal_cases import DIRECTORY, FILE_BYTES, Life, journal_files

from semel.errors import CorruptionError, StorageError
from semel.journal.chain import Chain
from semel.journal.snapshot import (
    CHUNK_BYTES,
    MIN_RESERVE_BYTES,
    SnapshotWriter,
    hold_reserve,
    load_newest,
    snapshot_numbers,
    snapshot_path,
)
from semel.testing.simdisk import PowerLoss, SimDisk

Parts = list[tuple[int, bytes]]


def take(life: Life, parts: Parts, horizon: int) -> int:
    """Take a snapshot and return the position below which no journal is needed."""
    snapshot = SnapshotWriter(life.disk, DIRECTORY, generation=life.writer.generation)
    for stamp, part in parts:
        snapshot.add(stamp, [part[:3], part[3:]])
    return snapshot.finish(horizon, generation=life.writer.generation, synced=life.writer.synced)


def loaded(disk: SimDisk) -> tuple[int, Parts] | None:
    snapshot = load_newest(disk, DIRECTORY, Chain.open(disk, DIRECTORY))
    if snapshot is None:
        return None
    return snapshot.horizon, [(stamp, bytes(part)) for stamp, part in snapshot.parts()]


def test_a_snapshot_is_read_back_as_it_was_written() -> None:
    disk = SimDisk(1)
    life = Life(disk)
    end = life.write(b"x" * 5000)
    parts = [
        (end, b""),
        (100, b"abc"),
        (end, bytes(3 * CHUNK_BYTES)),
        (7, random.Random(1).randbytes(CHUNK_BYTES)),
    ]
    parts += [(number, b"part %d" % number) for number in range(1000)]
    take(life, parts, 7)
    disk.crash()
    assert loaded(disk) == (7, parts)


def test_without_a_snapshot_the_journal_is_the_state() -> None:
    disk = SimDisk(1)
    Life(disk).write(b"x")
    assert loaded(disk) is None


def test_the_newest_is_loaded_and_two_are_kept() -> None:
    disk = SimDisk(2)
    life = Life(disk)
    needed = []
    for number in range(1, 6):
        end = life.write(b"x" * 100)
        needed.append(take(life, [(end, b"state %d" % number)], end - 10))
    assert snapshot_numbers(disk, DIRECTORY) == [4, 5]
    assert loaded(disk) == (end - 10, [(end, b"state 5")])
    # The journal is needed from the horizon of the one before the newest.
    assert needed[0] == 0
    assert needed[4] == end - 144 - 10


def test_a_snapshot_is_not_finished_before_its_stamps_are_synced() -> None:
    disk = SimDisk(3)
    life = Life(disk)
    life.write(b"synced")
    ahead = life.writer.append([[b"queued"]])
    with pytest.raises(ValueError, match="cannot be finished"):
        take(life, [(ahead, b"state")], 0)
    life.run()
    take(life, [(ahead, b"state")], 0)


def test_a_snapshot_begun_before_a_failure_is_not_finished_after_it() -> None:
    disk = SimDisk(4)
    life = Life(disk)
    stale = SnapshotWriter(disk, DIRECTORY, generation=life.writer.generation)
    stale.add(life.writer.append([[b"commit"]]), [b"committed"])
    disk.faults.fail_next("sync")
    life.run()
    life = life.recover()
    life.write(b"abort instead, and longer")
    assert life.writer.synced > stale.highest_stamp
    with pytest.raises(ValueError, match="cannot be finished"):
        stale.finish(0, generation=life.writer.generation, synced=life.writer.synced)
    stale.abandon()
    assert loaded(disk) is None


def test_a_damaged_snapshot_gives_way_to_the_one_before_it() -> None:
    disk = SimDisk(5)
    life = Life(disk)
    for number in (1, 2):
        end = life.write(b"x" * 100)
        take(life, [(end, b"state %d" % number), (end, b"more")], 0)
    path = snapshot_path(DIRECTORY, 2)
    content = disk.content(path)
    for offset in range(len(content)):
        damaged = bytearray(content)
        damaged[offset] ^= 0x40
        disk.put(path, bytes(damaged))
        found = loaded(disk)
        assert found is not None
        assert found[1][0][1] == b"state 1"
        assert disk.exists(DIRECTORY / f"{path.name}.damaged")
    for size in range(len(content)):
        disk.put(path, content[:size])
        found = loaded(disk)
        assert found is not None
        assert found[1][0][1] == b"state 1"


def test_parts_that_were_swapped_are_noticed() -> None:
    disk = SimDisk(5)
    life = Life(disk)
    end = life.write(b"x")
    take(life, [(end, b"aaaa"), (end, b"bbbb")], 0)
    path = snapshot_path(DIRECTORY, 1)
    content = disk.content(path)
    first, second = content[28:48], content[48:68]
    disk.put(path, content[:28] + second + first + content[68:])
    assert loaded(disk) is None
    assert disk.exists(DIRECTORY / f"{path.name}.damaged")


def test_a_journal_that_lost_its_beginning_needs_a_whole_snapshot() -> None:
    disk = SimDisk(6)
    life = Life(disk)
    needed = 0
    for _ in range(3):
        end = life.write(*[b"x" * 9000] * 4)
        needed = take(life, [(end, b"state")], end)
    life.writer.delete_before(needed)
    life.run()
    assert Chain.open(disk, DIRECTORY).start > 0
    disk.corrupt(snapshot_path(DIRECTORY, 3), 40)
    assert loaded(disk) is not None
    disk.corrupt(snapshot_path(DIRECTORY, 2), 40)
    with pytest.raises(CorruptionError, match="no snapshot has what came before"):
        loaded(disk)


def test_a_snapshot_whose_journal_was_lost_is_refused() -> None:
    disk = SimDisk(7)
    life = Life(disk)
    end = life.write(b"x" * 100)
    take(life, [(end, b"state")], end)
    for name in disk.listdir(DIRECTORY):
        if name.endswith(".journal"):
            disk.unlink(DIRECTORY / name)
    with pytest.raises(CorruptionError, match=f"durable up to {end} .*ends at 0.*files are missing"):
        loaded(disk)


def test_a_snapshot_whose_last_journal_file_was_lost_is_refused() -> None:
    disk = SimDisk(7)
    life = Life(disk)
    end = life.write(*[b"x" * 9000] * 4)
    take(life, [(end, b"state")], end)
    disk.unlink(journal_files(disk)[-1])
    with pytest.raises(CorruptionError, match=f"durable up to {end} .*files are missing"):
        loaded(disk)


def test_a_snapshot_that_needs_deleted_journal_is_refused() -> None:
    disk = SimDisk(8)
    life = Life(disk)
    ends = [life.write(b"x" * 9000) for _ in range(12)]
    take(life, [(ends[-1], b"state")], 0)
    life.writer.delete_before(ends[6])
    life.run()
    with pytest.raises(CorruptionError, match="needs the journal from 0 on"):
        loaded(disk)


def snapshots_in_a_row(disk: SimDisk, taken: list[bytes]) -> None:
    for _ in range(2):
        life = Life(disk)
        load_newest(disk, DIRECTORY, life.chain)
        for _ in range(3):
            end = life.write(b"x" * 15000)
            if life.failures:
                raise life.failures[0]
            state = b"state at %d" % end
            snapshot = SnapshotWriter(disk, DIRECTORY, generation=life.writer.generation)
            snapshot.add(end, [state])
            needed = snapshot.finish(end, generation=life.writer.generation, synced=life.writer.synced)
            life.writer.delete_before(needed)
            taken.append(state)
            life.run()
            if life.failures:
                raise life.failures[0]


@pytest.mark.parametrize("kind", ["power", "error"])
def test_taking_snapshots_may_fail_in_any_operation(kind: str) -> None:
    disk = SimDisk(0)
    snapshots_in_a_row(disk, [])
    operations = disk.faults.counts["any"]
    for nth in range(1, operations + 1):
        disk, taken = SimDisk(nth), list[bytes]()
        if kind == "power":
            disk.faults.lose_power(nth)
        else:
            disk.faults.fail("any", nth)
        try:
            snapshots_in_a_row(disk, taken)
        except (PowerLoss, StorageError):
            disk.crash()
        life = Life(disk)
        snapshot = load_newest(disk, DIRECTORY, life.chain)
        if snapshot is None:
            assert taken == []
            continue
        ((stamp, state),) = list(snapshot.parts())
        assert bytes(state) == b"state at %d" % stamp
        # Newer than what was taken is possible (a crash between rename and report), older is not.
        assert not taken or stamp >= int(taken[-1].split()[-1])
        list(life.chain.groups(snapshot.horizon))


def test_on_a_full_disk_a_snapshot_fits_into_its_reserve() -> None:
    disk = SimDisk(9)
    life = Life(disk)
    end = life.write(b"x" * 100)
    assert hold_reserve(disk, DIRECTORY, 0)
    disk.faults.capacity_bytes = 2 * FILE_BYTES + MIN_RESERVE_BYTES
    assert disk.free_bytes(DIRECTORY) < 4096
    take(life, [(end, bytes(MIN_RESERVE_BYTES // 2))], end)
    assert loaded(disk) == (end, [(end, bytes(MIN_RESERVE_BYTES // 2))])
    assert not hold_reserve(disk, DIRECTORY, 0)
    disk.faults.capacity_bytes *= 2
    assert hold_reserve(disk, DIRECTORY, 0)


def test_a_snapshot_that_finds_no_room_leaves_everything_as_it_was() -> None:
    disk = SimDisk(10)
    life = Life(disk)
    end = life.write(b"x" * 100)
    take(life, [(end, b"state")], end)
    disk.faults.capacity_bytes = 8 * MIN_RESERVE_BYTES
    snapshot = SnapshotWriter(disk, DIRECTORY, generation=life.writer.generation)
    with pytest.raises(StorageError, match="cannot write"):
        for _ in range(10):
            snapshot.add(end, [bytes(MIN_RESERVE_BYTES)])
    snapshot.abandon()
    assert loaded(disk) == (end, [(end, b"state")])
    take(life, [(end, b"newer")], end)
    assert loaded(disk) == (end, [(end, b"newer")])
