"""How staged rows reach the target: which of them win, and the statements that put them there.

Of two rows of one key in an epoch the last by `order_by` wins; whether it is a deletion or not decides what
becomes of the key. Two that `order_by` does not tell apart (or any two, without it) are an error naming the
key: to pick one would be to guess, and a replay might guess differently.
"""

from collections.abc import Sequence

from semel.sinks.errors import CommitFailed
from semel.sinks.sql.columns import Layout
from semel.sinks.sql.dialect import Dialect, SqlSession, SqlValue
from semel.sinks.sql.names import DELETE_COLUMN, RANK_COLUMN, WRITER_COLUMN, TableName
from semel.sinks.sql.target import Mode


class Merge:
    """The statements for one layout and one table of staged rows, made once at open."""

    def __init__(self, dialect: Dialect, layout: Layout, source: TableName) -> None:
        self._dialect = dialect
        self._layout = layout
        self._source = dialect.quote_table(source)

    async def move(self, session: SqlSession, stamps: Sequence[str] | None) -> int:
        """Puts the rows with these stamps (None: all rows) into the target; returns how many it found."""
        where, parameters = self._where(stamps)
        if not self._layout.merges:
            names = self._dialect.quote_names(self._layout.names)
            return await session.execute(
                f"INSERT INTO {self._dialect.quote_table(self._layout.table)} ({names}) "
                f"SELECT {names} FROM {self._source}{where}",
                parameters,
            )
        found = await session.fetch(f"SELECT COUNT(*) FROM {self._source}{where}", parameters)
        await self._refuse_ties(session, where, parameters)
        if self._deletes:
            keys = self._dialect.quote_names(self._layout.keys)
            losers = self._winners(where, keys, is_delete=True)
            await session.execute(self._dialect.delete(self._layout, losers), parameters)
        if self._layout.upserts:
            winners = self._winners(where, self._dialect.quote_names(self._layout.names), is_delete=False)
            await session.execute(self._dialect.upsert(self._layout, winners), parameters)
        count = found[0][0]
        assert isinstance(count, int)
        return count

    @property
    def _deletes(self) -> bool:
        return self._layout.mode is Mode.DELETE or self._layout.change_column is not None

    async def _refuse_ties(self, session: SqlSession, where: str, parameters: Sequence[SqlValue]) -> None:
        keys = self._dialect.quote_names(self._layout.keys)
        told_apart_by = self._dialect.quote_names((*self._layout.keys, *self._layout.order_by))
        ties = await session.fetch(
            f"SELECT {keys} FROM {self._source}{where} GROUP BY {told_apart_by} HAVING COUNT(*) > 1 LIMIT 1",
            parameters,
        )
        if not ties:
            return
        named = ", ".join(f"{key} = {value!r}" for key, value in zip(self._layout.keys, ties[0], strict=True))
        why = (
            f"order_by ({', '.join(self._layout.order_by)}) does not tell them apart"
            if self._layout.order_by
            else "without order_by nothing says which is the last"
        )
        raise CommitFailed(
            f"two rows of this epoch have the key {named} of {self._layout.table}, and {why}",
            is_permanent=True,
        )

    def _winners(self, where: str, selected: str, *, is_delete: bool) -> str:
        """The query for the rows that decide what becomes of their key."""
        flag = self._dialect.quote(DELETE_COLUMN)
        wanted = flag if is_delete else f"NOT {flag}"
        if not self._layout.order_by:
            return f"SELECT {selected} FROM {self._source}{where or ' WHERE 1 = 1'} AND {wanted}"
        keys = self._dialect.quote_names(self._layout.keys)
        latest_first = ", ".join(f"{self._dialect.quote(name)} DESC" for name in self._layout.order_by)
        every = self._dialect.quote_names((*self._layout.names, DELETE_COLUMN))
        return (
            f"SELECT {selected} FROM (SELECT {every}, ROW_NUMBER() OVER "
            f"(PARTITION BY {keys} ORDER BY {latest_first}) AS {RANK_COLUMN} FROM {self._source}{where}) "
            f"AS ranked WHERE {RANK_COLUMN} = 1 AND {wanted}"
        )

    def _where(self, stamps: Sequence[str] | None) -> tuple[str, list[SqlValue]]:
        if stamps is None:
            return "", []
        marks = ", ".join(["%s"] * len(stamps))
        return f" WHERE {self._dialect.quote(WRITER_COLUMN)} IN ({marks})", list(stamps)
