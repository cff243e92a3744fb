"""A null is never taken for the current time, which is what MariaDB writes into a `timestamp NOT NULL`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from mariadb_server import SqlServer

from semel.sinks.errors import WriteFailed
from semel.sinks.mysql import MySQLSink
from semel.sinks.settings import OnBadRow, SinkSettings

MOMENT = dt.datetime(2026, 7, 1, 12, 30, tzinfo=dt.UTC)
SCHEMA = pa.schema({"id": pa.int64(), "at": pa.timestamp("us", "UTC")})
CHANGES = SCHEMA.append(pa.field("op", pa.string()))
DEAD_LETTERS = SinkSettings(on_bad_row=OnBadRow.DEAD_LETTER)
WAYS: dict[str, dict[str, Any]] = {
    "bulk": {},
    "LOAD DATA": {"bulk": False},
    "INSERT": {"bulk": False, "local_infile": False},
    "staged": {"strategy": "staged"},
    "upsert": {"mode": "upsert", "keys": ["id"]},
    "upsert, staged": {"mode": "upsert", "keys": ["id"], "strategy": "staged"},
}


@pytest.fixture(params=["explicit defaults", "defaults of the server's own"])
def server(request: pytest.FixtureRequest, sql_server: SqlServer) -> Iterator[SqlServer]:
    ((kept,),) = sql_server.query("SELECT @@global.explicit_defaults_for_timestamp")
    wanted = request.param == "explicit defaults"
    sql_server.query("SET GLOBAL explicit_defaults_for_timestamp = %s", wanted)
    try:
        sql_server.query("CREATE TABLE kept (id bigint PRIMARY KEY, at timestamp(6) NOT NULL)")
        yield sql_server
    finally:
        sql_server.query("SET GLOBAL explicit_defaults_for_timestamp = %s", kept)


async def write(server: SqlServer, rows: list[dict[str, Any]], schema: pa.Schema, **options: Any) -> None:
    async with MySQLSink(server.url(), "kept", schema=schema, **options) as sink:
        await sink.open("timestamps")
        await sink.begin(0)
        writer = sink.writer()
        await writer.write(pa.Table.from_pylist(rows, schema))
        await sink.commit(0, [await writer.finish()])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_a_null_is_refused_where_the_server_would_write_the_time(
    server: SqlServer, way: dict[str, Any]
) -> None:
    rows: list[dict[str, Any]] = [{"id": 1, "at": MOMENT}, {"id": 2, "at": None}]
    with pytest.raises(WriteFailed, match="column 'at': it is null, and may not be") as caught:
        await write(server, rows, SCHEMA, **way)
    assert caught.value.is_permanent
    assert server.query("SELECT * FROM kept") == []


async def test_a_null_is_a_dead_letter(server: SqlServer) -> None:
    rows: list[dict[str, Any]] = [{"id": 1, "at": MOMENT}, {"id": 2, "at": None}]
    await write(server, rows, SCHEMA, settings=DEAD_LETTERS)
    assert server.query("SELECT id, UNIX_TIMESTAMP(at) FROM kept") == [(1, MOMENT.timestamp())]
    ((reason,),) = server.query("SELECT reason FROM semel_dead_letters")
    assert reason.startswith("column 'at': it is null")


@pytest.mark.parametrize("strategy", ["direct", "staged"])
async def test_what_is_deleted_needs_no_time(server: SqlServer, strategy: str) -> None:
    server.query("INSERT INTO kept VALUES (1, '2026-01-01'), (2, '2026-01-01')")
    options: dict[str, Any] = {
        "mode": "upsert", "keys": ["id"], "change_column": "op", "strategy": strategy
    }  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"id": 1, "at": None, "op": "delete"},
        {"id": 2, "at": None, "op": "update"},
    ]
    with pytest.raises(WriteFailed, match="column 'at': it is null"):
        await write(server, rows, CHANGES, **options)
    await write(server, [rows[0], {**rows[1], "at": MOMENT}], CHANGES, **options)
    assert server.query("SELECT id, UNIX_TIMESTAMP(at) FROM kept") == [(2, MOMENT.timestamp())]


async def test_a_column_that_may_be_null_is(sql_server: SqlServer) -> None:
    sql_server.query("CREATE TABLE kept (id bigint PRIMARY KEY, at timestamp(6) NULL)")
    await write(sql_server, [{"id": 1, "at": None}], SCHEMA)
    assert sql_server.query("SELECT * FROM kept") == [(1, None)]
