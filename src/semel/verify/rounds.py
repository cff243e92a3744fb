"""Rounds of a verification: clients and faults for some time, then rest, then the proof from the history.

Each round has topics of its own, so that a soak of any length needs the memory of one round.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.group_offsets import fetch_offsets
from semel.client.metadata import TopicPartition
from semel.client.shared_transaction import SharedTransaction
from semel.errors import ConfigError, SemelError
from semel.verify.history import load
from semel.verify.ledger import Ledger, Outcome, Place, Violation
from semel.verify.plan import Part, Plan
from semel.verify.watcher import Watcher, read_everything

STOP_TIMEOUT_S: Final = 90.0
"""How long a client may take for its last transaction; then it is killed, as others were."""
COMMAND_TIMEOUT_S: Final = 120.0
CATCH_UP_S: Final = 1.0


@dataclass(slots=True)
class Tally:
    """What happened."""

    rounds: int = 0
    committed: int = 0
    aborted: int = 0
    unknown: int = 0
    records: int = 0
    """Read by the watching reader, committed."""
    client_kills: int = 0
    broker_kills: int = 0

    def add(self, other: Tally) -> None:
        self.rounds += other.rounds
        self.committed += other.committed
        self.aborted += other.aborted
        self.unknown += other.unknown
        self.records += other.records
        self.client_kills += other.client_kills
        self.broker_kills += other.broker_kills


@dataclass(slots=True)
class Round:
    """One round. `directory` gets the histories of its clients."""

    plan: Plan
    number: int
    directory: Path
    kills_left: int | None = None
    tally: Tally = field(default_factory=Tally)
    ledger: Ledger = field(default_factory=Ledger)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    _workers: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)
    _lives: dict[int, int] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return f"semel-verify-{self.run_id}"

    @property
    def source_topic(self) -> str:
        return f"{self.prefix}-in"

    @property
    def target_topic(self) -> str:
        return f"{self.prefix}-out"

    @property
    def group(self) -> str:
        return f"{self.prefix}-group"

    @property
    def places(self) -> list[Place]:
        return [
            (topic, index)
            for topic in (self.source_topic, self.target_topic)
            for index in range(self.plan.partitions)
        ]

    async def play(self) -> None:
        """Raises Violation if the broker broke a promise."""
        self.directory.mkdir(parents=True, exist_ok=True)
        await self._create_topics()
        watcher = Watcher(self.plan.bootstrap, self.places)
        watching = asyncio.create_task(watcher.watch())
        try:
            for worker in range(self.plan.producers + self.plan.stages):
                await self._start(worker)
            await self._trouble()
            await self._stop_workers()
            await self._take_ids()
            await asyncio.sleep(CATCH_UP_S)
        finally:
            for process in self._workers.values():
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self._prove(watcher)
        self.tally.rounds = 1

    async def _create_topics(self) -> None:
        async with Cluster(self.plan.bootstrap) as cluster:
            for topic in (self.source_topic, self.target_topic):
                await Admin(cluster).create_topic(
                    topic, partitions=self.plan.partitions, configs={"retention.ms": "-1"}
                )

    async def delete_topics(self) -> None:
        async with Cluster(self.plan.bootstrap) as cluster:
            await Admin(cluster).delete_topics([self.source_topic, self.target_topic])

    # Clients.

    async def _start(self, worker: int) -> None:
        self._lives[worker] = self._lives.get(worker, 0) + 1
        part = self._part(worker)
        self._workers[worker] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "semel.verify.worker", part.dumps()
        )

    def _part(self, worker: int) -> Part:
        plan = self.plan
        stage = worker - plan.producers
        is_stage = stage >= 0
        indexes = list(range(plan.partitions))
        life = self._lives[worker]
        return Part(
            bootstrap=plan.bootstrap,
            kind="stage" if is_stage else "producer",
            worker=worker,
            life=life,
            source_topic=self.source_topic,
            target_topic=self.target_topic if is_stage else self.source_topic,
            partitions=indexes[stage :: plan.stages] if is_stage else indexes,
            group=self.group,
            transactional_id=self._transactional_id(worker),
            transaction_version=1 + worker % 2,
            cut_connections_every_s=plan.cut_connections_every_s,
            history=str(self.directory / f"{worker}-{life}.history"),
            seed=plan.seed + self.number,
        )

    def _transactional_id(self, worker: int) -> str:
        return f"semel-verify-{worker}"

    # Faults.

    async def _trouble(self) -> None:
        """Kill clients and the broker at random moments until the round is over."""
        dice = random.Random(f"trouble/{self.plan.seed}/{self.number}")
        clock = asyncio.get_running_loop().time
        end_s = clock() + self.plan.round_s
        client_at_s = clock() + _wait_s(dice, self.plan.kill_clients_every_s)
        broker_at_s = clock() + _wait_s(
            dice, self.plan.kill_broker_every_s if self.plan.kill_command is not None else 0
        )
        while (now_s := clock()) < end_s and self.tally.broker_kills != self.kills_left:
            await asyncio.sleep(max(0.0, min(client_at_s, broker_at_s, end_s) - now_s))
            if clock() >= client_at_s:
                await self._kill_client(dice.randrange(len(self._workers)))
                client_at_s = clock() + _wait_s(dice, self.plan.kill_clients_every_s)
            if clock() >= broker_at_s:
                await self._kill_broker()
                broker_at_s = clock() + _wait_s(dice, self.plan.kill_broker_every_s)

    async def _kill_client(self, worker: int) -> None:
        process = self._workers[worker]
        process.kill()
        await process.wait()
        self.tally.client_kills += 1
        await self._start(worker)

    async def _kill_broker(self) -> None:
        for command in (self.plan.kill_command, self.plan.restart_command):
            if command is not None:
                await _run(command)
        self.tally.broker_kills += 1

    # Rest and proof.

    async def _stop_workers(self) -> None:
        for process in self._workers.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self._workers.values():
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()

    async def _take_ids(self) -> None:
        """Take each transactional id once more: what a killed client left open is aborted by that."""
        async with Cluster(self.plan.bootstrap) as cluster:
            for worker in self._workers:
                async with SharedTransaction(cluster, self._transactional_id(worker)):
                    pass

    async def _prove(self, watcher: Watcher) -> None:
        for path in sorted(self.directory.glob("*.history"), key=_worker_and_life):
            load(path, self.ledger)
        outcomes = [unit.outcome for unit in self.ledger.units.values()]
        self.tally.committed = outcomes.count(Outcome.COMMITTED)
        self.tally.aborted = outcomes.count(Outcome.ABORTED)
        self.tally.unknown = outcomes.count(Outcome.MAYBE)
        self.tally.records = len(watcher.seen)
        for place, offset, value in watcher.seen:
            self.ledger.saw(place, offset, value)
        for place, ends in watcher.ends:
            self.ledger.told_ends(place, ends)
        async with Cluster(self.plan.bootstrap) as cluster:
            contents = await read_everything(cluster, self.places)
            partitions = [TopicPartition(*place) for place in self.places]
            offsets = await fetch_offsets(cluster, self.group, partitions)
        for place, content in contents.items():
            for offset, value in content.stored.items():
                self.ledger.stored_at(place, offset, value)
        group_offsets = {
            (self.group, (where.topic, where.partition)): found.offset for where, found in offsets.items()
        }
        self.ledger.check_end(contents, group_offsets)


async def _run(command: str) -> None:
    process = await asyncio.create_subprocess_shell(
        command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, told = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        raise ConfigError(f"{command!r} did not end within {COMMAND_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise ConfigError(f"{command!r} failed with {process.returncode}: {told.decode(errors='replace')}")


def _told_by_client(text: str, directory: Path) -> list[str]:
    """The lines about the unit that the text names first."""
    named = re.search(r"unit (\d+)", text)
    if named is None:
        return []
    return [
        line
        for path in directory.glob("*.history")
        for line in path.read_text().splitlines()
        if line.split()[1] == named[1]
    ]


def _worker_and_life(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in path.stem.split("-"))


def _wait_s(dice: random.Random, mean_s: float) -> float:
    return dice.uniform(0.2, 1.8) * mean_s if mean_s > 0 else float("inf")


@dataclass(slots=True, frozen=True)
class CounterExample:
    """A broken promise, and what the client of the first unit in it wrote down."""

    text: str
    history: list[str]


async def verify(plan: Plan, duration_s: float, directory: Path, tally: Tally) -> CounterExample | None:
    """Round after round until the time is over; the first broken promise ends it."""
    clock = asyncio.get_running_loop().time
    end_s = clock() + duration_s
    number = 0
    while number == 0 or (clock() < end_s and tally.broker_kills != plan.broker_kills):
        kills_left = None if plan.broker_kills is None else plan.broker_kills - tally.broker_kills
        played = Round(plan, number, directory / f"round-{number}", kills_left)
        try:
            await played.play()
        except Violation as violation:
            return CounterExample(str(violation), _told_by_client(str(violation), played.directory))
        finally:
            tally.add(played.tally)
        for path in played.directory.glob("*.history"):
            path.unlink()
        with suppress(SemelError):
            await played.delete_topics()
        number += 1
    return None
