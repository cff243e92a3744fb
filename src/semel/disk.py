"""The disk, as the journal and the segments see it: a small interface and its real implementation.

Everything that touches files goes through `Disk` and `File`, so that a whole broker can run on a simulated
disk (`semel.testing.simdisk`) and be crashed anywhere. What an implementation owes its callers:

- Bytes are durable after `fdatasync`, and not before. Names (created, renamed, unlinked) are durable after
  `fsync_dir` of their directory; a directory made by `mkdir` is durable on return unless told otherwise.
- After a failed `fdatasync` nothing is known about what was written since the last one that succeeded.
- Failures of the operating system are raised as `StorageError`, with the `OSError` as their cause.
- A short write is a failed write: on a regular file it means that the disk is full or ill (`write_fully`).
"""

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from semel.errors import ConfigError, StorageError

Buffer = bytes | bytearray | memoryview

IOV_MAX = os.sysconf("SC_IOV_MAX")
"""How many buffers one vectored write takes."""

LOCK_TEXT_BYTES = 64
"""A lock file holds a process id; more than this is not ours."""


class File(Protocol):
    """An open file. Offsets are explicit: there is no file position."""

    @property
    def path(self) -> Path:
        """Where the file was when it was opened."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Write any number of buffers one after the other, and say how many bytes were taken."""

    def pwritev_sync(self, buffers: Sequence[Buffer], offset: int) -> int:
        """`pwritev`, and make just these bytes as durable as `fdatasync` would: in one system call if it can.

        One call instead of two matters to a thread that shares Python's lock with a busy event loop: it waits
        up to a switch interval after each.
        """

    def pread(self, size: int, offset: int) -> bytes:
        """Read up to `size` bytes; fewer only at the end of the file."""

    def fdatasync(self) -> None:
        """Make the content, and the size needed to read it, durable."""

    def truncate(self, size: int) -> None:
        """Cut or extend (with zeros) to `size`."""

    def allocate(self, size: int) -> None:
        """Reserve the room for `size` bytes, so that writes below it cannot meet a full disk."""

    def size(self) -> int: ...

    def fileno(self) -> int | None:
        """The descriptor for sendfile, or None where there is none."""

    def close(self) -> None: ...


class Lock(Protocol):
    """The right to use a directory, held until `release` or the end of the process."""

    def release(self) -> None: ...


class Disk(Protocol):
    """A file system."""

    def create(self, path: Path) -> File:
        """Make a new, empty file, open for reading and writing. It must not exist yet."""

    def open(self, path: Path, *, writable: bool = False) -> File:
        """Open a file that exists."""

    def exists(self, path: Path) -> bool: ...

    def listdir(self, directory: Path) -> list[str]:
        """The names in a directory, sorted."""

    def mkdir(self, directory: Path, *, durable: bool = True) -> None:
        """Make a directory and its parents; it may exist already.

        If not `durable`, what is made is as volatile as a new file, until `fsync_dir` of where it was made.
        """

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, replacing what has that name."""

    def unlink(self, path: Path) -> None: ...

    def rmdir(self, directory: Path) -> None:
        """Remove an empty directory."""

    def fsync_dir(self, directory: Path) -> None:
        """Make the names in a directory durable."""

    def lock(self, path: Path) -> Lock:
        """Take the lock file at `path`, or raise ConfigError that names the process that holds it."""

    def free_bytes(self, directory: Path) -> int:
        """What an unprivileged process may still write there."""


def failure(what: str, path: Path, error: OSError) -> StorageError:
    """The StorageError for a failed operation: what, where, why and what next."""
    advice = "check the disk and the kernel's log"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free some room: delete topics or shorten their retention, or enlarge the disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "check the owner, the permissions and the mount options"
    raised = StorageError(f"cannot {what} {path}: {error.strerror}; {advice}")
    raised.__cause__ = error
    return raised


def write_fully(file: File, buffers: Sequence[Buffer], offset: int, *, sync: bool = False) -> int:
    """Write all the buffers and return their size. Less than all is a failure, and is not tried again.

    With `sync` the bytes are durable on return.
    """
    size = 0
    for buffer in buffers:
        size += len(buffer)
    written = file.pwritev_sync(buffers, offset) if sync else file.pwritev(buffers, offset)
    if written != size:
        raise StorageError(
            f"cannot write {size} bytes at {offset} of {file.path}: only {written} were taken; "
            "the disk is probably full: delete topics or shorten their retention, or enlarge the disk"
        )
    return size


class OsFile:
    """A file of the operating system."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        try:
            if len(buffers) <= IOV_MAX:
                return os.pwritev(self._fd, buffers, offset)
            return self._pwritev_in_parts(buffers, offset)
        except OSError as error:
            raise failure(f"write at {offset} of", self.path, error) from error

    def pwritev_sync(self, buffers: Sequence[Buffer], offset: int) -> int:
        if len(buffers) <= IOV_MAX:
            try:
                return os.pwritev(self._fd, buffers, offset, os.RWF_DSYNC)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise failure(f"write and sync at {offset} of", self.path, error) from error
        written = self.pwritev(buffers, offset)
        self.fdatasync()
        return written

    def _pwritev_in_parts(self, buffers: Sequence[Buffer], offset: int) -> int:
        written = 0
        for first in range(0, len(buffers), IOV_MAX):
            part = buffers[first : first + IOV_MAX]
            taken = os.pwritev(self._fd, part, offset + written)
            written += taken
            if taken < sum(map(len, part)):
                break
        return written

    def pread(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self._fd, size, offset)
        except OSError as error:
            raise failure(f"read at {offset} of", self.path, error) from error

    def fdatasync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise failure("sync", self.path, error) from error

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise failure(f"truncate to {size} bytes", self.path, error) from error

    def allocate(self, size: int) -> None:
        # Where the file system cannot allocate, glibc writes a byte into every block instead.
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            raise failure(f"allocate {size} bytes for", self.path, error) from error

    def size(self) -> int:
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise failure("look at", self.path, error) from error

    def fileno(self) -> int | None:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class OsLock:
    """A lock file held with flock: the kernel gives it back when the process dies, however it dies."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class OsDisk:
    """The file system of the operating system."""

    __slots__ = ()

    def create(self, path: Path) -> OsFile:
        try:
            return OsFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640))
        except OSError as error:
            raise failure("create", path, error) from error

    def open(self, path: Path, *, writable: bool = False) -> OsFile:
        try:
            return OsFile(path, os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC))
        except OSError as error:
            raise failure("open", path, error) from error

    def exists(self, path: Path) -> bool:
        return path.exists()

    def listdir(self, directory: Path) -> list[str]:
        try:
            return sorted(entry.name for entry in directory.iterdir())
        except OSError as error:
            raise failure("list", directory, error) from error

    def mkdir(self, directory: Path, *, durable: bool = True) -> None:
        missing: list[Path] = []
        while not directory.exists():
            missing.append(directory)
            directory = directory.parent
        for made in reversed(missing):
            try:
                made.mkdir(mode=0o750, exist_ok=True)
            except OSError as error:
                raise failure("make the directory", made, error) from error
            if durable:
                self.fsync_dir(made.parent)

    def rename(self, old: Path, new: Path) -> None:
        try:
            old.replace(new)
        except OSError as error:
            raise failure(f"rename to {new.name}", old, error) from error

    def unlink(self, path: Path) -> None:
        try:
            path.unlink()
        except OSError as error:
            raise failure("delete", path, error) from error

    def rmdir(self, directory: Path) -> None:
        try:
            directory.rmdir()
        except OSError as error:
            raise failure("delete the directory", directory, error) from error

    def fsync_dir(self, directory: Path) -> None:
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise failure("sync the directory", directory, error) from error

    def lock(self, path: Path) -> OsLock:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise failure("open the lock", path, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, LOCK_TEXT_BYTES, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise ConfigError(
                f"{path.parent} is in use by the process with pid {holder}; "
                "stop that one, or choose another directory"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        return OsLock(path, fd)

    def free_bytes(self, directory: Path) -> int:
        try:
            stat = os.statvfs(directory)
        except OSError as error:
            raise failure("look at", directory, error) from error
        return stat.f_bavail * stat.f_frsize
