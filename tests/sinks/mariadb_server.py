"""A MariaDB of our own for tests: in a temporary directory, on a free port, never the machine's."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pymysql
import pytest

START_TIMEOUT_S = 60.0
UNPRIVILEGED_USERS = ("mysql", "nobody")
DATABASE = "semel"


def find_binaries() -> tuple[str, str] | None:
    """Debian keeps the server off the path of ordinary users."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    found = shutil.which("mariadbd", path=path), shutil.which("mariadb-install-db", path=path)
    return (found[0], found[1]) if found[0] and found[1] else None


class MariaDBServer:
    """A server that can be stopped, killed and started again."""

    def __init__(self, server: str, installer: str) -> None:
        self._server = server
        self._user = _unprivileged_user()
        self.directory = Path(tempfile.mkdtemp(prefix="semel-mariadb-"))
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            os.chown(self.directory, self._user.pw_uid, self._user.pw_gid)
        subprocess.run(
            [
                installer, "--no-defaults", f"--datadir={self.directory / 'data'}",
                "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve",
            ],
            check=True, stdin=subprocess.DEVNULL, capture_output=True, **self._as_user(),
        )  # fmt: skip

    def url(self, user: str = "root", *, port: int | None = None, query: str = "") -> str:
        return f"mysql://{user}@127.0.0.1:{port or self.port}/{DATABASE}{query}"

    def start(self) -> None:
        log = (self.directory / "log").open("ab")
        self._process = subprocess.Popen(
            [
                self._server, "--no-defaults", f"--datadir={self.directory / 'data'}",
                f"--socket={self.directory / 'socket'}", f"--port={self.port}",
                "--bind-address=127.0.0.1", "--skip-name-resolve", "--innodb-buffer-pool-size=64M",
                "--innodb-flush-log-at-trx-commit=1", "--local-infile=1",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **self._as_user(),
        )  # fmt: skip
        log.close()
        self._await_ready()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(START_TIMEOUT_S)
            self._process = None

    def kill(self) -> None:
        """A crash: nothing is written any more."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(START_TIMEOUT_S)
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def connect(self, database: str | None = DATABASE) -> Any:
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            database=database,
            charset="utf8mb4",
            autocommit=True,
        )

    def query(
        self, statement: str, *parameters: object, database: str | None = DATABASE
    ) -> list[tuple[Any, ...]]:
        connection = self.connect(database)
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement, parameters or None)
                return list(cursor.fetchall())
        finally:
            connection.close()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.query("SELECT 1", database=None)
                return
            except pymysql.Error:
                if time.monotonic() > deadline or self._process is None or self._process.poll() is not None:
                    raise RuntimeError((self.directory / "log").read_text()[-2000:]) from None
                time.sleep(0.05)

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        identity: Mapping[str, Any] = {
            "user": self._user.pw_uid,
            "group": self._user.pw_gid,
            "extra_groups": [],
            "cwd": self.directory,
        }
        return dict(identity)


def _unprivileged_user() -> pwd.struct_passwd | None:
    """MariaDB refuses to run as root."""
    if os.getuid() != 0:
        return None
    for name in UNPRIVILEGED_USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("there is no unprivileged user to run MariaDB as")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaDBServer]:
    """The server that tests share; those that kill it start it again."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("MariaDB is not installed (Debian: mariadb-server-core)")
    server = MariaDBServer(*binaries)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def mariadb(mariadb_server: MariaDBServer) -> MariaDBServer:
    """The shared server, with nothing in it."""
    mariadb_server.query(f"DROP DATABASE IF EXISTS {DATABASE}", database=None)
    mariadb_server.query(f"CREATE DATABASE {DATABASE} CHARACTER SET utf8mb4", database=None)
    return mariadb_server
