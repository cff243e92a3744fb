"""A connection of PyMySQL that loads from memory.

PyMySQL answers LOAD DATA LOCAL with the content of whatever file the server names, at any time. Here the
server gets what the caller is loading just then, whatever it names, and otherwise nothing: a hostile server
can read no files.
"""

from collections.abc import Iterable
from typing import Any, Final

from pymysql.connections import Connection, MySQLResult
from pymysql.err import OperationalError

# Large packets are few; the server needs room for one at a time.
PACKET_BYTES: Final = 256 * 1024
OUT_OF_SYNC: Final = 2014


class LoadingResult(MySQLResult):  # type: ignore[misc]
    """Sends what its connection is loading."""

    connection: "LoadingConnection"

    def _read_load_local_packet(self, first_packet: object) -> None:
        connection = self.connection
        try:
            connection.send_loading()
        finally:
            connection.write_packet(b"")  # there is no more
            answer = connection._read_packet()
        if not answer.is_ok_packet():
            raise OperationalError(OUT_OF_SYNC, "the server did not confirm what was loaded")
        self._read_ok_packet(answer)


class LoadingConnection(Connection):  # type: ignore[misc]
    """Not for use by several threads at once."""

    def __init__(self, **options: Any) -> None:
        self._loading: Iterable[memoryview] = ()
        self.sent_bytes = 0
        super().__init__(**options)

    def load(self, statement: bytes, parts: Iterable[memoryview]) -> int:
        """Runs a LOAD DATA LOCAL that reads these parts; returns how many rows the server took."""
        self._loading, self.sent_bytes = parts, 0
        try:
            return int(self.query(statement))
        finally:
            self._loading = ()

    def send_loading(self) -> None:
        for part in self._loading:
            for start in range(0, len(part), PACKET_BYTES):
                self.write_packet(part[start : start + PACKET_BYTES])
            self.sent_bytes += len(part)

    def _read_query_result(self, unbuffered: bool = False) -> int | None:
        self._result = None
        result = LoadingResult(self)
        result.read()
        self._result = result
        if result.server_status is not None:
            self.server_status = result.server_status
        affected: int | None = result.affected_rows
        return affected
