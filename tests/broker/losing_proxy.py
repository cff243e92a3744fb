"""A proxy in front of a broker that loses answers: the request is carried out, and nobody hears of it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Final

from semel.wire.apis import ApiKey

TIMEOUT_S: Final = 20.0
SIZE_BYTES: Final = 4


class LosingProxy:
    """Forwards everything but the answers that it is told to lose; there it hangs up instead."""

    def __init__(self, broker_port: int) -> None:
        self._broker_port = broker_port
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_lose: dict[int, int] = {}
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(TIMEOUT_S)

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def lose(self, api: ApiKey, answers: int = 1) -> None:
        """The next answers of an API will not arrive."""
        self._to_lose[api] = answers

    def left_to_lose(self, api: ApiKey) -> int:
        return self._to_lose.get(api, 0)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: deque[tuple[int, bytes]] = deque()
        try:
            broker_reader, broker_writer = await asyncio.open_connection("127.0.0.1", self._broker_port)
        except OSError:
            writer.close()
            return
        for copying in (
            self._copy_requests(reader, broker_writer, asked),
            self._copy_answers(broker_reader, writer, asked),
        ):
            task = asyncio.create_task(copying)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: deque[tuple[int, bytes]]
    ) -> None:
        try:
            while True:
                frame = await _frame(reader)
                body = frame[SIZE_BYTES:]
                asked.append((int.from_bytes(body[:2]), body[4:8]))
                writer.write(frame)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.close()

    async def _copy_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: deque[tuple[int, bytes]]
    ) -> None:
        try:
            while True:
                frame = await _frame(reader)
                # A Produce that wants no answer has none: find the request by its correlation id.
                while asked[0][1] != frame[SIZE_BYTES : 2 * SIZE_BYTES]:
                    asked.popleft()
                api, _ = asked.popleft()
                if self._to_lose.get(api, 0):
                    self._to_lose[api] -= 1
                    return
                writer.write(frame)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.close()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    size = await reader.readexactly(SIZE_BYTES)
    return size + await reader.readexactly(int.from_bytes(size))
