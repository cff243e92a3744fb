"""A PostgreSQL of one's own: a cluster in a temporary directory, on a free port, never the machine's."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psycopg

START_TIMEOUT_S: Final = 60.0
UNPRIVILEGED_USERS: Final = ("postgres", "nobody")


def find_binaries() -> Path | None:
    """Debian keeps them off the path, one directory a version."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: path.parts[-3])
    if versions:
        return versions[-1].parent
    found = shutil.which("postgres")
    return Path(found).resolve().parent if found else None


class PostgresServer:
    """A cluster that can be stopped, killed and started again."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._user = _unprivileged_user()
        self.directory = Path(tempfile.mkdtemp(prefix="semel-postgres-"))
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            os.chown(self.directory, self._user.pw_uid, self._user.pw_gid)
        self._run(
            "initdb", "-D", str(self.directory / "cluster"), "-U", "postgres", "--auth=trust",
            "--no-sync", "-E", "UTF8", "--locale=C.UTF-8",
        )  # fmt: skip

    @property
    def dsn(self) -> str:
        return self.dsn_of("postgres")

    def dsn_of(self, user: str, port: int | None = None) -> str:
        return f"host=127.0.0.1 port={port or self.port} user={user} dbname=postgres"

    def start(self) -> None:
        log = (self.directory / "log").open("ab")
        self._process = subprocess.Popen(
            [
                self._binaries / "postgres", "-D", self.directory / "cluster", "-p", str(self.port),
                "-k", self.directory, "-c", "listen_addresses=127.0.0.1", "-c", "shared_buffers=64MB",
                "-c", "max_connections=60", "-c", "max_wal_size=2GB", "-c", "deadlock_timeout=200ms",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **self._as_user(),
        )  # fmt: skip
        log.close()
        self._await_ready()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # a fast shutdown
            self._process.wait(START_TIMEOUT_S)
            self._process = None

    def kill(self) -> None:
        """A crash: nothing is written any more, also not by the server's other processes."""
        assert self._process is not None
        children = self.processes()
        for pid in (self._process.pid, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(START_TIMEOUT_S)
        self._process = None
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def processes(self) -> list[int]:
        """The server's children: one a connection, and those that work in the background."""
        pid = self.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.query("SELECT 1")
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process is None or self._process.poll() is not None:
                    raise RuntimeError((self.directory / "log").read_text()[-2000:]) from None
                time.sleep(0.05)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._binaries / program, *arguments], check=True, stdin=subprocess.DEVNULL,
            capture_output=True, **self._as_user(),
        )  # fmt: skip

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {
            "user": self._user.pw_uid,
            "group": self._user.pw_gid,
            "extra_groups": [],
            "cwd": self.directory,
        }


def _unprivileged_user() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return None
    for name in UNPRIVILEGED_USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("there is no unprivileged user to run PostgreSQL as")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
