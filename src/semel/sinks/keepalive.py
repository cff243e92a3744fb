"""How a machine that is gone is noticed at the other end of its connection, though it says nothing."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

# Half a minute in all.
IDLE_S: Final = 10
INTERVAL_S: Final = 5
COUNT: Final = 4
KEEPALIVE: Final = (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", INTERVAL_S), ("TCP_KEEPCNT", COUNT))
# What was sent is not acknowledged for so long: the other machine is gone. Keep-alive does not look then.
ACKNOWLEDGED_WITHIN_MS: Final = 30_000


def keep_alive(connection: socket.socket) -> None:
    """Sends small packets at once, and has the kernel probe an idle peer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        _set(connection, name, value)


def expect_acknowledgement(connection: socket.socket) -> None:
    """What is sent is acknowledged in time, or the connection is given up."""
    _set(connection, "TCP_USER_TIMEOUT", ACKNOWLEDGED_WITHIN_MS)


@contextmanager
def reading_later(connection: socket.socket) -> Iterator[None]:
    """Meanwhile the other end may leave unread for long what is sent: whoever sends has a limit of its own.

    TCP_USER_TIMEOUT also drops a peer that is alive and whose receive window stays full. A time that is not
    ours stays: somebody has asked for it.
    """
    is_ours = _acknowledged_within_ms(connection) == ACKNOWLEDGED_WITHIN_MS
    if is_ours:
        _set(connection, "TCP_USER_TIMEOUT", 0)
    try:
        yield
    finally:
        if is_ours:
            with suppress(OSError):  # it was closed meanwhile
                expect_acknowledgement(connection)


def _acknowledged_within_ms(connection: socket.socket) -> int | None:
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is None:
        return None
    with suppress(OSError):  # it is no TCP, or closed
        return connection.getsockopt(socket.IPPROTO_TCP, option)
    return None


def _set(connection: socket.socket, name: str, value: int) -> None:
    if (option := getattr(socket, name, None)) is not None:  # not every system has them
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
