"""One seeded run: clients, a network that delays and forgets, a machine that fails, and readers who remember.

The seed decides everything, so a seed that fails fails again.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

from semel.journal.settings import Durability
from semel.server.planted import NO_FAULT
from semel.simulate.clients import (
    TIMEOUT_MS,
    VERSION_1,
    VERSION_2,
    Ask,
    Client,
    IdempotentClient,
    Process,
    StageClient,
    TransactionalClient,
    TwoPhaseClient,
)
from semel.simulate.machine import Call, Machine
from semel.simulate.reading import Reader, check_life, read_page
from semel.verify.ledger import Ledger, Outcome, Place, Violation
from semel.wire.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from semel.wire.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from semel.wire.messages.init_producer_id import InitProducerIdRequest

STEPS: Final = 400
TOPICS: Final = {"log": 2, "in": 1, "out": 2}
SEGMENT_BYTES: Final = 600
RETENTION_BYTES: Final = 1500
_CREATE_TOPICS_VERSION: Final = 5
_DELETE_RECORDS_VERSION: Final = 1


class Line:
    """A client with its request on the way."""

    __slots__ = ("ask", "call", "client", "connection", "is_delivered", "process")

    def __init__(self, client: Client, connection: int) -> None:
        self.client = client
        self.connection = connection
        self.process: Process = client.process()
        self.ask: Ask = next(self.process)
        self.call = Call()
        self.is_delivered = False

    def hear(self) -> None:
        """The client gets its answer, or gives up waiting for one, and asks the next thing."""
        answer = self.call.response if self.call.is_answered else None
        self.call = Call()
        self.is_delivered = False
        self.ask = self.process.send(answer)

    def restart(self) -> None:
        self.process.close()
        self.client.killed()
        self.process = self.client.process()
        self.ask = next(self.process)
        self.call = Call()
        self.is_delivered = False


@dataclass(slots=True, frozen=True)
class Late:
    """A request that nobody waits for any more, and that may still arrive."""

    ask: Ask
    connection: int
    process: int
    """The process of the broker that has the connection."""


@dataclass(slots=True)
class Tally:
    """What happened in a run, or in many."""

    seeds: int = 0
    steps: int = 0
    committed: int = 0
    aborted: int = 0
    unknown: int = 0
    crashes: int = 0
    recoveries: int = 0
    checks: int = 0

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.committed += other.committed
        self.aborted += other.aborted
        self.unknown += other.unknown
        self.crashes += other.crashes
        self.recoveries += other.recoveries
        self.checks += other.checks


class Run:
    """One run from one seed."""

    def __init__(self, seed: int, *, steps: int = STEPS, fault: str = NO_FAULT) -> None:
        self.seed = seed
        self.dice = random.Random(f"run/{seed}")
        self.durability: Durability = "os" if self.dice.random() < 0.15 else "fsync"
        self.machine = Machine(seed, durability=self.durability, fault=fault)
        self.ledger = Ledger()
        self.places: list[Place] = [
            (topic, index) for topic, count in TOPICS.items() for index in range(count)
        ]
        self.readers = [
            Reader(place, committed=committed) for place in self.places for committed in (True, False)
        ]
        self.late: list[Late] = []
        self._steps = steps
        self.taken = 0
        self._lines: list[Line] = []
        self._connections = count(1)
        self._actions: list[Callable[[], None]] = []

    async def play(self) -> Tally:
        """Play the run to its end; raises Violation if a promise was broken."""
        await self._create_topics()
        self._lines = [Line(client, next(self._connections)) for client in self._clients()]
        actions, weights = zip(*self._moves(), strict=True)
        for _ in range(self._steps):
            self.taken += 1
            self.dice.choices(actions, weights)[0]()
            await self.machine.breathe()
        await self._finish()
        return self._tally()

    def _clients(self) -> list[Client]:
        log: list[Place] = [("log", 0), ("log", 1)]
        ledger, dice = self.ledger, self.dice
        old_or_new = VERSION_1 if dice.random() < 0.5 else VERSION_2
        stage = partial(
            StageClient,
            dice=dice,
            ledger=ledger,
            places=[("out", 0), ("out", 1)],
            group="stage",
            source=("in", 0),
            read=self._read_input,
        )
        return [
            IdempotentClient("idempotent", dice, ledger, log, VERSION_2),
            TransactionalClient("version-1", dice, ledger, log, VERSION_1, "txn-1"),
            TransactionalClient("version-2", dice, ledger, log, VERSION_2, "txn-2"),
            TransactionalClient("twin", dice, ledger, [*log, ("in", 0)], VERSION_2, "txn-2"),
            TwoPhaseClient("two-phase", dice, ledger, log, "txn-two-phase"),
            TransactionalClient("input", dice, ledger, [("in", 0)], VERSION_2, "txn-in"),
            stage("stage-a", versions=old_or_new),
            stage("stage-b", versions=VERSION_2),
        ]

    def _moves(self) -> list[tuple[Callable[[], None], float]]:
        return [
            (self._hear, 30),
            (self._deliver, 30),
            (self._deliver_late, 2),
            (self._impatience, 2),
            (self._kill_client, 0.5),
            (self._write, 14),
            (self._report, 14),
            (self._work, 8),
            (self._read, 10),
            (self._time_passes, 3),
            (self._recover, 4),
            (self._checkpoint, 0.8),
            (self._delete_records, 0.3),
            (self._trouble, 0.8),
            (self._crash, 0.25),
            (self._kill, 0.25),
            (self._stop, 0.15),
            (self._retain, 0.5),
            (self._what_if, 0.8),
        ]

    # The network and the clients.

    def _hear(self) -> None:
        answered = [line for line in self._lines if line.call.is_answered]
        if answered:
            self.dice.choice(answered).hear()

    def _deliver(self) -> None:
        waiting = [line for line in self._lines if not line.is_delivered]
        if waiting:
            line = self.dice.choice(waiting)
            line.is_delivered = True
            self.machine.deliver(line.call, line.ask.make(), line.ask.version, line.connection)
            if self.dice.random() < 0.03 and line.ask.may_repeat:
                self._may_arrive_late(line)

    def _impatience(self) -> None:
        """A client waits no longer. Its request may be under way, or carried out, or both."""
        line = self.dice.choice(self._lines)
        self._leave_connection(line)
        line.call = Call()
        line.hear()

    def _leave_connection(self, line: Line) -> None:
        """The client goes on by another connection; what is under way by this one may arrive, or never."""
        if not line.is_delivered:
            self._may_arrive_late(line)
        line.connection = next(self._connections)

    def _may_arrive_late(self, line: Line) -> None:
        self.late.append(Late(line.ask, line.connection, self.machine.crashes))

    def _deliver_late(self) -> None:
        if self.late:
            late = self.late.pop(self.dice.randrange(len(self.late)))
            if late.ask.may_repeat or late.process == self.machine.crashes:
                self.machine.deliver(Call(), late.ask.make(), late.ask.version, late.connection)

    def _kill_client(self) -> None:
        line = self.dice.choice(self._lines)
        self._leave_connection(line)
        line.restart()

    def _read_input(self, place: Place, offset: int) -> list[tuple[int, bytes]]:
        page = read_page(self.machine.life, place, offset, committed=True)
        for at, value in page.records:
            self.ledger.saw(place, at, value)
        return page.records

    # The machine.

    def _write(self) -> None:
        self.machine.write()

    def _report(self) -> None:
        self.machine.report()

    def _work(self) -> None:
        self.machine.work()

    def _recover(self) -> None:
        self.machine.recover()

    def _read(self) -> None:
        self.dice.choice(self.readers).read(self.machine.life, self.ledger)

    def _time_passes(self) -> None:
        self.machine.now_ms += self.dice.choice((1, 10, 100, 1000, 2000))
        self.machine.tick()

    def _checkpoint(self) -> None:
        self.machine.begin_checkpoint(flush=self.dice.random() < 0.5)

    def _delete_records(self) -> None:
        place = self.dice.choice((("log", 0), ("log", 1)))
        ends = self.ledger.ends.get(place)
        if ends is not None:
            offset = self.dice.randint(ends.start, ends.high)
            partitions = [DeleteRecordsPartition(partition_index=place[1], offset=offset)]
            request = DeleteRecordsRequest(topics=[DeleteRecordsTopic(name=place[0], partitions=partitions)])
            self.machine.deliver(Call(), request, _DELETE_RECORDS_VERSION)

    def _trouble(self) -> None:
        """Something will go wrong at one of the next operations of the disk."""
        faults = self.machine.disk.faults
        distance = self.dice.randint(1, 10)
        if self.durability == "os":
            # A failed sync may take from the cache what was promised no more than the cache.
            faults.fail("write", faults.counts["write"] + distance)
        elif self.dice.random() < 0.5:
            faults.lose_power(faults.counts["any"] + distance)
        else:
            faults.fail("any", faults.counts["any"] + distance)

    def _crash(self) -> None:
        if self.durability == "fsync":
            self.machine.crash()

    def _kill(self) -> None:
        self.machine.kill()

    def _stop(self) -> None:
        self.machine.stop()

    def _retain(self) -> None:
        self.machine.retain(("log", self.dice.randrange(2)))

    def _what_if(self) -> None:
        """If the power failed now, would everything still be true that anybody saw or was told?"""
        if self.durability == "fsync":
            fork = self.machine.fork(unlucky=self.dice.random() < 0.7)
            check_life(fork.life, self.ledger, self.places)

    # Beginning and end.

    async def _create_topics(self) -> None:
        topics = [
            CreatableTopic(
                name=topic,
                num_partitions=count,
                replication_factor=1,
                configs=_configs(topic),
            )
            for topic, count in TOPICS.items()
        ]
        call = Call()
        self.machine.deliver(call, CreateTopicsRequest(topics=topics), _CREATE_TOPICS_VERSION)
        await self.machine.rest()
        assert call.is_answered

    async def _finish(self) -> None:
        """No more faults and clients; what is open runs into its timeout. Then everything must add up."""
        machine = self.machine
        machine.heal()
        await machine.rest()
        for line in self._lines:
            line.client.killed()
        check_life(machine.life, self.ledger, self.places)
        # A prepared transaction has no timeout: another owner, who keeps nothing, ends it.
        request = InitProducerIdRequest(transactional_id="txn-two-phase", transaction_timeout_ms=TIMEOUT_MS)
        machine.deliver(Call(), request, VERSION_2.init_producer_id)
        machine.now_ms += 2 * TIMEOUT_MS
        machine.tick()
        await machine.rest()
        check_life(machine.life, self.ledger, self.places, at_rest=True)
        machine.kill()
        check_life(machine.life, self.ledger, self.places, at_rest=True)

    def _tally(self) -> Tally:
        outcomes = [unit.outcome for unit in self.ledger.units.values()]
        return Tally(
            seeds=1,
            steps=self.taken,
            committed=outcomes.count(Outcome.COMMITTED),
            aborted=outcomes.count(Outcome.ABORTED),
            unknown=outcomes.count(Outcome.MAYBE),
            crashes=self.machine.crashes,
            recoveries=self.machine.recoveries,
            checks=self.ledger.checks,
        )


def _configs(topic: str) -> list[CreatableTopicConfig]:
    """Small segments; and what nobody reads in order to go on from there may be deleted."""
    configs = {"segment.bytes": str(SEGMENT_BYTES)}
    if topic == "log":
        configs["retention.bytes"] = str(RETENTION_BYTES)
    return [CreatableTopicConfig(name=name, value=value) for name, value in configs.items()]


@dataclass(slots=True, frozen=True)
class Failure:
    """A seed that broke a promise."""

    seed: int
    step: int
    text: str


async def play(seed: int, *, steps: int = STEPS, fault: str = NO_FAULT) -> Tally | Failure:
    """Play one seed. A broken promise is a failure, and so is any error that should not be."""
    run = Run(seed, steps=steps, fault=fault)
    try:
        return await run.play()
    except Violation as violation:
        return Failure(seed, run.taken, str(violation))
    except Exception as error:
        where = "".join(traceback.format_exception(error)[-2:])
        return Failure(seed, run.taken, f"{type(error).__name__}: {error}\n{where}")
    finally:
        run.machine.switch_off()
        # Twice: a checkpoint hears of it, and then of the file that it cannot remove any more.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
