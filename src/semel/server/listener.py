"""The server: a node that listens."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from typing import Final

from semel.broker.decision import Endpoint
from semel.disk import Disk
from semel.errors import ConfigError
from semel.server.clock import Clock, SystemClock
from semel.server.connection import Connection
from semel.server.intake import Intake
from semel.server.metrics_endpoint import MetricsEndpoint
from semel.server.node import Node
from semel.server.settings import Settings, join_address, parse_address

log = logging.getLogger(__name__)

BACKLOG: Final = 1024
WILDCARDS: Final = ("", "0.0.0.0", "::")
DRAIN_S: Final = 10.0
"""How long a stop waits for requests that are being answered."""


class Server:
    """Starts a node, listens for it, and stops both."""

    def __init__(
        self,
        settings: Settings,
        *,
        disk: Disk | None,
        clock: Clock | None = None,
        on_fatal: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.node = Node(settings, clock or SystemClock(), disk, on_fatal)
        self._intake = Intake(
            settings.integer("socket.request.max.bytes"), settings.integer("queued.max.request.bytes")
        )
        self._listener: asyncio.Server | None = None
        self.metrics_endpoint: MetricsEndpoint | None = None
        self._endpoint = Endpoint("", 0)

    @property
    def bootstrap(self) -> str:
        """host:port for clients on this machine."""
        return join_address(self._endpoint.host, self._endpoint.port)

    async def start(self) -> None:
        raise_descriptor_limit()
        host, port = parse_address(self.settings.text("listeners"), "listeners")
        await self.node.start()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._accept, host or None, port, backlog=BACKLOG, start_serving=False
            )
        except OSError as error:
            await self.node.stop()
            raise ConfigError(
                f"cannot listen on {join_address(host, port)}: {error.strerror or error}; "
                "is another broker running there?"
            ) from None
        bound = self._listener.sockets[0].getsockname()
        # Before the first connection: a client that waited for us asks at once where we are.
        self._endpoint = self._advertised(host, bound[1])
        await self._start_metrics()
        await self._listener.start_serving()

    async def _start_metrics(self) -> None:
        text = self.settings.text("metrics.listeners")
        if text:
            host, port = parse_address(text, "metrics.listeners")
            self.metrics_endpoint = MetricsEndpoint(host, port, self.node.render_metrics)
            await self.metrics_endpoint.start()

    def _advertised(self, host: str, port: int) -> Endpoint:
        text = self.settings.text("advertised.listeners")
        if text:
            advertised_host, advertised_port = parse_address(text, "advertised.listeners")
            return Endpoint(advertised_host, advertised_port or port)
        if host not in WILDCARDS:
            return Endpoint(host, port)
        # A wildcard is an address to listen on, not one to connect to.
        log.warning("clients are told 127.0.0.1; set advertised.listeners to let others in than this machine")
        return Endpoint("127.0.0.1", port)

    def _accept(self) -> Connection:
        return Connection(self.node, self._intake, self._endpoint, self.node.clock.monotonic_ms)

    async def stop(self) -> None:
        """Take no new work, answer what is under way, and leave the data as a start wants to find it."""
        if self.metrics_endpoint is not None:
            self.metrics_endpoint.stop()
        if self._listener is not None:
            self._listener.close()
        await self._drain()
        await self.node.stop()
        for connection in tuple(self.node.connections):
            connection.abort()

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + DRAIN_S
        for connection in self.node.connections:
            connection.stop_reading()
        self.node.refuse_parked()
        while asyncio.get_running_loop().time() < deadline:
            if all(connection.is_drained for connection in self.node.connections):
                return
            await asyncio.sleep(0.01)


def raise_descriptor_limit() -> None:
    """Ten thousand connections and as many segments need descriptors; take all that we may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
