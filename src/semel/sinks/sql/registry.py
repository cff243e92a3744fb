"""Looking at the sinks of a database, and setting a marker by hand: what `semel sink` does."""

from dataclasses import dataclass
from typing import Final

from semel.errors import NotFoundError, SemelError
from semel.sinks.errors import ConnectionLost, SinkError
from semel.sinks.marker import ANY_QUERY, BY_HAND, Marker, Owner
from semel.sinks.sql.dialect import Dialect, SqlSession
from semel.sinks.sql.failures import Cause, SqlFailure
from semel.sinks.sql.sink_row import Holder, SinkRow, SinkRows
from semel.sinks.sql.stage import drop_stages
from semel.sinks.sql.tables import make_table

LABEL: Final = "semel sink"


@dataclass(slots=True, frozen=True)
class SinkStatus:
    """A sink as its row tells: the last committed epoch, and who has it open."""

    sink_id: str
    marker: Marker
    owner: Owner | None
    is_alive: bool


class SqlRegistry:
    """The sinks of one database. Each call has a connection of its own."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._rows = SinkRows(dialect)

    async def sinks(self) -> list[SinkStatus]:
        session = await self._connect()
        try:
            return [await self._status(session, row) for row in await self._rows.read_all(session)]
        except SqlFailure as failure:
            if failure.cause is Cause.MISSING:
                return []  # no sink was ever opened here
            raise _explained("the sinks of the database could not be read", failure) from failure
        finally:
            await session.close()

    async def read(self, sink_id: str) -> SinkStatus | None:
        session = await self._connect()
        try:
            row = await self._rows.read(session, sink_id)
            return None if row is None else await self._status(session, row)
        except SqlFailure as failure:
            if failure.cause is Cause.MISSING:
                return None
            raise _explained("the sinks of the database could not be read", failure) from failure
        finally:
            await session.close()

    async def adopt(self, sink_id: str, epoch: int, query_id: str = ANY_QUERY) -> None:
        """Sets the marker, fencing whoever has the sink open. Makes the row, if it is not there."""
        session = await self._connect()
        try:
            for table, statement in self._dialect.create_bookkeeping():
                await make_table(self._dialect, session, table, statement)
            await self._rows.insert(session, sink_id)
            await self._rows.adopt(session, sink_id, Marker(epoch, query_id, ""), _nobody(session))
        except SqlFailure as failure:
            raise _explained(f"the marker of {sink_id!r} was not set", failure) from failure
        finally:
            await session.close()

    async def forget(self, sink_id: str) -> bool:
        """Deletes the row, which fences whoever has the sink open, and its stages. False if there is none."""
        session = await self._connect()
        try:
            is_known = await self._rows.forget(session, sink_id)
            await drop_stages(self._dialect, session, sink_id, owner=None)
            return is_known
        except SqlFailure as failure:
            raise _explained(f"{sink_id!r} was not forgotten", failure) from failure
        finally:
            await session.close()

    async def _connect(self) -> SqlSession:
        try:
            return await self._dialect.connect(LABEL)
        except SqlFailure as failure:
            if failure.cause is Cause.MISSING:
                raise NotFoundError(f"the database cannot be opened: {failure}. Name another") from failure
            raise _explained("the database cannot be opened", failure) from failure

    async def _status(self, session: SqlSession, row: SinkRow) -> SinkStatus:
        holder = row.holder
        if holder is None:
            return SinkStatus(row.sink_id, row.marker, None, False)
        alive = await self._dialect.is_alive(session, holder.session_id, holder.label)
        return SinkStatus(row.sink_id, row.marker, holder.owner, alive)


def _explained(what: str, failure: SqlFailure) -> SemelError:
    if failure.cause is Cause.LOST:
        return ConnectionLost(f"{what}: {failure}. Is the server running, and is this its address?")
    return SinkError(f"{what}: {failure}")


def _nobody(session: SqlSession) -> Holder:
    return Holder(Owner.here(BY_HAND), session.session_id, LABEL)
