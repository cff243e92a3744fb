"""The sink's row in `semel_sinks`: its fence and its marker.

Whoever opens the sink raises `owner`; every epoch's transaction locks the row, finds its own number there
or stops, and writes the marker. So the epochs of two owners can never be mixed, however late the older one
wakes up.
"""

import json
from dataclasses import asdict, dataclass

from semel.sinks.marker import NO_MARKER, Marker, Owner
from semel.sinks.sql.dialect import Dialect, SqlSession, SqlValue
from semel.sinks.sql.names import SINKS_TABLE, TableName


@dataclass(slots=True, frozen=True)
class Holder:
    """An owner, and the connection by which it can be told to go."""

    owner: Owner
    session_id: int
    label: str

    def encode(self) -> str:
        fields = {**asdict(self.owner), "session_id": self.session_id, "label": self.label}
        return json.dumps(fields, separators=(",", ":"))


@dataclass(slots=True, frozen=True)
class SinkRow:
    """The row as it was read. `owner` only ever grows."""

    sink_id: str
    owner: int
    holder: Holder | None
    marker: Marker


class SinkRows:
    """The statements on `semel_sinks`, in the words of one database."""

    def __init__(self, dialect: Dialect) -> None:
        self._insert = dialect.insert_sink()
        table = dialect.quote_table(TableName(None, SINKS_TABLE))
        self._select = f"SELECT sink_id, owner, owner_info, epoch, query_id, offsets_digest FROM {table}"
        self._take = f"UPDATE {table} SET owner = %s, owner_info = %s WHERE sink_id = %s AND owner = %s"
        self._adopt = (
            f"UPDATE {table} SET owner = owner + 1, owner_info = %s, epoch = %s, query_id = %s, "
            f"offsets_digest = '' WHERE sink_id = %s"
        )
        self._renew = f"UPDATE {table} SET owner_info = %s WHERE sink_id = %s AND owner = %s"
        self._mark = (
            f"UPDATE {table} SET epoch = %s, query_id = %s, offsets_digest = %s "
            f"WHERE sink_id = %s AND owner = %s AND epoch = %s"
        )
        self._forget = f"DELETE FROM {table} WHERE sink_id = %s"

    async def insert(self, session: SqlSession, sink_id: str) -> None:
        """Makes the row, with no owner and no marker, if it is not there."""
        await session.execute(self._insert, (sink_id,))

    async def read(self, session: SqlSession, sink_id: str) -> SinkRow | None:
        found = await session.fetch(f"{self._select} WHERE sink_id = %s", (sink_id,))
        return _decode(found[0]) if found else None

    async def read_all(self, session: SqlSession) -> list[SinkRow]:
        return [_decode(row) for row in await session.fetch(f"{self._select} ORDER BY sink_id")]

    async def lock(self, session: SqlSession, sink_id: str) -> SinkRow | None:
        """Reads it and keeps it locked until the transaction ends. Waits for the owner that has it locked."""
        found = await session.fetch(f"{self._select} WHERE sink_id = %s FOR UPDATE", (sink_id,))
        return _decode(found[0]) if found else None

    # The next three are one statement each, outside a transaction: a process that is stopped at any point
    # cannot hold the row's lock without its connection being noted in the row.

    async def take(self, session: SqlSession, row: SinkRow, holder: Holder) -> bool:
        """Makes `holder` the owner, with the next number; False if somebody did since the row was read."""
        parameters = (row.owner + 1, holder.encode(), row.sink_id, row.owner)
        return await session.execute(self._take, parameters) == 1

    async def renew(self, session: SqlSession, sink_id: str, owner: int, holder: Holder) -> bool:
        """Notes the owner's new connection; False if the owner is another by now."""
        return await session.execute(self._renew, (holder.encode(), sink_id, owner)) == 1

    async def adopt(self, session: SqlSession, sink_id: str, marker: Marker, holder: Holder) -> None:
        """Sets the marker by hand, and fences whoever has the sink."""
        await session.execute(self._adopt, (holder.encode(), marker.epoch, marker.query_id, sink_id))

    async def mark(
        self, session: SqlSession, sink_id: str, owner: int, marker: Marker, last_epoch: int
    ) -> bool:
        """Writes the marker; False if the row is no longer what it was."""
        parameters: tuple[SqlValue, ...] = (
            marker.epoch,
            marker.query_id,
            marker.offsets_digest,
            sink_id,
            owner,
            last_epoch,
        )
        return await session.execute(self._mark, parameters) == 1

    async def forget(self, session: SqlSession, sink_id: str) -> bool:
        return await session.execute(self._forget, (sink_id,)) == 1


def _decode(row: tuple[SqlValue, ...]) -> SinkRow:
    sink_id, owner, owner_info, epoch, query_id, offsets_digest = row
    assert isinstance(owner, int) and isinstance(epoch, int)
    marker = NO_MARKER if epoch < 0 else Marker(epoch, str(query_id), str(offsets_digest))
    return SinkRow(str(sink_id), owner, _decode_holder(str(owner_info)), marker)


def _decode_holder(text: str) -> Holder | None:
    if not text:
        return None
    fields = json.loads(text)
    owner = Owner(fields["host"], fields["pid"], fields["run"], fields["since"])
    return Holder(owner, fields["session_id"], fields["label"])
