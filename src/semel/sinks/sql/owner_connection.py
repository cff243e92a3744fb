"""The connection of a SQL sink's owner: one at a time, and a new one only while the sink is its own.

- A connection that was lost may still be there for the server, and keep the sink's row locked: whoever makes
  the next one ends it first, and notes the new one in the row.
- Every transaction begins with the row, which it locks, and ends there if the row has another owner by now.
"""

from semel.sinks.errors import FencedOut
from semel.sinks.marker import Owner
from semel.sinks.sql.dialect import Dialect, SqlSession
from semel.sinks.sql.names import sink_key
from semel.sinks.sql.sink_row import Holder, SinkRow, SinkRows


class OwnerConnection:
    """For one run of a sink. `session` is the connection, if there is one."""

    def __init__(
        self, dialect: Dialect, rows: SinkRows, sink_id: str, owner: Owner, lock_timeout: float
    ) -> None:
        self.session: SqlSession | None = None
        # Which the sink's row has, too, from when it is taken until another owner takes it.
        self.owner_number = 0
        # What makes the temporary table that each connection needs, if it needs one.
        self.preparation: str | None = None
        self._dialect = dialect
        self._rows = rows
        self._sink_id = sink_id
        self._owner = owner
        self._lock_timeout = lock_timeout

    @property
    def label(self) -> str:
        """What the server shows: whose connection it is, so that a successor ends the right one."""
        return f"semel:{sink_key(self._sink_id)}:{self._owner.run}"

    def holder(self, session: SqlSession) -> Holder:
        """What the sink's row notes of this owner."""
        return Holder(self._owner, session.session_id, self.label)

    async def open(self) -> SqlSession:
        """The first one, of an owner that has not taken the sink yet."""
        self.session = await self._dialect.connect(self.label)
        return self.session

    async def get_session(self) -> SqlSession:
        """The one that is there; a new one, if it was lost, after proof that the sink is still ours."""
        if self.session is not None:
            return self.session
        session = await self._dialect.connect(self.label)
        try:
            await session.set_lock_timeout(self._lock_timeout)
            await self._end_lost_one(session)
            if not await self._rows.renew(session, self._sink_id, self.owner_number, self.holder(session)):
                raise self.fenced_by(await self._rows.read(session, self._sink_id))
            if self.preparation is not None:
                await session.execute(self.preparation)
        except BaseException:
            await session.close()
            raise
        self.session = session
        return session

    async def _end_lost_one(self, session: SqlSession) -> None:
        """A server that has not noticed the loss would keep the row locked until it does."""
        row = await self._rows.read(session, self._sink_id)
        if row is not None and row.owner == self.owner_number and row.holder is not None:
            await self._dialect.end_session(session, row.holder.session_id, row.holder.label)

    async def lock_row(self, session: SqlSession) -> SinkRow:
        """Begins a transaction that has the sink's row, if it is still ours."""
        await session.begin()
        row = await self._rows.lock(session, self._sink_id)
        if row is None or row.owner != self.owner_number:
            await session.rollback()
            raise self.fenced_by(row)
        return row

    def fenced_by(self, row: SinkRow | None) -> FencedOut:
        """The error for an owner that finds another one in the sink's row, or no row."""
        if row is None:
            return FencedOut(
                f"the row of sink {self._sink_id!r} was deleted (forgotten) while it was open; restart"
            )
        by = row.holder.owner if row.holder is not None else "an unknown process"
        return FencedOut(
            f"sink {self._sink_id!r} was taken by {by}, owner number {row.owner}: stop this process; if it "
            "opened the sink again, it would fence its successor"
        )

    async def drop(self) -> None:
        """Gives the connection up, with its transaction. Idempotent."""
        session, self.session = self.session, None
        if session is not None:
            await session.close()
