"""Whatever the server, the role or the connection string asks for: what a sink's connection insists on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.errors import AdminShutdown, IdleInTransactionSessionTimeout, TransactionTimeout

from semel.errors import ConfigError
from semel.sinks.errors import ConnectionLost, InitFailed
from semel.sinks.postgres import PostgresSink
from semel.sinks.postgres.session import _failure, connect
from semel.sinks.settings import SinkSettings
from semel.sinks.sql.failures import Cause
from semel.testing.postgres_server import PostgresServer

RELOAD_TIMEOUT_S = 10.0


async def run_epoch(sink: PostgresSink, epoch: int) -> None:
    plan = await sink.begin(epoch)
    assert plan is not None
    writer = plan.writer(0)
    await writer.write([{"id": epoch}])
    await sink.commit(epoch, [await writer.finish()])


# Commits that last


@contextmanager
def lazy_commits(server: PostgresServer) -> Iterator[None]:
    """The role does not wait for its commits, and the server takes its time to write them."""
    server.query("ALTER ROLE postgres SET synchronous_commit = off")
    server.query("ALTER SYSTEM SET wal_writer_delay = '10s'")
    server.query("SELECT pg_reload_conf()")
    try:
        yield
    finally:
        server.query("ALTER ROLE postgres RESET synchronous_commit")
        server.query("ALTER SYSTEM RESET ALL")
        server.query("SELECT pg_reload_conf()")


@pytest.mark.parametrize("strategy", ["direct", "staged"])
async def test_a_committed_epoch_outlives_the_server_although_the_role_does_not_insist(
    postgres: PostgresServer, strategy: str
) -> None:
    postgres.query("CREATE TABLE kept (id bigint)")
    with lazy_commits(postgres):
        postgres.query("CHECKPOINT")
        async with PostgresSink(postgres.dsn, "kept", strategy=strategy) as sink:
            await sink.open("s")
            postgres.query("CHECKPOINT")
            for epoch in range(3):
                await run_epoch(sink, epoch)
            postgres.kill()
            postgres.start()
        assert postgres.query("SELECT id FROM kept ORDER BY id") == [(0,), (1,), (2,)]
        assert postgres.query("SELECT epoch FROM semel_sinks") == [(2,)]


@pytest.mark.parametrize(
    ("asked", "found"),
    [("off", "on"), ("local", "local"), ("remote_write", "remote_write"), ("on", "on"),
     ("remote_apply", "remote_apply")],
)  # fmt: skip
async def test_only_commits_that_may_be_forgotten_are_overridden(
    postgres: PostgresServer, asked: str, found: str
) -> None:
    session = await connect(f"{postgres.dsn} options='-c synchronous_commit={asked}'", "semel:test", 60)
    try:
        assert await session.fetch("SHOW synchronous_commit") == [(found,)]
    finally:
        await session.close()


async def test_a_server_that_is_told_to_forget_commits_later_on_does_not(postgres: PostgresServer) -> None:
    session = await connect(postgres.dsn, "semel:test", 60)
    try:
        postgres.query("ALTER SYSTEM SET synchronous_commit = off")
        postgres.query("ALTER SYSTEM SET work_mem = '5MB'")
        postgres.query("SELECT pg_reload_conf()")
        async with asyncio.timeout(RELOAD_TIMEOUT_S):
            while await session.fetch("SHOW work_mem") != [("5MB",)]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await session.fetch("SHOW synchronous_commit") == [("on",)]
    finally:
        await session.close()
        postgres.query("ALTER SYSTEM RESET ALL")
        postgres.query("SELECT pg_reload_conf()")


# Commits that wait for another server


@contextmanager
def absent_standby(server: PostgresServer) -> Iterator[None]:
    """Nobody's commit returns, since the standby that is to have it is not there."""
    set_standbys(server, "absent")
    try:
        yield
    finally:
        set_standbys(server, "")


def set_standbys(server: PostgresServer, names: str) -> None:
    server.query(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    server.query("SELECT pg_reload_conf()")
    deadline = time.monotonic() + RELOAD_TIMEOUT_S
    while server.query("SHOW synchronous_standby_names") != [(names,)]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_a_standby_that_open_waits_for_is_named(postgres: PostgresServer) -> None:
    postgres.query("CREATE TABLE kept (id bigint)")
    settings = SinkSettings(open_timeout=2.0)
    async with PostgresSink(postgres.dsn, "kept", settings=settings) as sink:
        with absent_standby(postgres):
            for _ in range(2):  # what the first has left behind does not keep the second waiting
                async with asyncio.timeout(RELOAD_TIMEOUT_S):
                    with pytest.raises(InitFailed, match="synchronous standby") as caught:
                        await sink.open("s")
                assert not caught.value.is_permanent
        assert await sink.open("s") is None
        await run_epoch(sink, 0)
    assert postgres.query("SELECT id FROM kept") == [(0,)]


# Text


async def test_text_is_what_was_written_whatever_encoding_the_dsn_asks_for(postgres: PostgresServer) -> None:
    text = "zażółć é 😀"
    postgres.query("CREATE TABLE kept (value text)")
    async with PostgresSink(f"{postgres.dsn} client_encoding=latin1", "kept") as sink:
        await sink.open("s")
        await sink.begin(0)
        writer = sink.writer()
        await writer.write([{"value": text}])
        await sink.commit(0, [await writer.finish()])
    assert postgres.query("SELECT value FROM kept") == [(text,)]


# Connections that no later try will get


HBA = """
host all         guarded 127.0.0.1/32 scram-sha-256
host all         barred  127.0.0.1/32 reject
host all         asked   127.0.0.1/32 ident
host postgres,other,absent  postgres,absent,shy,plain 127.0.0.1/32 trust
"""

REFUSED = [
    ("user=postgres dbname=absent", 'database "absent" does not exist'),
    ("user=absent dbname=postgres", 'role "absent" does not exist'),
    ("user=shy dbname=postgres", "not permitted to log in"),
    ("user=plain dbname=other", "permission denied for database"),
    ("user=guarded dbname=postgres", "no password supplied"),
    ("user=guarded password=wrong dbname=postgres", "password authentication failed"),
    ("user=asked dbname=postgres", "Ident authentication failed"),
    ("user=barred dbname=postgres", "pg_hba.conf rejects connection"),
    ("user=unheard dbname=postgres", "no pg_hba.conf entry"),
]


@pytest.fixture
def choosy(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """A server that does not let everybody in."""
    hba = postgres.directory / "cluster" / "pg_hba.conf"
    before = hba.read_text()
    postgres.query("CREATE ROLE guarded LOGIN PASSWORD 'right'")
    postgres.query("CREATE ROLE shy NOLOGIN")
    postgres.query("CREATE ROLE plain LOGIN")
    postgres.query("CREATE DATABASE other")
    postgres.query("REVOKE CONNECT ON DATABASE other FROM public")
    try:
        set_rules(postgres, hba, HBA)
        yield postgres
    finally:
        set_rules(postgres, hba, before)
        postgres.query("DROP DATABASE other")
        postgres.query("DROP ROLE guarded, shy, plain")


def set_rules(server: PostgresServer, hba: Path, rules: str) -> None:
    """Every connection that is made afterwards is judged by them."""
    hba.write_text(rules)
    server.stop()
    server.start()


@pytest.mark.parametrize(("login", "said"), REFUSED, ids=[said for _, said in REFUSED])
async def test_who_is_refused_is_told_for_good(choosy: PostgresServer, login: str, said: str) -> None:
    async with PostgresSink(f"host=127.0.0.1 port={choosy.port} {login}", "kept") as sink:
        with pytest.raises(InitFailed, match=said) as caught:
            await sink.open("s")
    assert caught.value.is_permanent


async def test_a_host_that_is_away_may_come_back_whatever_another_says(postgres: PostgresServer) -> None:
    dsn = f"host=127.0.0.1,127.0.0.1 port=1,{postgres.port} user=postgres dbname=absent"
    async with PostgresSink(dsn, "kept") as sink:
        with pytest.raises(ConnectionLost, match="does not exist"):
            await sink.open("s")


REFUSED_BY_ONE_ADDRESS = """connection failed: FATAL:  role "r" does not exist
Multiple connection attempts failed. All failures were:
- host: 'host', port: '5432', hostaddr: '::1': connection failed: Connection refused
\tIs the server running on that host and accepting TCP/IP connections?
- host: 'host', port: '5432', hostaddr: '127.0.0.1': connection failed: FATAL:  role "r" does not exist"""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (REFUSED_BY_ONE_ADDRESS, Cause.DENIED),
        (REFUSED_BY_ONE_ADDRESS.replace("'host'", "'elsewhere'", 1), Cause.LOST),
        ('connection failed: FATAL:  the database system is starting up', Cause.LOST),
        ('connection failed: FATAL:  too many connections for role "r"', Cause.LOST),
        ('connection failed: FATAL:  database "d" is not currently accepting connections', Cause.LOST),
        ('connection to server on socket "/s/.s.PGSQL.5432" failed: No such file or directory', Cause.LOST),
    ],
)  # fmt: skip
def test_only_what_every_server_has_said_is_final(said: str, cause: Cause) -> None:
    assert _failure(psycopg.OperationalError(said), is_connecting=True).cause is cause


@pytest.mark.parametrize("error", [IdleInTransactionSessionTimeout, TransactionTimeout, AdminShutdown])
def test_a_session_that_the_server_has_ended_is_lost(error: type[psycopg.Error]) -> None:
    assert _failure(error("terminating connection")).cause is Cause.LOST


@pytest.mark.parametrize("wrong", ["foo=bar", "password=my secret", "connect_timeout=soon"])
async def test_a_dsn_that_cannot_be_read_is_said_without_what_is_in_it(wrong: str) -> None:
    async with PostgresSink(f"host=127.0.0.1 port=1 {wrong}", "kept") as sink:
        with pytest.raises(ConfigError, match="connection string") as caught:
            await sink.open("s")
    assert "secret" not in str(caught.value)
