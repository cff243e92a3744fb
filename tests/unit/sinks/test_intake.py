"""The intake of an epoch, without a server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

import pytest

from semel.client.metadata import Address
from semel.sinks import service
from semel.sinks.errors import CommitFailed, ConnectionLost, WriteFailed
from semel.sinks.receipts import Attempt, Place
from semel.sinks.service import Channel
from semel.sinks.sql.dialect import Loaded, Part
from semel.sinks.sql.intake import Intake
from semel.sinks.sql.intake_service import FRAME, IntakeService, RemoteIntake

PATIENCE_S = 10.0
SHORT_S = 0.3
SLOW_S = 0.5
ROW = Part(1, memoryview(b"row"))
FORM: Any = object()


class Session:
    """A server that answers when it is told to."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()

    async def fetch(self, statement: str) -> list[Any]:
        await self.answers.wait()
        return []

    async def load(self, form: object, parts: Iterable[Part]) -> Loaded:
        await self.answers.wait()
        rows = sum(part.rows for part in parts)
        return Loaded(rows, rows, rows)


def make_intake(session: Any, write_timeout: float = PATIENCE_S) -> Intake:
    async def begin() -> Any:
        return session

    return Intake(begin, write_timeout)


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


async def test_a_server_that_does_not_answer_a_nudge_holds_up_no_end_of_an_epoch() -> None:
    session = Session()
    intake = make_intake(session)
    intake.open(Place("run", 0, 1), FORM)
    nudging = asyncio.create_task(intake.nudge(session))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.wait_for(intake.cut(), PATIENCE_S)
    await asyncio.wait_for(nudging, PATIENCE_S)


async def test_a_load_that_waits_for_a_nudge_without_an_answer_fails_in_time() -> None:
    intake = make_intake(Session(), write_timeout=SHORT_S)
    place = Place("run", 0, 1)
    intake.open(place, FORM)
    nudging = asyncio.create_task(intake.nudge(Session()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    with pytest.raises(ConnectionLost, match=r"silent for 0\.3 s"):
        await asyncio.wait_for(intake.load(Attempt.new(place, 0, "0"), [ROW]), PATIENCE_S)
    await nudging


class BrokenSession(Session):
    async def load(self, form: object, parts: Iterable[Part]) -> Loaded:
        raise AttributeError("a mistake of ours")


async def test_a_load_that_fails_for_whatever_reason_spoils_the_epoch_and_is_answered() -> None:
    intake = make_intake(BrokenSession())
    place = Place("run", 0, 1)
    intake.open(place, FORM)
    heard = IntakeService(intake)
    way = RemoteIntake(await heard.start("127.0.0.1"))
    try:
        await way.load(Attempt.new(place, 0, "0"), [ROW])
        with pytest.raises(WriteFailed, match=r"^a mistake of ours$"):
            await asyncio.wait_for(way.settle(), PATIENCE_S)
        with pytest.raises(WriteFailed, match=r"spoiled.*a mistake of ours"):
            await intake.load(Attempt.new(place, 1, "0"), [ROW])
        with pytest.raises(CommitFailed, match="a mistake of ours"):
            intake.check_covered([])
    finally:
        await way.close()
        await heard.stop()


class SlowSession(Session):
    """Takes its time over each part, and more than it may for all of them."""

    async def load(self, form: object, parts: Iterable[Part]) -> Loaded:
        rows = 0
        for part in parts:
            await asyncio.sleep(SLOW_S)
            rows += part.rows
        return Loaded(rows, rows, rows)


async def test_a_load_may_be_long_if_one_part_after_the_other_is_taken() -> None:
    intake = make_intake(SlowSession(), write_timeout=4 * SLOW_S)
    place = Place("run", 0, 1)
    intake.open(place, FORM)
    assert await intake.load(Attempt.new(place, 0, "0"), [ROW] * 6) == Loaded(6, 6, 6)


class DyingChannel(Channel):
    """Has no room for what is to be sent after the first message."""

    async def send(self, content: bytes | memoryview) -> None:
        if len(content) == FRAME.size:
            raise MemoryError("no room")
        await super().send(content)


async def test_a_writer_that_cannot_send_does_not_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """To what has not left there is none, and the connection is in order."""
    monkeypatch.setattr(service, "Channel", DyingChannel)
    heard = IntakeService(make_intake(Session()))
    way = RemoteIntake(await heard.start("127.0.0.1"))
    try:
        await way.load(Attempt.new(Place("run", 0, 1), 0, "0"), [ROW])
        with pytest.raises(WriteFailed, match="could not be brought"):
            await asyncio.wait_for(way.settle(), PATIENCE_S)
    finally:
        await way.close()
        await heard.stop()


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
