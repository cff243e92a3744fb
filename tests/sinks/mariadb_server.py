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
from urllib.parse import quote, unquote, urlsplit

import pymysql
import pytest

START_TIMEOUT_S = 60.0
UNPRIVILEGED_USERS = ("mysql", "nobody")
DATABASE = "semel"
# Tests that hurt no server run on this one, too: mysql://user:password@host:3306, whose database `semel` is
# theirs to drop.
GIVEN_MYSQL = "TEST_MYSQL"


# What `mariadb-install-db` reads; the script itself needs the client's package as well.
SYSTEM_TABLES = ("mysql_system_tables.sql", "mysql_performance_tables.sql", "mysql_system_tables_data.sql")


def find_server() -> Path | None:
    """Debian keeps the server off the path of ordinary users."""
    found = shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    return None if found is None else Path(found)


class SqlServer:
    """A server that is there."""

    def __init__(self, port: int, user: str = "root", password: str = "", host: str = "127.0.0.1") -> None:
        self.port = port
        self._login = (host, user, password)

    def url(self, user: str | None = None, *, port: int | None = None, query: str = "") -> str:
        host, own, password = self._login
        login = user or (f"{own}:{quote(password, safe='')}" if password else own)
        return f"mysql://{login}@{host}:{port or self.port}/{DATABASE}{query}"

    def connect(self, database: str | None = DATABASE) -> Any:
        host, user, password = self._login
        return pymysql.connect(
            host=host,
            port=self.port,
            user=user,
            password=password,
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

    def empty(self) -> None:
        self.query(f"DROP DATABASE IF EXISTS {DATABASE}", database=None)
        self.query(f"CREATE DATABASE {DATABASE} CHARACTER SET utf8mb4", database=None)


class MariaDBServer(SqlServer):
    """A server of our own, that can be stopped, killed and started again."""

    def __init__(self, server: Path) -> None:
        super().__init__(_free_port())
        self._server = server
        self._user = _unprivileged_user()
        self.directory = Path(tempfile.mkdtemp(prefix="semel-mariadb-"))
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            os.chown(self.directory, self._user.pw_uid, self._user.pw_gid)
        self._install()

    def _install(self) -> None:
        (self.directory / "data").mkdir()
        shares = self._server.resolve().parents[1] / "share" / "mysql"
        scripts = "\n".join((shares / name).read_text() for name in SYSTEM_TABLES)
        if self._user is not None:
            os.chown(self.directory / "data", self._user.pw_uid, self._user.pw_gid)
        subprocess.run(
            [
                self._server, "--no-defaults", "--bootstrap", f"--datadir={self.directory / 'data'}",
                "--log-warnings=0", "--enforce-storage-engine=", "--max-allowed-packet=8M",
            ],
            input=f"CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket = NULL;\n{scripts}".encode(),
            check=True, capture_output=True, **self._as_user(),
        )  # fmt: skip

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
    binary = find_server()
    if binary is None:
        pytest.skip("MariaDB is not installed (Debian: mariadb-server-core)")
    server = MariaDBServer(binary)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def mariadb(mariadb_server: MariaDBServer) -> MariaDBServer:
    """The shared server, with nothing in it."""
    mariadb_server.empty()
    return mariadb_server


@pytest.fixture(params=["MariaDB", "MySQL"] if GIVEN_MYSQL in os.environ else ["MariaDB"])
def sql_server(request: pytest.FixtureRequest) -> SqlServer:
    """MariaDB, then the MySQL that was given, with nothing in it."""
    if request.param == "MariaDB":
        mariadb: MariaDBServer = request.getfixturevalue("mariadb")
        return mariadb
    given = urlsplit(os.environ[GIVEN_MYSQL])
    login = unquote(given.username or "root"), unquote(given.password or "")
    server = SqlServer(given.port or 3306, *login, given.hostname or "127.0.0.1")
    server.empty()
    return server
