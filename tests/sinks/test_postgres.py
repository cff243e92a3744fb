"""What the PostgreSQL sink alone promises, held to on a real server; the rest is in `test_sql_sink`."""

from __future__ import annotations

import psycopg
import pytest
from table_cases import MODES, STRATEGIES, PostgresTable, rows, run_epoch

from semel.sinks.errors import CommitFailed, InitFailed, WriteFailed
from semel.sinks.postgres.session import _failure
from semel.sinks.sql.failures import Cause
from semel.testing.postgres_server import PostgresServer


@pytest.fixture
def table(postgres: PostgresServer) -> PostgresTable:
    return PostgresTable(postgres)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_constraint_that_is_checked_at_commit_fails_the_commit(
    postgres: PostgresServer, strategy: str
) -> None:
    postgres.query("CREATE TABLE parents (id bigint PRIMARY KEY)")
    table = PostgresTable(postgres, "id bigint REFERENCES parents DEFERRABLE INITIALLY DEFERRED, value text")
    async with table.opened(strategy=strategy) as sink:
        with pytest.raises(CommitFailed, match="kept_id_fkey") as caught:
            await run_epoch(sink, 0, rows(1))
        assert not caught.value.is_permanent, "another pipeline may yet write what it refers to"
        await sink.abort(0)
        postgres.query("INSERT INTO parents VALUES (1)")
        await run_epoch(sink, 0, rows(1))
        assert table.ids() == [1]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_refused_permission_is_a_clear_error(table: PostgresTable, strategy: str) -> None:
    table.query("DROP ROLE IF EXISTS clerk")
    table.query("CREATE ROLE clerk LOGIN")
    options = {"address": table.address("clerk"), "strategy": strategy}
    async with table.opened(**options) as sink:
        with pytest.raises((WriteFailed, CommitFailed), match="permission denied for table kept") as caught:
            await run_epoch(sink, 0, rows(1))
        assert caught.value.is_permanent
    table.query("GRANT INSERT ON kept TO clerk")
    async with table.opened(**options) as sink:
        await run_epoch(sink, 0, rows(1))
    table.query("REVOKE ALL ON semel_sinks FROM clerk")
    table.query("ALTER TABLE semel_sinks OWNER TO postgres")
    with pytest.raises(InitFailed, match="permission denied for table semel_sinks"):
        async with table.opened(**options):
            pass
    table.query("DROP OWNED BY clerk")
    table.query("DROP ROLE clerk")


@pytest.mark.parametrize("mode", MODES)
async def test_a_role_that_may_create_nothing_needs_few_rights(table: PostgresTable, mode: str) -> None:
    """As docs/sinks_sql.md says, once somebody else has made the tables."""
    granted, options = MODES[mode]
    async with table.opened("another"):
        pass
    table.query("DROP ROLE IF EXISTS clerk")
    table.query("CREATE ROLE clerk LOGIN")
    table.query("REVOKE ALL ON SCHEMA public FROM public")
    table.query("GRANT USAGE ON SCHEMA public TO clerk")
    table.query("GRANT SELECT, INSERT, UPDATE ON semel_sinks, semel_dead_letters TO clerk")
    table.query(f"GRANT {granted} ON kept TO clerk")
    for epoch in range(2):
        async with table.opened(address=table.address("clerk"), **options) as sink:
            await run_epoch(sink, epoch, rows(epoch))
    assert table.ids() == ([] if mode == "delete" else [0, 1])


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ('FATAL:  password authentication failed for user "semel"', Cause.DENIED),
        ("FATAL:  canceling authentication due to timeout", Cause.LOST),
    ],
)
def test_a_server_that_has_no_time_for_a_connection_has_not_refused_it(said: str, cause: Cause) -> None:
    error = psycopg.OperationalError(f"connection failed: {said}")
    assert _failure(error, is_connecting=True).cause is cause
