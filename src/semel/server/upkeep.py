"""Upkeep: retention, compaction, idle connections. What nobody asks for and everybody expects."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from semel.broker.decision import Decision
from semel.broker.journal_messages import LogStartMoved, ProducersExpired
from semel.broker.topics import Partition
from semel.broker.transactions.timeouts import forget_idle
from semel.errors import StorageError
from semel.log.settings import UNLIMITED
from semel.server.checkpoint import InWorker
from semel.server.idle_producers import IdleProducers
from semel.server.life import Life
from semel.storage.partition import PartitionStore

if TYPE_CHECKING:
    from semel.server.node import Node

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
PARTITIONS_PER_TURN: Final = 200
"""How many partitions are looked at before other work gets its turn ..."""
IDS_PER_TURN: Final = 1000
"""... and how many transactional ids."""


class Upkeep:
    """Runs what is due, until it is cancelled."""

    def __init__(self, node: Node) -> None:
        self._node = node
        settings = node.settings
        self._retention_every_ms = settings.integer("log.retention.check.interval.ms")
        self._compaction_every_ms = settings.integer("log.cleaner.backoff.ms")
        self._idle_producers = IdleProducers(settings.integer("producer.id.expiration.ms"))
        self._idle_limit_ms = settings.integer("connections.max.idle.ms")

    async def run(self) -> None:
        now_ms = self._node.clock.monotonic_ms
        retention_at = now_ms() + self._retention_every_ms
        compaction_at = now_ms() + self._compaction_every_ms
        idle_at = now_ms() + self._idle_limit_ms // 4
        while True:
            await asyncio.sleep(TICK_S)
            if now_ms() >= retention_at:
                await self.retain()
                retention_at = now_ms() + self._retention_every_ms
            if now_ms() >= compaction_at:
                await self.compact()
                compaction_at = now_ms() + self._compaction_every_ms
            if now_ms() >= idle_at:
                self.close_idle()
                idle_at = now_ms() + self._idle_limit_ms // 4

    async def retain(self) -> None:
        """Move the start of every log past what is too old or too much; forget idle producers."""
        await self._forget_transactional_ids()
        partitions = [partition for topic in self._node.life.broker.catalog for partition in topic.partitions]
        for count, partition in enumerate(partitions, start=1):
            self._retain(partition)
            self._forget_producers(partition)
            if count % PARTITIONS_PER_TURN == 0:
                await asyncio.sleep(0)
        self._idle_producers.keep(partitions)

    async def _forget_transactional_ids(self) -> None:
        ids = list(self._node.life.broker.transactions.by_id)
        for first in range(0, len(ids), IDS_PER_TURN):
            some = ids[first : first + IDS_PER_TURN]
            decision = forget_idle(self._node.life.broker, some, self._node.now())
            if decision.entries:
                self._submit(decision)
            await asyncio.sleep(0)

    def _retain(self, partition: Partition) -> None:
        try:
            moved = retention(self._node.life, partition, self._node.clock.wall_ms())
        except StorageError as error:
            # One partition that cannot be read must not keep the others from their retention.
            log.warning("%s-%d cannot be looked at: %s", partition.topic.name, partition.index, error)
            return
        if moved is None:
            return
        self._submit(Decision(None, [moved]))
        log.info(
            "%s-%d now begins at %d: retention", partition.topic.name, partition.index, moved.log_start_offset
        )

    def _forget_producers(self, partition: Partition) -> None:
        idle = self._idle_producers.look(partition, self._node.now())
        if idle:
            entry = ProducersExpired(
                topic_id=partition.topic.topic_id, index=partition.index, producer_ids=idle
            )
            self._submit(Decision(None, [entry]))

    def _submit(self, decision: Decision) -> None:
        try:
            self._node.life.submit(None, decision)
        except StorageError:
            return  # The disk has failed; the next life has upkeep, too.

    async def compact(self) -> None:
        """Compact the partitions that need it, one at a time."""
        for topic in tuple(self._node.life.broker.catalog):
            if topic.settings.log.compacts:
                for partition in topic.partitions:
                    await self._compact(partition)

    async def _compact(self, partition: Partition) -> None:
        life = self._node.life
        if life.is_over:
            return
        if self._node.is_in_memory:
            _count_as_flushed(life.store.partition(partition.topic.topic_id, partition.index))
        await compact(life, partition, self._node.clock.wall_ms(), self._node.in_worker)

    def close_idle(self) -> None:
        now_ms = self._node.clock.monotonic_ms()
        for connection in tuple(self._node.connections):
            if now_ms - connection.last_active_ms > self._idle_limit_ms:
                connection.close(f"nothing heard for {self._idle_limit_ms} ms (connections.max.idle.ms)")


async def compact(life: Life, partition: Partition, now_ms: int, in_worker: InWorker) -> None:
    """Compact a partition if it needs it. What the disk keeps it from is left to the next time."""
    view = life.store.partition(partition.topic.topic_id, partition.index)
    last_batches = {
        producer.producer_id: producer.batches[-1].last_offset
        for producer in partition.log.producers.values()
        if producer.batches
    }
    name = f"{partition.topic.name}-{partition.index}"
    try:
        job = view.begin_compaction(
            now_ms, partition.topic.settings.log, partition.log.last_stable_offset, last_batches
        )
    except StorageError as error:
        log.warning("%s cannot be compacted: %s", name, error)
        return
    while job is not None:
        try:
            await in_worker(job.run)
        except StorageError as error:
            log.warning("%s was not compacted: %s", name, error)
            return
        job = view.finish_compaction(job)


def _count_as_flushed(view: PartitionStore) -> None:
    """Compaction stays below what a recovery could go back to; in memory there is none to go back."""
    job = view.begin_flush()
    if job is not None:
        job.run()
        view.finish_flush(job)
    if view.flushed is not None:
        view.flush_recorded(view.flushed)


def retention(life: Life, partition: Partition, now_ms: int) -> LogStartMoved | None:
    """The entry by which a log begins later, if some of it is too old or too much."""
    settings = partition.topic.settings.log
    if life.is_over or not settings.deletes:
        return None
    if settings.retention_ms == UNLIMITED and settings.retention_bytes == UNLIMITED:
        return None
    view = life.store.partition(partition.topic.topic_id, partition.index)
    offset = view.retention_point(
        now_ms,
        retention_ms=settings.retention_ms,
        retention_bytes=settings.retention_bytes,
        limit_offset=partition.log.high_watermark,
    )
    if offset is None or offset <= partition.log.log_start_offset:
        return None
    return LogStartMoved(topic_id=partition.topic.topic_id, index=partition.index, log_start_offset=offset)
