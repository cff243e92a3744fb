"""The examples of the pages on sinks, as they stand there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import psycopg
from atomic_cases import Target
from broker_process import BrokerProcess
from mariadb_server import MariaDBServer
from transaction_cases import make_topic, read_committed

from semel.client.cluster import Cluster
from semel.sinks.atomic.database import COLUMNS
from semel.testing.postgres_server import PostgresServer

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def defined(page: str) -> dict[str, Any]:
    """What the page's examples define."""
    found: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), found)
    return found


async def test_the_examples_of_kafka_do_what_they_say(semel_broker: BrokerProcess) -> None:
    names, bootstrap = defined("sinks.md"), semel_broker.bootstrap
    async with Cluster(bootstrap) as cluster:
        await make_topic(cluster, "orders")
        await names["main"](bootstrap)
        await asyncio.to_thread(names["run"], bootstrap)
        await asyncio.to_thread(names["own"], bootstrap)
        assert await read_committed(cluster, "orders") == [[b"first", b"second"] * 3]


def test_the_example_of_postgres_does_what_it_says(postgres: PostgresServer) -> None:
    run = defined("sinks_sql.md")["run"]
    (create,) = re.findall(r"`(CREATE TABLE .*)`", run.__doc__)
    postgres.query(create)
    for _ in range(2):  # the second time everything is there
        run(postgres.dsn)
        assert postgres.query("SELECT * FROM orders") == [(1, 0)]


def test_the_example_of_mysql_does_what_it_says(mariadb: MariaDBServer) -> None:
    run = defined("sinks_sql.md")["run_on_mysql"]
    mariadb.query("CREATE TABLE events (id bigint PRIMARY KEY, note text)")
    for _ in range(2):
        run(mariadb.url())
    assert mariadb.query("SELECT * FROM events ORDER BY id") == [(0, "hello"), (1, "hello")]


async def test_the_examples_of_both_at_once_do_what_they_say(target: Target) -> None:
    """With the page's table and its grants, as a role that may create nothing."""
    names = defined("atomic.md")
    create, look = blocks("atomic.md", "sql")
    async with await psycopg.AsyncConnection.connect(target.dsn, autocommit=True) as admin:
        await admin.execute("REVOKE ALL ON SCHEMA public FROM public")
        await admin.execute("GRANT USAGE ON SCHEMA public TO public")
        await admin.execute("DROP ROLE IF EXISTS app")
        await admin.execute("CREATE ROLE app LOGIN")
        await admin.execute(create.encode())
        await admin.execute("CREATE TABLE accounts (id int, balance int)")
        await admin.execute("INSERT INTO accounts VALUES (7, 100)")
        await admin.execute("GRANT SELECT, UPDATE ON accounts TO app")
        async with Cluster(target.bootstrap) as cluster:
            await make_topic(cluster, "payments")
            dsn = psycopg.conninfo.make_conninfo(target.dsn, user="app")
            await names["pay"](target.bootstrap, dsn)
            await asyncio.to_thread(names["pay_blocking"], target.bootstrap, dsn)
            assert await read_committed(cluster, "payments") == [[b"10 from 7"] * 2]
        found = await admin.execute("SELECT balance FROM accounts")
        assert await found.fetchall() == [(80,)]
        found = await admin.execute(look.encode())
        assert await found.fetchall() == []
        await admin.execute("DROP OWNED BY app")
        await admin.execute("DROP ROLE app")


def test_the_page_creates_the_table_that_the_code_creates() -> None:
    create = blocks("atomic.md", "sql")[0]
    assert COLUMNS.split() == create[create.index("(") + 1 : create.index(");")].split()
