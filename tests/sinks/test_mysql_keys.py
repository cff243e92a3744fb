"""An upsert replaces rows of its own key only: tables with other keys that rows might meet are refused."""

from __future__ import annotations

from typing import Any

import pytest
from mariadb_server import SqlServer

from semel.sinks.errors import InitFailed
from semel.sinks.mysql import MySQLSink

UPSERT: dict[str, Any] = {"mode": "upsert", "keys": ["id"], "columns": {"id": "id", "email": "email"}}
EMAIL = "email varchar(50) NOT NULL"
MEETING = {
    "a constant": f"{EMAIL}, deleted tinyint NOT NULL DEFAULT 0, UNIQUE KEY (email, deleted)",
    "a constant that looks like a call": f"{EMAIL}, made char(36) DEFAULT 'uuid()', UNIQUE KEY (email, made)",
    "a constant that looks like null": f"{EMAIL}, made char(36) DEFAULT 'NULL', UNIQUE KEY (email, made)",
    "the same time": f"{EMAIL}, at datetime DEFAULT CURRENT_TIMESTAMP, UNIQUE KEY (email, at)",
    "a generated column": f"{EMAIL}, short char(3) AS (LEFT(email, 3)) STORED, UNIQUE KEY (short)",
    "a prefix": f"{EMAIL}, UNIQUE KEY (email(3))",
    "a prefix of what is distinct": f"{EMAIL}, made char(36) DEFAULT (uuid()), UNIQUE KEY (email, made(3))",
    "what is written": "email varchar(50), UNIQUE KEY (email)",
}
DISTINCT = {
    "AUTO_INCREMENT": f"{EMAIL}, number bigint AUTO_INCREMENT, KEY (number), UNIQUE KEY (email, number)",
    "null": f"{EMAIL}, batch int, UNIQUE KEY (email, batch)",
    "a default of null": f"{EMAIL}, batch int DEFAULT NULL, UNIQUE KEY (email, batch)",
    "a UUID": f"{EMAIL}, made char(36) NOT NULL DEFAULT (uuid()), UNIQUE KEY (made)",
    "its own key twice": f"{EMAIL}, UNIQUE KEY (id)",
}


async def write(server: SqlServer, epochs: list[list[dict[str, Any]]], **options: Any) -> None:
    async with MySQLSink(server.url(), "kept", **options) as sink:
        await sink.open("keys")
        for epoch, rows in enumerate(epochs):
            await sink.begin(epoch)
            writer = sink.writer()
            await writer.write(rows)
            await sink.commit(epoch, [await writer.finish()])


@pytest.mark.parametrize("strategy", ["direct", "staged"])
@pytest.mark.parametrize("columns", MEETING.values(), ids=MEETING)
async def test_a_key_that_rows_might_meet_is_refused(
    sql_server: SqlServer, columns: str, strategy: str
) -> None:
    sql_server.query(f"CREATE TABLE kept (id int PRIMARY KEY, {columns})")
    with pytest.raises(InitFailed, match=r"another unique key, \("):
        await write(sql_server, [], **UPSERT, strategy=strategy)


async def test_the_beginning_of_the_key_itself_is_another_key(sql_server: SqlServer) -> None:
    sql_server.query("CREATE TABLE kept (id varchar(50) PRIMARY KEY, email text, UNIQUE KEY (id(3)))")
    with pytest.raises(InitFailed, match=r"another unique key, \(id\(3\)\)"):
        await write(sql_server, [], **UPSERT)


async def test_a_key_over_an_expression_is_refused(sql_server: SqlServer) -> None:
    ((version,),) = sql_server.query("SELECT VERSION()")
    if "MariaDB" in version:
        pytest.skip("MariaDB has no indexes over expressions")
    sql_server.query(f"CREATE TABLE kept (id int PRIMARY KEY, {EMAIL}, UNIQUE KEY ((LOWER(email))))")
    with pytest.raises(InitFailed, match=r"another unique key, \(an expression\)"):
        await write(sql_server, [], **UPSERT)


@pytest.mark.parametrize("columns", DISTINCT.values(), ids=DISTINCT)
async def test_a_key_that_no_two_rows_share_is_taken(sql_server: SqlServer, columns: str) -> None:
    sql_server.query(f"CREATE TABLE kept (id int PRIMARY KEY, {columns})")
    await write(
        sql_server,
        [
            [{"id": 1, "email": "a"}, {"id": 2, "email": "a"}],
            [{"id": 3, "email": "a"}, {"id": 1, "email": "b"}],
        ],
        **UPSERT,
    )
    found = sql_server.query("SELECT id, email FROM kept ORDER BY id")
    assert found == [(1, "b"), (2, "a"), (3, "a")]


async def test_what_only_deletes_takes_any_key(sql_server: SqlServer) -> None:
    sql_server.query("CREATE TABLE kept (id int PRIMARY KEY, email varchar(50), UNIQUE KEY (email))")
    sql_server.query("INSERT INTO kept VALUES (1, 'a'), (2, 'b')")
    options: dict[str, Any] = {"mode": "delete", "keys": ["id"]}
    await write(sql_server, [[{"id": 1}]], **options, columns={"id": "id"})
    assert sql_server.query("SELECT * FROM kept") == [(2, "b")]
    with pytest.raises(InitFailed, match=r"another unique key, \(email\)"):
        await write(sql_server, [], **options, change_column="op")
