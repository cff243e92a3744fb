"""A proxy in front of a broker that loses commits: the request going in, or the answer coming out."""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum
from types import TracebackType
from typing import Self

from semel.client.cluster import Cluster
from semel.client.connection import Connection
from semel.client.metadata import Address
from semel.sinks.kafka import KafkaSink
from semel.sinks.settings import SinkSettings
from semel.wire.apis import ApiKey

SIZE_BYTES = 4


class Loss(Enum):
    NOTHING = "nothing"
    REQUEST = "request"
    ANSWER = "answer"


class EndTxnProxy:
    """Forwards everything but what it is told to lose; whatever it loses, it hangs up. Counts the losses."""

    def __init__(self, broker: Address) -> None:
        self._broker = broker
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.loss = Loss.NOTHING
        self.only_once = False
        self.losses = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> Address:
        assert self._server is not None
        return Address("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broker_reader, broker_writer = await asyncio.open_connection(*self._broker)
        asked: deque[int] = deque()
        for copying in (
            self._copy(reader, broker_writer, asked, Loss.REQUEST),
            self._copy(broker_reader, writer, asked, Loss.ANSWER),
        ):
            task = asyncio.create_task(copying)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: deque[int], kind: Loss
    ) -> None:
        try:
            while True:
                size = await reader.readexactly(SIZE_BYTES)
                frame = await reader.readexactly(int.from_bytes(size))
                if kind is Loss.REQUEST:
                    asked.append(int.from_bytes(frame[:2]))
                    api_key = asked[-1]
                else:
                    api_key = asked.popleft()
                if api_key == ApiKey.END_TXN and self.loss is kind:
                    self.losses += 1
                    if self.only_once:
                        self.loss = Loss.NOTHING
                    return
                writer.write(size + frame)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.close()


class ProxiedCluster(Cluster):
    """A cluster whose only broker is reached through the proxy, whatever address it says it has."""

    def __init__(self, proxy: EndTxnProxy, bootstrap: str) -> None:
        super().__init__(bootstrap)
        self._proxy = proxy

    async def _connection_to(self, address: Address, lane: str) -> Connection:
        return await super()._connection_to(self._proxy.address, lane)


class ProxiedSink(KafkaSink):
    """A sink whose owner talks to the broker through the proxy."""

    def __init__(self, proxy: EndTxnProxy, bootstrap: str, topic: str, settings: SinkSettings) -> None:
        super().__init__(bootstrap, topic, key=None, partition_column="partition", settings=settings)
        self._proxy = proxy

    def _new_cluster(self) -> Cluster:
        return ProxiedCluster(self._proxy, self.bootstrap)
