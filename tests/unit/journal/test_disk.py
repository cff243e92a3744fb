"""The real disk, and that the simulated one forgets and fails as it says."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from semel.disk import IOV_MAX, Disk, OsDisk, write_fully
from semel.errors import ConfigError, StorageError
from semel.testing.simdisk import SECTOR_BYTES, Faults, PowerLoss, SimDisk

HOME = Path("/data")


@pytest.fixture(params=["os", "simulated"])
def disk_and_home(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, Path]:
    if request.param == "os":
        return OsDisk(), tmp_path / "deep" / "home"
    return SimDisk(0), HOME / "deep" / "home"


def test_both_disks_do_the_same(disk_and_home: tuple[Disk, Path]) -> None:
    disk, home = disk_and_home
    disk.mkdir(home)
    disk.mkdir(home)
    file = disk.create(home / "a")
    assert file.pwritev([b"abc", memoryview(b"defg"), bytearray(b"h")], 2) == 8
    assert file.pwritev_sync([b"XY"], 4) == 2
    assert file.pread(100, 0) == b"\0\0abXYefgh"
    assert (file.pread(3, 9), file.pread(3, 10), file.size()) == (b"h", b"", 10)
    file.truncate(5)
    file.truncate(7)
    assert file.pread(100, 0) == b"\0\0abX\0\0"
    file.allocate(10_000)
    file.allocate(10)
    assert file.size() == 10_000
    file.fdatasync()
    disk.rename(home / "a", home / "b")
    disk.create(home / "c").close()
    disk.fsync_dir(home)
    assert disk.listdir(home) == ["b", "c"]
    assert disk.listdir(home.parent) == ["home"]
    assert (disk.exists(home / "a"), disk.exists(home / "b"), disk.exists(home)) == (False, True, True)
    again = disk.open(home / "b")
    assert again.pread(5, 0) == b"\0\0abX"
    disk.unlink(home / "b")
    assert again.pread(5, 0) == b"\0\0abX"
    again.close()
    file.close()
    file.close()
    disk.unlink(home / "c")
    disk.rmdir(home)
    assert disk.free_bytes(home.parent) > 0


def test_both_disks_fail_alike(disk_and_home: tuple[Disk, Path]) -> None:
    disk, home = disk_and_home
    disk.mkdir(home)
    disk.create(home / "a").close()
    for attempt, text in (
        (lambda: disk.create(home / "a"), "cannot create .*/a:"),
        (lambda: disk.create(home / "no" / "a"), "cannot create .*/no/a:"),
        (lambda: disk.open(home / "b"), "cannot open .*/b:"),
        (lambda: disk.unlink(home / "b"), "cannot delete .*/b:"),
        (lambda: disk.rename(home / "b", home / "c"), "cannot rename to c .*/b:"),
        (lambda: disk.listdir(home / "no"), "cannot list .*/no:"),
        (lambda: disk.rmdir(home), "cannot delete the directory .*/home:"),
    ):
        with pytest.raises(StorageError, match=text) as caught:
            attempt()
        assert isinstance(caught.value.__cause__, OSError)
    closed = disk.open(home / "a")
    closed.close()
    with pytest.raises(StorageError):
        closed.pread(1, 0)


@pytest.mark.parametrize("sync", [False, True])
def test_more_buffers_than_one_call_takes_are_written_in_order(tmp_path: Path, sync: bool) -> None:
    file = OsDisk().create(tmp_path / "a")
    buffers = [number.to_bytes(2, "big") for number in range(2 * IOV_MAX + 5)]
    assert write_fully(file, buffers, 7, sync=sync) == 2 * len(buffers)
    assert file.pread(10**6, 7) == b"".join(buffers)


def test_a_full_device_is_explained() -> None:
    file = OsDisk().open(Path("/dev/full"), writable=True)
    with pytest.raises(StorageError, match=r"cannot write at 0 of /dev/full: No space left.*free some room"):
        write_fully(file, [b"x"], 0)


def test_a_second_holder_of_a_lock_is_told_the_pid_of_the_first(tmp_path: Path) -> None:
    disk = OsDisk()
    held = disk.lock(tmp_path / "lock")
    with pytest.raises(ConfigError, match=f"is in use by the process with pid {os.getpid()};"):
        disk.lock(tmp_path / "lock")
    held.release()
    disk.lock(tmp_path / "lock").release()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from semel.disk import OsDisk\n"
        f"held = OsDisk().lock(Path({str(tmp_path / 'lock')!r})); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"pid {process.pid};"):
            OsDisk().lock(tmp_path / "lock")
        process.kill()
        process.wait()
    OsDisk().lock(tmp_path / "lock").release()


def crashed(seed: int, *, sync: bool) -> bytes:
    disk = SimDisk(seed)
    disk.mkdir(HOME)
    file = disk.create(HOME / "a")
    file.allocate(8 * SECTOR_BYTES)
    file.fdatasync()
    disk.fsync_dir(HOME)
    file.pwritev([b"x" * 8 * SECTOR_BYTES], 0)
    if sync:
        file.fdatasync()
    disk.crash()
    return disk.content(HOME / "a")


def test_a_crash_keeps_any_subset_of_sectors_that_were_not_synced() -> None:
    outcomes = {crashed(seed, sync=False) for seed in range(60)}
    assert len(outcomes) > 30
    for content in outcomes:
        sectors = {content[start : start + SECTOR_BYTES] for start in range(0, len(content), SECTOR_BYTES)}
        assert sectors <= {b"x" * SECTOR_BYTES, bytes(SECTOR_BYTES)}
    assert {crashed(seed, sync=True) for seed in range(60)} == {b"x" * 8 * SECTOR_BYTES}


def test_the_same_seed_gives_the_same_crash() -> None:
    assert [crashed(seed, sync=False) for seed in range(9)] == [
        crashed(seed, sync=False) for seed in range(9)
    ]


def test_names_are_durable_only_after_a_sync_of_their_directory() -> None:
    outcomes = set()
    for seed in range(60):
        disk = SimDisk(seed)
        disk.mkdir(HOME)
        for name in ("kept", "renamed", "unlinked"):
            disk.create(HOME / name)
        disk.fsync_dir(HOME)
        disk.create(HOME / "created")
        disk.rename(HOME / "renamed", HOME / "other")
        disk.unlink(HOME / "unlinked")
        disk.crash()
        outcomes.add(tuple(disk.listdir(HOME)))
    assert len(outcomes) == 8
    assert all("kept" in names and ("renamed" in names) != ("other" in names) for names in outcomes)


def test_after_a_failed_sync_the_cache_lies() -> None:
    lied = 0
    for seed in range(30):
        disk = SimDisk(seed)
        disk.mkdir(HOME)
        file = disk.create(HOME / "a")
        disk.fsync_dir(HOME)
        disk.faults.fail_next("sync")
        file.pwritev([b"x" * SECTOR_BYTES], 0)
        with pytest.raises(StorageError, match="EIO"):
            file.fdatasync()
        assert file.pread(SECTOR_BYTES, 0) == b"x" * SECTOR_BYTES
        file.fdatasync()  # says nothing, does nothing
        assert file.pread(SECTOR_BYTES, 0) == b"x" * SECTOR_BYTES
        disk.crash()
        lied += disk.content(HOME / "a") != b"x" * SECTOR_BYTES
    assert 0 < lied < 30


def test_a_kill_keeps_the_cache_and_closes_files() -> None:
    disk = SimDisk(1)
    disk.mkdir(HOME)
    file = disk.create(HOME / "a")
    file.pwritev([b"not synced"], 0)
    disk.lock(HOME / "lock")
    disk.kill()
    assert disk.content(HOME / "a") == b"not synced"
    disk.lock(HOME / "lock")
    with pytest.raises(StorageError, match="EBADF"):
        file.pread(1, 0)


def test_the_power_fails_when_it_shall_and_nothing_works_until_it_is_back() -> None:
    disk = SimDisk(2, Faults())
    disk.mkdir(HOME)
    disk.faults.lose_power(3)
    file = disk.create(HOME / "a")
    file.pwritev([b"one"], 0)
    with pytest.raises(PowerLoss):
        file.fdatasync()
    with pytest.raises(PowerLoss):
        disk.open(HOME / "a")
    disk.crash()
    disk.create(HOME / "b")


def test_room_is_counted_in_pages_and_given_back() -> None:
    disk = SimDisk(3)
    disk.mkdir(HOME)
    disk.faults.capacity_bytes = 3 * 4096
    file = disk.create(HOME / "a")
    file.allocate(2 * 4096)
    other = disk.create(HOME / "b")
    assert other.pwritev([bytes(5000)], 0) == 4096
    with pytest.raises(StorageError, match="ENOSPC"):
        other.pwritev([b"x"], 4096)
    assert file.pwritev([bytes(8192)], 0) == 8192
    disk.unlink(HOME / "a")
    assert other.pwritev([bytes(5000)], 0) == 5000
    disk.faults.fail("allocate", disk.faults.counts["allocate"] + 1, errno.ENOSPC)
    with pytest.raises(StorageError, match="ENOSPC"):
        other.allocate(10)
