"""A small HTTP endpoint for `GET /metrics`: enough for Prometheus, and for nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from semel.errors import ConfigError

MAX_REQUEST_BYTES: Final = 8192
REQUEST_TIMEOUT_S: Final = 5.0


class MetricsEndpoint:
    """Listens, and answers each request with what `render` says."""

    def __init__(self, host: str, port: int, render: Callable[[], str]) -> None:
        self._host = host
        self._port = port
        self._render = render
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(
                self._answer, self._host, self._port, limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen for metrics on {self._host}:{self._port}: {error.strerror or error}"
            ) from None

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # Not a client that we could help.
        finally:
            writer.close()

    def _response(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) < 2 or words[0] != b"GET":
            return _http("405 Method Not Allowed", "only GET is answered here\n")
        if words[1].split(b"?")[0] != b"/metrics":
            return _http("404 Not Found", "metrics are at /metrics\n")
        return _http("200 OK", self._render())


def _http(status: str, text: str) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
