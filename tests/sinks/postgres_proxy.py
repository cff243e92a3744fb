"""A proxy before PostgreSQL that loses or swallows one COMMIT, or its answer, and all that comes after."""

from __future__ import annotations

import asyncio
from typing import Self


class PostgresProxy:
    """Passes everything on until it is armed and sees a COMMIT.

    `lose the request` and `lose the answer` close the connection; `swallow …` leave it open and dead, and so
    with every later connection, until it is disarmed.
    """

    def __init__(self, port: int) -> None:
        self._upstream_port = port
        self._fault = ""
        self._is_dead = False
        self.fired = asyncio.Event()
        self.port = 0
        self._pipes: set[asyncio.Task[None]] = set()

    @property
    def has_fired(self) -> bool:
        return self.fired.is_set()

    def arm(self, fault: str) -> None:
        self._fault = fault

    def disarm(self) -> None:
        self._fault, self._is_dead = "", False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        if self._is_dead:
            await asyncio.Event().wait()
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        link = _Link(self, reader, writer, upstream_reader, upstream_writer)
        try:
            await asyncio.gather(link.requests(), link.answers())
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            upstream_writer.close()
            writer.close()

    def fire(self) -> str:
        """The fault, if it is to happen now: it does once."""
        fault, self._fault = self._fault, ""
        if fault:
            self._is_dead = fault.startswith("swallow")
            self.fired.set()
        return fault


class _Link:
    def __init__(
        self,
        proxy: PostgresProxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream_reader: asyncio.StreamReader,
        upstream_writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._upstream_reader = upstream_reader
        self._upstream_writer = upstream_writer
        self._answer_fault = ""
        self._is_mute = False

    async def requests(self) -> None:
        while chunk := await self._reader.read(65536):
            fault = self._proxy.fire() if b"COMMIT\0" in chunk else ""
            if fault == "lose the request":
                raise ConnectionResetError
            if fault == "swallow the request":
                self._is_mute = True
            self._answer_fault = self._answer_fault or (fault if fault.endswith("answer") else "")
            if not self._is_mute:
                self._upstream_writer.write(chunk)
                await self._upstream_writer.drain()
        raise ConnectionResetError

    async def answers(self) -> None:
        while chunk := await self._upstream_reader.read(65536):
            if self._answer_fault == "lose the answer":
                raise ConnectionResetError
            if not self._answer_fault:
                self._writer.write(chunk)
                await self._writer.drain()
        raise ConnectionResetError
