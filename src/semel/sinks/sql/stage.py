"""The staging tables of one sink: one for its rows, one for its dead letters.

They are made once, and named for the sink and the columns, so that they never change. Their rows belong to an
epoch by their stamps alone; whoever empties them has proved before that the sink is still its own.
"""

import hashlib
from collections.abc import Collection, Sequence

from semel.sinks.errors import CommitFailed
from semel.sinks.receipts import Receipt
from semel.sinks.sql.columns import Layout
from semel.sinks.sql.dialect import Dialect, SqlSession
from semel.sinks.sql.names import DEAD_LETTERS_TABLE, WRITER_COLUMN, TableName, stage_prefix
from semel.sinks.sql.owner_connection import OwnerConnection
from semel.sinks.sql.tables import make_table
from semel.sinks.sql.writers import dead_letter_columns, stamp_of


class Stage:
    """The two tables for one layout.

    With `refuses_nulls` the first does not take what the target's columns would refuse.
    """

    def __init__(self, dialect: Dialect, sink_id: str, layout: Layout, *, refuses_nulls: bool) -> None:
        self._dialect = dialect
        self._sink_id = sink_id
        self._columns = layout.staged
        self._refuses_nulls = refuses_nulls
        prefix = stage_prefix(sink_id)
        self.rows = TableName(None, f"{prefix}{_digest(layout, refuses_nulls)}")
        self.dead_letters = TableName(None, f"{prefix}dead")

    async def make(self, connection: OwnerConnection, session: SqlSession) -> None:
        """And drops those that the sink had before."""
        kept = (self.rows.name, self.dead_letters.name)
        await drop_stages(self._dialect, session, self._sink_id, owner=connection, kept=kept)
        letters = dead_letter_columns(self._dialect)
        for table, columns in ((self.rows, self._columns), (self.dead_letters, letters)):
            statement = self._dialect.create_stage(table, columns, refuses_nulls=self._refuses_nulls)
            await make_table(self._dialect, session, table, statement)

    async def move_dead_letters(self, session: SqlSession, receipts: Sequence[Receipt]) -> None:
        """Those of the receipts, to where they stay."""
        buried = [receipt for receipt in receipts if receipt.dead_letters]
        if not buried:
            return
        marks = ", ".join(["%s"] * len(buried))
        moved = await session.execute(
            f"INSERT INTO {self._dialect.quote_table(TableName(None, DEAD_LETTERS_TABLE))} "
            f"(sink_id, epoch, row_text, reason) SELECT %s, {buried[0].place.epoch}, row_text, reason "
            f"FROM {self._dialect.quote_table(self.dead_letters)} "
            f"WHERE {self._dialect.quote(WRITER_COLUMN)} IN ({marks})",
            [self._sink_id, *(stamp_of(receipt.place, receipt.task, receipt.attempt) for receipt in buried)],
        )
        check_count(moved, sum(receipt.dead_letters for receipt in buried), self.dead_letters)


async def drop_stages(
    dialect: Dialect,
    session: SqlSession,
    sink_id: str,
    *,
    owner: OwnerConnection | None,
    kept: Collection[str] = (),
) -> None:
    """All that the sink has but those that are kept: it may have had other columns, or another strategy.

    Each with the sink's row locked for `owner`: one that was asleep since it took the sink must not drop its
    successor's. MySQL gives the row free within DROP, before it has dropped: a successor that takes the sink
    in that moment, and uses that table, loses it, and so its epoch, but no rows.
    """
    for old in await dialect.stages(session, stage_prefix(sink_id)):
        if old.name not in kept:
            if owner is None:  # the sink was forgotten, there is no row
                await session.begin()
            else:
                await owner.lock_row(session)
            await session.execute(f"DROP TABLE IF EXISTS {dialect.quote_table(old)}")
            await session.commit()


def check_count(moved: int, promised: int, where: TableName) -> None:
    if moved != promised:
        raise CommitFailed(
            f"the writers' receipts promise {promised} rows in {where}, and {moved} are there: the server "
            f"was restarted or has failed over since (staging tables do not survive that), or a trigger "
            f"drops rows. Nothing was committed; abort the epoch and run it again"
        )


def _digest(layout: Layout, refuses_nulls: bool) -> str:
    return hashlib.sha256(repr((layout.staged, refuses_nulls)).encode()).hexdigest()[:8]
