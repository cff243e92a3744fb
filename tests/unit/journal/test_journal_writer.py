"""Writing a journal: group commit, rolls, failures, the reserve, the thread."""

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from journal_cases import DIRECTORY, FILE_BYTES, Life, journal_files

from semel.disk import Disk, OsDisk
from semel.errors import CorruptionError, StorageError
from semel.journal import writer as journal_writer
from semel.journal.chain import Chain
from semel.journal.files import SMALL_FILE_BYTES
from semel.journal.format import FILE_HEADER_BYTES, GROUP_HEADER_BYTES
from semel.journal.generation import begin_generation
from semel.journal.settings import JournalSettings
from semel.journal.writer import JournalWriter
from semel.testing.simdisk import SimDisk, SimFile

PATIENCE_S = 30.0


def test_all_that_is_queued_is_one_write_and_one_sync() -> None:
    disk = SimDisk(1)
    life = Life(disk)
    before = disk.faults.counts.copy()
    ends = [life.writer.append([[b"%d" % number]], attachment=number) for number in range(10)]
    assert life.writer.released == 0
    assert life.writer.queued_bytes == ends[-1]
    life.writer.step()
    assert disk.faults.counts["write"] - before["write"] == 1
    assert disk.faults.counts["sync"] - before["sync"] == 1
    assert life.released == [ends[-1]]
    assert life.attachments == list(range(10))
    assert (life.writer.synced, life.writer.queued_bytes) == (ends[-1], 0)


def test_what_is_released_survives_and_what_is_queued_does_not() -> None:
    disk = SimDisk(2)
    life = Life(disk)
    life.write(b"released")
    life.writer.append([[b"queued"]])
    disk.crash()
    assert Life(disk).found() == [b"released"]


def test_entries_are_joined_from_their_buffers() -> None:
    disk = SimDisk(2)
    life = Life(disk)
    life.writer.append([[b"a", memoryview(b"b" * 5000), bytearray(b"c")], [b"d"]])
    life.run()
    assert Life(disk).found() == [b"a" + b"b" * 5000 + b"c", b"d"]


def test_a_full_file_is_followed_by_the_next() -> None:
    disk = SimDisk(3)
    life = Life(disk)
    payloads = [bytes([number]) * 9000 for number in range(20)]
    for payload in payloads:
        life.write(payload)
    assert len(journal_files(disk)) == 7
    disk.crash()
    assert Life(disk).found() == payloads


def test_a_file_is_never_written_beyond_the_room_it_holds() -> None:
    for size in range(4700, 4760):
        disk = SimDisk(3)
        life = Life(disk)
        life.write(*[bytes(size)] * 12)
        assert {len(disk.content(path)) for path in journal_files(disk)} == {FILE_BYTES}
        assert len(Life(disk).found()) == 12


def test_groups_queued_together_are_spread_over_files() -> None:
    disk = SimDisk(3)
    life = Life(disk)
    payloads = [bytes([number]) * 9000 for number in range(20)]
    life.write(*payloads)
    assert len(life.released) == 7
    assert Life(disk).found() == payloads


def test_a_group_larger_than_a_file_gets_a_file_of_its_own_size() -> None:
    disk = SimDisk(4)
    life = Life(disk)
    payloads = [b"small", bytes(3 * FILE_BYTES), b"after"]
    life.write(*payloads)
    disk.crash()
    assert Life(disk).found() == payloads


def test_an_empty_file_that_is_too_small_is_replaced() -> None:
    disk = SimDisk(4)
    life = Life(disk)
    end = life.write(bytes(3 * FILE_BYTES))
    assert len(journal_files(disk)) == 1
    life.writer.delete_before(end)
    life.run()
    disk.crash()
    later = Life(disk)
    assert later.found() == [bytes(3 * FILE_BYTES)]
    assert later.writer.generation == 2


def test_a_cycle_takes_no_more_buffers_than_one_call() -> None:
    disk = SimDisk(4)
    life = Life(disk, file_bytes=64 * 1024 * 1024)
    for _ in range(700):
        life.writer.append([[bytes(3000)]])
    life.writer.step()
    assert 0 < life.released[0] < life.writer.end
    life.run()
    assert life.released[-1] == life.writer.end


def test_with_os_durability_groups_are_released_without_a_sync_and_claim_nothing() -> None:
    disk = SimDisk(5)
    life = Life(disk, durability="os")
    syncs = disk.faults.counts["sync"]
    end = life.write(b"one", b"two")
    assert (life.released[-1], life.writer.synced, disk.faults.counts["sync"]) == (end, 0, syncs)
    life.write(b"three")
    assert Chain.open(disk, DIRECTORY).claimed == 0
    disk.kill()
    assert Life(disk).found() == [b"one", b"two", b"three"]


def test_with_os_durability_a_group_that_asks_for_it_is_synced_with_all_before_it() -> None:
    disk = SimDisk(6)
    life = Life(disk, durability="os")
    life.write(b"one")
    end = life.write(b"two", sync=True)
    assert life.writer.synced == end
    life.write(b"three")
    disk.crash()
    assert Life(disk).found()[:2] == [b"one", b"two"]


def test_with_os_durability_a_full_file_is_synced_before_the_next() -> None:
    for seed in range(20):
        disk = SimDisk(seed)
        life = Life(disk, durability="os")
        payloads = [bytes([number]) * 9000 for number in range(5)]
        for payload in payloads:
            life.write(payload)
        disk.crash()
        assert Life(disk).found()[:3] == payloads[:3]


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_a_failed_write_is_reported_once_and_nothing_is_tried_again(kind: str) -> None:
    disk = SimDisk(7)
    life = Life(disk)
    end = life.write(b"durable")
    disk.faults.fail_next(kind)
    life.write(b"lost", b"also lost")
    assert len(life.failures) == 1
    assert "EIO" in str(life.failures[0])
    assert life.believed == end
    counts = disk.faults.counts.copy()
    with pytest.raises(StorageError, match=r"takes no more writes.*EIO"):
        life.writer.append([[b"refused"]])
    assert not life.writer.step()
    life.writer.close()
    assert disk.faults.counts == counts
    assert len(life.failures) == 1


class IllFile(SimFile):
    """Cannot even be closed: on a network's file system that is when a failure shows."""

    __slots__ = ()

    def close(self) -> None:
        raise OSError(errno.EIO, "the server is gone")


def test_a_failed_file_that_cannot_be_closed_either_is_reported_all_the_same() -> None:
    disk = SimDisk(7)
    life = Life(disk)
    life.writer._head.file.__class__ = IllFile
    disk.faults.fail_next("sync")
    life.write(b"lost")
    assert len(life.failures) == 1


def test_a_short_write_is_a_failed_write() -> None:
    disk = SimDisk(8)
    life = Life(disk)
    end = life.write(b"durable")
    disk.faults.shorten(disk.faults.counts["write"] + 1, 10)
    life.write(b"lost")
    assert life.believed == end
    assert "only 10 were taken" in str(life.failures[0])
    assert life.recover().found() == [b"durable"]


def test_a_failed_segment_write_is_a_failure_beyond_the_durable_group() -> None:
    disk = SimDisk(9)
    life = Life(disk)
    life.segment_error = StorageError("the segment is ill")
    end = life.writer.append([[b"durable"]], attachment="batch")
    life.run()
    assert life.released == []
    assert (life.believed, life.writer.synced) == (end, end)
    assert life.recover().found() == [b"durable"]


def test_nothing_past_a_failed_sync_is_believed_now_or_later() -> None:
    for seed in range(40):
        disk = SimDisk(seed)
        life = Life(disk)
        life.write(b"durable")
        disk.faults.fail_next("sync")
        life.write(b"past D", b"x" * 2000)
        second = life.recover()
        assert second.found() == [b"durable"]
        if seed % 2:
            second.write(b"new")
        expected = [b"durable"] + [b"new"] * (seed % 2)
        disk.crash()
        third = Life(disk)
        assert third.found() == expected
        third.write(b"newer")
        disk.kill()
        assert Life(disk).found() == [*expected, b"newer"]


def test_with_os_durability_a_failure_loses_nothing_that_was_released() -> None:
    disk = SimDisk(11)
    life = Life(disk, durability="os")
    life.write(b"one", b"two")
    disk.faults.fail_next("sync")
    life.write(b"asked for a sync", sync=True)
    assert life.writer.synced == 0
    recovered = life.recover(durability="os")
    assert recovered.found() == [b"one", b"two", b"asked for a sync"]
    disk.crash()
    assert Life(disk).found() == [b"one", b"two", b"asked for a sync"]


def test_generations_are_never_given_twice() -> None:
    disk = SimDisk(12)
    given = []
    for number in range(30):
        life = Life(disk)
        given.append(life.writer.generation)
        if number % 3 == 0:
            disk.faults.fail_next("sync")
        life.write(b"x" * (number * 100))
        if life.failures and number % 2:
            life = life.recover()
            given.append(life.writer.generation)
        if number % 4 == 0:
            life.writer.close()
        disk.crash() if number % 2 else disk.kill()
    assert given == sorted(set(given))


def test_a_clean_close_leaves_a_claim_and_no_unused_room() -> None:
    for durability in ("fsync", "os"):
        disk = SimDisk(13)
        life = Life(disk, durability=durability)  # type: ignore[arg-type]
        life.write(b"one")
        end = life.writer.append([[b"two"]])
        life.writer.close()
        with pytest.raises(StorageError, match="it was closed"):
            life.writer.append([[b"three"]])
        chain = Chain.open(disk, DIRECTORY)
        assert chain.claimed == end
        assert chain.end == end + GROUP_HEADER_BYTES
        (path,) = journal_files(disk)
        assert len(disk.content(path)) == FILE_HEADER_BYTES + chain.end
        disk.corrupt(path, FILE_HEADER_BYTES + end - 1)
        with pytest.raises(CorruptionError):
            Chain.open(disk, DIRECTORY)


def test_closing_without_draining_drops_what_is_queued() -> None:
    disk = SimDisk(14)
    life = Life(disk)
    life.write(b"one")
    life.writer.append([[b"two"]])
    end = life.writer.released
    life.writer.close(drain=False)
    assert not life.failures
    later = Life(disk)
    assert later.found() == [b"one"]
    assert (later.opened.claimed, later.opened.end) == (end, end + GROUP_HEADER_BYTES)


def test_files_below_the_horizon_are_deleted_oldest_first() -> None:
    disk = SimDisk(15)
    life = Life(disk)
    ends = [life.write(bytes([number]) * 9000) for number in range(20)]
    life.writer.delete_before(ends[9])
    life.run()
    assert Chain.open(disk, DIRECTORY).start == ends[8]
    disk.crash()
    later = Life(disk)
    assert later.found(ends[9]) == [bytes([number]) * 9000 for number in range(10, 20)]
    with pytest.raises(CorruptionError, match="begin at 0"):
        later.found(0)


def test_the_file_that_is_written_is_never_deleted() -> None:
    disk = SimDisk(15)
    life = Life(disk)
    end = life.write(*[bytes([number]) * 9000 for number in range(20)])
    life.writer.delete_before(end)
    life.run()
    assert len(journal_files(disk)) == 1
    assert Life(disk).found(end) == []


def test_deleted_files_become_spares_and_their_old_bytes_are_harmless() -> None:
    disk = SimDisk(16)
    life = Life(disk)
    spares_seen = 0
    expected: list[bytes] = []
    for number in range(60):
        expected.append(bytes([number]) * 7000)
        end = life.write(expected[-1])
        if number % 10 == 9:
            life.writer.delete_before(end)
            life.run()
            spares = [name for name in disk.listdir(DIRECTORY) if name.endswith(".spare")]
            spares_seen = max(spares_seen, len(spares))
            disk.crash()
            life = Life(disk)
            assert life.found(life.opened.start) == expected[-len(life.found()) or len(expected) :]
            assert life.opened.torn is None
    assert spares_seen == 2


def test_a_full_disk_is_survived_on_the_reserve() -> None:
    disk = SimDisk(17)
    life = Life(disk)
    life.write(b"first")
    assert life.writer.reserve_ready
    disk.faults.capacity_bytes = 2 * FILE_BYTES  # the file and the spare, and not a byte more
    expected = [b"first"]
    while life.writer.reserve_ready:
        expected.append(bytes([len(expected)]) * 5000)
        life.write(expected[-1])
    assert not life.failures
    # The reserve is in use. What frees room can still be written, until this file is full too.
    expected.append(b"topic deleted")
    end = life.write(expected[-1])
    while not life.failures:
        last = life.write(b"x" * 5000)
    assert "ENOSPC" in str(life.failures[0])
    assert life.believed == last - len(b"x" * 5000) - GROUP_HEADER_BYTES - 4
    with pytest.raises(StorageError, match=r"ENOSPC.*free some room"):
        life.recover()
    disk.faults.capacity_bytes = 8 * FILE_BYTES
    recovered = life.recover()
    assert recovered.found()[: len(expected)] == expected
    recovered.writer.delete_before(end)
    recovered.write(b"goes on")
    assert recovered.writer.reserve_ready


def test_the_reserve_is_restored_when_room_returns() -> None:
    disk = SimDisk(18)
    disk.faults.capacity_bytes = FILE_BYTES
    life = Life(disk)
    life.write(b"one")
    assert not life.writer.reserve_ready
    disk.faults.capacity_bytes = 3 * FILE_BYTES
    life.writer.restore_reserve()
    life.run()
    assert life.writer.reserve_ready


def test_without_room_for_a_whole_file_a_small_one_will_do() -> None:
    disk = SimDisk(19)
    disk.faults.capacity_bytes = 2 * SMALL_FILE_BYTES
    life = Life(disk, file_bytes=16 * SMALL_FILE_BYTES)
    life.write(b"one")
    assert not life.writer.reserve_ready
    disk.crash()
    assert Life(disk, file_bytes=16 * SMALL_FILE_BYTES).found() == [b"one"]


def test_a_failed_recovery_can_be_tried_again() -> None:
    disk = SimDisk(20)
    life = Life(disk)
    life.write(b"durable")
    disk.faults.fail_next("sync")
    life.write(b"past D")
    attempts = 0
    for kind in ("write", "sync", "rename", "sync_dir", "unlink"):
        disk.faults.fail_next(kind, errno.EIO)
        with pytest.raises(StorageError):
            life.recover()
        attempts += 1
    recovered = life.recover()
    assert (recovered.found(), attempts) == ([b"durable"], 5)
    disk.crash()
    assert Life(disk).found() == [b"durable"]


def test_a_spare_that_could_not_be_written_is_not_used_again() -> None:
    for kind in ("write", "sync"):
        disk = SimDisk(21)
        life = Life(disk)
        life.write(b"one")
        assert "0.spare" in disk.listdir(DIRECTORY)
        disk.kill()
        disk.faults.fail_next(kind)
        with pytest.raises(StorageError):
            Life(disk)
        assert "0.spare" not in disk.listdir(DIRECTORY)
        assert Life(disk).found() == [b"one"]


def test_damage_to_copied_groups_is_corruption() -> None:
    disk = SimDisk(22)
    life = Life(disk)
    life.write(b"one", b"two")
    disk.kill()
    assert Life(disk).found() == [b"one", b"two"]
    (path,) = journal_files(disk)
    disk.corrupt(path, FILE_HEADER_BYTES + 90)
    with pytest.raises(CorruptionError, match="is damaged at position 47"):
        Chain.open(disk, DIRECTORY)


class Waiter:
    """A callback for a real thread: wakes the test at each release."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.released = 0
        self.positions: list[int] = []
        self.failure: BaseException | None = None

    def on_released(self, position: int) -> None:
        with self.changed:
            self.released = position
            self.positions.append(position)
            self.changed.notify_all()

    def on_failure(self, error: BaseException, believed: int) -> None:
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    def wait_for(self, position: int) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.released >= position or self.failure is not None, PATIENCE_S
            )
        assert self.failure is None

    def wait_for_failure(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.failure is not None, PATIENCE_S)


def threaded_writer(directory: Path, waiter: Waiter, disk: Disk | None = None) -> JournalWriter:
    disk = disk or OsDisk()
    disk.mkdir(directory)
    settings = JournalSettings(file_bytes=256 * 1024)
    generation = begin_generation(disk, directory, Chain.open(disk, directory), settings, salt=0xA11CE)
    return JournalWriter(
        disk,
        directory,
        generation,
        settings,
        after_sync=lambda attachments: None,
        on_released=waiter.on_released,
        on_failure=waiter.on_failure,
    )


def test_the_thread_writes_what_several_threads_append(tmp_path: Path) -> None:
    waiter = Waiter()
    writer = threaded_writer(tmp_path / "journal", waiter)
    writer.start()

    def client(number: int) -> None:
        for count in range(50):
            waiter.wait_for(writer.append([[b"%d %d" % (number, count), bytes(500)]]))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    writer.close()
    chain = Chain.open(OsDisk(), tmp_path / "journal")
    found = [bytes(entry).rstrip(b"\0") for group in chain.groups(0) for entry in group.entries]
    assert sorted(found) == sorted(b"%d %d" % (number, count) for number in range(4) for count in range(50))
    for number in range(4):
        own = [entry for entry in found if entry.startswith(b"%d " % number)]
        assert own == [b"%d %d" % (number, count) for count in range(50)]


def test_the_thread_takes_what_was_queued_in_one_turn_of_the_loop_together(tmp_path: Path) -> None:
    waiter = Waiter()
    writer = threaded_writer(tmp_path / "journal", waiter)
    turns: list[Callable[[], None]] = []
    writer.start(turns.append)
    ends = [writer.append([[b"%d" % number]]) for number in range(200)]
    assert len(turns) == 1, "it asks once a turn"
    turns.pop()()
    waiter.wait_for(ends[-1])
    assert waiter.positions == [ends[-1]], "one cycle for all of them"
    last = writer.append([[b"at the end"]])
    writer.close()
    assert writer.released >= last, "a close waits for no turn"


def test_the_thread_claims_what_it_wrote_when_it_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "CLAIM_AFTER_S", 0.001)
    waiter = Waiter()
    writer = threaded_writer(tmp_path / "journal", waiter)
    writer.start()
    end = writer.append([[b"one"]])
    waiter.wait_for(end + GROUP_HEADER_BYTES)
    assert Chain.open(OsDisk(), tmp_path / "journal").claimed == end
    assert writer.append([[b"two"]]) > end + GROUP_HEADER_BYTES
    writer.close()


class GoneLoop(Waiter):
    """An event loop that was closed too early."""

    def on_released(self, position: int) -> None:
        raise RuntimeError("the loop is gone")


def test_a_loop_that_is_gone_is_a_failure(tmp_path: Path) -> None:
    waiter = GoneLoop()
    writer = threaded_writer(tmp_path / "journal", waiter)
    writer.start()
    writer.append([[b"one"]])
    waiter.wait_for_failure()
    writer.close()
    with pytest.raises(StorageError, match="the loop is gone"):
        writer.append([[b"two"]])


def test_the_thread_ends_by_itself_after_a_failed_write(tmp_path: Path) -> None:
    """Nobody closes a writer that has failed: its thread would stay, and all that it refers to."""
    waiter = Waiter()
    disk = SimDisk(3)
    writer = threaded_writer(tmp_path / "journal", waiter, disk)
    before = set(threading.enumerate())
    writer.start()
    (thread,) = set(threading.enumerate()) - before
    waiter.wait_for(writer.append([[b"one"]]))
    disk.faults.fail_next("write")
    writer.append([[b"two"]])
    waiter.wait_for_failure()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_journal_writer import Waiter, threaded_writer
waiter = Waiter()
writer = threaded_writer(Path(sys.argv[2]), waiter)
writer.start()
for number in range(10**9):
    waiter.wait_for(writer.append([[b"%d" % number, bytes(number % 3000)]]))
    print(number, flush=True)
"""


def test_a_killed_process_leaves_all_that_it_had_reported(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", CHILD, here, str(tmp_path / "journal")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(300):
            process.stdout.readline()
        process.kill()
        reported = 300 + len(process.stdout.read().splitlines())
    chain = Chain.open(OsDisk(), tmp_path / "journal")
    found = [bytes(entry).rstrip(b"\0") for group in chain.groups(0) for entry in group.entries]
    assert len(found) >= reported
    assert found == [b"%d" % number for number in range(len(found))]
