"""Transactions over a topic and a database, as users see them: on a real broker and a real PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading

import psycopg
import pytest
from atomic_cases import QUICK, Target, pay
from broker_process import SEMEL, StartBroker
from kafka_process import KafkaProcess
from postgres_server import PostgresServer

from semel.client.cluster import Cluster
from semel.client.transaction_admin import TransactionAdmin
from semel.errors import ConfigError, SemelError
from semel.sinks.atomic import Atomic, AtomicSettings, transaction
from semel.sinks.atomic.slot import Slot
from semel.sinks.errors import BeginFailed, CommitFailed, ConnectionLost, FencedOut, InitFailed


async def leave_prepared(target: Target, number: int, *, decided: bool) -> Atomic:
    """An application that does no more after its save, or after its COMMIT."""
    atomic = target.open(pool=1)
    await atomic.open()
    slot: Slot = await atomic._ready.get()
    await slot.begin()
    await slot.execute("INSERT INTO payments VALUES (%s)", (number,))
    await slot.publish(target.label, str(number).encode())
    await slot.save(await slot.prepare())
    if decided:
        await slot.decide()
    return atomic


async def test_a_row_and_a_record_come_to_be_together(target: Target) -> None:
    async with target.open() as atomic:
        for number in range(5):
            await pay(atomic, number)
        assert await target.both() == list(range(5))
        assert atomic.metrics.commits == 5
        assert atomic.oldest_prepared_s == 0


async def test_a_block_that_raises_leaves_nothing(target: Target) -> None:
    async with target.open() as atomic:
        with pytest.raises(ZeroDivisionError):
            async with atomic.begin() as tx:
                await tx.execute("INSERT INTO payments VALUES (1)")
                await tx.publish(target.label, b"1")
                _ = 1 / 0
        await pay(atomic, 2)
        assert await target.both() == [2]
        assert atomic.metrics.aborts == 1


async def test_a_statement_that_fails_raises_the_databases_own_error_and_leaves_nothing(
    target: Target,
) -> None:
    async with target.open() as atomic:
        with pytest.raises(psycopg.errors.UndefinedTable, match="no_such_table"):
            async with atomic.begin() as tx:
                await tx.publish(target.label, b"1")
                await tx.execute("INSERT INTO no_such_table VALUES (1)")
        await pay(atomic, 2)
        assert await target.both() == [2]


async def test_an_error_that_the_block_swallows_is_not_committed(target: Target) -> None:
    async with target.open() as atomic:
        with pytest.raises(CommitFailed, match="aborted"):
            async with atomic.begin() as tx:
                await tx.publish(target.label, b"1")
                with pytest.raises(psycopg.errors.UndefinedTable):
                    await tx.execute("INSERT INTO no_such_table VALUES (1)")
        assert await target.both() == []


async def test_a_constraint_that_fails_at_commit_leaves_nothing(target: Target) -> None:
    async with target.open() as atomic:
        await pay(atomic, 1)
        with pytest.raises(CommitFailed, match="duplicate key") as refused:
            await pay(atomic, 1)
        assert refused.value.is_permanent
        await pay(atomic, 2)
        assert await target.both() == [1, 2]


async def test_a_record_that_is_refused_leaves_nothing(target: Target) -> None:
    async with target.open() as atomic:
        with pytest.raises(SemelError, match="no-such-topic"):
            async with atomic.begin() as tx:
                await tx.execute("INSERT INTO payments VALUES (1)")
                await tx.publish("no-such-topic", b"1", partition=0)
        await pay(atomic, 2)
        assert await target.both() == [2]


async def test_many_tasks_share_a_pool(target: Target) -> None:
    async with target.open(pool=2) as atomic:
        await asyncio.gather(*(pay(atomic, number) for number in range(30)))
        assert await target.both() == list(range(30))


async def test_a_transaction_without_records_does_not_lend_its_pair_to_the_next(target: Target) -> None:
    """Nothing ends it in Kafka, so the next one has the same producer epoch; it must not look committed."""
    atomic = target.open(pool=1)
    await atomic.open()
    async with atomic.begin() as tx:
        await tx.execute("INSERT INTO payments VALUES (1)")
    slot = await atomic._ready.get()
    await slot.begin()
    await slot.publish(target.label, b"2")
    await slot.prepare()
    # Here it would die, before it saves.
    async with target.open(pool=1) as successor:
        assert successor.metrics.recovered_aborts == 1
        assert await target.topic_ids() == []
    await atomic.close()


async def test_a_commit_by_hand_is_noticed(target: Target) -> None:
    async with target.open() as atomic:
        with pytest.raises(ConfigError, match="leave COMMIT"):
            async with atomic.begin() as tx:
                await tx.publish(target.label, b"1")
                await tx.execute("COMMIT")
        assert await target.topic_ids() == []
        await pay(atomic, 2)
        assert await target.both() == [2]


async def test_a_caller_that_is_cancelled_leaves_both_halves_or_none(target: Target) -> None:
    async with target.open() as atomic:
        for number in range(20):
            paying = asyncio.create_task(pay(atomic, number))
            for _ in range(number * 3):
                await asyncio.sleep(0)
            paying.cancel()
            await asyncio.gather(paying, return_exceptions=True)
        await pay(atomic, 100)
    assert 100 in await target.both()


async def test_a_statement_that_is_given_up_leaves_later_connections_alone(target: Target) -> None:
    """Its descriptor would be given to the next connection while the loop still waits for the old one."""
    impatient = AtomicSettings(fence_timeout=0.3, commit_timeout=0.5, begin_timeout=20)
    async with (
        await psycopg.AsyncConnection.connect(target.dsn) as blocker,
        target.open(pool=1, settings=impatient) as atomic,
    ):
        slot = await atomic._ready.get()
        await slot.begin()
        await blocker.execute(f"SELECT FROM {impatient.table} FOR UPDATE")
        with pytest.raises(ConnectionLost, match=r"has not answered .* for 0\.5 s"):
            await slot.save(await slot.prepare())
        assert await target.table_ids() == []


async def test_the_older_of_two_owners_stops(target: Target) -> None:
    async with target.open() as older:
        await pay(older, 1)
        async with target.open() as newer:
            with pytest.raises(FencedOut, match=r"taken over by process \d+ on .*: stop this process"):
                await pay(older, 2)
            with pytest.raises(FencedOut):
                await pay(older, 3)
            await pay(newer, 4)
            assert await target.both() == [1, 4]


async def test_one_name_in_two_databases_does_not_meet(
    target: Target, postgres_cluster: PostgresServer
) -> None:
    other_name = f"{target.label}_other"
    postgres_cluster.query(f"CREATE DATABASE {other_name}")
    other = Target(target.bootstrap, target.dsn.replace(target.label, other_name), target.label)
    atomic = await leave_prepared(target, 1, decided=True)
    async with Atomic(other.bootstrap, other.dsn, target.label, 1, QUICK) as stranger:
        assert stranger.metrics.recovered_aborts == 0
        assert atomic.oldest_prepared_s > 0
    async with target.open() as successor:
        assert successor.metrics.recovered_commits == 1
        assert await target.both() == [1]
    await atomic.close()


async def test_a_pool_that_is_used_up_is_said(target: Target) -> None:
    settings = AtomicSettings(begin_timeout=0.2)
    async with target.open(pool=1, settings=settings) as atomic, atomic.begin():
        with pytest.raises(BeginFailed, match="all 1 slots"):
            await pay(atomic, 1)


async def test_commits_are_durable_although_the_database_does_not_insist(target: Target) -> None:
    async with await psycopg.AsyncConnection.connect(target.dsn, autocommit=True) as connection:
        await connection.execute(f"ALTER DATABASE {target.label} SET synchronous_commit = off")
    async with target.open() as atomic, atomic.begin() as tx:
        assert (await tx.execute("SHOW synchronous_commit")).rows == [("on",)]


def test_it_works_without_an_event_loop_and_from_threads(target: Target) -> None:
    with transaction(kafka=target.bootstrap, postgres=target.dsn, name=target.label) as atomic:

        def work(number: int) -> None:
            with atomic.begin() as tx:
                tx.execute("INSERT INTO payments VALUES (%s)", (number,))
                tx.publish(target.label, str(number).encode())

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(ZeroDivisionError), atomic.begin() as tx:
            tx.execute("INSERT INTO payments VALUES (99)")
            _ = 1 / 0
    assert asyncio.run(target.both()) == list(range(8))


async def test_a_broker_without_two_phase_commit_is_refused_before_anybody_is_fenced(
    target: Target, kafka_broker: KafkaProcess
) -> None:
    async with target.open() as atomic:
        with pytest.raises(InitFailed, match="no two-phase commit"):
            await Atomic(kafka_broker.bootstrap, target.dsn, target.label, 1, QUICK).open()
        await pay(atomic, 1)


async def test_who_the_database_does_not_let_in_is_told_for_good(target: Target) -> None:
    elsewhere = target.dsn.replace(f"dbname={target.label}", "dbname=absent")
    with pytest.raises(InitFailed, match='database "absent" does not exist') as caught:
        await Atomic(target.bootstrap, elsewhere, target.label, 1, QUICK).open()
    assert caught.value.is_permanent


async def test_a_broker_that_does_not_allow_it_is_refused_with_the_reason(
    target: Target, start_broker: StartBroker
) -> None:
    broker = start_broker()
    with pytest.raises(InitFailed, match=r"needs transaction\.two\.phase\.commit\.enable=true"):
        await Atomic(broker.bootstrap, target.dsn, f"{target.label}-2", 1, QUICK).open()


async def test_a_pair_of_another_cluster_is_refused(target: Target, start_broker: StartBroker) -> None:
    left = await leave_prepared(target, 1, decided=True)
    other = start_broker(transaction_two_phase_commit_enable="true")
    with pytest.raises(InitFailed, match="on cluster"):
        await Atomic(other.bootstrap, target.dsn, target.label, 1, QUICK).open()
    async with target.open():
        assert await target.both() == [1]
    await left.close()


# `semel txn recover`


def recover(target: Target, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SEMEL, "txn", "recover", "--postgres", target.dsn, "-b", target.bootstrap, *options],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("decided", [True, False], ids=["decided", "undecided"])
async def test_the_command_ends_what_a_dead_application_left(target: Target, decided: bool) -> None:
    dead = await leave_prepared(target, 1, decided=decided)
    for slot in dead._slots:
        slot.session.drop()  # the server notices that its client is gone
    ran = await asyncio.to_thread(recover, target, "-o", "json")
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(ran.stdout)
    assert (row["name"], row["outcome"]) == (target.label, "committed" if decided else "aborted")
    assert await target.both() == ([1] if decided else [])
    async with Cluster(target.bootstrap) as cluster:
        described = await TransactionAdmin(cluster).describe(row["transactional_id"])
        assert not described.is_open
    await dead.close()


async def test_the_command_leaves_a_living_application_alone_unless_by_force(target: Target) -> None:
    async with target.open() as atomic:
        ran = await asyncio.to_thread(recover, target, "--name", target.label)
        assert ran.returncode == 1
        assert "is in use by process" in ran.stderr
        await pay(atomic, 1)
        ran = await asyncio.to_thread(recover, target, "--force")
        assert ran.returncode == 0, ran.stderr
        assert "nothing was open" in ran.stdout
        with pytest.raises(FencedOut):
            await pay(atomic, 2)


async def test_the_command_says_which_names_there_are(target: Target) -> None:
    async with target.open():
        pass
    ran = await asyncio.to_thread(recover, target, "--name", "nobody")
    assert ran.returncode == 4
    assert target.label in ran.stderr
