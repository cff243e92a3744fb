"""A server, or a proxy before it, that takes connections and says no more does not hold anybody up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from mariadb_server import MariaDBServer
from pymysql.constants import CLIENT

from semel.sinks.errors import ConnectionLost
from semel.sinks.mysql import MySQLSink, session
from semel.sinks.mysql.dialect import MySQLDialect
from semel.sinks.mysql.sink import parse_url

THREAD_NAME = "semel mysql"
SHORT_S = 0.3
HANDSHAKE_S = 1.0
LONG_S = 15.0


def greeting_of(server: MariaDBServer, *, offers_tls: bool) -> bytes:
    """The first packet of the real one, which may be made to promise TLS."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        greeting = bytearray(connection.recv(4096))
    if offers_tls:
        # After the header and the version: the thread, the salt's beginning and a zero, then the flags.
        flags = greeting.index(0, 5) + 1 + 4 + 8 + 1
        assert not greeting[flags + 1] & (CLIENT.SSL >> 8)
        greeting[flags + 1] |= CLIENT.SSL >> 8
    return bytes(greeting)


class MuteServer:
    """Says what it is told to whoever comes, and nothing else."""

    def __init__(self, first_words: bytes) -> None:
        self._first_words = first_words
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._taken: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        self.was_called = threading.Event()
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._taken.append(connection)
                connection.sendall(self._first_words)
                self.was_called.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._taken):
            each.close()


@pytest.fixture(params=["nothing", "its greeting", "its greeting, which offers TLS"])
def mute(request: pytest.FixtureRequest, mariadb: MariaDBServer) -> Iterator[MuteServer]:
    """By what it says."""
    says = request.param
    first_words = b"" if says == "nothing" else greeting_of(mariadb, offers_tls="TLS" in says)
    server = MuteServer(first_words)
    try:
        yield server
    finally:
        server.close()


def dialing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


async def open_sink(port: int) -> None:
    async with MySQLSink(f"mysql://root@127.0.0.1:{port}/semel", "kept") as sink:
        await sink.open("dialing")


async def test_the_handshake_is_not_waited_for_without_a_limit(
    mute: MuteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CONNECT_TIMEOUT_S", SHORT_S)
    async with asyncio.timeout(LONG_S):
        with pytest.raises(ConnectionLost, match="timed out"):
            await open_sink(mute.port)


async def test_a_cancellation_ends_the_thread_that_dials(mute: MuteServer) -> None:
    opening = asyncio.create_task(open_sink(mute.port))
    assert await asyncio.to_thread(mute.was_called.wait, LONG_S)
    await asyncio.sleep(SHORT_S)
    threads = dialing_threads()
    assert threads
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    for thread in threads:
        await asyncio.to_thread(thread.join, session.CONNECT_TIMEOUT_S / 2)
        assert not thread.is_alive()


SCRIPT = """
import asyncio, sys
from semel.sinks.mysql import MySQLSink

async def main():
    sink = MySQLSink(f"mysql://root@127.0.0.1:{sys.argv[1]}/semel", "kept")
    try:
        async with asyncio.timeout(0.5):
            await sink.open("dialing")
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""


def test_a_process_that_gave_up_ends(mute: MuteServer) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(mute.port)],
        timeout=LONG_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "given up\n", "")


async def test_what_follows_the_handshake_may_take_longer(
    mariadb: MariaDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CONNECT_TIMEOUT_S", HANDSHAKE_S)
    dialect = MySQLDialect(parse_url(mariadb.url()))
    connected = await dialect.connect("test")
    try:
        before = time.monotonic()
        assert await connected.fetch("SELECT SLEEP(%s)", (2 * HANDSHAKE_S,)) == [(0,)]
        assert time.monotonic() - before >= 2 * HANDSHAKE_S
    finally:
        await connected.close()
