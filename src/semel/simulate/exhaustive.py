"""Every interleaving of a small scope, to a stated depth: what a model checker does, with the real core.

The scope: a transactional producer that writes to two partitions, another one that writes to one of them and
commits an offset of a group, a timeout, another instance that fences the first producer, a request that is
repeated, a write that arrives late, a crash that loses or keeps what was not synced. Each producer speaks
transaction version 1 or 2 (`PAIRS`). Decisions, `apply`, `Life` and `Replay` are the broker's own; the
journal is a list, and syncing it is an action.

A state is reached by playing its actions from the beginning. Two states are the same if the durable state,
the journal beyond it, the clients and what may still happen are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Final

from semel.broker.core import Broker, Identity, Limits
from semel.broker.decision import Caller, Endpoint, Now
from semel.broker.entries import Append, decode_entry
from semel.broker.tick import tick
from semel.broker.transactions.timeouts import start_clocks
from semel.disk import Buffer
from semel.journal.chain import Group
from semel.log.partition import PartitionLog
from semel.server.apis import ServedApi, served_apis
from semel.server.building import write_placements
from semel.server.life import Job, Life
from semel.server.parts import encode_catalog, encode_group, encode_partition, encode_transaction
from semel.server.planted import NO_FAULT, planted_apis, planted_life
from semel.server.recovery import Replay
from semel.simulate.clients import (
    TIMEOUT_MS,
    VERSION_1,
    VERSION_2,
    Ask,
    GaveUp,
    Process,
    StageClient,
    TransactionalClient,
    Versions,
)
from semel.simulate.machine import START_MS, Call, silenced
from semel.simulate.reading import check_life, read_whole
from semel.storage.memory import MemoryDisk
from semel.storage.store import Store
from semel.verify.ledger import Ends, Ledger, Outcome, Place, Violation, name
from semel.wire.frames import Message
from semel.wire.messages.create_topics import CreatableTopic, CreateTopicsRequest
from semel.wire.messages.init_producer_id import InitProducerIdRequest
from semel.wire.messages.produce import ProduceRequest

PLACES: Final[tuple[Place, ...]] = (("log", 0), ("log", 1))
SOURCE: Final[Place] = ("in", 0)
GROUP: Final = "group"
GROUP_OFFSET: Final = 7
_ENDPOINT: Final = Endpoint("localhost", 9092)


@dataclass(slots=True, frozen=True)
class Pair:
    """What the two producers speak."""

    name: str
    writer: Versions
    committer: Versions


PAIRS: Final = (
    Pair("both of version 2", VERSION_2, VERSION_2),
    Pair("the writer of version 2, the committer of version 1", VERSION_2, VERSION_1),
    Pair("the writer of version 1, the committer of version 2", VERSION_1, VERSION_2),
    Pair("both of version 1", VERSION_1, VERSION_1),
)


@dataclass(slots=True, frozen=True)
class Scope:
    """What is explored."""

    depth: int
    clients: Pair = PAIRS[0]
    fault: str = NO_FAULT


@dataclass(slots=True)
class Found:
    """What the exploration came across."""

    depth: int
    clients: str
    states: int = 0
    transitions: int = 0
    crashes: int = 0
    elapsed_s: float = 0.0
    violation: str = ""
    path: list[str] = field(default_factory=list)


class ListJournal:
    """A journal in memory that is synced when it is told to."""

    def __init__(self, store: Store, groups: Sequence[Group] = ()) -> None:
        self.groups = list(groups)
        self.end = self.groups[-1].end if self.groups else 0
        self.released = self.end
        self._store = store
        self._attachments: list[object] = []

    def append(self, entries: list[list[Buffer]], *, sync: bool = False, attachment: object = None) -> int:
        stored = [memoryview(b"".join(entry)) for entry in entries]
        self.groups.append(Group(self.end, self.end + 1, stored))
        self.end += 1
        if attachment is not None:
            self._attachments.append(attachment)
        return self.end

    def sync(self) -> None:
        write_placements(self._store, self._attachments)
        self._attachments = []
        self.released = self.end

    @property
    def durable(self) -> list[Group]:
        return [group for group in self.groups if group.end <= self.released]

    @property
    def unsynced(self) -> list[Group]:
        return [group for group in self.groups if group.end > self.released]


class Writer(TransactionalClient):
    """One transaction over both partitions."""

    def process(self) -> Process:
        yield from self._identify(self.transactional_id)
        try:
            self.unit = unit = self._ledger.begin(self.life_id)
            if not self._versions.joins_by_writing:
                yield from self._join(list(PLACES))  # At once, as clients do: it is one step then, not two.
            for place in PLACES:
                yield from self._send({place: [unit.add(place)]})
            yield from self._end(unit, commit=True)
        except GaveUp:
            self.killed()


class Committer(StageClient):
    """One transaction with a record and the offset of a group."""

    def process(self) -> Process:
        yield from self._identify(self.transactional_id)
        try:
            self.unit = unit = self._ledger.begin(self.life_id)
            unit.read_to = (GROUP, SOURCE, GROUP_OFFSET)
            yield from self._send({PLACES[0]: [unit.add(PLACES[0])]})
            yield from self._send_offset(GROUP_OFFSET)
            yield from self._end(unit, commit=True)
        except GaveUp:
            self.killed()


class Actor:
    """A client in the small scope: at rest, or with one request under way."""

    def __init__(self, client: TransactionalClient) -> None:
        self.client = client
        self.process = client.process()
        self.ask: Ask | None = next(self.process)
        self.call = Call()
        self.is_delivered = False
        self.first_write: Ask | None = None
        self.asked = 0

    def hear(self, answer: Message | None) -> None:
        self.call = Call()
        self.is_delivered = False
        self.asked += 1
        try:
            self.ask = self.process.send(answer)
        except StopIteration:
            self.ask = None

    @property
    def key(self) -> tuple[object, ...]:
        unit = self.client.unit
        outcome = None if unit is None else unit.outcome
        return self.asked, self.is_delivered, self.call.is_answered, repr(self.call.response), outcome


class World:
    """The small scope at one moment."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.ledger = Ledger()
        self.now_ms = START_MS
        self.left = {"timeout": 1, "crash": 1, "fence": 1, "late": 1, "repeat": 1}
        self._apis = _apis(scope.fault)
        self._ids = 0
        self.life = self._build([])
        self._prepare()
        dice = random.Random(0)
        places = list(PLACES)
        speaks = scope.clients
        self.actors = {
            "writer": Actor(Writer("writer", dice, self.ledger, places, speaks.writer, "writer")),
            "committer": Actor(
                Committer(
                    "committer", dice, self.ledger, places, speaks.committer, GROUP, SOURCE, _read_nothing
                )
            ),
        }
        for actor in self.actors.values():
            self._deliver(actor)
            self.sync()
            actor.hear(actor.call.response)

    # Its journal and its life.

    @property
    def journal(self) -> ListJournal:
        journal = self.life.journal
        assert isinstance(journal, ListJournal)
        return journal

    def _build(self, groups: Sequence[Group]) -> Life:
        broker = Broker(
            1,
            identity=Identity("simulation", 0),
            limits=Limits(),
            topic_defaults={},
            settings=[],
            new_id=self._new_id,
        )
        store = Store(MemoryDisk(), Path("memory"))
        replay = Replay(broker, store)
        for group in groups:
            replay.replay(group)
        replay.finish()
        journal = ListJournal(store, groups)
        life = planted_life(self.scope.fault)(broker, store, journal, _now)
        start_clocks(broker, self._now())
        return life

    def _new_id(self) -> bytes:
        self._ids += 1
        return self._ids.to_bytes(16)

    def _now(self) -> Now:
        return Now(self.now_ms, self.now_ms)

    def _prepare(self) -> None:
        topics = [
            CreatableTopic(name="log", num_partitions=2, replication_factor=1),
            CreatableTopic(name="in", num_partitions=1, replication_factor=1),
        ]
        self.request(Call(), CreateTopicsRequest(topics=topics), 5)
        self.sync()

    def request(self, call: Call, request: Message, version: int) -> None:
        decide = self._apis[request.API_KEY].decide
        assert decide is not None
        caller = Caller(version, "simulation", "localhost", _ENDPOINT, call)
        self.life.submit(call, decide(self.life.broker, request, caller, self._now()))

    # What may happen.

    def enabled(self) -> list[str]:
        actions = [
            who
            for who, actor in self.actors.items()
            if actor.ask is not None and (not actor.is_delivered or actor.call.is_answered)
        ]
        if self.journal.released < self.journal.end:
            actions.append("sync")
        for action in ("timeout", "fence"):
            if self.left[action]:
                actions.append(action)
        if self.left["crash"]:
            actions.append("crash")
            if self.journal.unsynced:
                actions.append("crash, all kept")
        writer = self.actors["writer"]
        if self.left["late"] and writer.first_write is not None:
            actions.append("late")
        if self.left["repeat"]:
            actions += [f"repeat {who}" for who, actor in self.actors.items() if actor.is_delivered]
        return actions

    def act(self, action: str) -> None:
        kind, _, who = action.partition(" ")
        if kind in self.left or kind == "crash,":
            self.left[kind.rstrip(",")] -= 1
        moves: dict[str, Callable[[], None]] = {
            "sync": self.sync,
            "timeout": self._timeout,
            "fence": self._fence,
            "crash": partial(self._crash, keep=False),
            "crash,": partial(self._crash, keep=True),
            "late": self._late,
            "repeat": partial(self._repeat, who),
        }
        moves.get(kind, partial(self._go_on, action))()

    def _go_on(self, who: str) -> None:
        actor = self.actors[who]
        if actor.is_delivered:
            actor.hear(actor.call.response)
        if actor.ask is not None:
            self._deliver(actor)

    def _deliver(self, actor: Actor) -> None:
        assert actor.ask is not None
        request = actor.ask.make()
        if actor.first_write is None and isinstance(request, ProduceRequest):
            actor.first_write = actor.ask
        actor.is_delivered = True
        self.request(actor.call, request, actor.ask.version)

    def _repeat(self, who: str) -> None:
        """The answer was lost, or takes too long: the client asks the same again."""
        actor = self.actors[who]
        actor.hear(None)
        actor.asked -= 1
        self._go_on(who)

    def _late(self) -> None:
        ask = self.actors["writer"].first_write
        assert ask is not None
        self.request(Call(), ask.make(), ask.version)

    def sync(self) -> None:
        self.journal.sync()
        self.life.release(self.journal.released)

    def _timeout(self) -> None:
        self.now_ms += 2 * TIMEOUT_MS
        for decision in tick(self.life.broker, self._now()):
            self.life.submit(None, decision)

    def _fence(self) -> None:
        request = InitProducerIdRequest(transactional_id="writer", transaction_timeout_ms=TIMEOUT_MS)
        self.request(Call(), request, VERSION_2.init_producer_id)

    def _crash(self, *, keep: bool) -> None:
        self.life = self._build(self.journal.groups if keep else self.journal.durable)
        for actor in self.actors.values():
            if actor.is_delivered and not actor.call.is_answered:
                # Its connection is gone: it asks again.
                actor.hear(None)
                actor.asked -= 1

    # What must hold, and what makes a state.

    def observe(self) -> None:
        """Readers look at everything that is new to them, and remember it."""
        for place in PLACES:
            log = self._log(place)
            ends = Ends(log.shown_start_offset, log.last_stable_offset, log.high_watermark)
            if ends != self.ledger.ends.get(place):
                content = read_whole(self.life, place)
                self.ledger.told_ends(place, content.ends)
                for offset, value in content.committed.items():
                    self.ledger.saw(place, offset, value)

    def check(self) -> None:
        self.observe()
        check_life(self.life, self.ledger, [*PLACES, SOURCE])

    def _log(self, place: Place) -> PartitionLog:
        partition = self.life.broker.catalog.partition(*place)
        assert partition is not None
        return partition.log

    def check_settled(self) -> None:
        """When all clients are gone and their time is over, nothing may be left open."""
        for actor in self.actors.values():
            if actor.client.unit is not None and actor.client.unit.outcome is Outcome.OPEN:
                actor.client.killed()
        self._timeout()
        self.sync()
        self.check()
        for place in PLACES:
            log = self._log(place)
            if log.last_stable_offset != log.high_watermark:
                raise Violation(
                    f"{name(place)} is stable up to {log.last_stable_offset} of {log.high_watermark}: "
                    "a transaction hangs"
                )

    def key(self) -> int:
        unsynced = tuple(bytes(entry) for group in self.journal.unsynced for entry in group.entries)
        actors = tuple(actor.key for actor in self.actors.values())
        outcomes = tuple((unit.outcome, unit.was_seen) for unit in self.ledger.units.values())
        return hash((self._durable_key(), unsynced, actors, outcomes, tuple(self.left.values()), self.now_ms))

    def _durable_key(self) -> int:
        """The durable state: what a crash would leave, whatever the order of events that led to it."""
        groups = self.journal.durable
        broker = self.life.broker if len(groups) == len(self.journal.groups) else self._build(groups).broker
        parts = [bytes(encode_catalog(broker))]
        parts += [
            bytes(encode_partition(partition, None))
            for topic in broker.catalog
            for partition in topic.partitions
        ]
        parts += sorted(bytes(encode_group(group)) for group in broker.groups)
        parts += sorted(bytes(encode_transaction(one)) for one in broker.transactions.by_id.values())
        logs: dict[tuple[bytes, int], list[bytes]] = {}
        for group in groups:
            for stored in group.entries:
                entry = decode_entry(stored)
                if isinstance(entry, Append):
                    logs.setdefault((entry.topic_id, entry.index), []).append(bytes(entry.batch))
        return hash((tuple(parts), repr(sorted(logs.items()))))


def explore(scope: Scope) -> Found:
    """Go through all states up to the depth, the nearest first; stop at the first that breaks a promise."""
    with silenced():
        return _explore(scope)


def _explore(scope: Scope) -> Found:
    found = Found(scope.depth, scope.clients.name)
    began_s = time.monotonic()
    start = World(scope)
    seen = {start.key()}
    frontier: list[tuple[tuple[str, ...], list[str]]] = [((), start.enabled())]
    for _ in range(scope.depth):
        following: list[tuple[tuple[str, ...], list[str]]] = []
        for path, actions in frontier:
            for action in actions:
                world = _play(scope, path)
                found.transitions += 1
                found.crashes += action.startswith("crash")
                try:
                    world.act(action)
                    world.check()
                    key = world.key()
                    if key in seen:
                        continue
                    seen.add(key)
                    following.append(((*path, action), world.enabled()))
                    world.check_settled()
                except Violation as violation:
                    found.violation = str(violation)
                    found.path = [*path, action]
                    return _finished(found, seen, began_s)
        frontier = following
    return _finished(found, seen, began_s)


def _play(scope: Scope, path: Sequence[str]) -> World:
    world = World(scope)
    for action in path:
        world.act(action)
        world.observe()
    return world


def _finished(found: Found, seen: set[int], began_s: float) -> Found:
    found.states = len(seen)
    found.elapsed_s = time.monotonic() - began_s
    return found


@cache
def _apis(fault: str) -> dict[int, ServedApi]:
    return planted_apis(fault, served_apis())


def _now(job: Job) -> None:
    job.run()


def _read_nothing(place: Place, offset: int) -> list[tuple[int, bytes]]:
    return []
