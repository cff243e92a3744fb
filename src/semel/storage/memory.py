"""A disk in memory, for a broker that keeps nothing: the same segments over files that are byte arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock as ThreadLock
from typing import Final

from semel.disk import Buffer
from semel.errors import StorageError

FREE_BYTES: Final = 2**62
"""Memory has no figure for what is left that would hold until it is used."""


class MemoryFile:
    """A file that lives as long as somebody refers to it."""

    __slots__ = ("_content", "_lock", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = bytearray()
        self._lock = ThreadLock()
        """A byte array cannot grow while another thread copies from it."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        written = offset
        with self._lock:
            content = self._content
            if len(content) < offset:
                content.extend(bytes(offset - len(content)))
            for buffer in buffers:
                content[written : written + len(buffer)] = buffer
                written += len(buffer)
        return written - offset

    def pwritev_sync(self, buffers: Sequence[Buffer], offset: int) -> int:
        return self.pwritev(buffers, offset)

    def pread(self, size: int, offset: int) -> bytes:
        with self._lock, memoryview(self._content) as view:
            return bytes(view[offset : offset + size])

    def fdatasync(self) -> None:
        pass

    def truncate(self, size: int) -> None:
        with self._lock:
            content = self._content
            if len(content) < size:
                content.extend(bytes(size - len(content)))
            del content[size:]

    def allocate(self, size: int) -> None:
        if self.size() < size:
            self.truncate(size)

    def size(self) -> int:
        return len(self._content)

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        """The content stays for whoever opens the file again."""


class MemoryLock:
    """A lock that nobody else can want: the disk is this process's own."""

    __slots__ = ()

    def release(self) -> None:
        pass


class MemoryDisk:
    """A file system that is gone with the process."""

    def __init__(self) -> None:
        self._files: dict[Path, MemoryFile] = {}
        self._directories: dict[Path, set[str]] = {}

    def create(self, path: Path) -> MemoryFile:
        if path in self._files:
            raise StorageError(f"cannot create {path}: it exists; this is a fault of the broker")
        file = self._files[path] = MemoryFile(path)
        self._names(path.parent).add(path.name)
        return file

    def open(self, path: Path, *, writable: bool = False) -> MemoryFile:
        file = self._files.get(path)
        if file is None:
            raise _missing("open", path)
        return file

    def exists(self, path: Path) -> bool:
        return path in self._files or path in self._directories

    def listdir(self, directory: Path) -> list[str]:
        return sorted(self._names(directory))

    def mkdir(self, directory: Path, *, durable: bool = True) -> None:
        if directory in self._directories:
            return
        self._directories[directory] = set()
        if directory.parent != directory:
            self.mkdir(directory.parent)
            self._directories[directory.parent].add(directory.name)

    def rename(self, old: Path, new: Path) -> None:
        if old not in self._files:
            raise _missing("rename", old)
        self._names(new.parent).add(new.name)
        self._files[new] = self._files.pop(old)
        self._names(old.parent).discard(old.name)

    def unlink(self, path: Path) -> None:
        if self._files.pop(path, None) is None:
            raise _missing("delete", path)
        self._names(path.parent).discard(path.name)

    def rmdir(self, directory: Path) -> None:
        if self._names(directory):
            raise StorageError(f"cannot delete the directory {directory}: it is not empty")
        del self._directories[directory]
        self._directories.get(directory.parent, set()).discard(directory.name)

    def fsync_dir(self, directory: Path) -> None:
        pass

    def lock(self, path: Path) -> MemoryLock:
        return MemoryLock()

    def free_bytes(self, directory: Path) -> int:
        return FREE_BYTES

    def _names(self, directory: Path) -> set[str]:
        names = self._directories.get(directory)
        if names is None:
            raise _missing("use the directory", directory)
        return names


def _missing(what: str, path: Path) -> StorageError:
    return StorageError(f"cannot {what} {path}: there is no such name; this is a fault of the broker")
