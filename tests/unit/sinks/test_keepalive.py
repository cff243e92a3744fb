"""How long a peer may acknowledge nothing, and when that is not asked."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from semel.sinks.keepalive import ACKNOWLEDGED_WITHIN_MS, expect_acknowledgement, reading_later

A_USERS_MS = 7_000


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        yield connection


def user_timeout_ms(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_a_peer_that_reads_later_is_not_given_up_meanwhile(connection: socket.socket) -> None:
    expect_acknowledgement(connection)
    with pytest.raises(RuntimeError), reading_later(connection):
        assert user_timeout_ms(connection) == 0
        raise RuntimeError
    assert user_timeout_ms(connection) == ACKNOWLEDGED_WITHIN_MS


@pytest.mark.parametrize("asked_ms", [0, A_USERS_MS])
def test_a_time_that_somebody_else_asks_for_stays(connection: socket.socket, asked_ms: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, asked_ms)
    with reading_later(connection):
        assert user_timeout_ms(connection) == asked_ms
    assert user_timeout_ms(connection) == asked_ms


def test_a_connection_may_be_closed_meanwhile_or_be_none_of_tcp(connection: socket.socket) -> None:
    expect_acknowledgement(connection)
    with reading_later(connection):
        connection.close()
    here, there = socket.socketpair()
    with here, there, reading_later(here):
        pass
