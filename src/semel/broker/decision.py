"""What a request decides: the entries that the journal must hold, and the answer that leaves once it does."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Caller:
    """Who asks, in which version of the API, and which address of ours it should be told.

    Not frozen: one is made for every request, and that takes four times as long.
    """

    api_version: int
    client_id: str
    host: str
    endpoint: Endpoint
    waiter: Waiter
    """Kept by a handler that parks the request, and answered by a later decision."""
    principal: str = "User:ANONYMOUS"


class Parked:
    """In place of a reply: the request waits, and a later decision answers its waiter."""


PARKED: Final = Parked()


@dataclass(slots=True)
class Decision:
    """The outcome of one request, or of a deadline.

    No entries: nothing changes. A reply of None: the client wants none (acks=0), or there is no client.
    """

    reply: Message | Parked | None
    entries: list[Entry] = field(default_factory=list)
    others: list[tuple[Waiter, Message]] = field(default_factory=list)
    """Answers to requests that were parked before."""
    hang_up: str | None = None
    """Why the client must be cut off: it wants no answers, and has to notice somehow."""
    sync: bool = False
    """Must be on disk before the answers, whatever the durability setting says."""
