"""The partitions that join one transaction of version 1, for many tasks that ask at once.

- One request is under way at a time, and what is wanted meanwhile shares the next.
- A request is nobody's own: whoever asked may be cancelled, and the others hear what came of it all the same.
- Nothing is sent from `end` on. A request that came after the end would open a transaction anew behind its
  owner's back; after the next epoch was given it would be fenced, as if another owner had come.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Set
from typing import TypeAlias

from semel.client.errors import TransactionStateError
from semel.client.metadata import TopicPartition

# Has the coordinator add partitions; what it raises is told to all who wait for them.
AddPartitions: TypeAlias = Callable[[Set[TopicPartition]], Awaitable[None]]


class Joins:
    """Who wants which partitions in, and which are."""

    __slots__ = ("_add", "_is_over", "_joined", "_request", "_wanted")

    def __init__(self, add: AddPartitions) -> None:
        self._add = add
        self._joined: set[TopicPartition] = set()
        self._wanted: set[TopicPartition] = set()
        self._request: asyncio.Task[None] | None = None
        self._is_over = False

    async def join(self, partitions: Iterable[TopicPartition]) -> None:
        """Returns once all of them have joined."""
        ours = set(partitions)
        while not ours <= self._joined:
            if self._is_over:
                raise TransactionStateError("the transaction is over: no partition joins it any more")
            self._wanted |= ours
            if self._request is None or self._request.done():
                self._request = asyncio.create_task(self._ask(), name="partitions join")
                self._request.add_done_callback(_heard)
            request = self._request
            await asyncio.wait((request,))  # which leaves it alone when we are cancelled
            if not request.cancelled():
                request.result()

    async def _ask(self) -> None:
        wanted, self._wanted = self._wanted - self._joined, set()
        await self._add(wanted)
        self._joined |= wanted

    def end(self) -> None:
        """The transaction is about to end. Idempotent."""
        self._is_over = True
        if self._request is not None:
            self._request.cancel()


def _heard(request: asyncio.Task[None]) -> None:
    """Whoever waited for it may be gone; that is no reason for asyncio to complain."""
    if not request.cancelled():
        request.exception()
