"""A simulated computer that runs the real broker: its clock, its disk, its threads' work, its crashes.

Nothing runs by itself. The writer of the journal, its reports to the loop, the work on files and the
checkpoints are queues, and whoever drives the machine decides what goes on next. A crash may come at any
operation of the disk. Between two steps the machine can be asked what would be left if the power failed now.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from semel.broker.core import Broker, Identity, Limits
from semel.broker.decision import Caller, Decision, Endpoint, Now, Parked
from semel.broker.tick import tick
from semel.broker.transactions.hearing import Hearing
from semel.broker.transactions.timeouts import start_clocks
from semel.errors import CorruptionError, StorageError
from semel.journal.settings import Durability, JournalSettings
from semel.journal.writer import JournalWriter
from semel.server.apis import ServedApi, served_apis
from semel.server.building import build_life
from semel.server.checkpoint import Checkpointer
from semel.server.life import Job, Life
from semel.server.planted import NO_FAULT, planted_apis, planted_life
from semel.server.recovery import Layout
from semel.server.settings import Settings
from semel.server.upkeep import compact, retention
from semel.storage.store import Store
from semel.testing.simdisk import Faults, PowerLoss, SimDisk
from semel.verify.ledger import Place, Violation
from semel.wire.frames import Message

JOURNAL_FILE_BYTES: Final = 24 * 1024
"""Small, so that a run rolls files."""
MAX_BUILDS: Final = 200
"""Attempts to come back up; with more the faults are no longer planned ones."""
START_MS: Final = 1_700_000_000_000
_ENDPOINT: Final = Endpoint("localhost", 9092)


@contextmanager
def silenced() -> Iterator[None]:
    """Without logs: a broker that crashes all the time has much to say."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


class Unlucky(random.Random):
    """Dice that always fall badly: of a forked disk nothing survives that was not synced."""

    def random(self) -> float:
        return 1.0


class Call:
    """A request that was sent, and its answer."""

    __slots__ = ("is_answered", "response")

    def __init__(self) -> None:
        self.is_answered = False
        self.response: Message | None = None
        """None: refused, or never answered. The client does not know more."""

    def answer(self, response: Message | None) -> None:
        self.is_answered = True
        self.response = response

    def refuse(self) -> None:
        self.is_answered = True


class FileWork:
    """Work that a coroutine of the loop waits for."""

    __slots__ = ("_work", "done")

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def run(self) -> None:
        try:
            result = self._work()
        except BaseException as error:
            if not self.done.done():
                self.done.set_exception(error)
                self.done.exception()
            if isinstance(error, PowerLoss):
                raise
            return
        if not self.done.done():
            self.done.set_result(result)


class Machine:
    """One broker on one simulated computer."""

    def __init__(
        self,
        seed: int,
        *,
        durability: Durability = "fsync",
        fault: str = NO_FAULT,
        disk: SimDisk | None = None,
    ) -> None:
        self.dice = random.Random(f"machine/{seed}")
        self.disk = disk or SimDisk(seed)
        self.layout = Layout(Path("/data"))
        self.layout.make(self.disk)
        self.journal_settings = JournalSettings(durability=durability, file_bytes=JOURNAL_FILE_BYTES)
        self.settings = Settings({})
        self.fault = fault
        self.apis: dict[int, ServedApi] = planted_apis(fault, served_apis())
        self.now_ms = START_MS
        self.is_recovering = False
        self.crashes = 0
        self._hearing = Hearing()
        self.recoveries = 0
        self._jobs: deque[Job] = deque()
        self._reports: deque[Callable[[], None]] = deque()
        self._background: dict[str, asyncio.Task[None]] = {}
        """Coroutines of the loop that wait for work on files: one checkpoint and one compaction at most."""
        self._checkpointer: Checkpointer | None = None
        self._is_dark = False
        self._durable = 0
        self.life = self._start()

    # The host of a life.

    def new_broker(self, leader_epoch: int) -> Broker:
        return Broker(
            leader_epoch,
            identity=Identity("simulation", 0),
            limits=Limits(two_phase_commit=True),
            topic_defaults={},
            settings=[],
            new_id=partial(self.dice.randbytes, 16),
            hearing=self._hearing,
        )

    def new_life(self, broker: Broker, store: Store, journal: JournalWriter) -> Life:
        return planted_life(self.fault)(broker, store, journal, self.in_background)

    def in_background(self, job: Job) -> None:
        self._jobs.append(job)

    def journal_released(self, journal: JournalWriter, position: int) -> None:
        self._reports.append(partial(self._released, journal, position))

    def journal_failed(self, journal: JournalWriter, error: BaseException, durable: int) -> None:
        if isinstance(error, PowerLoss):
            self._is_dark = True
        elif isinstance(error, Exception) and not isinstance(error, StorageError):
            raise error
        else:
            self._reports.append(partial(self._failed, journal, durable))

    def _released(self, journal: JournalWriter, position: int) -> None:
        if self.life.journal is journal:
            self.life.release(position)

    def _failed(self, journal: JournalWriter, durable: int) -> None:
        if self.life.journal is journal and not self.life.is_over:
            self.is_recovering = True
            self._durable = durable
            self.life.end(journal.released, min(durable, journal.synced))

    # Requests.

    def now(self) -> Now:
        return Now(self.now_ms, self.now_ms)

    def deliver(self, call: Call, request: Message, version: int, connection: int = 0) -> None:
        """A request arrives: what the node does with it."""
        served = self.apis[request.API_KEY]
        assert served.decide is not None
        if self.is_recovering:
            call.refuse()
            return
        caller = Caller(version, "simulation", "localhost", _ENDPOINT, call, connection)
        self.submit(call, served.decide(self.life.broker, request, caller, self.now()))

    def submit(self, call: Call | None, decision: Decision) -> None:
        try:
            self.life.submit(call, decision)
        except StorageError:
            if call is not None and not isinstance(decision.reply, Parked):
                call.refuse()

    def tick(self) -> None:
        if not self.life.is_over:
            for decision in tick(self.life.broker, self.now()):
                self.submit(None, decision)

    def retain(self, place: Place) -> None:
        """Look whether a partition has too much."""
        partition = self.life.broker.catalog.partition(*place)
        if partition is not None:
            moved = retention(self.life, partition, self.now_ms)
            if moved is not None:
                self.submit(None, Decision(None, [moved]))

    # Steps. Each says whether there was anything to do.

    @property
    def journal(self) -> JournalWriter:
        journal = self.life.journal
        assert isinstance(journal, JournalWriter)
        return journal

    def write(self) -> bool:
        """One cycle of the journal's writer."""
        did = self.journal.step()
        if self._is_dark:
            self.crash()
        return did

    def report(self) -> bool:
        """The loop hears the next report of the journal's writer."""
        if not self._reports:
            return False
        self._reports.popleft()()
        return True

    def work(self) -> bool:
        """The thread for work on files takes its next job."""
        if not self._jobs:
            return False
        try:
            self._jobs.popleft().run()
        except PowerLoss:
            self.crash()
        except CorruptionError:
            raise
        except StorageError:
            pass  # Left to the next start, as the node does.
        return True

    def recover(self) -> bool:
        """Build the next life after a failed write, once; it may fail again."""
        if not self.is_recovering:
            return False
        old = self.life
        try:
            self.life = self._build(self._durable, self.journal.synced, old.store)
        except PowerLoss:
            self.crash()
            return True
        except CorruptionError as error:
            raise Violation(f"recovery takes what it wrote for corrupt: {error}") from error
        except StorageError:
            return True
        self._began()
        self.recoveries += 1
        return True

    def _build(self, limit: int | None, synced: int, predecessor: Store | None) -> Life:
        return build_life(
            self,
            self.disk,
            self.layout,
            self.journal_settings,
            salt=partial(self.dice.getrandbits, 64),
            limit=limit,
            synced=synced,
            predecessor=predecessor,
        )

    def _began(self) -> None:
        self.is_recovering = False
        start_clocks(self.life.broker, self.now())

    # Checkpoints.

    def begin_checkpoint(self, *, flush: bool) -> None:
        if self.life.is_over:
            return
        if self._checkpointer is None or self._checkpointer.life is not self.life:
            in_worker = partial(self._in_worker, self.disk.life)
            self._checkpointer = Checkpointer(
                self.life, self.disk, self.layout, self.settings, in_worker, self.dice.random
            )
        self._spawn("checkpoint", partial(self._take, self._checkpointer, flush))

    def begin_compaction(self, place: Place) -> None:
        """Look whether a partition needs compaction, and if so do that beside everything else."""
        partition = self.life.broker.catalog.partition(*place)
        if partition is None or self.life.is_over or not partition.topic.settings.log.compacts:
            return
        in_worker = partial(self._in_worker, self.disk.life)
        self._spawn("compaction", partial(compact, self.life, partition, self.now_ms, in_worker))

    def _spawn(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._background:
            self._background[name] = asyncio.get_running_loop().create_task(work())

    async def _take(self, checkpointer: Checkpointer, flush: bool) -> None:
        life = checkpointer.life
        journal = self.journal
        try:
            if flush:
                await checkpointer.flush()
        except StorageError:
            if not life.is_over:
                # As the node does: the journal is sound, so all of it is synced before the life ends.
                journal.close()
                self._failed(journal, journal.written)
            return
        try:
            await checkpointer.snapshot()
        except StorageError:
            return

    async def _in_worker(self, disk_life: int, work: Callable[[], Any]) -> Any:
        if disk_life != self.disk.life:
            raise PowerLoss  # This process is no more.
        file_work = FileWork(work)
        self._jobs.append(file_work)
        return await file_work.done

    async def breathe(self) -> None:
        """Let checkpoints and compactions go on."""
        if not self._background:
            return
        await asyncio.sleep(0)
        for name, task in tuple(self._background.items()):
            if not task.done():
                continue
            del self._background[name]
            error = None if task.cancelled() else task.exception()
            if isinstance(error, PowerLoss) or self._is_dark:
                self.crash()
                return
            if error is not None:
                raise error

    # Ends.

    def crash(self) -> None:
        """The power fails, and the broker starts again."""
        self._end()
        self.disk.crash()
        self.life = self._start()

    def kill(self) -> None:
        """The process ends without a word, and another one starts."""
        self._end()
        self.disk.kill()
        self.life = self._start()

    def stop(self) -> None:
        """The process ends in good order: everything queued is written, and all is synced."""
        self.journal.close()
        if self._is_dark:
            self.crash()
            return
        while self.report():
            pass
        self.kill()

    def _end(self) -> None:
        self.crashes += 1
        self._hearing = Hearing()  # No connection outlives its process.
        self._jobs.clear()
        self._reports.clear()
        self._is_dark = False
        for task in self._background.values():
            task.add_done_callback(_forget)
            task.cancel()
        self._background.clear()

    def _start(self) -> Life:
        for _ in range(MAX_BUILDS):
            try:
                self.life = self._build(None, 0, None)
                self._began()
                return self.life
            except PowerLoss:
                self.disk.crash()
            except CorruptionError as error:
                raise Violation(f"a start takes what was written for corrupt: {error}") from error
            except StorageError:
                self.disk.kill()
        raise Violation(f"the broker did not come up in {MAX_BUILDS} attempts")

    def switch_off(self) -> None:
        """For good; nothing of it may go on by itself."""
        self._end()
        self.disk.kill()

    def heal(self) -> None:
        """From here on the disk does as it is told."""
        counts = self.disk.faults.counts
        self.disk.faults = Faults()
        self.disk.faults.counts = counts

    def fork(self, *, unlucky: bool) -> Machine:
        """What would be left if the power failed now: of what is not synced nothing, or some of it."""
        dice = Unlucky() if unlucky else random.Random(self.dice.random())
        disk = self.disk.fork(dice)
        disk.faults = Faults()
        disk.crash()
        return Machine(0, durability=self.journal_settings.durability, disk=disk)

    async def rest(self) -> None:
        """Until nothing is left to do."""
        while True:
            did = self.recover()
            did = self.write() or did
            did = self.report() or did
            did = self.work() or did
            await self.breathe()
            if not did and not self._background and not self.is_recovering and not self.life.waiting:
                return


def _forget(task: asyncio.Task[None]) -> None:
    """Look at the error of a task that nobody waits for, or asyncio complains."""
    if not task.cancelled():
        task.exception()
