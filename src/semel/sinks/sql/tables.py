"""Making a table of ours, if it is not there, however many do so at once."""

from typing import Final

from semel.sinks.sql.dialect import Dialect, SqlSession
from semel.sinks.sql.failures import SqlFailure
from semel.sinks.sql.names import TableName

MAX_ATTEMPTS: Final = 3


async def make_table(dialect: Dialect, session: SqlSession, table: TableName, statement: str) -> None:
    """Looks first: who may use a table need not have the right to make it."""
    for attempt in range(MAX_ATTEMPTS):
        if await dialect.describe(session, table):
            return
        try:
            await session.execute(statement)
            return
        except SqlFailure:
            # "If not exists" is not atomic: who comes second may be told of a duplicate in the catalogue.
            if attempt == MAX_ATTEMPTS - 1:
                raise
