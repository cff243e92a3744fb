"""Checkpoints: snapshots of the state, often, and flushes of the segments, seldom; then old journal goes.

Both are taken beside the traffic. A snapshot is written part by part, with a pause for requests after every
few milliseconds; a flush goes partition by partition. A journal file is deleted when no part needs it:
below the position at which the snapshot began, and below the first batch of any partition that is not
flushed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

from semel.broker.decision import Decision
from semel.broker.topics import Partition
from semel.disk import Disk
from semel.errors import StorageError
from semel.journal.snapshot import SnapshotWriter
from semel.journal.writer import JournalWriter
from semel.server.life import Life
from semel.server.parts import encode_catalog, encode_group, encode_partition, encode_transaction
from semel.server.recovery import Layout
from semel.server.settings import Settings
from semel.storage.partition import Flushed, PartitionStore
from semel.wire.frames import Message

log = logging.getLogger(__name__)

SLICE_S: Final = 0.002
"""How long the loop may be kept by a snapshot at a time."""
LOOK_EVERY_S: Final = 0.2

Part = tuple[int, bytearray, int]
"""A stamp, the part itself, and from where on the journal is needed because of it."""

InWorker = Callable[[Callable[[], Any]], Awaitable[Any]]


class Checkpointer:
    """Takes checkpoints of one life."""

    def __init__(
        self,
        life: Life,
        disk: Disk,
        layout: Layout,
        settings: Settings,
        in_worker: InWorker,
        elapsed_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert isinstance(life.journal, JournalWriter)
        self.life = life
        self._journal = life.journal
        self._disk = disk
        self._layout = layout
        self._in_worker = in_worker
        self._elapsed_s = elapsed_s
        self._snapshot_every = settings.integer("snapshot.interval.bytes")
        self._flush_every = settings.integer("flush.interval.bytes")
        # From where the life before left off: short lives must not add up to a journal without end.
        self._snapshot_at = life.snapshot_at
        self._flushed_at = min(life.dirty.values(), default=self._journal.end)
        self._is_closing = asyncio.Event()
        self._in_last: dict[PartitionStore, Flushed] = {}
        """What the snapshot before says is flushed; that is as far back as a recovery goes."""

    async def run(self) -> None:
        """Until the life is over, or `close` is called. If a flush fails, StorageError: the life must end."""
        while not self.life.is_over and not self._is_closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_closing.wait(), LOOK_EVERY_S)
            if self._is_flush_due:
                await self.flush()
                await self._try_snapshot()
            elif self._journal.end - self._snapshot_at >= self._snapshot_every:
                await self._try_snapshot()
            elif not self._journal.reserve_ready:
                self._journal.restore_reserve()

    @property
    def _is_flush_due(self) -> bool:
        return self._journal.end - self._flushed_at >= self._flush_every

    def begin_close(self) -> None:
        """Let `run` come to its end. It must not be cancelled: a flush that nobody finishes is no flush."""
        self._is_closing.set()

    async def close(self) -> None:
        """After `run`: the last checkpoint of a life, so that the next start has little to read."""
        if self._is_flush_due:
            await self.flush()
        await self.snapshot()

    async def _try_snapshot(self) -> None:
        """A snapshot that fails harms nobody: the journal is kept, and the next one is tried in its time."""
        try:
            await self.snapshot()
        except StorageError as error:
            log.warning("no snapshot was taken, so the journal stays: %s", error)

    async def flush(self) -> None:
        """Make every dirty partition's segments durable, one after the other."""
        self._flushed_at = self._journal.end
        for partition in tuple(self.life.dirty):
            if self.life.is_over:
                return
            await self._flush(partition)

    async def _flush(self, partition: Partition) -> None:
        view = self.life.store.partition(partition.topic.topic_id, partition.index)
        shown = self.life.shown
        job = view.begin_flush()
        if job is not None:
            await self._in_worker(job.run)
            view.finish_flush(job)
        if view.flushed is not None and view.flushed.end_offset == partition.log.end_offset:
            self.life.dirty.pop(partition, None)
        elif job is not None and partition in self.life.dirty:
            # What was visible when the flush began is in it; what the journal has beyond that is not.
            # Without a job nothing was flushed: that of a cancelled checkpointer may never have run.
            self.life.dirty[partition] = max(self.life.dirty[partition], shown)

    async def snapshot(self) -> None:
        """Write the whole state to a new snapshot, and give back the journal that nobody needs any more."""
        self._snapshot_at = horizon = self._journal.end
        generation = self._journal.generation
        writer = await self._in_worker(
            lambda: SnapshotWriter(self._disk, self._layout.snapshots, generation=generation)
        )
        in_this: dict[PartitionStore, Flushed] = {}
        try:
            for parts in self._parts(in_this):
                horizon = min(horizon, *(needed for _, _, needed in parts))
                await self._in_worker(partial(_add, writer, parts))
            # The state may hold what is still queued: the snapshot counts only when all of that is on disk.
            await self._synced()
            synced = self._journal.synced
            needed_from = await self._in_worker(
                lambda: writer.finish(horizon, generation=generation, synced=synced)
            )
        except BaseException:
            await self._in_worker(writer.abandon)
            raise
        self._journal.delete_before(needed_from)
        for view, flushed in self._in_last.items():
            view.flush_recorded(flushed)
        self._in_last = in_this

    def _parts(self, in_this: dict[PartitionStore, Flushed]) -> Iterator[list[Part]]:
        """The state, a few milliseconds' worth at a time."""
        parts: list[Part] = []
        pause_at = self._elapsed_s() + SLICE_S
        for part in self._every_part(in_this):
            parts.append(part)
            if self._elapsed_s() >= pause_at:
                yield parts
                parts = []
                pause_at = self._elapsed_s() + SLICE_S
        if parts:
            yield parts

    def _every_part(self, in_this: dict[PartitionStore, Flushed]) -> Iterator[Part]:
        """Requests are served between two parts: what is gone by its turn is left to the journal."""
        broker = self.life.broker
        topics, groups = list(broker.catalog), list(broker.groups)
        transactions = list(broker.transactions.by_id.values())
        yield self._stamped(encode_catalog(broker))
        for topic in topics:
            for partition in topic.partitions:
                if topic.topic_id in broker.catalog.by_id:
                    yield self._partition_part(partition, in_this)
        for group in groups:
            if group.is_journaled and broker.groups.by_id.get(group.group_id) is group:
                yield self._stamped(encode_group(group))
        for transaction in transactions:
            if broker.transactions.by_id.get(transaction.transactional_id) is transaction:
                yield self._stamped(encode_transaction(transaction))

    def _stamped(self, part: bytearray) -> Part:
        return self._journal.end, part, self._journal.end

    def _partition_part(self, partition: Partition, in_this: dict[PartitionStore, Flushed]) -> Part:
        view = self.life.store.partition(partition.topic.topic_id, partition.index)
        if view.flushed is not None:
            in_this[view] = view.flushed
        end = self._journal.end
        return end, encode_partition(partition, view.flushed), self.life.dirty.get(partition, end)

    async def _synced(self) -> None:
        done = _Synced()
        self.life.submit(done, Decision(None, [], sync=True))
        await done.future


def _add(writer: SnapshotWriter, parts: list[Part]) -> None:
    for stamp, part, _ in parts:
        writer.add(stamp, [part])


class _Synced:
    """Waits for everything queued so far."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self, response: Message | None) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def refuse(self) -> None:
        if not self.future.done():
            self.future.set_exception(StorageError("the journal has failed"))
