"""Transactions over a topic and a database: a pool of slots under one name.

    async with semel.transaction(kafka="localhost:9092", postgres=dsn, name="payments") as payments:
        async with payments.begin() as tx:
            await tx.execute("UPDATE accounts SET balance = balance - %s WHERE id = %s", (10, 7))
            await tx.publish("payments", b"10 from 7", key=b"7")

Both happen or neither does, whatever is killed, and when. `docs/design/atomic.md` says why. The end of a
transaction runs in a task of its own: a caller that is cancelled meanwhile does not leave it half done. A
slot whose transaction ended in doubt, or whose connections broke, is mended in the background, for later use.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import TupleRow

from semel.client.cluster import Cluster
from semel.client.coordinator import TWO_PHASE_VERSION
from semel.client.producer import PendingRecord
from semel.errors import FencedError, SemelError
from semel.sinks.atomic.database import Result, Saved, SlotRow, TransactionTable, connect, one_line
from semel.sinks.atomic.settings import DEFAULT_POOL, AtomicMetrics, AtomicSettings, check_name
from semel.sinks.atomic.slot import Recovered, Slot
from semel.sinks.errors import (
    BeginFailed,
    CommitFailed,
    ConnectionLost,
    FencedOut,
    InitFailed,
    SinkError,
    UnknownOutcome,
)
from semel.wire.apis import ApiKey
from semel.wire.records import Headers

if TYPE_CHECKING:
    from semel.sinks.atomic.blocking import BlockingAtomic

T = TypeVar("T")

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 10.0
# How long the caller of a failed transaction waits to learn whether it was fenced.
OWNER_PATIENCE_S: Final = 2.0


def transaction(
    *,
    kafka: str | Cluster,
    postgres: str,
    name: str,
    pool: int = DEFAULT_POOL,
    settings: AtomicSettings | None = None,
) -> "Atomic":
    """Opened by `async with`, or by `with` in a program without an event loop.

    `kafka` is the address of a broker with two-phase commit, or a cluster that is connected already;
    `postgres` a connection string. One process at a time has a `name`: opening it fences whoever had it.
    `pool` is how many transactions it can have at a time.
    """
    return Atomic(kafka, postgres, name, pool, settings)


class AtomicTransaction:
    """One transaction: statements and records that come to be together."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    @property
    def connection(self) -> AsyncConnection[TupleRow]:
        """The session itself, for COPY, cursors and the like. Never commit or roll back with it."""
        return self._slot.session.connection

    async def execute(self, query: str | bytes | sql.Composable, params: object = None) -> Result:
        """Runs a statement; `params` as psycopg takes them."""
        return await self._slot.execute(query, params)

    async def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> PendingRecord:
        """Queues a record; it is sent at the latest with the commit."""
        return await self._slot.publish(
            topic, value, key=key, partition=partition, timestamp_ms=timestamp_ms, headers=headers
        )


class Atomic:
    """The slots of one name. Several tasks have transactions at the same time, each in a slot of its own."""

    def __init__(
        self,
        kafka: str | Cluster,
        postgres: str,
        name: str,
        pool: int = DEFAULT_POOL,
        settings: AtomicSettings | None = None,
    ) -> None:
        check_name(name, pool)
        self.name = name
        self.pool = pool
        self.settings = settings or AtomicSettings()
        self.metrics = AtomicMetrics()
        self._postgres = postgres
        self._owns_cluster = isinstance(kafka, str)
        self._cluster = Cluster(kafka) if isinstance(kafka, str) else kafka
        self._slots: list[Slot] = []
        self._ready: asyncio.Queue[Slot] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fenced: FencedOut | None = None
        self._blocking: BlockingAtomic | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> "BlockingAtomic":
        from semel.sinks.atomic.blocking import BlockingAtomic

        self._blocking = BlockingAtomic(self)
        return self._blocking.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._blocking is not None
        self._blocking.__exit__(kind, error, trace)

    @property
    def oldest_prepared_s(self) -> float:
        """The age of the oldest transaction that is prepared and not completed: readers wait for it."""
        return max((each for slot in self._slots if (each := slot.prepared_for_s) is not None), default=0.0)

    # Opening

    async def open(self) -> None:
        """Takes the name: fences whoever had it, and ends what they left as the database says."""
        try:
            if self._owns_cluster:
                await self._cluster.connect()
            cluster_id = await check_broker(self._cluster)
            rows = await self._take()
            check_clusters(rows, cluster_id)
            await self._fill_pool(rows, cluster_id)
        except BaseException:
            await self.close()
            raise

    async def _fill_pool(self, rows: list[SlotRow], cluster_id: str | None) -> None:
        try:
            for row in rows:
                slot = self._make_slot(row, cluster_id)
                self._slots.append(slot)
                self._count(await self._recover(slot))
                if row.slot < self.pool:
                    self._ready.put_nowait(slot)
                else:
                    self._slots.remove(slot)
                    await slot.drop()
        except SinkError:
            raise
        except (SemelError, psycopg.Error) as error:
            raise InitFailed(f"{self.name!r} could not be opened: {one_line(error)}") from error

    async def _recover(self, slot: Slot) -> Recovered:
        try:
            return await slot.mend()
        except psycopg.Error:
            # Whoever fences ends sessions, too: a second look at the row tells that from a failure.
            return await slot.mend()

    async def _take(self) -> list[SlotRow]:
        connection = await connect(self._postgres, self.settings, f"semel {self.name}"[:63])
        table = TransactionTable(connection, self.settings)
        try:
            await table.create()
            await table.add_slots(self.name, self.pool)
            return await table.raise_owner(self.name, describe_owner())
        except psycopg.Error as error:
            raise InitFailed(f"{self.name!r} could not be opened: {one_line(error)}") from error
        finally:
            await connection.close()

    def _make_slot(self, row: SlotRow, cluster_id: str | None) -> Slot:
        return Slot(row, self._cluster, cluster_id, self._postgres, self.settings)

    def _count(self, recovered: Recovered) -> None:
        self.metrics.recovered_commits += recovered is Recovered.COMMITTED
        self.metrics.recovered_aborts += recovered is Recovered.ABORTED

    async def close(self) -> None:
        """Waits a little for what is being ended, and lets go. What is in doubt is for the next open."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots:
            await slot.release()
        self._slots.clear()
        if self._owns_cluster:
            await self._cluster.close()

    # Transactions

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AtomicTransaction]:
        """`async with atomic.begin() as tx:` commits if the block succeeds, and drops all of it if it raises.

        `CommitFailed`: nothing of it was or will be visible, and it may be run again. `UnknownOutcome`: the
        database did not say; look before running it again. `FencedOut`: another process has taken over.
        """
        slot = await self._acquire()
        try:
            yield AtomicTransaction(slot)
        except BaseException as error:
            await self._finish(self._drop(slot, error))
            if self._fenced is not None and isinstance(error, (SemelError, psycopg.Error)):
                raise self._fenced from error
            raise
        await self._finish(self._commit(slot))

    async def _acquire(self) -> Slot:
        self._require_owner()
        try:
            async with asyncio.timeout(self.settings.begin_timeout):
                while True:
                    slot = await self._ready.get()
                    if self._fenced is not None:
                        self._ready.put_nowait(slot)  # whoever else waits is to learn it, too
                        raise self._fenced
                    if await self._has_begun(slot):
                        return slot
        except TimeoutError:
            raise BeginFailed(
                f"all {self.pool} slots of {self.name!r} are in use, or wait for a server that is away: "
                f"none came free within {self.settings.begin_timeout:g} s"
            ) from None

    async def _has_begun(self, slot: Slot) -> bool:
        """False if its session was lost meanwhile; nothing has happened yet, so another slot will do."""
        try:
            await slot.begin()
        except ConnectionLost as error:
            log.info("a slot of %r is mended: %s", self.name, error)
            self._mend_later(slot)
            return False
        except BaseException:
            self._mend_later(slot)
            raise
        return True

    def _require_owner(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        if not self._slots:
            raise BeginFailed(f"{self.name!r} is not open")

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the end of a transaction to its end, also when the caller is cancelled."""
        await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("the end of a transaction of %r: %s", self.name, error)

    async def _drop(self, slot: Slot, why: BaseException) -> None:
        self.metrics.aborts += 1
        if isinstance(why, FencedError) or slot.session.is_lost:
            await self._ask_owner(slot)
            return
        try:
            await slot.roll_back()
        except (SemelError, psycopg.Error) as error:
            log.info("a slot of %r is mended after %s", self.name, one_line(error))
            self._mend_later(slot)
            return
        self._ready.put_nowait(slot)

    async def _commit(self, slot: Slot) -> None:
        started = time.monotonic()
        try:
            pair = await slot.prepare()
            await slot.save(pair)
        except (SemelError, psycopg.Error) as error:
            raise await self._refused(slot, error) from error
        try:
            await slot.decide()
        except CommitFailed as error:
            raise await self._refused(slot, error) from error
        except UnknownOutcome as error:
            await self._find_out(slot, error)
        else:
            await self._complete(slot)
        self.metrics.commits += 1
        self.metrics.commit_latency.observe(time.monotonic() - started)

    async def _refused(self, slot: Slot, error: Exception) -> SinkError:
        """Before the decision: drops both halves, and says what that means for the caller."""
        self.metrics.failures += 1
        if isinstance(error, FencedOut):
            self._fence(error)
            self._mend_later(slot)
            return error
        await self._drop(slot, error)
        if self._fenced is not None:
            return self._fenced
        if isinstance(error, CommitFailed):
            return error
        return CommitFailed(f"the transaction was not committed: {one_line(error)}")

    async def _complete(self, slot: Slot) -> None:
        """After the decision: nothing that happens here undoes it."""
        try:
            await slot.complete()
        except FencedError as error:
            await self._ask_owner(slot)
            if self._fenced is not None:
                raise FencedOut(
                    f"{self._fenced}. Its last transaction is committed in the database, and whoever took "
                    f"over publishes its records"
                ) from error
        except SemelError as error:
            log.warning(
                "a transaction of %r is committed; its records become visible once the broker answers: %s",
                self.name,
                one_line(error),
            )
            self._mend_later(slot)
        else:
            self._ready.put_nowait(slot)

    async def _find_out(self, slot: Slot, lost: UnknownOutcome) -> None:
        """The database did not answer COMMIT: its row tells. Raises where it was not committed."""
        txn = slot.txn
        mending = self._mend_later(slot)
        done, _ = await asyncio.wait({mending}, timeout=self.settings.commit_timeout)
        saved = mending.result() if done else slot.saved
        if done and saved is None:
            raise FencedOut(f"{self._fenced}. Its last transaction may be committed: look") from lost
        if saved is None:
            self.metrics.failures += 1
            raise UnknownOutcome(
                f"{lost}. Whether it was committed was not to be learned within "
                f"{self.settings.commit_timeout:g} s: look before doing it again. Both halves will agree"
            )
        if saved.txn != txn:
            self.metrics.failures += 1
            raise CommitFailed(f"the transaction was not committed: {lost}") from lost

    async def _ask_owner(self, slot: Slot) -> None:
        """Someone may have taken over: Kafka said so, or a session was ended. The row's owner tells."""
        mending = self._mend_later(slot)
        await asyncio.wait({mending}, timeout=OWNER_PATIENCE_S)

    # Mending

    def _mend_later(self, slot: Slot) -> asyncio.Task[Saved | None]:
        return self._start(self._mend(slot))

    async def _mend(self, slot: Slot) -> Saved | None:
        """Tries until the slot is fit for use; None if it is somebody else's. Otherwise what its row said."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                recovered = await slot.mend()
            except FencedOut as error:
                self._fence(error)
                await slot.drop()
                self._ready.put_nowait(slot)
                return None
            except (SemelError, psycopg.Error) as error:
                log.info("a slot of %r is not mended yet: %s", self.name, one_line(error))
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
                continue
            self.metrics.mended += 1
            self._count(recovered)
            saved = slot.saved
            self._ready.put_nowait(slot)
            return saved

    def _fence(self, error: FencedOut) -> None:
        if self._fenced is None:
            log.error("%s", error)
            self._fenced = error


async def check_broker(cluster: Cluster) -> str | None:
    """Refuses a broker without two-phase commit, before anybody is fenced; returns the cluster's id."""
    connection = await cluster.any_connection()
    if connection.versions.get(ApiKey.INIT_PRODUCER_ID, (0, 0))[1] < TWO_PHASE_VERSION:
        raise InitFailed(
            f"{connection.peer} has no two-phase commit (KIP-939), so it cannot share a transaction with a "
            "database: use Semel with transaction.two.phase.commit.enable=true"
        )
    return (await cluster.view()).cluster_id


def check_clusters(rows: list[SlotRow], cluster_id: str | None) -> None:
    for row in rows:
        if row.pair is not None and row.cluster_id != cluster_id:
            raise InitFailed(
                f"transactional id {row.transactional_id!r} may have a prepared transaction on cluster "
                f"{row.cluster_id!r}, and this is {cluster_id!r}: connect to that one, or, if it is gone, "
                f"delete the rows of {row.name!r}"
            )


def describe_owner() -> str:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} (since {since})"
