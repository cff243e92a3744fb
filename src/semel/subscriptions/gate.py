"""Commits wait while their member joins the group anew: they would name the old generation."""

import asyncio
from types import TracebackType


class CommitGate:
    """`async with gate` around a commit; `close` waits for those under way and holds up the others."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._inside = 0

    async def __aenter__(self) -> None:
        while not self._is_open.is_set():
            await self._is_open.wait()
        self._inside += 1
        self._is_empty.clear()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._is_empty.set()

    async def close(self, timeout_ms: int) -> bool:
        """Lets nobody in; False if somebody was still inside after the timeout."""
        self._is_open.clear()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True

    def open(self) -> None:
        self._is_open.set()
