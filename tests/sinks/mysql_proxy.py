"""A proxy before MySQL that loses or swallows one COMMIT, its answer or a load, and all that comes after."""

from __future__ import annotations

import asyncio
from typing import Self

COMMIT = b"\x03COMMIT"
ON_A_FILE = "hang up on a file"
# What a packet says, after its size and number.
FIRST_OF_PAYLOAD = slice(4, 5)
FILE_REQUEST = b"\xfb"


class MySQLProxy:
    """Passes everything on until it is armed and sees a COMMIT.

    `lose the request` and `lose the answer` close the connection; `swallow …` leave it open and dead, and so
    with every later connection, until it is disarmed. `hang up on a file` closes the connection, before any
    COMMIT, when the server asks for what LOAD DATA is to send.
    """

    def __init__(self, port: int) -> None:
        self._upstream_port = port
        self._fault = ""
        self._is_dead = False
        self.fired = asyncio.Event()
        self.port = 0
        self._links: set[asyncio.Task[None]] = set()

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
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        if self._is_dead:
            await asyncio.Event().wait()
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        faults: list[str] = []
        try:
            await asyncio.gather(
                self._requests(reader, upstream_writer, faults),
                self._answers(upstream_reader, writer, faults),
            )
        except ConnectionError:
            pass
        finally:
            upstream_writer.close()
            writer.close()

    async def _requests(
        self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, faults: list[str]
    ) -> None:
        while chunk := await reader.read(65536):
            if COMMIT in chunk and self._fault and self._fault != ON_A_FILE:
                faults.append(self._fault)
                self._is_dead = self._fault.startswith("swallow")
                self._fault = ""
                self.fired.set()
            if "lose the request" in faults:
                raise ConnectionResetError
            if "swallow the request" not in faults:
                upstream.write(chunk)
                await upstream.drain()
        raise ConnectionResetError

    async def _answers(
        self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: list[str]
    ) -> None:
        while chunk := await upstream.read(65536):
            if "lose the answer" in faults:
                raise ConnectionResetError
            if "swallow the answer" not in faults:
                writer.write(chunk)
                await writer.drain()
            if self._fault == ON_A_FILE and chunk[FIRST_OF_PAYLOAD] == FILE_REQUEST:
                self._fault = ""
                self.fired.set()
                break
        raise ConnectionResetError
