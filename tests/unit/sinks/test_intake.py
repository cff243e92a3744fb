"""The intake of an epoch, without a server."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from semel.client.metadata import Address
from semel.sinks.errors import WriteFailed
from semel.sinks.receipts import Attempt, Place
from semel.sinks.service import Channel
from semel.sinks.sql.dialect import Loaded, Part
from semel.sinks.sql.intake import Intake

ROW = Part(1, memoryview(b"row"))
FORM: Any = object()


class Session:
    """A server that answers when it is told to."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()

    async def load(self, form: object, parts: list[Part]) -> Loaded:
        await self.answers.wait()
        rows = sum(part.rows for part in parts)
        return Loaded(rows, rows, rows)


def make_intake(session: Any) -> Intake:
    async def begin() -> Any:
        return session

    return Intake(begin)


async def test_what_is_cut_short_is_forgotten() -> None:
    """Errors hold the calls that they went through, and those the rows: each load has an error of its own."""
    intake = make_intake(Session())
    depths = []
    for turn in range(3):
        place = Place("run", 0, turn)
        intake.open(place, FORM)
        loading = asyncio.ensure_future(intake.load(Attempt.new(place, 0, "0"), [ROW]))
        await asyncio.sleep(0)
        await intake.cut()
        with pytest.raises(WriteFailed, match="cut short") as caught:
            await loading
        depths.append(len(caught.traceback))
    assert depths == depths[:1] * 3


async def test_what_waits_in_line_when_a_turn_ends_does_not_come_into_the_next() -> None:
    session = Session()
    intake = make_intake(session)
    old, new = Place("run", 0, 1), Place("run", 0, 2)
    intake.open(old, FORM)
    first, waiting = (
        asyncio.ensure_future(intake.load(Attempt.new(old, task, "0"), [ROW])) for task in range(2)
    )
    await asyncio.sleep(0)
    await intake.cut()
    intake.open(new, FORM)
    session.answers.set()
    attempt = Attempt.new(new, 0, "0")
    assert await intake.load(attempt, [ROW]) == Loaded(1, 1, 1)
    for late in (first, waiting):
        with pytest.raises(WriteFailed):
            await late
    assert {task: rows for task, (_, rows) in intake._loaded.items()} == {0: 1}


async def test_who_gives_up_waiting_for_a_load_spoils_the_epoch() -> None:
    intake = make_intake(Session())
    place = Place("run", 0, 1)
    intake.open(place, FORM)
    loading = asyncio.ensure_future(intake.load(Attempt.new(place, 0, "0"), [ROW]))
    await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    with pytest.raises(WriteFailed, match="the epoch is spoiled"):
        await intake.load(Attempt.new(place, 1, "0"), [ROW])


async def test_a_connection_whose_rows_are_not_read_for_long_is_not_given_up() -> None:
    """They wait for their turn: Linux would take that for a peer that is gone, if it were told a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = await Channel.open(Address(*listener.getsockname()))
        try:
            assert channel._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            assert channel._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        finally:
            channel.close()
