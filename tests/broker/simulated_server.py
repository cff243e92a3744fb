"""A broker in this process, on a real socket and a simulated disk.

The simulated disk is not made for threads, and a server has three: so every operation takes a lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from broker_process import free_port

from semel.disk import Buffer, Disk, File, Lock
from semel.errors import CorruptionError, StorageError
from semel.server.clock import Clock
from semel.server.listener import Server
from semel.server.settings import Settings
from semel.testing.simdisk import Faults, PowerLoss, SimDisk

TIMEOUT_S: Final = 30.0
MAX_STARTS: Final = 100


class Turnstile:
    """Lets one operation through at a time, and none after the power has failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_dead = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.is_dead:
            self._lock.release()
            raise PowerLoss

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


class LockedFile:
    """A file whose operations come one at a time with all others of its disk."""

    def __init__(self, file: File, turnstile: Turnstile) -> None:
        self._file = file
        self._turnstile = turnstile

    @property
    def path(self) -> Path:
        return self._file.path

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> int:
        with self._turnstile:
            return self._file.pwritev(buffers, offset)

    def pwritev_sync(self, buffers: Sequence[Buffer], offset: int) -> int:
        with self._turnstile:
            return self._file.pwritev_sync(buffers, offset)

    def pread(self, size: int, offset: int) -> bytes:
        with self._turnstile:
            return self._file.pread(size, offset)

    def fdatasync(self) -> None:
        with self._turnstile:
            self._file.fdatasync()

    def truncate(self, size: int) -> None:
        with self._turnstile:
            self._file.truncate(size)

    def allocate(self, size: int) -> None:
        with self._turnstile:
            self._file.allocate(size)

    def size(self) -> int:
        with self._turnstile:
            return self._file.size()

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        self._file.close()


class LockedDisk:
    """A simulated disk for the threads of one process, until the power fails."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self.turnstile = Turnstile()

    def create(self, path: Path) -> LockedFile:
        with self.turnstile:
            return LockedFile(self._disk.create(path), self.turnstile)

    def open(self, path: Path, *, writable: bool = False) -> LockedFile:
        with self.turnstile:
            return LockedFile(self._disk.open(path, writable=writable), self.turnstile)

    def exists(self, path: Path) -> bool:
        with self.turnstile:
            return self._disk.exists(path)

    def listdir(self, directory: Path) -> list[str]:
        with self.turnstile:
            return self._disk.listdir(directory)

    def mkdir(self, directory: Path, *, durable: bool = True) -> None:
        with self.turnstile:
            self._disk.mkdir(directory, durable=durable)

    def rename(self, old: Path, new: Path) -> None:
        with self.turnstile:
            self._disk.rename(old, new)

    def unlink(self, path: Path) -> None:
        with self.turnstile:
            self._disk.unlink(path)

    def rmdir(self, directory: Path) -> None:
        with self.turnstile:
            self._disk.rmdir(directory)

    def fsync_dir(self, directory: Path) -> None:
        with self.turnstile:
            self._disk.fsync_dir(directory)

    def lock(self, path: Path) -> Lock:
        with self.turnstile:
            return self._disk.lock(path)

    def free_bytes(self, directory: Path) -> int:
        with self.turnstile:
            return self._disk.free_bytes(directory)


class SimulatedServer:
    """A server on a loop in its own thread. The port stays the same from one start to the next."""

    def __init__(
        self, disk: SimDisk | None, clock: Clock | None = None, settings: dict[str, str] | None = None
    ) -> None:
        self.disk = disk
        self.port = free_port()
        self._clock = clock
        self._settings = Settings.load(
            flags={
                "listeners": f"127.0.0.1:{self.port}",
                "log.dirs": "/data",
                "storage.min.free.bytes": "0",
                **(settings or {}),
            }
        )
        self._locked: LockedDisk | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: Server | None = None

    @property
    def fatal_error(self) -> CorruptionError | None:
        assert self._server is not None
        return self._server.node.fatal_error

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> SimulatedServer:
        self._locked = None if self.disk is None else LockedDisk(self.disk)
        disk: Disk | None = self._locked
        self.gave_up = threading.Event()
        self._server = Server(self._settings, disk=disk, clock=self._clock, on_fatal=self.gave_up.set)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="simulated-server", daemon=True)
        self._thread.start()
        try:
            self._run(self._server.start())
        except BaseException:
            self._end_loop()
            if self.disk is not None:
                self.disk.kill()
            raise
        return self

    def bring_up(self) -> None:
        """Start as often as it takes, as a supervisor would; only corruption is final."""
        for _ in range(MAX_STARTS):
            try:
                self.start()
                return
            except CorruptionError:
                raise
            except StorageError as error:
                print(f"the start failed: {error}")
        raise AssertionError(f"{MAX_STARTS} starts failed")

    def stop(self) -> None:
        assert self._server is not None
        self._run(self._server.stop())
        self._end_loop()

    def lose_power(self) -> None:
        """Nothing is read or written any more, connections break, and what was not synced is gone in part."""
        assert self.disk is not None and self._locked is not None
        with self._locked.turnstile:
            self._locked.turnstile.is_dead = True
        self._run(self._hang_up())
        self._end_loop()
        self.disk.crash()

    @contextmanager
    def faults(self) -> Iterator[Faults]:
        """The plan of faults, while no operation is under way."""
        assert self.disk is not None and self._locked is not None
        with self._locked.turnstile:
            yield self.disk.faults

    async def _hang_up(self) -> None:
        assert self._server is not None
        listener = self._server._listener
        assert listener is not None
        listener.close()
        # A connection that was just accepted is known a moment later; its client must not be left hanging.
        await asyncio.sleep(0.02)
        for connection in tuple(self._server.node.connections):
            connection.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def _end_loop(self) -> None:
        assert self._loop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
