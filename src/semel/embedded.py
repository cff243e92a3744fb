"""A broker inside the process: for tests, notebooks and small services.

with semel.Broker() as broker:            # in memory
    ...connect any Kafka client to broker.bootstrap...

with semel.Broker("data") as broker:      # durable, in a directory
    ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from os import PathLike
from types import TracebackType
from typing import Final

from semel.disk import OsDisk
from semel.errors import SemelError
from semel.server.listener import Server
from semel.server.settings import Settings

FREE_PORT: Final = "127.0.0.1:0"


class Broker:
    """A broker on a free port, in a thread of its own (`with`) or on the running event loop (`async with`).

    `path` is the directory of its data; without one it keeps everything in memory. `settings` are the
    broker's, by Kafka's names.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        settings: Mapping[str, str | int | bool] | None = None,
    ) -> None:
        flags = {"listeners": FREE_PORT}
        for name, value in (settings or {}).items():
            flags[name] = str(value).lower() if isinstance(value, bool) else str(value)
        if path is not None:
            flags["log.dirs"] = str(path)
        self._settings = Settings.load(flags=flags)
        self._is_durable = path is not None
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def bootstrap(self) -> str:
        """host:port for `bootstrap.servers`."""
        return self.server.bootstrap

    @property
    def server(self) -> Server:
        """The server behind it, for what is not a client's business."""
        if self._server is None:
            raise SemelError("the broker is not running; use it in a with statement, or call start()")
        return self._server

    def _new_server(self) -> Server:
        if self._server is not None:
            raise SemelError("this broker has been started before; make another one")
        return Server(self._settings, disk=OsDisk() if self._is_durable else None)

    # In a thread.

    def start(self) -> Broker:
        """Start in a thread of its own; returns when clients can connect."""
        self._server = self._new_server()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="semel-broker", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise
        return self

    def stop(self) -> None:
        """Answer what is under way, and stop."""
        if self._loop is None or self._server is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result()
        finally:
            self._end_loop()

    def _run_loop(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end_loop(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # On the running loop.

    async def __aenter__(self) -> Broker:
        self._server = self._new_server()
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        await self._server.stop()
