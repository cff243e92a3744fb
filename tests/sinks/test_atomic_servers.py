"""The broker or the database is killed after every step of a transaction, and comes back."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import psycopg
import pytest
from atomic_cases import QUICK, Target, pay
from atomic_driver import AFTER_DECISION, BEFORE_DECISION
from atomic_fixtures import TWO_PHASE
from broker_process import BrokerProcess
from postgres_server import PostgresServer, find_binaries

from row_checks import check_rows
from semel.client.producer import PendingRecord, ProducerIdentity
from semel.errors import SemelError
from semel.sinks.atomic import Atomic
from semel.sinks.atomic.database import Result, SlotRow
from semel.sinks.atomic.slot import Slot
from semel.sinks.errors import CommitFailed, UnknownOutcome

STEPS = (*BEFORE_DECISION, *AFTER_DECISION)


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """A cluster that is killed: other tests have theirs."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    server = PostgresServer(binaries)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("killed") / "broker", TWO_PHASE).start()
    yield process
    process.kill()


@pytest.fixture
async def mortal(own_broker: BrokerProcess, own_postgres: PostgresServer) -> AsyncIterator[Target]:
    label = f"atomic_{uuid.uuid4().hex[:10]}"
    own_postgres.query(f"CREATE DATABASE {label}")
    dsn = own_postgres.dsn.replace("dbname=postgres", f"dbname={label}")
    target = Target(own_broker.bootstrap, dsn, label)
    await target.make()
    yield target


class HookedSlot(Slot):
    """Calls `strike` after a step, once."""

    step: str
    strike: Callable[[], None] | None = None

    def _after(self, step: str) -> None:
        if step == self.step and self.strike is not None:
            strike, self.strike = self.strike, None
            strike()

    async def begin(self) -> None:
        await super().begin()
        self._after("begin")

    async def execute(self, query: object, params: object = None) -> Result:
        result = await super().execute(query, params)  # type: ignore[arg-type]
        self._after("execute")
        return result

    async def publish(self, topic: str, value: bytes | None, **options: object) -> PendingRecord:
        pending = await super().publish(topic, value, **options)  # type: ignore[arg-type]
        self._after("publish")
        return pending

    async def prepare(self) -> ProducerIdentity | None:
        pair = await super().prepare()
        self._after("prepare")
        return pair

    async def save(self, pair: ProducerIdentity | None) -> None:
        await super().save(pair)
        self._after("save")

    async def decide(self) -> None:
        await super().decide()
        self._after("decide")

    async def complete(self) -> None:
        await super().complete()
        self._after("complete")


class HookedAtomic(Atomic):
    def __init__(self, target: Target, step: str) -> None:
        super().__init__(target.bootstrap, target.dsn, target.label, 1, QUICK)
        self.step = step

    def _make_slot(self, row: SlotRow, cluster_id: str | None) -> Slot:
        self.hooked = HookedSlot(row, self._cluster, cluster_id, self._postgres, self.settings)
        self.hooked.step = self.step
        return self.hooked


async def try_to_pay(atomic: Atomic, number: int) -> bool:
    """Whether it was paid, as far as the caller is told."""
    try:
        await pay(atomic, number)
    except (SemelError, psycopg.Error) as error:
        assert not isinstance(error, UnknownOutcome), error
        return False
    return True


@pytest.mark.parametrize("step", STEPS)
async def test_a_broker_killed_after_any_step_leaves_both_halves_or_none(
    mortal: Target, own_broker: BrokerProcess, step: str
) -> None:
    async with HookedAtomic(mortal, step) as atomic:
        await pay(atomic, 1)
        atomic.hooked.strike = own_broker.restart
        was_paid = await try_to_pay(atomic, 2)
        await pay(atomic, 3)
        check_rows(await mortal.both(), [1, 2, 3] if was_paid else [1, 3])


async def test_what_is_decided_while_the_broker_is_away_becomes_visible_when_it_is_back(
    mortal: Target, own_broker: BrokerProcess
) -> None:
    async with HookedAtomic(mortal, "decide") as atomic:
        atomic.hooked.strike = own_broker.kill
        paying = asyncio.create_task(pay(atomic, 1))
        while atomic.oldest_prepared_s < 0.5:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await mortal.table_ids() == [1]
        own_broker.start()
        await paying
        check_rows(await mortal.both(), [1])
        assert atomic.oldest_prepared_s == 0


@pytest.mark.parametrize("step", STEPS)
async def test_a_database_killed_after_any_step_leaves_both_halves_or_none(
    mortal: Target, own_postgres: PostgresServer, step: str
) -> None:
    def strike() -> None:
        own_postgres.kill()
        own_postgres.start()

    async with HookedAtomic(mortal, step) as atomic:
        await pay(atomic, 1)
        atomic.hooked.strike = strike
        was_paid = await try_to_pay(atomic, 2)
        assert was_paid == (step in AFTER_DECISION)
        await pay(atomic, 3)
        check_rows(await mortal.both(), [1, 2, 3] if was_paid else [1, 3])


class DeafSlot(Slot):
    """Sends COMMIT, and loses the connection in place of the answer."""

    loses: str = ""

    async def decide(self) -> None:
        lost, self.loses = self.loses, ""
        if lost == "answer":
            await super().decide()
        if lost:
            self.session.drop()
            raise UnknownOutcome("the connection was lost during the commit")
        await super().decide()


class DeafAtomic(Atomic):
    def _make_slot(self, row: SlotRow, cluster_id: str | None) -> Slot:
        self.deaf = DeafSlot(row, self._cluster, cluster_id, self._postgres, self.settings)
        return self.deaf


@pytest.mark.parametrize("loses", ["answer", "request"])
async def test_a_commit_whose_answer_was_lost_is_looked_up(target: Target, loses: str) -> None:
    async with DeafAtomic(target.bootstrap, target.dsn, target.label, 1, QUICK) as atomic:
        await pay(atomic, 1)
        atomic.deaf.loses = loses
        if loses == "answer":
            await pay(atomic, 2)
        else:
            with pytest.raises(CommitFailed, match="was not committed"):
                await pay(atomic, 2)
        await pay(atomic, 3)
        check_rows(await target.both(), [1, 2, 3] if loses == "answer" else [1, 3])


async def test_a_commit_without_records_whose_answer_was_lost_is_looked_up(target: Target) -> None:
    async with DeafAtomic(target.bootstrap, target.dsn, target.label, 1, QUICK) as atomic:
        atomic.deaf.loses = "answer"
        async with atomic.begin() as tx:
            await tx.execute("INSERT INTO payments VALUES (1)")
        atomic.deaf.loses = "request"
        with pytest.raises(CommitFailed):
            async with atomic.begin() as tx:
                await tx.execute("INSERT INTO payments VALUES (2)")
        assert await target.table_ids() == [1]


async def test_servers_that_die_at_random_never_part_the_halves(
    mortal: Target, own_broker: BrokerProcess, own_postgres: PostgresServer
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    paid: list[int] = []
    unknown: list[int] = []

    async def client(atomic: Atomic, first: int) -> None:
        for number in range(first, first + 40):
            try:
                await pay(atomic, number)
                paid.append(number)
            except UnknownOutcome:
                unknown.append(number)
            except (SemelError, psycopg.Error):
                pass

    async with mortal.open(pool=3) as atomic:
        clients = [asyncio.create_task(client(atomic, 1_000 * each)) for each in range(3)]
        for _ in range(3):
            await asyncio.sleep(chance.uniform(0.05, 0.4))
            if chance.random() < 0.5:
                await asyncio.to_thread(own_broker.restart)
            else:
                await asyncio.to_thread(own_postgres.kill)
                await asyncio.to_thread(own_postgres.start)
        await asyncio.gather(*clients)
    async with mortal.open():
        there = await mortal.both()
    assert set(paid) <= set(there)
    assert set(there) <= set(paid) | set(unknown)
