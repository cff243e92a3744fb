"""What the MySQL sink alone promises, held to on a real server; the rest is in `test_sql_sink`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mariadb_server import DATABASE, MariaDBServer
from table_cases import MODES, STRATEGIES, WAITING_TIMEOUT_S, MariaDBTable, rows, run_epoch, write_all

from semel.sinks.errors import CommitFailed, ConnectionLost, InitFailed, WriteFailed
from semel.sinks.mysql import session
from semel.sinks.mysql.dialect import MAX_DELETED_ROWS
from semel.sinks.settings import SinkSettings
from semel.sinks.sql.failures import NotEndedYet
from semel.sinks.sql.sink import SqlSink


@pytest.fixture
def table(mariadb: MariaDBServer) -> MariaDBTable:
    return MariaDBTable(mariadb)


@pytest.mark.parametrize("count", [1, MAX_DELETED_ROWS + 1], ids=["few", "many"])
async def test_the_stage_is_empty_when_the_next_epoch_begins(table: MariaDBTable, count: int) -> None:
    async with table.opened(strategy="staged") as sink:
        await run_epoch(sink, 0, rows(*range(count)))
        receipts = await write_all(sink, 1, rows(count))
        stage = sink._stage.rows
        assert table.query(f"SELECT id FROM {stage}") == [(count,)]
        await sink.commit(1, receipts)
    assert len(table.ids()) == count + 1


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_foreign_key_that_leads_nowhere_is_named(mariadb: MariaDBServer, strategy: str) -> None:
    mariadb.query("CREATE TABLE parents (id bigint PRIMARY KEY)")
    table = MariaDBTable(mariadb, "id bigint REFERENCES parents (id), value text")
    async with table.opened(strategy=strategy) as sink:
        with pytest.raises((WriteFailed, CommitFailed), match="foreign key constraint fails") as caught:
            await run_epoch(sink, 0, rows(1))
        assert not caught.value.is_permanent, "another pipeline may yet write what it refers to"
        await sink.abort(0)
        mariadb.query("INSERT INTO parents VALUES (1)")
        await run_epoch(sink, 0, rows(1))
        assert table.ids() == [1]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_refused_permission_is_a_clear_error(table: MariaDBTable, strategy: str) -> None:
    table.query("DROP USER IF EXISTS clerk@'127.0.0.1'")
    table.query("CREATE USER clerk@'127.0.0.1'")
    options = {"address": table.address("clerk"), "strategy": strategy}
    with pytest.raises(InitFailed, match="Access denied for user 'clerk'"):
        async with table.opened(**options):
            pass
    async with table.opened(strategy=strategy):
        pass  # makes the tables
    for (name,) in table.query("SHOW TABLES LIKE 'semel%'"):
        table.query(f"GRANT ALL ON {DATABASE}.{name} TO clerk@'127.0.0.1'")
    table.query(f"GRANT SELECT ON {DATABASE}.kept TO clerk@'127.0.0.1'")
    async with table.opened(**options) as sink:
        with pytest.raises((WriteFailed, CommitFailed), match=r"INSERT command denied.*kept") as caught:
            await run_epoch(sink, 0, rows(1))
        assert caught.value.is_permanent
    table.query(f"GRANT INSERT ON {DATABASE}.kept TO clerk@'127.0.0.1'")
    async with table.opened(**options) as sink:
        await run_epoch(sink, 0, rows(1))
    assert table.ids() == [1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", MODES)
async def test_a_user_needs_few_rights(table: MariaDBTable, mode: str, strategy: str) -> None:
    """As docs/sinks_sql.md says, once somebody else has made the tables."""
    granted, options = MODES[mode]
    async with table.opened(strategy=strategy, **options):
        stages = [name for (name,) in table.query("SHOW TABLES LIKE 'semel\\_stage%'")]
    table.query("DROP USER IF EXISTS clerk@'127.0.0.1'")
    table.query("CREATE USER clerk@'127.0.0.1'")
    for name in ("semel_sinks", "semel_dead_letters"):
        table.query(f"GRANT SELECT, INSERT, UPDATE ON {DATABASE}.{name} TO clerk@'127.0.0.1'")
    for name in stages:
        table.query(f"GRANT CREATE, DROP, SELECT, INSERT, DELETE ON {DATABASE}.{name} TO clerk@'127.0.0.1'")
    if strategy == "direct" and mode != "append":
        table.query(f"GRANT CREATE TEMPORARY TABLES ON {DATABASE}.* TO clerk@'127.0.0.1'")
    table.query(f"GRANT {granted} ON {DATABASE}.kept TO clerk@'127.0.0.1'")
    for epoch in range(2):
        async with table.opened(address=table.address("clerk"), strategy=strategy, **options) as sink:
            await run_epoch(sink, epoch, rows(epoch))
    assert table.ids() == ([] if mode == "delete" else [0, 1])


async def test_with_one_limit_for_all_that_is_idle_only_owners_have_that_of_a_transaction(
    table: MariaDBTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MySQL 8 has it. A writer may compute for long; an owner between epochs makes another connection."""
    monkeypatch.setattr(session, "is_mariadb", lambda _: False)
    async with table.opened(idle_timeout=table.SHORTEST_PAUSE_S) as sink:
        receipts = await write_all(sink, 0, rows(1))
        await until_ended(table, sink)
        with pytest.raises(CommitFailed, match=table.PAUSED):
            await sink.commit(0, receipts)
        await sink.abort(0)
        await run_epoch(sink, 0, rows(1))
        await until_ended(table, sink)
        await run_epoch(sink, 1, rows(2))
    settings = SinkSettings(max_buffered=1)
    async with table.opened(
        strategy="staged", idle_timeout=table.SHORTEST_PAUSE_S, settings=settings
    ) as sink:
        plan = await sink.begin(2)
        assert plan is not None
        writer = plan.writer(0)
        await writer.write(rows(3))
        await until_ended(table, sink)
        await writer.write(rows(4))
        await sink.commit(2, [await writer.finish()])
    assert table.ids() == [1, 2, 3, 4]


async def until_ended(table: MariaDBTable, sink: SqlSink) -> None:
    """The server has ended the connection of the sink's owner."""
    async with asyncio.timeout(WAITING_TIMEOUT_S):
        while table.has_owner(sink):  # noqa: ASYNC110 - the server does not call
            await asyncio.sleep(0.05)


def make_clerk(table: MariaDBTable) -> None:
    """Who may write, and end no connection but its own."""
    table.query("DROP USER IF EXISTS clerk@'127.0.0.1'")
    table.query("CREATE USER clerk@'127.0.0.1'")
    table.query(f"GRANT ALL ON {DATABASE}.* TO clerk@'127.0.0.1'")


def stand_in_for(table: MariaDBTable, owner: SqlSink) -> Any:
    """Ends the owner's connection, and holds its label on another one, which no clerk may end."""
    stand_in = table.connect()
    table.end_owner(owner)
    with stand_in.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK(%s, 10)", (owner._connection.label,))
        assert cursor.fetchone() == (1,)
    return stand_in


async def test_an_owner_that_cannot_be_found_does_not_go_on(
    table: MariaDBTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection was lost, and the label stays taken: by what the server rolls back for long, say."""
    monkeypatch.setattr(session, "LABEL_LOCK_TIMEOUT_S", 1)
    make_clerk(table)
    settings = SinkSettings(write_timeout=5)
    async with table.opened(address=table.address("clerk"), settings=settings) as old:
        stand_in = stand_in_for(table, old)
        try:
            with pytest.raises(ConnectionLost, match="label"):
                await write_all(old, 0, rows(1))
            await old.abort(0)
            with pytest.raises(ConnectionLost, match=r"label.*waited for 5 s \(write_timeout"):
                await old.begin(0)
        finally:
            stand_in.close()
        await write_all(old, 0, rows(1))
        async with table.opened() as new:  # ends the other, which stays away with its rows in the table
            await run_epoch(new, 0, rows(2))
    assert table.ids() == [2]


async def test_begin_waits_for_what_is_rolled_back_longer_than_for_anything_else(
    table: MariaDBTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the label of a connection that it ends until all of it is rolled back."""
    monkeypatch.setattr(session, "LABEL_LOCK_TIMEOUT_S", 1)
    make_clerk(table)
    async with table.opened(address=table.address("clerk")) as sink:
        await write_all(sink, 0, rows(1))
        stand_in = stand_in_for(table, sink)
        await sink.abort(0)
        in_vain: list[str] = []

        def give_up(told: str) -> NotEndedYet:
            in_vain.append(told)
            if len(in_vain) == 2:
                stand_in.close()
            return NotEndedYet(told)

        monkeypatch.setattr(session, "NotEndedYet", give_up)
        await run_epoch(sink, 0, rows(2))
    assert len(in_vain) >= 2
    assert table.ids() == [2]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_connection_that_is_lost_in_a_load_of_a_file_is_lost_as_any_other(
    table: MariaDBTable, strategy: str
) -> None:
    """More is on its way then than there is room for at either end."""
    async with table.proxied(bulk=False, strategy=strategy) as (proxy, sink):
        proxy.arm("hang up on a file")
        await sink.begin(0)
        writer = sink.writer()
        with pytest.raises(ConnectionLost, match="MySQL server has gone away"):
            await writer.write(rows(*range(1_000), value="v" * 50_000))
            await writer.finish()
        await writer.cancel()  # its thread would be there for the next tests
        assert proxy.has_fired
        await sink.abort(0)
        await run_epoch(sink, 0, rows(1))
    assert table.ids() == [1]
