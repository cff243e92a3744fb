"""A small TCP service in the process of a sink's owner, for its writers in other processes.

What is said is JSON, each message after its size. A connection begins with one that holds the run's secret:
whoever does not know it, or talks nonsense, is hung up on and told nothing. Rows may follow as plain bytes;
they are received where they are wanted, without a copy on the way.
"""

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from functools import partial
from struct import Struct
from typing import Any, Final, NamedTuple, Self, TypeVar, cast

from semel.client.loop_thread import run_in
from semel.client.metadata import Address
from semel.errors import ConfigError
from semel.sinks.errors import InitFailed, WriteFailed
from semel.sinks.keepalive import expect_acknowledgement, keep_alive

TOKEN_BYTES: Final = 32
MAX_MESSAGE_BYTES: Final = 64 * 1024
MAX_CONNECTIONS: Final = 4_096
# How many may be silent at a time, before they have shown the secret. More are borne with for a moment:
# hundreds of tasks may begin at once.
MAX_STRANGERS: Final = 128
STRANGER_PATIENCE_S: Final = 1.0
# A connection that says nothing is not a writer's.
FIRST_MESSAGE_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 10.0
ACCEPT_BACKOFF_S: Final = 0.1
WILDCARD_HOSTS: Final = frozenset({"", "0.0.0.0", "::"})

T = TypeVar("T")

TOKEN: Final = "token"
SIZE: Final = Struct(">I")


class ServiceAddress(NamedTuple):
    """Where an owner listens, and the secret that lets writers in. Part of a plan, and pickled with it."""

    address: Address
    token: str


class Channel:
    """One connection, at either end of it. Raises OSError where it is lost, ValueError at nonsense."""

    __slots__ = ("_loop", "_socket")

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        connection.setblocking(False)
        keep_alive(connection)

    def expect_reader(self) -> None:
        """Whoever is at the other end reads at once what is sent, or is gone.

        Not for rows: those of a writer that waits for its turn are not read, and nobody is gone.
        """
        expect_acknowledgement(self._socket)

    @classmethod
    async def open(cls, address: Address) -> Self:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, where)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    async def say(self, fields: Mapping[str, object]) -> None:
        message = json.dumps(fields).encode()
        await self.send(SIZE.pack(len(message)) + message)

    async def hear(self) -> dict[str, Any]:
        """What the other side says next."""
        (size,) = SIZE.unpack(await self.receive(SIZE.size))
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {size} bytes was announced")
        try:
            fields = json.loads(bytes(await self.receive(size)))
        except RecursionError as error:
            raise ValueError("a message is nested too deeply") from error
        if not isinstance(fields, dict):
            raise ValueError("a message has no fields")
        return fields

    async def send(self, content: bytes | memoryview) -> None:
        await self._loop.sock_sendall(self._socket, content)

    async def receive(self, size: int) -> memoryview:
        """So many bytes, in a buffer of their own."""
        received = rest = memoryview(bytearray(size))
        while rest:
            count = await self._loop.sock_recv_into(self._socket, rest)
            if not count:
                raise ConnectionResetError(
                    "the connection was closed: the owner knows no such run, or it broke"
                )
            rest = rest[count:]
        return received

    def hang_up(self) -> None:
        """Whoever waits for the other side, here or there, learns that no more comes."""
        with contextlib.suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent. Not while somebody waits for it: asyncio would go on looking at the descriptor."""
        self._socket.close()


class HomeLoop:
    """The owner's loop, for writers in its process: in that loop, or in any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != self._process or self._loop.is_closed():
            work.close()
            raise WriteFailed(
                "the owner of this epoch is not in this process, or is closed: give writers in other "
                "processes a plan that was pickled, and not one that was inherited by a fork",
                is_permanent=True,
            )
        return await run_in(self._loop, work)


class OwnerService(ABC):
    """Lives in the owner's loop from `start` to `stop`."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._talks: set[asyncio.Task[None]] = set()
        # Those that have not shown the secret yet, and since when they could be heard, the oldest first.
        self._strangers: dict[asyncio.Task[None], float] = {}

    @abstractmethod
    async def _serve(self, fields: Mapping[str, Any], channel: Channel) -> None:
        """Talks with a writer whose first message, without the secret, was this.

        Hangs up by returning, or by raising OSError, ValueError or TimeoutError.
        """

    async def start(self, host: str) -> ServiceAddress:
        """Listens on a free port of this host (its address as the writers see it)."""
        try:
            listener = self._listener = await _listen(host)
        except OSError as error:
            raise InitFailed(
                f"cannot listen at {host!r} for writers: {error}. If that is no address of this machine, "
                f"share the sink at one (a pipeline: spark.driver.host)",
                is_permanent=False,
            ) from error
        self._accepting = asyncio.create_task(self._accept(listener))
        return ServiceAddress(Address(host, listener.getsockname()[1]), self._token)

    async def stop(self) -> None:
        """Hangs up on everybody. Idempotent."""
        ending = [*self._talks, *([self._accepting] if self._accepting is not None else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._accepting = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # too many open files: those who wait are heard later
                await asyncio.sleep(ACCEPT_BACKOFF_S)
                continue
            if len(self._talks) >= MAX_CONNECTIONS:
                connection.close()
                continue
            talk = asyncio.create_task(self._talk(connection))
            self._talks.add(talk)
            talk.add_done_callback(partial(self._end, connection))

    def _meet_stranger(self) -> None:
        """One more is heard. Writers show the secret at once: who has been silent for long is none."""
        now = asyncio.get_running_loop().time()
        if len(self._strangers) >= MAX_STRANGERS:
            oldest, since = next(iter(self._strangers.items()))
            if now - since >= STRANGER_PATIENCE_S:
                del self._strangers[oldest]
                oldest.cancel()
        self._strangers[_this_task()] = now

    def _end(self, connection: socket.socket, talk: asyncio.Task[None]) -> None:
        connection.close()
        self._talks.discard(talk)
        self._strangers.pop(talk, None)

    async def _talk(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection)
            channel.expect_reader()
            self._meet_stranger()
            async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
                fields = await channel.hear()
            if self._knows(fields.pop(TOKEN, None)):
                self._strangers.pop(_this_task(), None)
                await self._serve(fields, channel)
        except (OSError, ValueError, TimeoutError):
            return  # gone, talking nonsense, or silent

    def _knows(self, token: object) -> bool:
        return isinstance(token, str) and hmac.compare_digest(token.encode(), self._token.encode())


async def dial(service: ServiceAddress, fields: Mapping[str, object]) -> Channel:
    """A writer's connection, with its first message said."""
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        channel = await Channel.open(service.address)
        try:
            await channel.say({TOKEN: service.token, **fields})
        except BaseException:
            channel.close()
            raise
    return channel


def require_shared(service: ServiceAddress | None) -> ServiceAddress:
    """The address that a plan takes along to other processes."""
    if service is None:
        raise ConfigError(
            "this plan is for writers in the owner's process: call the sink's `share()` before `open`, so "
            "that writers elsewhere can reach its owner"
        )
    return service


def owner_away(what_failed: str, service: ServiceAddress, error: Exception) -> WriteFailed:
    """What a writer raises that cannot talk with its owner."""
    return WriteFailed(
        f"{what_failed} the sink's owner at {service.address}: {str(error) or type(error).__name__}. Is the "
        "owner alive, and can this machine reach it? `share(host)` says where it listens"
    )


def _this_task() -> asyncio.Task[None]:
    return cast("asyncio.Task[None]", asyncio.current_task())


async def _listen(host: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, address = (await loop.getaddrinfo(host, 0, type=socket.SOCK_STREAM))[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(MAX_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener
