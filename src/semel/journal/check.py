"""Examining a journal that is not in use, and repairing one that is corrupt by giving up what lies behind.

`check` changes nothing and never refuses: it reports, file by file, what a start would find. `repair` begins
a generation at the first damaged position, which makes everything from there on void, for good. It refuses if
there would be no state to go on from. Both want the directory's lock to be held by the caller.
"""

from dataclasses import dataclass, field
from pathlib import Path

from semel.disk import Disk
from semel.errors import ConfigError, CorruptionError
from semel.journal.chain import Torn, counting_ranges, read_bodies, read_file_header, scan_tail
from semel.journal.files import SMALL_FILE_BYTES, JournalName, Spares, create_journal_file, journal_names
from semel.journal.format import FileHeader, Seal
from semel.journal.snapshot import Snapshot, SnapshotDamagedError, snapshot_numbers, snapshot_path


@dataclass(slots=True)
class FileReport:
    """One journal file: what counts of it, and whether that is whole."""

    path: Path
    generation: int
    base: int
    end: int
    """Where its valid groups end, or where it stops to count."""
    groups: int
    size_bytes: int
    void: bool = False
    problem: str | None = None


@dataclass(slots=True)
class SnapshotReport:
    """One snapshot."""

    path: Path
    parts: int = 0
    generation: int = 0
    horizon: int = 0
    highest_stamp: int = 0
    problem: str | None = None


@dataclass(slots=True)
class Report:
    """What a journal directory holds."""

    files: list[FileReport] = field(default_factory=list)
    snapshots: list[SnapshotReport] = field(default_factory=list)
    torn: Torn | None = None
    """An unfinished write that the next start will cut: no loss."""
    corrupt_at: int | None = None
    """The first position where durable bytes are damaged: the broker refuses to start."""

    @property
    def generation(self) -> int:
        return max((file.generation for file in self.files), default=0)

    @property
    def groups(self) -> int:
        return sum(file.groups for file in self.files)

    @property
    def start(self) -> int:
        return min((file.base for file in self.files if not file.void), default=0)

    @property
    def end(self) -> int:
        """Where a start would go on, or would have to be cut to."""
        if self.corrupt_at is not None:
            return self.corrupt_at
        return max((file.end for file in self.files if not file.void), default=0)

    @property
    def ok(self) -> bool:
        """Whether everything is whole; without it a start may still succeed, from the older snapshot."""
        whole = self.corrupt_at is None and all(snapshot.problem is None for snapshot in self.snapshots)
        return whole and self.has_state_at(self.end)

    def has_state_at(self, position: int) -> bool:
        """Whether the state at a position can be had: from position 0, or from a snapshot."""
        return self.start == 0 or any(
            snapshot.problem is None and snapshot.highest_stamp <= position for snapshot in self.snapshots
        )


@dataclass(slots=True, frozen=True)
class Repair:
    """What a repair has done."""

    cut_at: int
    generation: int
    removed_snapshots: list[Path]


def check(disk: Disk, directory: Path, *, snapshots: Path) -> Report:
    """Read everything in a journal directory, and in that of its snapshots, and say what is there."""
    report = Report()
    for name, end in counting_ranges(journal_names(disk, directory)):
        report.files.append(_check_file(disk, directory, name, end, report))
    for number in snapshot_numbers(disk, snapshots):
        report.snapshots.append(_check_snapshot(disk, snapshot_path(snapshots, number), report))
    return report


def repair(disk: Disk, directory: Path, *, snapshots: Path, accept_loss: bool, salt: int) -> Repair | None:
    """Cut a corrupt journal at its first damage; None if there is none. `salt` is 64 random bits."""
    report = check(disk, directory, snapshots=snapshots)
    if report.corrupt_at is None:
        return None
    cut = report.corrupt_at
    if not accept_loss:
        raise ConfigError(
            f"repairing {directory} gives up every write at or beyond journal position {cut}, acknowledged "
            "ones too; restore the files from a backup, or accept the loss with --accept-loss"
        )
    if not report.has_state_at(cut):
        raise CorruptionError(
            f"{directory} cannot be repaired: the journal is whole from {report.start} to {cut}, and "
            "no whole snapshot lies in that range; restore the directory from a backup"
        )
    header = FileHeader(Seal(report.generation + 1, salt), cut, cut)
    spares = Spares(disk, directory, SMALL_FILE_BYTES)
    create_journal_file(disk, directory, spares, header, (), 0).file.close()
    # After the cut, not before it: a start in between recognises such a snapshot by its generation.
    removed = [snapshot.path for snapshot in report.snapshots if snapshot.highest_stamp > cut]
    for path in removed:
        disk.unlink(path)
    disk.fsync_dir(snapshots)
    return Repair(cut, header.seal.generation, removed)


def _check_file(
    disk: Disk, directory: Path, name: JournalName, end: int | None, report: Report
) -> FileReport:
    path = directory / str(name)
    file = disk.open(path)
    try:
        found = FileReport(path, name.generation, name.base, name.base, 0, file.size())
        if end is not None and name.base >= end:
            found.void = True
            return found
        try:
            header = read_file_header(disk, path, name)
        except CorruptionError as error:
            found.problem = str(error)
            _note_corruption(report, name.base)
            return found
        if end is None:
            tail = scan_tail(file, header, limit=None, synced=0)
            found.end, found.groups, report.torn = tail.end, tail.groups, tail.torn
            wanted = tail.claimed
        else:
            for group, _ in read_bodies(file, header, name.base, end):
                found.end = group.end
                found.groups += 1
            wanted = end
    finally:
        file.close()
    if found.end < wanted:
        found.problem = f"no valid group at position {found.end}, though all below {wanted} was durable"
        report.torn = None
        _note_corruption(report, found.end)
    return found


def _note_corruption(report: Report, position: int) -> None:
    if report.corrupt_at is None or position < report.corrupt_at:
        report.corrupt_at = position


def _check_snapshot(disk: Disk, path: Path, report: Report) -> SnapshotReport:
    found = SnapshotReport(path)
    try:
        snapshot = Snapshot(disk, path)
        found.parts = snapshot.part_count
        found.generation = snapshot.generation
        found.horizon = snapshot.horizon
        found.highest_stamp = snapshot.highest_stamp
        snapshot.verify()
    except SnapshotDamagedError as error:
        found.problem = str(error)
        return found
    if snapshot.horizon < report.start:
        found.problem = f"it needs the journal from {snapshot.horizon} on, which begins at {report.start}"
    elif snapshot.highest_stamp > report.end:
        found.problem = f"it reaches to {snapshot.highest_stamp}, the journal only to {report.end}"
    return found
