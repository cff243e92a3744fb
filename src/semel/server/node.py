"""The node: requests come in, lives come and go.

A node has one life at a time (`semel.server.life`). When the disk fails the life is over: what was durable
is answered, what waited is refused with an error that clients retry, readers go on with what they could
see, and a new life is built from the disk, again and again until it works. Nothing is ever retried in
place.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter_ns
from typing import Final, TypeVar

from semel.broker.core import Broker, Identity, Limits
from semel.broker.counters import Counters
from semel.broker.decision import Caller, Decision, Now, Parked
from semel.broker.groups.settings import GroupSettings
from semel.broker.produce import produce
from semel.broker.recompression import Recompression
from semel.broker.tick import tick
from semel.broker.transactions.hearing import Hearing
from semel.broker.transactions.timeouts import start_clocks
from semel.disk import Disk, Lock
from semel.errors import CorruptionError, ProtocolError, StorageError
from semel.journal.settings import JournalSettings
from semel.journal.writer import JournalWriter
from semel.server.apis import ServedApi, api_versions, served_apis
from semel.server.building import build_life, write_placements
from semel.server.checkpoint import Checkpointer
from semel.server.clock import Clock
from semel.server.connection import Connection, Slot
from semel.server.fetch import Fetcher
from semel.server.fetch_sessions import FetchSessions
from semel.server.identity import load_identity, new_cluster_id
from semel.server.large_requests import COUNTED_FRAME_BYTES, most_elements
from semel.server.life import Job, Journal, Life
from semel.server.list_offsets import list_offsets
from semel.server.log_dirs import alter_replica_log_dirs, describe_log_dirs
from semel.server.memory_journal import MemoryJournal
from semel.server.metrics import Metrics
from semel.server.planted import check_allowed, planted_apis, planted_life
from semel.server.quorum import describe_quorum
from semel.server.quotas import ClientMeters
from semel.server.recovery import Layout
from semel.server.settings import Settings
from semel.server.space import SpaceGuard
from semel.server.upkeep import Upkeep
from semel.storage.memory import MemoryDisk
from semel.storage.store import Store
from semel.wire.apis import ApiKey
from semel.wire.counting import check_elements
from semel.wire.errors import ErrorCode
from semel.wire.frames import Message
from semel.wire.messages.alter_replica_log_dirs import AlterReplicaLogDirsRequest
from semel.wire.messages.describe_log_dirs import DescribeLogDirsRequest
from semel.wire.messages.describe_quorum import DescribeQuorumRequest
from semel.wire.messages.fetch import FetchRequest
from semel.wire.messages.list_offsets import ListOffsetsRequest

log = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.05
LAST_RETRY_S: Final = 5.0
SPACE_CHECK_S: Final = 1.0
TICK_S: Final = 0.05
"""How late a deadline of the core may be noticed."""
MEMORY_SEGMENT_BYTES: Final = 16 * 1024 * 1024
_MEMORY_EPOCH: Final = 1

T = TypeVar("T")


class Node:
    """One broker: its life of the moment, and everything that outlives a life."""

    def __init__(
        self, settings: Settings, clock: Clock, disk: Disk | None, on_fatal: Callable[[], None]
    ) -> None:
        """`disk` is None for a broker that keeps everything in memory. `on_fatal` should stop the broker."""
        self.settings = settings
        self.clock = clock
        fault = settings.text("testing.fault")
        check_allowed(fault, os.environ)
        self.apis: dict[int, ServedApi] = planted_apis(fault, served_apis())
        self._new_life = planted_life(fault)
        self.connections: set[Connection] = set()
        self.metrics = Metrics()
        self._counters = Counters()
        self._hearing = Hearing()
        self._opened_connections = 0
        self.meters = ClientMeters(clock.monotonic_ms)
        self.fetcher = Fetcher(
            settings.integer("fetch.max.bytes"),
            FetchSessions(
                settings.integer("max.incremental.fetch.session.cache.slots"),
                lambda: int.from_bytes(os.urandom(4)) >> 1,
            ),
            self.meters,
        )
        self.layout = Layout(Path(settings.text("log.dirs")))
        self._disk = disk
        self._lock: Lock | None = None
        self._identity = Identity("", settings.integer("node.id"))
        self._life: Life | None = None
        self.fatal_error: CorruptionError | None = None
        """Why the broker cannot go on, once `on_fatal` has been called."""
        self._on_fatal = on_fatal
        self._checkpointer: Checkpointer | None = None
        self._checkpointing: asyncio.Task[None] | None = None
        self._is_recovering = False
        self._space: SpaceGuard | None = None
        self._is_stopping = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="semel-files")
        self._codecs = ThreadPoolExecutor(1, thread_name_prefix="semel-codecs")
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._max_connections = settings.integer("max.connections")
        self._most_elements = most_elements(settings.integer("max.partitions"))

    @property
    def is_in_memory(self) -> bool:
        return self._disk is None

    @property
    def life(self) -> Life:
        assert self._life is not None, "the node has not been started"
        return self._life

    # Starting and stopping.

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._disk is None:
            self._begin(self._in_memory())
        else:
            self.layout.make(self._disk)
            self._lock = self._disk.lock(self.layout.lock)
            self._identity = load_identity(self._disk, self.layout.identity, self._identity.node_id)
            self._begin(await self._loop.run_in_executor(self._worker, self._build, None, 0, None))
            floor_bytes = self.settings.integer("storage.min.free.bytes")
            self._space = SpaceGuard(self._disk, self.layout.root, floor_bytes)
            self._spawn(self._watch_space(self._space))
        self._spawn(Upkeep(self).run())
        self._tick()

    async def stop(self) -> None:
        """Answer what waits, then leave everything on disk as a start would want to find it."""
        self._is_stopping = True
        if self._checkpointing is not None and self._checkpointer is not None:
            self._checkpointer.begin_close()
            await asyncio.gather(self._checkpointing, return_exceptions=True)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        life = self.life
        if self._disk is not None and not self._is_recovering:
            assert self._loop is not None
            assert isinstance(life.journal, JournalWriter)
            journal = life.journal
            assert self._checkpointer is not None
            try:
                await self._checkpointer.close()
            except StorageError as error:
                log.warning("no snapshot at the end, the next start replays more of the journal: %s", error)
            await self._loop.run_in_executor(self._worker, journal.close)
            life.release(journal.released)
        self._worker.shutdown(wait=True)
        self._codecs.shutdown(wait=True)
        if self._lock is not None:
            self._lock.release()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task ended: %s", task.exception(), exc_info=task.exception())

    # Lives.

    def new_broker(self, leader_epoch: int) -> Broker:
        settings = self.settings
        return Broker(
            leader_epoch,
            identity=self._identity,
            limits=Limits(
                default_partitions=settings.integer("num.partitions"),
                max_partitions=settings.integer("max.partitions"),
                auto_create_topics=settings.flag("auto.create.topics.enable"),
                max_transaction_timeout_ms=settings.integer("transaction.max.timeout.ms"),
                max_transaction_partitions=settings.integer("transaction.max.partitions"),
                max_open_transactions=settings.integer("max.open.transactions"),
                max_transactional_ids=settings.integer("max.transactional.ids"),
                transactional_id_expiration_ms=settings.integer("transactional.id.expiration.ms"),
                two_phase_commit=settings.flag("transaction.two.phase.commit.enable"),
            ),
            group_settings=GroupSettings(
                min_session_timeout_ms=settings.integer("group.min.session.timeout.ms"),
                max_session_timeout_ms=settings.integer("group.max.session.timeout.ms"),
                initial_rebalance_delay_ms=settings.integer("group.initial.rebalance.delay.ms"),
                max_size=settings.integer("group.max.size"),
                consumer_session_timeout_ms=settings.integer("group.consumer.session.timeout.ms"),
                consumer_heartbeat_interval_ms=settings.integer("group.consumer.heartbeat.interval.ms"),
                max_offset_metadata_chars=settings.integer("offset.metadata.max.bytes"),
                offsets_retention_ms=settings.integer("offsets.retention.minutes") * 60_000,
                retention_check_interval_ms=settings.integer("offsets.retention.check.interval.ms"),
            ),
            topic_defaults=self._topic_defaults(),
            settings=settings.described(),
            new_id=new_topic_id,
            counters=self._counters,
            hearing=self._hearing,
        )

    def _topic_defaults(self) -> dict[str, str]:
        defaults = self.settings.topic_defaults()
        if self.is_in_memory:
            # A segment is one piece of memory: of Kafka's gigabyte, no retention would give anything back.
            defaults.setdefault("segment.bytes", str(MEMORY_SEGMENT_BYTES))
        return defaults

    def _in_memory(self) -> Life:
        self._identity = Identity(new_cluster_id(), self._identity.node_id)
        store = Store(MemoryDisk(), Path("memory"))
        journal = MemoryJournal(lambda attachments: write_placements(store, attachments))
        return self.new_life(self.new_broker(_MEMORY_EPOCH), store, journal)

    def _build(self, limit: int | None, synced: int, predecessor: Store | None) -> Life:
        """A life from what is on disk; in a worker thread, since it may take long."""
        assert self._disk is not None
        settings = JournalSettings(
            durability="fsync" if self.settings.text("durability") == "fsync" else "os",
            file_bytes=self.settings.integer("journal.file.bytes"),
        )
        return build_life(
            self,
            self._disk,
            self.layout,
            settings,
            salt=new_salt,
            limit=limit,
            synced=synced,
            predecessor=predecessor,
        )

    def new_life(self, broker: Broker, store: Store, journal: Journal) -> Life:
        return self._new_life(broker, store, journal, self.in_background, self.metrics)

    def journal_released(self, journal: JournalWriter, position: int) -> None:
        self._from_thread(self._released, journal, position)

    def journal_failed(self, journal: JournalWriter, error: BaseException, durable: int) -> None:
        self._from_thread(self._failed, journal, error, durable)

    def _begin(self, life: Life) -> None:
        self._life = life
        self.fetcher.life = life
        start_clocks(life.broker, self.now())
        if isinstance(life.journal, JournalWriter):
            assert self._loop is not None
            life.journal.start(self._loop.call_soon)
            assert self._disk is not None
            self._checkpointer = Checkpointer(life, self._disk, self.layout, self.settings, self.in_worker)
            self._checkpointing = self._spawn(self._checkpoints(self._checkpointer))

    async def _checkpoints(self, checkpointer: Checkpointer) -> None:
        try:
            await checkpointer.run()
        except StorageError as error:
            life = checkpointer.life
            if not life.is_over:
                # The journal itself is sound: sync all of it before the life ends, so that nothing goes back.
                journal = life.journal
                assert isinstance(journal, JournalWriter)
                await self.in_worker(journal.close)
                # `written`: if the journal has failed as well, that is as far as it can be believed.
                self._failed(journal, error, journal.written)

    def _from_thread(self, call: Callable[..., None], *arguments: object) -> None:
        loop = self._loop
        assert loop is not None
        if not loop.is_closed():
            loop.call_soon_threadsafe(call, *arguments)

    def _released(self, journal: JournalWriter, position: int) -> None:
        if self._life is not None and self._life.journal is journal:
            self._life.release(position)

    def _failed(self, journal: JournalWriter, error: BaseException, durable: int) -> None:
        life = self._life
        if life is None or life.journal is not journal or life.is_over:
            return
        log.error("the disk failed: %s; refusing writes and recovering from position %d", error, durable)
        self._is_recovering = True
        # Without fsync, `durable` is the page cache: not enough for what had asked for the disk.
        life.end(journal.released, min(durable, journal.synced))
        self.refuse_parked()
        if not self._is_stopping:
            self._spawn(self._recover(life, durable, journal.synced))

    async def _recover(self, life: Life, durable: int, synced: int) -> None:
        delay_s = FIRST_RETRY_S
        while True:
            try:
                successor = await self.in_worker(lambda: self._build(durable, synced, life.store))
                break
            except CorruptionError as error:
                # Time will not help, and a start would refuse just the same: end, so that somebody looks.
                log.critical("cannot recover: %s", error)
                self.fatal_error = error
                self._on_fatal()
                return
            except StorageError as error:
                log.warning("cannot recover yet: %s; trying again in %.2f s", error, delay_s)
                await asyncio.sleep(delay_s)
                delay_s = min(LAST_RETRY_S, delay_s * 2)
        self._is_recovering = False
        self._begin(successor)
        life.wake_all()
        log.info("recovered: writes are taken again, leader epoch %d", successor.broker.leader_epoch)

    # Work on files.

    async def in_worker(self, work: Callable[[], T]) -> T:
        assert self._loop is not None
        return await self._loop.run_in_executor(self._worker, work)

    def in_background(self, job: Job) -> None:
        """Run a job that nobody waits for."""
        self._worker.submit(job.run).add_done_callback(_job_done)

    async def _watch_space(self, space: SpaceGuard) -> None:
        while True:
            space.look(self.life.journal.end)
            await asyncio.sleep(SPACE_CHECK_S)

    def _tick(self) -> None:
        """Ask the core what has come due, and again after a while. No task: it runs all the time."""
        if self._is_stopping:
            return
        assert self._loop is not None
        self._loop.call_later(TICK_S, self._tick)
        if self.life.is_over:
            return
        try:
            for decision in tick(self.life.broker, self.now()):
                self._submit(None, decision)
        except Exception:
            log.exception("a deadline could not be dealt with; this is a bug")

    def now(self) -> Now:
        return Now(self.clock.wall_ms(), self.clock.monotonic_ms())

    def render_metrics(self) -> str:
        return self.metrics.render(self.life.broker, len(self.connections), self.clock.wall_ms())

    # Connections and requests.

    def opened(self, connection: Connection) -> bool:
        if self._is_stopping or len(self.connections) >= self._max_connections:
            log.warning(
                "refusing %s: %d connections are open (max.connections)",
                connection.peer,
                len(self.connections),
            )
            return False
        self.connections.add(connection)
        self._opened_connections += 1
        connection.number = self._opened_connections
        return True

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self._life is not None:
            for slot in connection.slots:
                self._life.broker.groups.forget_waiter(slot)
        if connection.lifeline is not None and not (self._is_stopping or self._is_recovering):
            for decision in connection.lifeline.abort_held(self.life.broker, self.now()):
                self._submit(None, decision)

    def handle(self, slot: Slot, body: memoryview, pos: int) -> None:
        header = slot.header
        served = self.apis.get(header.api_key)
        if served is None or not served.api.serves(header.api_version):
            self._unsupported(slot, served)
            return
        if len(body) > COUNTED_FRAME_BYTES:
            check_elements(body, pos, header.api_key, header.api_version, self._most_elements)
        request, _ = served.decode(body, pos, header.api_version)
        slot.request = request
        self.metrics.requested(served.api.name)
        quotas = self.life.broker.quotas
        if not quotas.by_entity:
            self._answer(served, slot, request)
            return
        self.meters.admit(quotas, slot, request)
        began_ns = perf_counter_ns()
        self._answer(served, slot, request)
        self.meters.handled(quotas, slot, perf_counter_ns() - began_ns)

    def _answer(self, served: ServedApi, slot: Slot, request: Message) -> None:
        try:
            if served.prepare is not None:
                work = served.prepare(self.life.broker, request, slot.header.api_version)
                if work:
                    self._prepare(served, slot, request, work)
                    return
            if served.decide is not None:
                self._decide(served, slot, request)
            else:
                assert served.serve is not None
                served.serve(self, slot, request)
        except ProtocolError:
            raise
        except Exception:
            log.exception("a %s request of %s failed; this is a bug", served.api.name, slot.connection.peer)
            slot.connection.abort()

    def _prepare(self, served: ServedApi, slot: Slot, request: Message, work: list[Recompression]) -> None:
        """Have done elsewhere what takes too long; later requests of the connection wait for this one."""
        assert self._loop is not None
        slot.connection.hold()
        preparing = self._loop.run_in_executor(self._codecs, _recompress, work)
        preparing.add_done_callback(lambda prepared: self._prepared(served, slot, request, prepared))

    def _prepared(
        self, served: ServedApi, slot: Slot, request: Message, prepared: asyncio.Future[None]
    ) -> None:
        connection = slot.connection
        try:
            prepared.result()
            if slot.is_open:
                self._decide(served, slot, request)
        except Exception:
            log.exception("a %s request of %s failed; this is a bug", served.api.name, connection.peer)
            connection.abort()
        connection.release()

    def _unsupported(self, slot: Slot, served: ServedApi | None) -> None:
        header = slot.header
        if header.api_key == ApiKey.API_VERSIONS:
            # Version 0, whatever was asked for: that is what a client then falls back to.
            slot.answer_as_version(api_versions(self.apis, ErrorCode.UNSUPPORTED_VERSION), 0)
            return
        if served is None:
            raise ProtocolError(f"there is no API with key {header.api_key} here")
        raise ProtocolError(
            f"{served.api.name} version {header.api_version} is not spoken here, only "
            f"{served.api.min_version} to {served.api.max_version}"
        )

    def _decide(self, served: ServedApi, slot: Slot, request: Message) -> None:
        assert served.decide is not None
        if self._is_recovering and not served.reads_only:
            slot.refuse()
            return
        space = self._space
        if space is not None and served.decide is produce and space.refuses(self.life.journal.end):
            slot.refuse()
            return
        connection = slot.connection
        caller = Caller(
            slot.header.api_version,
            slot.header.client_id or "",
            connection.peer_host,
            connection.endpoint,
            slot,
            connection.number,
        )
        decision = served.decide(self.life.broker, request, caller, self.now())
        if self._is_recovering:
            # Readers go on: they find the broker and their partitions, whatever the old life ended on.
            if decision.entries or isinstance(decision.reply, Parked):
                slot.refuse()
            else:
                slot.answer(decision.reply)
            return
        if connection.lifeline is not None:
            connection.lifeline.hold(self.life.broker, decision.entries)
        self._submit(slot, decision)
        if decision.hang_up is not None:
            connection.close(decision.hang_up)

    def _submit(self, slot: Slot | None, decision: Decision) -> None:
        try:
            self.life.submit(slot, decision)
        except StorageError:
            # The writer has failed, and its report is on the way to this loop; it refuses what is parked.
            for waiter, _ in decision.others:
                waiter.refuse()
            if slot is not None and not isinstance(decision.reply, Parked):
                slot.refuse()

    def refuse_parked(self) -> None:
        """No other member will come for those who wait in a group: this life is over, or the broker stops."""
        groups = self.life.broker.groups
        for waiter in tuple(groups.parked):
            groups.forget_waiter(waiter)
            waiter.refuse()

    def fetch(self, slot: Slot, request: FetchRequest) -> None:
        self.fetcher.fetch(slot, request, self.clock.monotonic_ms())

    def list_offsets(self, slot: Slot, request: ListOffsetsRequest) -> None:
        slot.answer(list_offsets(self.life, request))

    @property
    def _log_dir(self) -> str:
        return "memory" if self._disk is None else str(self.layout.root.absolute())

    def describe_log_dirs(self, slot: Slot, request: DescribeLogDirsRequest) -> None:
        slot.answer(describe_log_dirs(self.life, self._log_dir, self._disk, request))

    def alter_replica_log_dirs(self, slot: Slot, request: AlterReplicaLogDirsRequest) -> None:
        slot.answer(alter_replica_log_dirs(self.life, self._log_dir, request))

    def describe_quorum(self, slot: Slot, request: DescribeQuorumRequest) -> None:
        endpoint = slot.connection.endpoint
        slot.answer(describe_quorum(self.life, endpoint, request, self.clock.wall_ms()))


def _recompress(work: list[Recompression]) -> None:
    for each in work:
        each.run()


def new_topic_id() -> bytes:
    return os.urandom(16)


def new_salt() -> int:
    return int.from_bytes(os.urandom(8))


def _job_done(done: Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        log.error("work on files failed, and is left to the next start: %s", error)
