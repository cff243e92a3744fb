"""What comes out of MySQL is what went in, for every type and way of loading; what does not fit is named.

The server is MariaDB, and also the MySQL whose URL TEST_MYSQL gives: its database is emptied.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from mariadb_server import SqlServer

from semel.sinks.errors import CommitFailed, InitFailed, WriteFailed
from semel.sinks.mysql import MySQLSink
from semel.sinks.settings import SinkSettings

UTC = dt.UTC
BULK: dict[str, bool] = {}
LOAD_DATA = {"bulk": False}
INSERT = {"bulk": False, "local_infile": False}
LOADS = pytest.mark.parametrize("way", [BULK, LOAD_DATA, INSERT], ids=["bulk", "LOAD DATA", "INSERT"])
# Every character that LOAD DATA or a literal gives a meaning to, and some that need more bytes.
TRICKY = [
    "", " ", "\\", "\\.", "\\N", "a\n\\.\nb", '"', "''", "a,b", "\t\r\n", "\0", "\\0", "NULL", "%s %%",
    "\x01\x1a\x7f", "ß€😀", "x" * 100_000, "'); DROP TABLE kept; --",
]  # fmt: skip


async def write(server: SqlServer, table: str, rows: Any, **options: Any) -> None:
    async with MySQLSink(server.url(), table, **options) as sink:
        last = await sink.open("types")
        epoch = 0 if last is None else last + 1
        plan = await sink.begin(epoch)
        assert plan is not None
        writer = plan.writer(0)
        await writer.write(rows)
        await sink.commit(epoch, [await writer.finish()])


async def round_trip(server: SqlServer, type_name: str, column: pa.Array, **options: Any) -> list[Any]:
    server.query(f"CREATE TABLE kept (id bigint, value {type_name})")
    rows = pa.table({"id": pa.array(range(len(column)), pa.int64()), "value": column})
    await write(server, "kept", rows, **options)
    return [value for (value,) in server.query("SELECT value FROM kept ORDER BY id")]


CASES = [
    ("tinyint(1)", pa.array([True, False, None])),
    ("tinyint", pa.array([-128, 0, None, 127], pa.int8())),
    ("int", pa.array([-(2**31), 0, None, 2**31 - 1], pa.int64())),
    ("bigint", pa.array([-(2**63), 0, None, 2**63 - 1], pa.int64())),
    ("tinyint unsigned", pa.array([0, None, 255], pa.uint8())),
    ("smallint", pa.array([-(2**15), None, 2**15 - 1], pa.int16())),
    ("smallint unsigned", pa.array([0, None, 2**16 - 1], pa.uint16())),
    ("mediumint", pa.array([-(2**23), None, 2**23 - 1], pa.int32())),
    ("int unsigned", pa.array([0, None, 2**32 - 1], pa.uint32())),
    ("bigint unsigned", pa.array([0, None, 2**64 - 1], pa.uint64())),
    ("bigint", pa.chunked_array([[1, None], [], [2]], pa.int64())),
    ("float", pa.array([1.5, None, -0.25], pa.float32())),
    ("float", pa.array([1.5, None, -0.25], pa.float16())),
    ("float", pa.array([1.5, None, 0.0, 0.125])),
    ("double", pa.array([1.1, None, -1e300, 5e-324])),
    ("double", pa.array([2**53, None], pa.int64())),
    ("double", pa.array([0.1, None], pa.float32())),
    ("decimal(38,10)", pa.array([Decimal("-1234567890123456789012345678.0123456789"), None])),
    ("decimal(20,0)", pa.array([2**63, None], pa.uint64())),
    ("decimal(20,10)", pa.array([Decimal("0E-10"), None, Decimal("-1E-10")])),
    ("decimal(60,30)", pa.array([Decimal("-" + "9" * 30 + "." + "1" * 30), None], pa.decimal256(60, 30))),
    ("longtext", pa.array([*TRICKY, None])),
    ("longtext", pa.array([*TRICKY, None], pa.large_string())),
    ("longtext", pa.array([*TRICKY, None], pa.string_view())),
    ("longtext", pa.array(["", None, *("x" * size for size in (250, 251, 65_535, 65_536))])),
    ("text", pa.array(["a", "b", None, "a"]).dictionary_encode()),
    ("enum('sad','ok')", pa.array(["ok", None, "sad"])),
    ("set('a','b')", pa.array(["a,b", None, "", "b"])),
    ("varchar(5) CHARACTER SET latin1", pa.array(["ßé", None])),
    ("longblob", pa.array([b"", bytes(range(256)) * 300, None])),
    ("longblob", pa.array([b"\xff'\\\0", None], pa.binary_view())),
    ("binary(2)", pa.array([b"\x00\xff", None], pa.binary(2))),
    ("date", pa.array([dt.date(1999, 12, 31), None, dt.date(2026, 11, 16), dt.date(1, 1, 1)])),
    ("date", pa.array([dt.date(1969, 12, 31), None, dt.date(9999, 12, 31)], pa.date64())),
    ("datetime(6)", pa.array([dt.datetime(1970, 1, 1), None, dt.datetime(2026, 2, 28, 1, 2, 3, 4)])),
    ("datetime(6)", pa.array([dt.datetime(1, 1, 1), None, dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)])),
    ("datetime(3)", pa.array([dt.datetime(1969, 12, 31, 23, 59, 59, 1_000), None], pa.timestamp("ms"))),
    ("datetime", pa.array([dt.datetime(2026, 2, 28, 1, 2, 3), None])),
    ("text", pa.nulls(3)),
    ("datetime", pa.nulls(3)),
]  # fmt: skip


@LOADS
@pytest.mark.parametrize(("type_name", "column"), CASES, ids=lambda part: str(getattr(part, "type", part)))
async def test_values_come_back_as_they_were(
    sql_server: SqlServer, type_name: str, column: pa.Array, way: dict[str, bool]
) -> None:
    found = await round_trip(sql_server, type_name, column, **way)
    assert found == column.to_pylist()


@LOADS
async def test_times_are_kept_to_the_microsecond_and_moments_in_utc(
    sql_server: SqlServer, way: dict[str, bool]
) -> None:
    sql_server.query("CREATE TABLE kept (clock time(6), moment timestamp(6))")
    moment = dt.datetime(2026, 7, 1, 12, 30, 0, 5, tzinfo=UTC)
    rows = pa.table(
        {
            "clock": pa.array([dt.time(23, 59, 59, 999_999)]),
            "moment": pa.array([moment], pa.timestamp("us", "Europe/Vienna")),
        }
    )
    await write(sql_server, "kept", rows, **way)
    found = sql_server.query("SELECT CAST(clock AS char), UNIX_TIMESTAMP(moment) FROM kept")
    assert found == [("23:59:59.999999", Decimal(str(moment.timestamp())))]


@LOADS
async def test_json_comes_from_text_and_from_structs(sql_server: SqlServer, way: dict[str, bool]) -> None:
    sql_server.query("CREATE TABLE kept (texts json, structs json, maps json)")
    rows = pa.table(
        {
            "texts": pa.array(['{"a": [1, null, "\\n"]}', None]),
            "structs": pa.array([{"a": 1, "b": ["'\\"]}, None]),
            "maps": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        }
    )
    await write(sql_server, "kept", rows, **way)
    found, nothing = sql_server.query("SELECT * FROM kept ORDER BY texts IS NULL")
    assert [json.loads(text) for text in found] == [{"a": [1, None, "\n"]}, {"a": 1, "b": ["'\\"]}, {"k": 1}]
    assert nothing == (None, None, None)


async def test_rows_that_are_mappings_may_hold_what_python_has(sql_server: SqlServer) -> None:
    sql_server.query(
        "CREATE TABLE kept (id char(36), at datetime, extra json, amount decimal(9,3), raw blob)"
    )
    row = {
        "id": uuid.uuid4(),
        "at": dt.datetime(2026, 1, 2, 3, 4, 5),
        "extra": {"k": [1]},
        "amount": Decimal("12.340"),
        "raw": b"\0\1",
    }
    await write(sql_server, "kept", [row])
    ((id_, at, extra, amount, raw),) = sql_server.query("SELECT * FROM kept")
    found = {"id": uuid.UUID(id_), "at": at, "extra": json.loads(extra), "amount": amount, "raw": raw}
    assert found == row


@pytest.mark.parametrize("strategy", ["direct", "staged"])
async def test_databases_and_odd_names_are_quoted(sql_server: SqlServer, strategy: str) -> None:
    sql_server.query("DROP DATABASE IF EXISTS `semel.other`")
    sql_server.query("CREATE DATABASE `semel.other`")
    try:
        sql_server.query(
            "CREATE TABLE `semel.other`.`100%% ``Orders``` (`Key %%s` bigint PRIMARY KEY, `sel``ect` text) "
            "COMMENT = %s",
            "odd",
        )
        await write(
            sql_server,
            '"semel.other"."100% `Orders`"',
            [{"k": 1, "v": "one"}],
            mode="upsert",
            keys=["k"],
            columns={"k": "Key %s", "v": "sel`ect"},
            strategy=strategy,
        )
        found = sql_server.query("SELECT * FROM `semel.other`.`100%% ``Orders``` WHERE 0 < %s", 1)
        assert found == [(1, "one")]
    finally:
        sql_server.query("DROP DATABASE `semel.other`")


async def test_a_table_is_created_on_request(sql_server: SqlServer) -> None:
    schema = pa.schema(
        {
            "name": pa.string(),
            "amount": pa.decimal128(12, 3),
            "at": pa.timestamp("us"),
            "extra": pa.struct({"a": pa.int32()}),
            "raw": pa.binary(),
            "op": pa.string(),
        }
    )
    row = {
        "name": "n", "amount": Decimal("1.500"), "at": dt.datetime(2026, 1, 1), "extra": {"a": 1},
        "raw": b"r", "op": "insert",
    }  # fmt: skip
    other_case = {**row, "name": "N"}  # another key: keys are compared byte by byte
    options = {"mode": "upsert", "keys": ["name"], "change_column": "op", "schema": schema}
    for _ in range(2):
        given = pa.Table.from_pylist([row, other_case], schema)
        await write(sql_server, "made", given, **options, create_table=True)
    found = sql_server.query("SELECT name, amount, at, raw FROM made ORDER BY name")
    assert found == [(name, Decimal("1.500"), dt.datetime(2026, 1, 1), b"r") for name in ("N", "n")]


# What does not fit


def invalid_text(content: bytes) -> pa.Array:
    """A string that is no UTF-8, which Arrow does not look for."""
    sizes = pa.array([0, len(content)], pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), 1, [None, sizes, pa.py_buffer(content)])


REFUSED = [
    ("tinyint", pa.array([1, 128]), "Out of range value"),
    ("tinyint", pa.array([128, *[1] * 5_000]), "Out of range value for column 'value' at row 1"),
    ("int unsigned", pa.array([-1]), "Out of range value"),
    ("decimal(5,2)", pa.array([Decimal("1.234")]), "value"),
    ("decimal(5,2)", pa.array([Decimal("1.234"), *[Decimal("1.230")] * 9]), "value"),
    ("decimal(3,0)", pa.array([Decimal("1234")]), "Out of range value"),
    ("varchar(2)", pa.array(["abc"]), "(too long|truncated) for column 'value'"),
    ("varchar(9) CHARACTER SET latin1", pa.array(["€uro", "😀"]), "Incorrect string value"),
    ("varchar(9)", invalid_text(b"\xe2\x82"), "Incorrect string value"),
    ("varbinary(2)", pa.array([b"abc"]), "(too long|truncated) for column 'value'"),
    ("enum('a','b')", pa.array(["c"]), "Data truncated for column 'value'"),
    ("double", pa.array([1.5, float("nan")]), "'value': nan is no number"),
    ("float", pa.array([float("-inf")], pa.float32()), "'value': -inf is no number"),
    ("float", pa.array([1.0, None, 1e300]), r"'value': 1e\+300 does not fit float"),
    ("float unsigned", pa.array([1.0, 1e-300]), "'value': 1e-300 does not fit float"),
    ("float", pa.array([2**24, None, 2**24 + 1]), "'value': Integer value 16777217 not in range"),
    ("double", pa.array([2**53, 2**53 + 1]), "'value': Integer value 9007199254740993 not in range"),
    ("datetime", pa.array([dt.datetime(2026, 1, 1, 0, 0, 0, 1)]), "'value'.*would round it"),
    ("datetime(6)", pa.array([1_000_000_001], pa.timestamp("ns")), "'value'.*lose data"),
    ("datetime(6)", pa.array([253_402_300_800], pa.timestamp("s")), "value"),
    ("datetime", pa.array([253_402_300_800_000_001], pa.timestamp("us")), "'value': 10000-01.*would round"),
    ("json", pa.array([{"on": 2_932_897}], pa.struct({"on": pa.date32()})), "'value'.*out of range"),
    ("datetime(6)", pa.array([-(2**62)], pa.timestamp("us")), "value"),
    ("date", pa.array([2_932_897], pa.date32()), "value"),
    ("date", pa.array([-719_529], pa.date32()), "value"),
    ("time", pa.array([1_500], pa.time32("ms")), "'value'.*would round it"),
    ("time(6)", pa.array([86_400_000_000], pa.time64("us")), "value"),
    ("timestamp", pa.array([-1], pa.timestamp("s", "UTC")), "value"),
    ("json", pa.array(['{"a"']), "JSON|kept.value"),
    ("bigint NOT NULL", pa.array([1, None]), "value"),
    ("bigint NOT NULL", pa.array([None, 1]), "value"),
    ("bigint NOT NULL", pa.nulls(2), "value"),
]  # fmt: skip


@LOADS
@pytest.mark.parametrize(("type_name", "column", "reason"), REFUSED, ids=lambda part: str(part)[:20])
async def test_a_value_that_does_not_fit_is_named_and_nothing_is_written(
    sql_server: SqlServer, type_name: str, column: pa.Array, reason: str, way: dict[str, bool]
) -> None:
    """The server would adjust it, skip the row and call it a warning: that is what LOAD DATA does."""
    with pytest.raises(WriteFailed, match=reason) as caught:
        await round_trip(sql_server, type_name, column, **way)
    assert caught.value.is_permanent, caught.value
    assert sql_server.query("SELECT * FROM kept") == []


@LOADS
@pytest.mark.parametrize("strategy", ["direct", "staged"])
async def test_a_key_that_is_there_is_not_skipped(
    sql_server: SqlServer, strategy: str, way: dict[str, bool]
) -> None:
    """LOAD DATA LOCAL behaves as if it were told IGNORE: the row is left out, with a warning."""
    sql_server.query("CREATE TABLE kept (id bigint PRIMARY KEY, value text)")
    sql_server.query("INSERT INTO kept VALUES (2, 'old')")
    with pytest.raises((WriteFailed, CommitFailed), match="Duplicate entry '2' for key") as caught:
        rows = [{"id": number, "value": "new"} for number in range(4)]
        await write(sql_server, "kept", rows, strategy=strategy, **way)
    assert caught.value.is_permanent
    assert sql_server.query("SELECT * FROM kept") == [(2, "old")]


WRONG_TYPES = [
    ("int", pa.string(), "takes integers"),
    ("text", pa.int64(), "cast the column to string"),
    ("decimal(9,2)", pa.float64(), "cast the column to decimal"),
    ("timestamp(6)", pa.timestamp("us"), "no time zone"),
    ("datetime(6)", pa.timestamp("us", "UTC"), "use a timestamp column"),
    ("blob", pa.string(), "takes binary"),
    ("date", pa.timestamp("us"), "takes dates"),
    ("time", pa.int64(), "takes times"),
    ("year", pa.int64(), "year is not supported"),
]


@pytest.mark.parametrize(("type_name", "arrow_type", "reason"), WRONG_TYPES, ids=str)
async def test_wrong_types_are_found_at_open(
    sql_server: SqlServer, type_name: str, arrow_type: pa.DataType, reason: str
) -> None:
    sql_server.query(f"CREATE TABLE kept (value {type_name} NULL)")
    with pytest.raises(InitFailed, match=f"'value'.*kept.value.*{reason}"):
        await write(sql_server, "kept", [], schema=pa.schema({"value": arrow_type}))
    # Without a schema the first write finds them.
    with pytest.raises(WriteFailed, match=reason):
        await write(sql_server, "kept", pa.table({"value": pa.nulls(1, arrow_type)}))


async def test_tables_and_columns_are_checked_at_open(sql_server: SqlServer) -> None:
    sql_server.query(
        "CREATE TABLE kept (id bigint PRIMARY KEY, needed varchar(9) NOT NULL, "
        "filled int DEFAULT 7, made int GENERATED ALWAYS AS (filled * 2) STORED)"
    )
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"columns": {"id": "id", "x": "absent"}}, "no column 'absent'"),
        ({"columns": {"id": "id"}}, "'needed'.*may not be null"),
        ({"columns": {"id": "id", "n": "needed", "m": "made"}}, "'made'.*generated"),
        ({"mode": "upsert", "keys": ["needed"]}, "no primary key or unique constraint on exactly"),
    ]
    for options, reason in wrong:
        with pytest.raises(InitFailed, match=reason):
            await write(sql_server, "kept", [], **options)
    await write(sql_server, "kept", [{"id": 1, "needed": "n"}])
    assert sql_server.query("SELECT * FROM kept") == [(1, "n", 7, 14)]
    sql_server.query("CREATE UNIQUE INDEX other ON kept (needed)")
    with pytest.raises(InitFailed, match=r"another unique key, \(needed\)"):
        await write(sql_server, "kept", [], mode="upsert", keys=["id"])
    with pytest.raises(InitFailed, match="there is no table"):
        await write(sql_server, "absent", [])
    sql_server.query("CREATE VIEW seen AS SELECT * FROM kept")
    sql_server.query("CREATE TABLE plain (id bigint) ENGINE=MyISAM")
    for name in ("seen", "plain"):
        with pytest.raises(InitFailed, match=f"{name} has no transactions.*ENGINE=InnoDB"):
            await write(sql_server, name, [])


# Ways of loading


def loads_of(server: SqlServer) -> int:
    """How many LOAD DATA the server has seen."""
    return status_of(server, "Com_load")


def status_of(server: SqlServer, name: str) -> int:
    ((_, count),) = server.query("SHOW GLOBAL STATUS LIKE %s", name)
    return int(count)


@pytest.mark.parametrize("forbidden_by", ["the sink", "the server"])
async def test_without_local_infile_rows_are_inserted_and_open_says_so(
    sql_server: SqlServer, forbidden_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    sql_server.query("CREATE TABLE kept (id bigint)")
    loads_before = loads_of(sql_server)
    if forbidden_by == "the server":
        sql_server.query("SET GLOBAL local_infile = 0")
    try:
        with caplog.at_level(logging.WARNING):
            allowed = forbidden_by == "the server"
            await write(sql_server, "kept", [{"id": 1}], local_infile=allowed, bulk=False)
    finally:
        sql_server.query("SET GLOBAL local_infile = 1")
    assert "rows are sent by multi-row INSERT" in caplog.text
    caplog.clear()
    assert loads_of(sql_server) == loads_before
    with caplog.at_level(logging.WARNING):
        await write(sql_server, "kept", [{"id": 2}], bulk=False)
    assert not caplog.text
    assert loads_of(sql_server) == loads_before + 1
    assert sql_server.query("SELECT id FROM kept ORDER BY id") == [(1,), (2,)]


@pytest.mark.parametrize("local_infile", [True, False])
@pytest.mark.parametrize("strategy", ["direct", "staged"])
async def test_mariadb_is_given_arrays_whatever_else_it_allows(
    mariadb: SqlServer, strategy: str, local_infile: bool, caplog: pytest.LogCaptureFixture
) -> None:
    mariadb.query("CREATE TABLE kept (id bigint)")
    before = {name: status_of(mariadb, name) for name in ("Com_load", "Com_stmt_prepare", "Com_stmt_execute")}
    with caplog.at_level(logging.WARNING):
        await write(mariadb, "kept", [{"id": 1}, {"id": 2}], strategy=strategy, local_infile=local_infile)
    assert not caplog.text
    assert {name: status_of(mariadb, name) - count for name, count in before.items()} == {
        "Com_load": 0,
        "Com_stmt_prepare": 1,
        "Com_stmt_execute": 1,
    }
    assert mariadb.query("SELECT id FROM kept ORDER BY id") == [(1,), (2,)]


@LOADS
async def test_a_merge_table_is_filled_epoch_after_epoch(sql_server: SqlServer, way: dict[str, bool]) -> None:
    """It is truncated in between, which must not spoil what is prepared."""
    sql_server.query("CREATE TABLE kept (id bigint PRIMARY KEY, value text)")
    async with MySQLSink(sql_server.url(), "kept", mode="upsert", keys=["id"], **way) as sink:
        await sink.open("s")
        for epoch in range(3):
            await sink.begin(epoch)
            writer = sink.writer()
            await writer.write([{"id": number, "value": str(epoch)} for number in range(epoch, epoch + 2)])
            await sink.commit(epoch, [await writer.finish()])
    found = sql_server.query("SELECT * FROM kept ORDER BY id")
    assert found == [(0, "0"), (1, "1"), (2, "2"), (3, "2")]


async def test_a_table_that_changes_between_epochs_is_prepared_again(sql_server: SqlServer) -> None:
    sql_server.query("CREATE TABLE kept (id int, value text)")
    async with MySQLSink(sql_server.url(), "kept") as sink:
        await sink.open("s")
        for epoch, id_ in enumerate((1, 2**40)):
            await sink.begin(epoch)
            writer = sink.writer()
            await writer.write([{"id": id_, "value": str(epoch)}])
            await sink.commit(epoch, [await writer.finish()])
            sql_server.query("ALTER TABLE kept MODIFY id bigint, ADD extra int FIRST")
            sql_server.query("ALTER TABLE kept DROP extra")
    assert sql_server.query("SELECT * FROM kept ORDER BY id") == [(1, "0"), (2**40, "1")]


@pytest.mark.parametrize("way", [BULK, INSERT], ids=["bulk", "INSERT"])
async def test_a_row_is_as_large_as_the_server_takes(sql_server: SqlServer, way: dict[str, bool]) -> None:
    """From 16 MiB on it takes several packets of the protocol."""
    sql_server.query("CREATE TABLE kept (id bigint, value longtext)")
    ((default,),) = sql_server.query("SELECT @@global.max_allowed_packet")
    sizes = [default - 300, (1 << 24) - 60, 17 << 20]
    rows = pa.table({"id": pa.array(range(len(sizes))), "value": pa.array(["x" * size for size in sizes])})
    with pytest.raises(WriteFailed, match="max_allowed_packet is") as caught:
        await write(sql_server, "kept", rows.slice(2), **way)
    assert caught.value.is_permanent
    await write(sql_server, "kept", rows.slice(0, 1), **way)
    sql_server.query("SET GLOBAL max_allowed_packet = 67108864")
    try:
        await write(sql_server, "kept", rows.slice(1), **way)
    finally:
        sql_server.query("SET GLOBAL max_allowed_packet = %s", default)
    found = sql_server.query("SELECT length(value) FROM kept ORDER BY id")
    assert [size for (size,) in found] == sizes


@LOADS
@pytest.mark.parametrize("strategy", ["direct", "staged"])
async def test_it_is_the_number_of_rows_that_flushes(
    sql_server: SqlServer, strategy: str, way: dict[str, bool]
) -> None:
    """Many rows in odd pieces are all there."""
    count, most = 40_000, 12_000
    sql_server.query("CREATE TABLE kept (id bigint, value text)")
    table = pa.table({"id": pa.array(range(count)), "value": pa.array([str(n) for n in range(count)])})
    settings = SinkSettings(max_buffered=most)
    async with MySQLSink(sql_server.url(), "kept", strategy=strategy, **way, settings=settings) as sink:
        await sink.open("s")
        await sink.begin(0)
        writer = sink.writer()
        for start in range(0, count, 7_001):
            await writer.write(table.slice(start, 7_001))
            assert sink.metrics.buffered_rows < most
        receipt = await writer.finish()
        assert sink.metrics.buffered_rows == 0
        await sink.commit(0, [receipt])
    found = sql_server.query("SELECT count(*), sum(id), count(distinct value) FROM kept")
    assert found == [(count, sum(range(count)), count)]
