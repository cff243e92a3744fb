"""Rows for MariaDB's array binding, byte by byte, and who is offered them."""

from __future__ import annotations

import datetime as dt
import pickle
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any, cast

import pyarrow as pa
import pymysql
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.sinks.mysql.bulk_rows import BulkForm
from semel.sinks.mysql.connection import LoadingConnection, asking_for_bulk, offers_bulk
from semel.sinks.mysql.session import MAX_PREPARED, NEED_REPREPARE, MySQLSession
from semel.sinks.sql.columns import Column
from semel.sinks.sql.dialect import Part
from semel.sinks.sql.failures import Cause, SqlFailure
from semel.sinks.sql.names import TableName

NO_LIMIT = 1 << 40
TINY, LONG, DOUBLE, LONGLONG, DATE, TIME, DATETIME, BLOB, TEXT = 1, 3, 5, 8, 10, 11, 12, 252, 253
UNSIGNED = 0x80


def form_of(*types: str, max_bytes: int = NO_LIMIT, stamp: str | None = None) -> BulkForm:
    columns = tuple(Column(f"c{number}", f"c{number}", name) for number, name in enumerate(types))
    return BulkForm(TableName(None, "kept"), columns, stamp, max_bytes)


def parts_of(form: BulkForm, *columns: pa.Array | pa.ChunkedArray) -> list[Part]:
    return list(form.parts(pa.table({f"c{number}": column for number, column in enumerate(columns)})))


def encoded(type_name: str, column: pa.Array | pa.ChunkedArray) -> bytes:
    (part,) = parts_of(form_of(type_name), column)
    assert part.rows == len(column)
    return bytes(part.content)


def decoded_texts(content: bytes) -> list[bytes | None]:
    """The fields of one column of text, read as the protocol says."""
    found: list[bytes | None] = []
    at = 2
    while at < len(content):
        indicator, at = content[at], at + 1
        if indicator == 1:
            found.append(None)
            continue
        mark, at = content[at], at + 1
        width = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(mark, 0)
        size = int.from_bytes(content[at : at + width], "little") if width else mark
        at += width
        found.append(content[at : at + size])
        at += size
    assert at == len(content)
    return found


def test_a_small_table_byte_by_byte() -> None:
    form = form_of("bigint", "varchar(9)", "tinyint(1)", "varbinary(9)")
    (part,) = parts_of(
        form,
        pa.array([1, None], pa.int64()),
        pa.array(["é", None]),
        pa.array([True, False]),
        pa.array([b"\xff", b""]),
    )
    types = bytes([LONGLONG, 0, TEXT, 0, TINY, 0, BLOB, 0])
    first = b"\0" + struct.pack("<q", 1) + b"\0\x02\xc3\xa9" + b"\0\x01" + b"\0\x01\xff"
    second = b"\x01" + b"\x01" + b"\0\0" + b"\0\0"
    assert part == Part(2, memoryview(types + first + second))


def test_the_stamp_stands_in_the_statement() -> None:
    assert form_of("int", "text").statement == "INSERT INTO `kept` (`c0`, `c1`) VALUES (?, ?)"
    stamped = form_of("int", stamp="it's 1")
    assert stamped.statement == "INSERT INTO `kept` (`c0`, `semel_writer`) VALUES (?, 'it\\'s 1')"
    assert pickle.loads(pickle.dumps(stamped)) == stamped


NUMBERS = [
    (pa.int8(), -1, TINY, 0, "<b"),
    (pa.uint8(), 255, TINY, UNSIGNED, "<B"),
    (pa.int16(), -2, 2, 0, "<h"),
    (pa.uint16(), 65_535, 2, UNSIGNED, "<H"),
    (pa.int32(), -3, LONG, 0, "<i"),
    (pa.uint32(), 2**32 - 1, LONG, UNSIGNED, "<I"),
    (pa.int64(), -(2**63), LONGLONG, 0, "<q"),
    (pa.uint64(), 2**64 - 1, LONGLONG, UNSIGNED, "<Q"),
    (pa.float16(), 0.5, 4, 0, "<f"),
    (pa.float32(), 0.5, 4, 0, "<f"),
    (pa.float64(), 0.1, DOUBLE, 0, "<d"),
]


@pytest.mark.parametrize(("arrow_type", "number", "code", "flags", "layout"), NUMBERS, ids=str)
def test_numbers(arrow_type: pa.DataType, number: float, code: int, flags: int, layout: str) -> None:
    type_name = "bigint" if pa.types.is_integer(arrow_type) else "double"
    found = encoded(type_name, pa.array([number, None], arrow_type))
    assert found == bytes([code, flags, 0]) + struct.pack(layout, number) + b"\x01"


MOMENTS = [
    ("date", pa.array([dt.date(2026, 11, 16), None]), DATE, b"\x04" + struct.pack("<HBB", 2026, 11, 16)),
    (
        "datetime(6)",
        pa.array([dt.datetime(1969, 12, 31, 23, 59, 58, 7), None]),
        DATETIME,
        b"\x0b" + struct.pack("<HBBBBBI", 1969, 12, 31, 23, 59, 58, 7),
    ),
    (
        "timestamp",
        pa.array([0, None], pa.timestamp("s", "Europe/Vienna")),
        DATETIME,
        b"\x0b" + struct.pack("<HBBBBBI", 1970, 1, 1, 0, 0, 0, 0),
    ),
    (
        "time(6)",
        pa.array([dt.time(1, 2, 3, 4), None]),
        TIME,
        b"\x0c" + struct.pack("<BIBBBI", 0, 0, 1, 2, 3, 4),
    ),
]


@pytest.mark.parametrize(("type_name", "column", "code", "value"), MOMENTS, ids=lambda part: str(part)[:11])
def test_dates_and_times(type_name: str, column: pa.Array, code: int, value: bytes) -> None:
    assert encoded(type_name, column) == bytes([code, 0, 0]) + value + b"\x01"


def test_decimals_and_nested_values_are_text_and_nulls_alone_are_nulls() -> None:
    assert decoded_texts(encoded("decimal(9,2)", pa.array([Decimal("-1.50")]))) == [b"-1.50"]
    assert decoded_texts(encoded("json", pa.array([{"a": 1}]))) == [b'{"a": 1}']
    assert encoded("datetime", pa.nulls(3))[2:] == b"\x01\x01\x01"


SIZES = [0, 1, 250, 251, 65_535, 65_536, (1 << 24) - 1, 1 << 24]
LENGTHS = {
    250: b"\xfa",
    251: b"\xfc\xfb\x00",
    65_535: b"\xfc\xff\xff",
    65_536: b"\xfd\x00\x00\x01",
    1 << 24: b"\xfe\x00\x00\x00\x01\x00\x00\x00\x00",
}


@pytest.mark.parametrize("size", LENGTHS, ids=str)
def test_a_length_takes_as_many_bytes_as_it_needs(size: int) -> None:
    found = encoded("longtext", pa.array(["x" * size]))
    assert found[:2] + found[2 : len(found) - size] == bytes([TEXT, 0, 0]) + LENGTHS[size]
    assert found[len(found) - size :] == b"x" * size


def test_lengths_of_all_sizes_stand_side_by_side() -> None:
    texts = [None, *("x" * size for size in SIZES), None, "end"]
    expected = [None if text is None else text.encode() for text in texts]
    assert decoded_texts(encoded("longtext", pa.array(texts))) == expected


@given(
    st.lists(st.none() | st.binary(max_size=9) | st.binary(min_size=249, max_size=260), min_size=1),
    st.integers(0, 5),
    st.sampled_from([pa.binary(), pa.large_binary(), pa.binary_view()]),
)
def test_slices_and_chunks_are_encoded_as_what_they_hold(
    values: list[bytes | None], start: int, arrow_type: pa.DataType
) -> None:
    array = pa.array([b"before", *values, None], arrow_type)
    chunks = pa.chunked_array([array.slice(1, start), array.slice(1 + start)], arrow_type)
    assert decoded_texts(encoded("longblob", chunks)) == [*values, None]


def test_slices_of_numbers_and_nulls_begin_where_they_begin() -> None:
    numbers = pa.array([9, None, 1, None, 2], pa.int32()).slice(1, 3)
    assert encoded("int", numbers) == bytes([LONG, 0]) + b"\x01" + b"\0\x01\0\0\0" + b"\x01"
    flags = pa.array([True, None, True, False]).slice(1)
    assert encoded("tinyint", flags) == bytes([TINY, 0]) + b"\x01" + b"\0\x01" + b"\0\0"
    bytes_of_two = pa.array([b"ab", None, b"cd"], pa.binary(2)).slice(1)
    assert encoded("binary(2)", bytes_of_two) == bytes([BLOB, 0]) + b"\x01" + b"\0\x02cd"


def test_parts_keep_to_their_limit_and_each_says_its_types() -> None:
    row = 2 + 5
    texts = pa.array(["12345"] * 7 + ["x" * 200] + ["12345"] * 2)
    parts = parts_of(form_of("text", max_bytes=3 * row), texts)
    assert [part.rows for part in parts] == [3, 3, 1, 1, 2]
    assert all(bytes(part.content[:2]) == bytes([TEXT, 0]) for part in parts)
    assert [text for part in parts for text in decoded_texts(bytes(part.content))] == [
        text.encode() for text in texts.to_pylist()
    ]


def test_no_rows_are_no_parts_and_many_are_all_there() -> None:
    form = form_of("bigint", max_bytes=1 << 20)
    assert parts_of(form, pa.array([], pa.int64())) == []
    count = 40_000
    parts = parts_of(form, pa.array(range(count + 3), pa.int64()).slice(3))
    assert sum(part.rows for part in parts) == count
    rows = b"".join(bytes(part.content[2:]) for part in parts)
    assert [number for (number,) in struct.iter_unpack("<xq", rows)] == list(range(3, count + 3))


REFUSED = [
    ("double", pa.array([1.0, float("nan")]), "nan is no number"),
    ("datetime", pa.array([1], pa.timestamp("us")), "would round it"),
    ("datetime", pa.array([-(60_000 * 366 * 86_400)], pa.timestamp("s")), "no date or time that MySQL has"),
    ("date", pa.array([0, 2_932_897], pa.date32()), "10000-01-01 is no date"),
    ("time(6)", pa.array([-1], pa.time64("us")), "no date or time that MySQL has"),
]


@pytest.mark.parametrize(("type_name", "column", "reason"), REFUSED, ids=lambda part: str(part)[:20])
def test_what_cannot_be_said_is_named(type_name: str, column: pa.Array, reason: str) -> None:
    with pytest.raises(SqlFailure, match=f"column 'c0': .*{reason}") as caught:
        encoded(type_name, column)
    assert caught.value.cause is Cause.ROW


# Who is offered it


def greeting(flags: int, extended: int, *, version: bytes = b"5.5.5-10.11.19-MariaDB") -> bytes:
    low, high = flags & 0xFFFF, flags >> 16
    middle = struct.pack("<I8sxHBHHB6xI", 7, b"saltsalt", low, 45, 2, high, 21, extended)
    return b"\x0a" + version + b"\0" + middle + b"moresaltmore\0" + b"mysql_native_password\0"


MARIADB_FLAGS, MYSQL_FLAG, BULK = 0x81BFF7FE, 1, 4


def test_only_a_server_that_says_so_has_bulk_operations() -> None:
    assert offers_bulk(greeting(MARIADB_FLAGS, 0x1D))
    assert not offers_bulk(greeting(MARIADB_FLAGS, 0x1D & ~BULK))
    # MySQL sets the flag, and owes nothing to what it leaves empty.
    assert not offers_bulk(greeting(MARIADB_FLAGS | MYSQL_FLAG, 0x1D, version=b"8.4.0"))
    assert not offers_bulk(greeting(MARIADB_FLAGS, 0x1D)[:40])
    assert not offers_bulk(b"")


def test_a_response_asks_for_bulk_operations_and_is_otherwise_the_same() -> None:
    response = struct.pack("<IIB23x", 0x3AA687, 1 << 24, 45) + b"root\0and more"
    asked = struct.pack("<IIB19xI", 0x3AA686, 1 << 24, 45, BULK) + b"root\0and more"
    assert asking_for_bulk(response) == asked


class Handshake(LoadingConnection):
    """Keeps what it would send."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        super().__init__(bulk=True, defer_connect=True)
        self.has_bulk = self._is_responding = True
        self._next_seq_id = 1

    def _write_bytes(self, packet: bytes) -> None:
        self.sent.append(packet[4:])


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "TLS"])
def test_the_handshake_asks_once_or_before_and_after_tls_and_leaves_the_rest_alone(is_secure: bool) -> None:
    request = struct.pack("<IIB23x", 0x3AA687, 1 << 24, 45)
    response, password = request + b"root\0", bytes(range(256))  # as long as a password that RSA encrypts
    asking = [request] * is_secure + [response]
    handshake = Handshake()
    for packet in (*asking, password):
        handshake.write_packet(packet)
    assert handshake.sent == [*map(asking_for_bulk, asking), password]


# What a session keeps prepared


class FakeConnection:
    """Takes every row, but first raises what it is told to."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.prepared: dict[int, bytes] = {}
        self.executed: list[int] = []

    def get_server_info(self) -> str:
        return "10.11.19-MariaDB"

    def thread_id(self) -> int:
        return 1

    def prepare(self, statement: bytes) -> int:
        number = len(self.executed) + len(self.prepared) + 1
        self.prepared[number] = statement
        return number

    def close_statement(self, statement_id: int) -> None:
        del self.prepared[statement_id]

    def execute_bulk(self, statement_id: int, content: memoryview) -> int:
        assert statement_id in self.prepared
        self.executed.append(statement_id)
        if self.errors:
            raise self.errors.pop(0)
        return 1


def session_on(connection: FakeConnection) -> MySQLSession:
    return MySQLSession(
        cast(LoadingConnection, connection), cast(socket.socket, None), cast(ThreadPoolExecutor, None), True
    )


def execute(session: MySQLSession, statement: str) -> Any:
    return session._execute_bulk(statement, memoryview(b""))


def test_a_statement_is_prepared_once_and_again_if_the_server_says_so() -> None:
    connection = FakeConnection()
    session = session_on(connection)
    assert [execute(session, "a"), execute(session, "a")] == [1, 1]
    assert connection.executed == [1, 1]
    connection.errors.append(pymysql.err.OperationalError(NEED_REPREPARE, "changed"))
    assert execute(session, "a") == 1
    assert connection.executed[-2] not in connection.prepared
    assert list(connection.prepared.values()) == [b"a"]


@pytest.mark.parametrize("codes", [[1062], [NEED_REPREPARE, NEED_REPREPARE]], ids=str)
def test_other_errors_and_one_that_stays_are_raised(codes: list[int]) -> None:
    connection = FakeConnection(*(pymysql.err.OperationalError(code, "no") for code in codes))
    with pytest.raises(pymysql.err.OperationalError):
        execute(session_on(connection), "a")
    assert len(connection.executed) == len(codes)


def test_the_oldest_statement_makes_room() -> None:
    connection = FakeConnection()
    session = session_on(connection)
    names = [str(number) for number in range(MAX_PREPARED + 1)]
    for name in names:
        execute(session, name)
    assert [statement.decode() for statement in connection.prepared.values()] == names[1:]
