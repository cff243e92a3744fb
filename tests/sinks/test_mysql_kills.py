"""A session that has ended by itself just before it is ended is no error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from mariadb_server import SqlServer

from semel.sinks.mysql.dialect import MySQLDialect
from semel.sinks.mysql.sink import parse_url
from semel.sinks.sql.dialect import SqlSession

Ending = Callable[[MySQLDialect, SqlSession, SqlSession, str], Awaitable[None]]


async def end_session(dialect: MySQLDialect, session: SqlSession, old: SqlSession, label: str) -> None:
    await dialect.end_session(session, old.session_id, label)


async def end_writers(dialect: MySQLDialect, session: SqlSession, old: SqlSession, label: str) -> None:
    await dialect.end_writers(session, label)


@pytest.mark.parametrize(
    ("ending", "label"), [(end_session, "semel:kills:run"), (end_writers, "semel-writer:kills:")]
)
async def test_a_session_that_ends_meanwhile_is_ended(
    sql_server: SqlServer, monkeypatch: pytest.MonkeyPatch, ending: Ending, label: str
) -> None:
    dialect = MySQLDialect(parse_url(sql_server.url()))
    old = await dialect.connect(label)
    session = await dialect.connect("kills")
    fetch = session.fetch
    found: list[int] = []

    async def fetch_and_lose(statement: str, parameters: Any = ()) -> Any:
        answer = await fetch(statement, parameters)
        if not found and any(old.session_id in row for row in answer):
            found.append(old.session_id)
            await old.close()
            async with asyncio.timeout(10):
                while await fetch("SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = %s", found):
                    pass
        return answer

    monkeypatch.setattr(session, "fetch", fetch_and_lose)
    try:
        await ending(dialect, session, old, label)
    finally:
        await session.close()
    assert found
