"""A connection of PyMySQL that loads from memory, and binds arrays where MariaDB is at the other end.

PyMySQL answers LOAD DATA LOCAL with the content of whatever file the server names, at any time. Here the
server gets what the caller is loading just then, whatever it names, and otherwise nothing: a hostile server
can read no files.

MariaDB tells what it has beyond MySQL in bytes of its greeting that MySQL leaves empty, and says so by a flag
that MySQL always sets and MariaDB does not. A client that wants any of it answers in the same way.
"""

import struct
from collections.abc import Iterable
from typing import Any, Final

from pymysql.connections import Connection, MySQLResult
from pymysql.constants import CLIENT, COMMAND
from pymysql.err import OperationalError
from pymysql.protocol import MysqlPacket

# Large packets are few; the server needs room for one at a time.
PACKET_BYTES: Final = 256 * 1024
OUT_OF_SYNC: Final = 2014

# Set by MySQL, and by clients that know of nothing else.
CLIENT_MYSQL: Final = CLIENT.LONG_PASSWORD
# Of the extended capabilities, which are the bits from 32 on: COM_STMT_BULK_EXECUTE.
BULK_OPERATIONS: Final = 1 << (34 - 32)
BULK_EXECUTE: Final = 0xFA
# The types of the parameters come with the rows.
SEND_TYPES: Final = 128
# In the greeting, after the version: the thread, the salt's beginning, flags, character set, status and more
# flags, the salt's length, and what MySQL leaves empty.
GREETING: Final = struct.Struct("<I8sxHBHHB6xI")
# What a handshake response begins with, and all that a request for TLS is.
RESPONSE_BYTES: Final = 32
FLAGS: Final = slice(0, 4)
EXTENDED_FLAGS: Final = slice(28, 32)
PREPARED: Final = struct.Struct("<xIHH")


class LoadingResult(MySQLResult):  # type: ignore[misc]
    """Sends what its connection is loading."""

    connection: "LoadingConnection"

    def _read_load_local_packet(self, first_packet: object) -> None:
        connection = self.connection
        try:
            connection.send_loading()
        except BaseException:
            if connection.open:  # it is in step again with the server's answer; else it was lost
                connection.end_loading()
            raise
        answer = connection.end_loading()
        if not answer.is_ok_packet():
            raise OperationalError(OUT_OF_SYNC, "the server did not confirm what was loaded")
        self._read_ok_packet(answer)


class LoadingConnection(Connection):  # type: ignore[misc]
    """Not for use by several threads at once."""

    def __init__(self, *, bulk: bool = False, **options: Any) -> None:
        self._loading: Iterable[memoryview] = ()
        self._wants_bulk = bulk
        self._greeting: bytes | None = None
        self._is_responding = False
        self.has_bulk = False
        """Whether `prepare` and `execute_bulk` can be used."""
        super().__init__(**options)

    # The handshake

    def _read_packet(self, packet_type: type[MysqlPacket] = MysqlPacket) -> MysqlPacket:
        packet = super()._read_packet(packet_type)
        if self._greeting is None:
            self._greeting = packet.get_all_data()
        return packet

    def _get_server_information(self) -> None:
        super()._get_server_information()
        self.has_bulk = self._wants_bulk and offers_bulk(self._greeting or b"")

    def _request_authentication(self) -> None:
        self._is_responding = self.has_bulk
        super()._request_authentication()

    def write_packet(self, payload: bytes | memoryview) -> None:
        if self._is_responding:
            # After a request for TLS the response itself is still to come; the rest is up to the plugins.
            self._is_responding = len(payload) == RESPONSE_BYTES
            payload = asking_for_bulk(payload)
        super().write_packet(payload)

    def wait_without_limit(self) -> None:
        """After the handshake: a statement may take as long as it takes."""
        self._read_timeout = self._write_timeout = None

    # Loads

    def load(self, statement: bytes, parts: Iterable[memoryview]) -> int:
        """Runs a LOAD DATA LOCAL that reads these parts; returns how many rows the server took."""
        self._loading = parts
        try:
            return int(self.query(statement))
        finally:
            self._loading = ()

    def prepare(self, statement: bytes) -> int:
        """Returns the server's number for the statement, which has no results."""
        self._execute_command(COMMAND.COM_STMT_PREPARE, statement)
        answer = self._read_packet()
        if not answer.is_ok_packet():
            raise OperationalError(OUT_OF_SYNC, "the server did not confirm what was prepared")
        statement_id, columns, parameters = PREPARED.unpack_from(answer.get_all_data())
        for described in (parameters, columns):
            for _ in range(described + 1 if described else 0):  # and what ends them
                self._read_packet()
        return int(statement_id)

    def execute_bulk(self, statement_id: int, content: memoryview) -> int:
        """Runs a prepared statement with the rows of a BulkForm; returns how many the server took."""
        self._execute_command(BULK_EXECUTE, struct.pack("<IH", statement_id, SEND_TYPES) + content)
        return int(self._read_query_result() or 0)

    def close_statement(self, statement_id: int) -> None:
        """The server does not answer."""
        self._execute_command(COMMAND.COM_STMT_CLOSE, struct.pack("<I", statement_id))

    @property
    def warning_count(self) -> int:
        """How many warnings the last statement has left."""
        return 0 if self._result is None else int(self._result.warning_count)

    def send_loading(self) -> None:
        for part in self._loading:
            for start in range(0, len(part), PACKET_BYTES):
                self.write_packet(part[start : start + PACKET_BYTES])

    def end_loading(self) -> MysqlPacket:
        """Says that there is no more; returns the answer."""
        self.write_packet(b"")
        return self._read_packet()

    def _read_query_result(self, unbuffered: bool = False) -> int | None:
        self._result = None
        result = LoadingResult(self)
        result.read()
        self._result = result
        if result.server_status is not None:
            self.server_status = result.server_status
        affected: int | None = result.affected_rows
        return affected


def offers_bulk(greeting: bytes) -> bool:
    """Whether the first packet of a server says that it binds arrays."""
    start = greeting.find(b"\0") + 1
    if len(greeting) < start + GREETING.size:
        return False
    _, _, flags, _, _, _, _, extended = GREETING.unpack_from(greeting, start)
    return not flags & CLIENT_MYSQL and bool(extended & BULK_OPERATIONS)


def asking_for_bulk(response: bytes | memoryview) -> bytes:
    """A handshake response, or request for TLS, with the flags of a client that binds arrays."""
    asking = bytearray(response)
    flags = int.from_bytes(asking[FLAGS], "little") & ~CLIENT_MYSQL
    asking[FLAGS] = flags.to_bytes(4, "little")
    asking[EXTENDED_FLAGS] = BULK_OPERATIONS.to_bytes(4, "little")
    return bytes(asking)
