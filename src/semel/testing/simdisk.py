"""A simulated disk: it forgets what was not synced, fails where it is told to, and does both from a seed.

Every file has two contents: what reads see (the page cache) and what is durable. Writes change the first;
some of their sectors reach the second at once, at random, as a kernel's write-back would. Then:

- `fdatasync` makes the rest durable. If it fails, some sectors reached the disk and some did not, and *all*
  count as clean: they can be read, but no later sync will write them (what Rebello et al. found in 2020).
- `crash` is a power failure. Of the sectors not synced an arbitrary subset survives, and so it is with
  changed sizes and with names that were created, renamed or unlinked since the last `fsync_dir`.
- `kill` is the end of the process alone. The cache stays, except that some of the sectors that a failed sync
  left behind are read from the disk again.

`Faults` says which operations fail. Tests give it as an argument; nothing is patched.
"""

import copy
import errno
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from semel.disk import Buffer, failure
from semel.errors import ConfigError, StorageError

SECTOR_BYTES = 512
PAGE_BYTES = 4096


class PowerLoss(BaseException):
    """The simulated machine went dark. Not an `Exception`: nothing in the broker may handle it and go on."""


class Faults:
    """Which operations go wrong.

    Operations are counted by kind, from 1: `create`, `write`, `sync`, `truncate`, `allocate`, `rename`,
    `unlink`, `sync_dir`, `read`; and all but reads are counted together as `any`. Plans can be made at any
    time; `counts` says how far the disk is.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.capacity_bytes: int | None = None
        """How much fits on the disk; None is no limit. It may be changed at any time."""
        self._failures: dict[tuple[str, int], int] = {}
        self._shorts: dict[int, int] = {}
        self._power_loss_at: int | None = None

    def fail(self, kind: str, nth: int, code: int = errno.EIO) -> None:
        """Let the nth operation of a kind fail with an error of the operating system."""
        self._failures[kind, nth] = code

    def fail_next(self, kind: str, code: int = errno.EIO) -> None:
        """Let the next operation of a kind fail."""
        self.fail(kind, self.counts[kind] + 1, code)

    def shorten(self, nth: int, taken: int) -> None:
        """Let the nth write take only so many bytes."""
        self._shorts[nth] = taken

    def lose_power(self, nth: int) -> None:
        """Let the power fail during the nth operation of all."""
        self._power_loss_at = nth

    def forget(self) -> None:
        """Let no operation fail any more, nor be short."""
        self._failures.clear()
        self._shorts.clear()

    def count(self, kind: str) -> int:
        """Note that an operation begins; the error code that it shall fail with, or 0."""
        self.counts[kind] += 1
        code = self._failures.get((kind, self.counts[kind]), 0)
        if kind != "read":
            self.counts["any"] += 1
            code = code or self._failures.get(("any", self.counts["any"]), 0)
        return code

    def power_fails_now(self) -> bool:
        """Whether the operation counted last is the one that the power fails in."""
        return self._power_loss_at is not None and self.counts["any"] >= self._power_loss_at

    def taken(self, size: int) -> int:
        """How much of a write of `size` bytes the disk takes."""
        return min(size, self._shorts.get(self.counts["write"], size))

    def power_returns(self) -> None:
        """Forget the planned power failure: it has happened."""
        self._power_loss_at = None


class _Node:
    """The content of a file, whatever its name: in the cache and on the disk."""

    __slots__ = ("cached", "cut", "dirty", "durable", "lost", "room")

    def __init__(self) -> None:
        self.cached = bytearray()
        self.durable = bytearray()
        self.dirty: set[int] = set()
        """Sectors that the next sync writes."""
        self.lost: set[int] = set()
        """Sectors that a failed sync left clean in the cache, though they are not on the disk."""
        self.cut: int | None = None
        """The least size since the last sync, if the file was cut: what the disk has beyond is no more."""
        self.room = 0
        """Bytes allocated, in whole pages."""

    def write_back(self, sector: int) -> None:
        """Bring one sector to the disk."""
        self.cut_durable()
        start = sector * SECTOR_BYTES
        content = self.cached[start : start + SECTOR_BYTES]
        _resize(self.durable, max(len(self.durable), start + len(content)))
        self.durable[start : start + len(content)] = content
        self.dirty.discard(sector)
        self.lost.discard(sector)

    def sync(self) -> None:
        if not self.lost:
            # The disk then lacks nothing but what is dirty: both are the same afterwards.
            self.durable[:] = self.cached
            self.dirty.clear()
            self.cut = None
            return
        self.cut_durable()
        for sector in sorted(self.dirty):
            self.write_back(sector)
        _resize(self.durable, len(self.cached))

    def copy(self) -> "_Node":
        twin = _Node()
        twin.cached[:] = self.cached
        twin.durable[:] = self.durable
        twin.dirty = set(self.dirty)
        twin.lost = set(self.lost)
        twin.cut = self.cut
        twin.room = self.room
        return twin

    def cut_durable(self) -> None:
        """Bring the cut to the disk."""
        if self.cut is not None:
            _resize(self.durable, min(self.cut, len(self.durable)))
            self.cut = None

    def resize(self, size: int) -> None:
        if size < len(self.cached):
            self.cut = size if self.cut is None else min(size, self.cut)
        _resize(self.cached, size)
        last = -(-size // SECTOR_BYTES)
        self.dirty = {sector for sector in self.dirty if sector < last}
        self.lost = {sector for sector in self.lost if sector < last}

    def touch(self, offset: int, size: int) -> None:
        """Note that a range was changed."""
        sectors = range(offset // SECTOR_BYTES, -(-(offset + size) // SECTOR_BYTES))
        self.dirty.update(sectors)
        self.lost.difference_update(sectors)


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


class _Change:
    """A name that was made (with a node), unmade (without) or moved (from another name)."""

    __slots__ = ("moved_from", "node", "path")

    def __init__(self, path: Path, node: _Node | None, moved_from: Path | None = None) -> None:
        self.path = path
        self.node = node
        self.moved_from = moved_from

    def apply(self, names: dict[Path, _Node]) -> None:
        if self.node is None:
            names.pop(self.path, None)
            return
        if self.moved_from is not None and names.get(self.moved_from) is self.node:
            del names[self.moved_from]
        names[self.path] = self.node


class SimFile:
    """An open file of a simulated disk; it is closed for good when the power fails or the process ends."""

    __slots__ = ("_disk", "_life", "_node", "path")

    def __init__(self, disk: "SimDisk", path: Path, node: _Node) -> None:
        self._disk = disk
        self._life = disk.life
        self._node = node
        self.path = path

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._check_open()
        self._disk.begin("write", f"write at {offset} of", self.path)
        content = b"".join(buffers)
        size = self._disk.grant(self._node, offset, self._disk.faults.taken(len(content)), self.path)
        self._disk.write(self._node, offset, content[:size])
        self._disk.end()
        return size

    def pwritev_sync(self, buffers: Sequence[Buffer], offset: int) -> int:
        written = self.pwritev(buffers, offset)
        self.fdatasync()
        return written

    def pread(self, size: int, offset: int) -> bytes:
        self._check_open()
        self._disk.begin("read", f"read at {offset} of", self.path)
        return bytes(self._node.cached[offset : offset + size])

    def fdatasync(self) -> None:
        self._check_open()
        self._disk.sync(self._node, self.path)

    def truncate(self, size: int) -> None:
        self._check_open()
        self._disk.begin("truncate", f"truncate to {size} bytes", self.path)
        self._node.resize(size)
        self._node.room = min(self._node.room, _pages(size))
        self._disk.end()

    def allocate(self, size: int) -> None:
        self._check_open()
        self._disk.begin("allocate", f"allocate {size} bytes for", self.path)
        if self._disk.grant(self._node, 0, size, self.path) < size:
            raise failure(f"allocate {size} bytes for", self.path, _os_error(errno.ENOSPC))
        if size > len(self._node.cached):
            self._node.resize(size)
        self._disk.end()

    def size(self) -> int:
        self._check_open()
        return len(self._node.cached)

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        self._life = -1

    def _check_open(self) -> None:
        if self._life != self._disk.life:
            raise failure("use", self.path, _os_error(errno.EBADF))


class SimLock:
    """A lock of a simulated process."""

    __slots__ = ("_disk", "path")

    def __init__(self, disk: "SimDisk", path: Path) -> None:
        self._disk = disk
        self.path = path

    def release(self) -> None:
        self._disk.locks.discard(self.path)


class SimDisk:
    """A simulated file system. The same seed and the same calls give the same crash."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.life = 0
        """Rises when the process ends, in whatever way: what it had open is closed."""
        self.locks: set[Path] = set()
        self._random = random.Random(seed)
        self._names: dict[Path, _Node] = {}
        self._durable_names: dict[Path, _Node] = {}
        self._changes: list[_Change] = []
        self._directories: set[Path] = {Path("/"), Path()}
        self._volatile_directories: set[Path] = set()
        self._dark = False

    # What a broker uses

    def create(self, path: Path) -> SimFile:
        self.begin("create", "create", path)
        if path in self._names:
            raise failure("create", path, _os_error(errno.EEXIST))
        if path.parent not in self._directories:
            raise failure("create", path, _os_error(errno.ENOENT))
        node = _Node()
        self._change(_Change(path, node))
        self.end()
        return SimFile(self, path, node)

    def open(self, path: Path, *, writable: bool = False) -> SimFile:
        return SimFile(self, path, self._node(path, "open"))

    def exists(self, path: Path) -> bool:
        return path in self._names or path in self._directories

    def listdir(self, directory: Path) -> list[str]:
        if directory not in self._directories:
            raise failure("list", directory, _os_error(errno.ENOENT))
        files = {path.name for path in self._names if path.parent == directory}
        return sorted(files | {path.name for path in self._directories if path.parent == directory != path})

    def mkdir(self, directory: Path, *, durable: bool = True) -> None:
        made = {directory, *directory.parents} - self._directories
        self._directories |= made
        if not durable:
            self._volatile_directories |= made

    def rename(self, old: Path, new: Path) -> None:
        self.begin("rename", f"rename to {new.name}", old)
        node = self._node(old, f"rename to {new.name}")
        self._change(_Change(new, node, moved_from=old))
        self.end()

    def unlink(self, path: Path) -> None:
        self.begin("unlink", "delete", path)
        self._node(path, "delete")
        self._change(_Change(path, None))
        self.end()

    def rmdir(self, directory: Path) -> None:
        if self.listdir(directory):
            raise failure("delete the directory", directory, _os_error(errno.ENOTEMPTY))
        self._directories.discard(directory)
        self._volatile_directories.discard(directory)

    def fsync_dir(self, directory: Path) -> None:
        self.begin("sync_dir", "sync the directory", directory)
        self._settle_names([change for change in self._changes if change.path.parent == directory])
        self._volatile_directories = {made for made in self._volatile_directories if made.parent != directory}
        self.end()

    def lock(self, path: Path) -> SimLock:
        if path in self.locks:
            raise ConfigError(f"{path.parent} is in use by the process with pid 1; stop that one")
        self.locks.add(path)
        return SimLock(self, path)

    def free_bytes(self, directory: Path) -> int:
        if self.faults.capacity_bytes is None:
            return 2**40
        return max(0, self.faults.capacity_bytes - self._used_bytes())

    # What a test does to it

    def crash(self) -> None:
        """Fail the power and bring it back: what was not synced survives in part, at random."""
        self._settle_names([change for change in self._changes if self._random.random() < 0.5])
        self._changes.clear()
        self._lose_directories()
        self._names = dict(self._durable_names)
        for node in dict.fromkeys(self._names.values()):
            self._crash_node(node)
        self._end_life()

    def kill(self) -> None:
        """End the process: the cache stays, though the kernel may drop what it thinks is clean."""
        for node in dict.fromkeys(self._names.values()):
            for sector in sorted(node.lost):
                if self._random.random() < 0.5:
                    self._reread(node, sector)
        self._end_life()

    def fork(self, dice: random.Random) -> "SimDisk":
        """A copy of the disk as it is now, with other luck: crash it, and see what would be left."""
        nodes = {id(node): node.copy() for node in self._nodes()}
        twin = SimDisk(0, copy.deepcopy(self.faults))
        twin.life = self.life
        twin.locks = set(self.locks)
        twin._random = dice
        twin._names = {path: nodes[id(node)] for path, node in self._names.items()}
        twin._durable_names = {path: nodes[id(node)] for path, node in self._durable_names.items()}
        twin._changes = [
            _Change(change.path, None if change.node is None else nodes[id(change.node)], change.moved_from)
            for change in self._changes
        ]
        twin._directories = set(self._directories)
        twin._volatile_directories = set(self._volatile_directories)
        twin._dark = self._dark
        return twin

    def _nodes(self) -> list[_Node]:
        """Every file that has a name, had one, or may have one again after a crash."""
        changed = [change.node for change in self._changes if change.node is not None]
        return [*self._names.values(), *self._durable_names.values(), *changed]

    def corrupt(self, path: Path, offset: int, mask: int = 0xFF) -> None:
        """Flip bits of a byte, in the cache and on the disk."""
        node = self._node(path, "corrupt")
        node.cached[offset] ^= mask
        if offset < len(node.durable):
            node.durable[offset] ^= mask

    def content(self, path: Path) -> bytes:
        """What a read of the whole file sees."""
        return bytes(self._node(path, "look at").cached)

    def put(self, path: Path, content: bytes) -> None:
        """Let a file be there with this content, durably."""
        node = _Node()
        node.cached[:] = content
        node.durable[:] = content
        node.room = _pages(len(content))
        self._names[path] = node
        self._durable_names[path] = node

    # What its files use

    def begin(self, kind: str, what: str, path: Path) -> None:
        """Count an operation, and fail it if it shall fail."""
        if self._dark:
            raise PowerLoss
        code = self.faults.count(kind)
        if code:
            raise failure(what, path, _os_error(code))

    def end(self) -> None:
        """An operation has had its effect on the cache: the moment for the power to fail."""
        if self.faults.power_fails_now():
            self._dark = True
            raise PowerLoss

    def write(self, node: _Node, offset: int, content: bytes) -> None:
        """Change the cache, and let the kernel write some sectors back."""
        if offset + len(content) > len(node.cached):
            node.resize(offset + len(content))
        node.cached[offset : offset + len(content)] = content
        node.touch(offset, len(content))
        if self._random.random() < 0.25:
            self._write_some_back(node)

    def sync(self, node: _Node, path: Path) -> None:
        try:
            self.begin("sync", "sync", path)
        except StorageError:
            self._write_some_back(node)
            node.lost |= node.dirty
            node.dirty.clear()
            raise
        if self.faults.power_fails_now():
            self._write_some_back(node)
        else:
            node.sync()
        self.end()

    def grant(self, node: _Node, offset: int, size: int, path: Path) -> int:
        """How much of a write finds room. None at all is an error."""
        wanted = _pages(offset + size)
        if wanted <= node.room or size == 0:
            return size
        if self.faults.capacity_bytes is not None:
            free = max(0, self.faults.capacity_bytes - self._used_bytes())
            wanted = min(wanted, node.room + free // PAGE_BYTES * PAGE_BYTES)
        granted = min(size, wanted - offset)
        if granted <= 0:
            raise failure(f"write at {offset} of", path, _os_error(errno.ENOSPC))
        node.room = max(node.room, wanted)
        return granted

    # Inside

    def _node(self, path: Path, what: str) -> _Node:
        if self._dark:
            raise PowerLoss
        node = self._names.get(path)
        if node is None:
            raise failure(what, path, _os_error(errno.ENOENT))
        return node

    def _change(self, change: _Change) -> None:
        change.apply(self._names)
        self._changes.append(change)

    def _settle_names(self, changes: list[_Change]) -> None:
        """Make some changes of names durable, in the order in which they were made."""
        settled = set(map(id, changes))
        for change in changes:
            change.apply(self._durable_names)
        self._changes = [change for change in self._changes if id(change) not in settled]

    def _lose_directories(self) -> None:
        """Let some of the directories go that were never synced, with all that is in them."""
        lost = {made for made in sorted(self._volatile_directories) if self._random.random() < 0.5}
        self._volatile_directories.clear()
        self._directories = {kept for kept in self._directories if lost.isdisjoint((kept, *kept.parents))}
        for path in [path for path in self._durable_names if not lost.isdisjoint(path.parents)]:
            del self._durable_names[path]

    def _write_some_back(self, node: _Node) -> None:
        for sector in sorted(node.dirty):
            if self._random.random() < 0.5:
                node.write_back(sector)

    def _crash_node(self, node: _Node) -> None:
        if self._random.random() < 0.5:
            node.cut_durable()
        self._write_some_back(node)
        if self._random.random() < 0.5:
            _resize(node.durable, max(len(node.durable), len(node.cached)))
        node.cached[:] = node.durable
        node.cut = None
        node.dirty.clear()
        node.lost.clear()

    def _reread(self, node: _Node, sector: int) -> None:
        start = sector * SECTOR_BYTES
        stop = min(start + SECTOR_BYTES, len(node.cached))
        node.cached[start:stop] = bytes(node.durable[start:stop]).ljust(stop - start, b"\0")
        node.lost.discard(sector)

    def _end_life(self) -> None:
        self.life += 1
        self.locks.clear()
        self._dark = False
        self.faults.power_returns()

    def _used_bytes(self) -> int:
        return sum(node.room for node in set(self._names.values()))


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _os_error(code: int) -> OSError:
    return OSError(code, errno.errorcode.get(code, str(code)))
