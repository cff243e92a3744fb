"""The transactional ids of one partition: `group/topic/partition/slot`.

Slot 0 is the owner's own; the others are lent to deliveries, one transaction each at a time. Least recently
used first: Kafka answers a commit before it has written its markers, and an id that rests meanwhile does not
have to wait for them. The number of slots is in the partition's entry, so that a new owner knows what to
fence; therefore new slots are opened first, then an entry counts them, and only then are they lent.

Slots are spread over a few connections: Kafka handles one request of a connection at a time.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from semel.client.cluster import Cluster
from semel.client.metadata import TopicPartition
from semel.client.producer import ProducerOptions
from semel.client.shared_transaction import State, TransactionOptions
from semel.client.transactional_producer import ABORTABLE_STATES, TransactionalProducer
from semel.errors import SemelError

log = logging.getLogger(__name__)

FIRST_SLOTS: Final = 3
"""The owner's, and two that take turns."""
OPENED_AT_ONCE: Final = 16
"""InitProducerId requests under way at a time."""
# A statement leaves at once: its publisher waits for the offset.
STATEMENT_OPTIONS: Final = ProducerOptions(linger_ms=0)


def transactional_id(group_id: str, where: TopicPartition, slot: int) -> str:
    return f"{group_id}/{where.topic}/{where.partition}/{slot}"


class Slots:
    """The slots of one partition, opened as they are needed."""

    def __init__(
        self,
        clusters: Sequence[Cluster],
        group_id: str,
        where: TopicPartition,
        options: TransactionOptions,
        most: int,
        count_them: Callable[[], Awaitable[None]],
    ) -> None:
        self._clusters = clusters  # the same one, by different connections
        self._group_id = group_id
        self._where = where
        self._options = options
        self._most = most + 1
        self._count_them = count_them  # commits an entry that counts the slots opened
        self._slots: list[TransactionalProducer] = []
        self._idle: deque[TransactionalProducer] = deque()
        self._waiting: deque[asyncio.Future[TransactionalProducer]] = deque()
        self._growing: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        return len(self._slots)

    @property
    def own(self) -> TransactionalProducer:
        return self._slots[0]

    async def take(self, count: int) -> None:
        """Opens this many slots in all: aborts and fences whatever others have open in them."""
        first = len(self._slots)
        opened = [self._slot(index) for index in range(first, count)]
        limit = asyncio.Semaphore(OPENED_AT_ONCE)
        # All of them come to an end: one that is late must not fence a slot that is opened again meanwhile.
        outcomes = await asyncio.gather(*(_open(slot, limit) for slot in opened), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        self._slots += opened

    async def keep(self, count: int) -> None:
        """Leaves the slots beyond this many, which only had to be fenced."""
        for slot in self._slots[count:]:
            await slot.close()
        del self._slots[count:]

    def lend_all(self) -> None:
        """An entry counts all slots: they may be used."""
        self._idle.extend(self._slots[1:])

    async def borrow(self) -> TransactionalProducer:
        """An idle slot; opens more if there is none, or waits for one."""
        if self._idle:
            return self._idle.popleft()
        waiting: asyncio.Future[TransactionalProducer] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        if self.count < self._most and self._growing is None:
            self._growing = asyncio.create_task(self._grow(), name=f"more slots for {self._where}")
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.give_back(waiting.result())
            raise

    def give_back(self, slot: TransactionalProducer) -> None:
        if slot.state is not State.READY:
            return  # fenced or in doubt: the partition is lost, or will be taken over anew
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(slot)
                return
        self._idle.append(slot)

    async def _grow(self) -> None:
        first = len(self._slots)
        try:
            await self.take(min(2 * first, self._most))
            await self._count_them()
            for slot in self._slots[first:]:
                self.give_back(slot)
        except SemelError as error:
            log.warning("more slots for %s could not be opened: %s", self._where, error)
        finally:
            self._growing = None

    def fail_waiting(self, error: Exception) -> None:
        """Nobody will get a slot any more."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error)

    async def close(self) -> None:
        """Aborts what is open and gives the ids up."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.gather(self._growing, return_exceptions=True)
        await asyncio.gather(*(slot.close() for slot in self._slots), return_exceptions=True)
        self._slots.clear()
        self._idle.clear()

    def _slot(self, index: int) -> TransactionalProducer:
        name = transactional_id(self._group_id, self._where, index)
        cluster = self._clusters[(self._where.partition + index) % len(self._clusters)]
        return TransactionalProducer(cluster, name, self._options, STATEMENT_OPTIONS)


async def _open(slot: TransactionalProducer, limit: asyncio.Semaphore) -> None:
    async with limit:
        await slot.open()


def can_abort(slot: TransactionalProducer) -> bool:
    return slot.state in ABORTABLE_STATES
