"""What a request decides: the entries that the journal must hold, and the answer that leaves once it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from semel.broker.entries import Entry
from semel.wire.frames import Message


class Now:
    """The time of a decision: wall time for what is told, monotonic time for what is waited for."""

    __slots__ = ("monotonic_ms", "wall_ms")

    def __init__(self, wall_ms: int, monotonic_ms: int) -> None:
        self.wall_ms = wall_ms
        self.monotonic_ms = monotonic_ms


class Waiter(Protocol):
    """Whoever waits for an answer: a request in line on its connection."""

    def answer(self, response: Message | None) -> None: ...

    def refuse(self) -> None:
        """There will be no answer: the disk has failed, or the broker stops. The client may try again."""


@dataclass(slots=True, frozen=True)
class Endpoint:
    """Where clients reach this broker; it depends on the listener that they came in through."""

    host: str
    port: int


class Caller:
    """Who asks, in which version of the API, and which address of ours it should be told.

    No dataclass: one is made for every request, and mypyc leaves what a dataclass makes to the interpreter.
    """

    __slots__ = ("api_version", "client_id", "connection", "endpoint", "host", "principal", "waiter")

    def __init__(
        self,
        api_version: int,
        client_id: str,
        host: str,
        endpoint: Endpoint,
        waiter: Waiter,
        connection: int = 0,
        principal: str = "User:ANONYMOUS",
    ) -> None:
        self.api_version = api_version
        self.client_id = client_id
        self.host = host
        self.endpoint = endpoint
        self.waiter = waiter
        """Kept by a handler that parks the request, and answered by a later decision."""
        self.connection = connection
        """Which connection it came by: a later one has a higher number."""
        self.principal = principal


class Parked:
    """In place of a reply: the request waits, and a later decision answers its waiter."""


PARKED: Final = Parked()


class Decision:
    """The outcome of one request, or of a deadline.

    No entries: nothing changes. A reply of None: the client wants none (acks=0), or there is no client.
    """

    __slots__ = ("entries", "hang_up", "others", "reply", "sync")

    def __init__(
        self,
        reply: Message | Parked | None,
        entries: list[Entry] | None = None,
        *,
        sync: bool = False,
    ) -> None:
        self.reply = reply
        self.entries: list[Entry] = [] if entries is None else entries
        self.others: list[tuple[Waiter, Message]] = []
        """Answers to requests that were parked before."""
        self.hang_up: str | None = None
        """Why the client must be cut off: it wants no answers, and has to notice somehow."""
        self.sync = sync
        """Must be on disk before the answers, whatever the durability setting says."""
