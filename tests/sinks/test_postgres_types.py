"""What comes out of PostgreSQL is what went in, for every type, and what does not fit is named."""

from __future__ import annotations

import datetime as dt
import json
import random
import uuid
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest

from semel.sinks.errors import InitFailed, WriteFailed
from semel.sinks.postgres import PostgresSink
from semel.testing.postgres_server import PostgresServer

UTC = dt.UTC
# Every character that some text format gives a meaning to, and some that need more bytes.
TRICKY = [
    "", " ", "\\", "\\.", "\\N", "a\n\\.\nb", '"', "''", "a,b", "\t\r\n", "NULL", "{}", "%s %%", "\x01\x7f",
    "ß€😀", "x" * 100_000,
]  # fmt: skip


async def write(server: PostgresServer, table: str, rows: Any, **options: Any) -> None:
    async with PostgresSink(server.dsn, table, **options) as sink:
        last = await sink.open("types")
        epoch = 0 if last is None else last + 1
        plan = await sink.begin(epoch)
        assert plan is not None
        writer = plan.writer(0)
        await writer.write(rows)
        await sink.commit(epoch, [await writer.finish()])


async def round_trip(server: PostgresServer, type_name: str, column: pa.Array) -> list[Any]:
    server.query(f"CREATE TABLE kept (id bigint, value {type_name})")
    await write(server, "kept", pa.table({"id": pa.array(range(len(column)), pa.int64()), "value": column}))
    return [value for (value,) in server.query("SELECT value FROM kept ORDER BY id")]


CASES = [
    ("boolean", pa.array([True, False, None])),
    ("smallint", pa.array([-(2**15), 0, None, 2**15 - 1], pa.int16())),
    ("integer", pa.array([-(2**31), 0, None, 2**31 - 1], pa.int64())),
    ("bigint", pa.array([-(2**63), 0, None, 2**63 - 1], pa.int64())),
    ("bigint", pa.array([0, None, 255], pa.uint8())),
    ("real", pa.array([1.5, None, -0.25, float("inf")], pa.float32())),
    ("real", pa.array([1.5, None, 0.0, float("-inf")])),
    ("real[]", pa.array([[1.5, None], None, [float("inf")]], pa.list_(pa.float64()))),
    ("double precision", pa.array([1.1, None, -1e300, float("-inf")])),
    ("text", pa.array([*TRICKY, None])),
    ("varchar", pa.array([*TRICKY, None], pa.large_string())),
    ("text", pa.array(["a", "b", None, "a"]).dictionary_encode()),
    ("bytea", pa.array([b"", bytes(range(256)), None])),
    ("bytea", pa.array([b"\x00\xff", None], pa.binary(2))),
    ("uuid", pa.array(["00112233-4455-6677-8899-aabbccddeeff", None, "0" * 32])),
    ("date", pa.array([dt.date(1999, 12, 31), None, dt.date(2026, 11, 16), dt.date(1, 1, 1)])),
    ("time", pa.array([dt.time(23, 59, 59, 999_999), None, dt.time(0)])),
    ("timestamp", pa.array([dt.datetime(1970, 1, 1), None, dt.datetime(2026, 2, 28, 1, 2, 3, 4)])),
    ("timestamptz", pa.array([dt.datetime(1969, 1, 1, tzinfo=UTC), None], pa.timestamp("us", "UTC"))),
    ("timestamptz", pa.array([dt.datetime(2026, 7, 1, tzinfo=UTC)], pa.timestamp("ms", "Europe/Vienna"))),
    ("interval", pa.array([dt.timedelta(days=3, microseconds=7), None, dt.timedelta(seconds=-1)])),
    ("integer[]", pa.array([[1, None, 3], [], None, [4]], pa.list_(pa.int32()))),
    ("text[]", pa.array([TRICKY, None, [], [None]], pa.list_(pa.string()))),
    ("numeric[]", pa.array([[Decimal("1.50"), None]], pa.list_(pa.decimal128(5, 2)))),
    ("double precision[]", pa.array([[1.0, 2.0], None], pa.list_(pa.float64(), 2))),
    ("text", pa.nulls(3)),
]


@pytest.mark.parametrize(("type_name", "column"), CASES, ids=lambda part: str(getattr(part, "type", part)))
async def test_values_come_back_as_they_were(
    postgres: PostgresServer, type_name: str, column: pa.Array
) -> None:
    expected = column.to_pylist()
    found = await round_trip(postgres, type_name, column)
    if type_name == "uuid":
        expected = [None if value is None else uuid.UUID(value) for value in expected]
    assert found == expected


@pytest.mark.parametrize(("precision", "scale"), [(5, 2), (18, 0), (38, 10), (38, 0), (20, 19), (9, 1)])
async def test_numbers_of_any_precision_come_back(
    postgres: PostgresServer, precision: int, scale: int
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    largest = 10**precision - 1
    units = [0, 1, -1, largest, -largest, *(chance.randint(-largest, largest) for _ in range(200))]
    units += [chance.randint(0, 10 ** chance.randint(1, precision)) for _ in range(200)]
    context = Context(prec=60)
    numbers = [None, *(context.scaleb(Decimal(unit), -scale) for unit in units)]
    found = await round_trip(postgres, "numeric", pa.array(numbers, pa.decimal128(precision, scale)))
    assert found == numbers
    # The number of digits after the point is kept, too.
    exponents = {value.as_tuple().exponent for value in found if value is not None}
    assert exponents == {-scale}


async def test_integers_go_into_numeric(postgres: PostgresServer) -> None:
    column = pa.array([2**64 - 1, 0, None], pa.uint64())
    assert await round_trip(postgres, "numeric", column) == [2**64 - 1, 0, None]


@pytest.mark.parametrize("type_name", ["json", "jsonb"])
async def test_json_comes_from_text_and_from_structs(postgres: PostgresServer, type_name: str) -> None:
    texts = ['{"a": [1, null, "\\n"]}', None, "[]", '"x"']
    expected = [None if text is None else json.loads(text) for text in texts]
    assert await round_trip(postgres, type_name, pa.array(texts)) == expected
    postgres.query("DROP TABLE kept")
    structs = pa.array([{"a": 1, "b": [True]}, None])
    assert await round_trip(postgres, type_name, structs) == [{"a": 1, "b": [True]}, None]
    postgres.query("DROP TABLE kept")
    maps = pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64()))
    assert await round_trip(postgres, type_name, maps) == [{"k": 1}, {}, None]


async def test_rows_that_are_mappings_may_hold_what_python_has(postgres: PostgresServer) -> None:
    postgres.query(
        "CREATE TABLE kept (id uuid, at timestamptz, extra jsonb, tags text[], amount numeric, raw bytea)"
    )
    row = {
        "id": uuid.uuid4(),
        "at": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "extra": {"k": [1]},
        "tags": ["a", "b"],
        "amount": Decimal("12.340"),
        "raw": b"\0\1",
    }
    other = {**row, "extra": {"other": 2}, "tags": None}
    await write(postgres, "kept", [row, other])
    assert postgres.query("SELECT * FROM kept") == [tuple(row.values()), tuple(other.values())]


async def test_enums_and_domains_are_taken_for_what_they_are_made_of(postgres: PostgresServer) -> None:
    postgres.query("""CREATE TYPE "odd ""mood" AS ENUM ('sad', 'ok')""")
    postgres.query("CREATE DOMAIN short AS varchar(3) CHECK (VALUE <> 'bad')")
    postgres.query("""CREATE TABLE kept (mood "odd ""mood", word short)""")
    await write(postgres, "kept", [{"mood": "ok", "word": "abc"}])
    assert postgres.query("SELECT mood::text, word FROM kept") == [("ok", "abc")]
    for row in ({"mood": "up", "word": "a"}, {"mood": "ok", "word": "bad"}, {"mood": "ok", "word": "long"}):
        with pytest.raises(WriteFailed) as caught:
            await write(postgres, "kept", [row])
        assert caught.value.is_permanent


@pytest.mark.parametrize("strategy", ["direct", "staged"])
async def test_a_percent_sign_in_the_name_of_a_type_is_no_parameter(
    postgres: PostgresServer, strategy: str
) -> None:
    postgres.query("""CREATE TYPE "pc%t" AS ENUM ('a', 'b')""".replace("%", "%%"))
    postgres.query('CREATE TABLE kept (id bigint PRIMARY KEY, value "pc%%t")')
    rows = [{"id": 1, "value": "b"}]
    await write(postgres, "kept", rows, mode="upsert", keys=["id"], strategy=strategy)
    assert postgres.query("SELECT id, value::text FROM kept") == [(1, "b")]


async def test_doubles_are_rounded_to_a_real_and_not_refused(postgres: PostgresServer) -> None:
    column = pa.array([0.1, float("nan"), 1e-40, 3.4e38, -0.0])
    await round_trip(postgres, "real", column)
    found = postgres.query("SELECT value::double precision FROM kept ORDER BY id")
    assert repr([value for (value,) in found]) == repr(column.cast(pa.float32()).to_pylist())


async def test_schemas_and_odd_names_are_quoted(postgres: PostgresServer) -> None:
    postgres.query('CREATE SCHEMA "a.b"')
    postgres.query(
        """CREATE TABLE "a.b"."100%% ""Orders"" " ("Key %%s" bigint PRIMARY KEY, "sel""ect" text)"""
    )
    rows = [{"k": 1, "v": "one"}]
    for strategy in ("direct", "staged"):
        await write(
            postgres,
            '"a.b"."100% ""Orders"" "',
            rows,
            mode="upsert",
            keys=["k"],
            columns={"k": "Key %s", "v": 'sel"ect'},
            strategy=strategy,
        )
    assert postgres.query("""SELECT * FROM "a.b"."100%% ""Orders"" " WHERE 0 < %s""", 1) == [(1, "one")]
    postgres.query('DROP SCHEMA "a.b" CASCADE')


async def test_a_table_is_created_on_request(postgres: PostgresServer) -> None:
    schema = pa.schema(
        {
            "id": pa.int64(),
            "name": pa.string(),
            "amount": pa.decimal128(12, 3),
            "at": pa.timestamp("us", "UTC"),
            "tags": pa.list_(pa.string()),
            "extra": pa.struct({"a": pa.int32()}),
            "raw": pa.binary(),
            "op": pa.string(),
        }
    )
    row = {
        "id": 1, "name": "n", "amount": Decimal("1.500"), "at": dt.datetime(2026, 1, 1, tzinfo=UTC),
        "tags": ["x"], "extra": {"a": 1}, "raw": b"r", "op": "insert",
    }  # fmt: skip
    options = {
        "mode": "upsert",
        "keys": ["id"],
        "change_column": "op",
        "schema": schema,
        "create_table": True,
    }
    for _ in range(2):
        await write(postgres, "made", pa.Table.from_pylist([row], schema), **options)
    assert postgres.query("SELECT * FROM made") == [tuple(value for key, value in row.items() if key != "op")]


REFUSED = [
    ("text", pa.array(["a\0b"]), "0x00"),
    ("integer", pa.array([1, 2**31]), "'value'.*not in range"),
    ("real", pa.array([1.0, None, 1e300]), r"'value': 1e\+300 does not fit real"),
    ("real", pa.array([1.0, -1e-300]), "'value': -1e-300 does not fit real"),
    ("real", pa.array([2**24, None, 2**24 + 1]), "'value': Integer value 16777217 not in range"),
    ("real[]", pa.array([[1.0], [None, 1e39]]), r"'value': 1e\+39 does not fit real"),
    ("numeric(5,2)", pa.array([Decimal("1.234")]), "'value'.*data loss"),
    ("numeric(3,0)", pa.array([Decimal("1234")]), "overflow"),
    ("varchar(2)", pa.array(["abc"]), "too long"),
    ("jsonb", pa.array(['{"a"']), "line 1, column value"),
    ("uuid", pa.array(["not-a-uuid"]), "'not-a-uuid' is not a UUID"),
    ("timestamptz", pa.array([1_000_000_001], pa.timestamp("ns", "UTC")), "'value'.*lose data"),
    ("bigint NOT NULL", pa.array([1, None]), 'null value in column "value"'),
]


@pytest.mark.parametrize(("type_name", "column", "reason"), REFUSED, ids=lambda part: str(part)[:20])
async def test_a_value_that_does_not_fit_is_named_and_nothing_is_written(
    postgres: PostgresServer, type_name: str, column: pa.Array, reason: str
) -> None:
    with pytest.raises(WriteFailed, match=reason) as caught:
        await round_trip(postgres, type_name, column)
    assert caught.value.is_permanent
    assert postgres.query("SELECT * FROM kept") == []


async def test_the_row_of_a_copy_that_fails_is_numbered(postgres: PostgresServer) -> None:
    with pytest.raises(WriteFailed, match="COPY kept, line 4, column value"):
        await round_trip(postgres, "varchar(2)", pa.array(["a", "b", "c", "long", "d"]))


WRONG_TYPES = [
    ("integer", pa.string(), "takes integers"),
    ("text", pa.int64(), "cast the column to string"),
    ("numeric", pa.float64(), "cast the column to decimal"),
    ("timestamptz", pa.timestamp("us"), "no time zone"),
    ("timestamp", pa.timestamp("us", "UTC"), "use timestamptz"),
    ("bytea", pa.string(), "takes binary"),
    ("date", pa.timestamp("us"), "takes dates"),
    ("integer[]", pa.int32(), "takes lists"),
    ("boolean", pa.int8(), "takes booleans"),
    ("inet", pa.string(), "inet is not supported"),
]


@pytest.mark.parametrize(("type_name", "arrow_type", "reason"), WRONG_TYPES, ids=str)
async def test_wrong_types_are_found_at_open(
    postgres: PostgresServer, type_name: str, arrow_type: pa.DataType, reason: str
) -> None:
    postgres.query(f"CREATE TABLE kept (value {type_name})")
    with pytest.raises(InitFailed, match=f"'value'.*kept.value.*{reason}"):
        await write(postgres, "kept", [], schema=pa.schema({"value": arrow_type}))
    # Without a schema the first write finds them.
    with pytest.raises(WriteFailed, match=reason):
        await write(postgres, "kept", pa.table({"value": pa.nulls(1, arrow_type)}))


async def test_columns_are_checked_at_open(postgres: PostgresServer) -> None:
    postgres.query(
        "CREATE TABLE kept (id bigint PRIMARY KEY, needed text NOT NULL, "
        "filled int DEFAULT 7, made int GENERATED ALWAYS AS (filled * 2) STORED)"
    )
    schema = pa.schema({"id": pa.int64(), "needed": pa.string()})
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"columns": {"id": "id", "x": "absent"}}, "no column 'absent'"),
        ({"columns": {"id": "id"}}, "'needed'.*may not be null"),
        ({"columns": {"id": "id", "n": "needed", "m": "made"}}, "'made'.*generated"),
        ({"columns": {"id": "id", "n": "needed"}, "schema": schema}, "rows have no column 'n'"),
        ({"mode": "upsert", "keys": ["needed"]}, "no primary key or unique constraint on exactly"),
        ({"mode": "upsert", "keys": ["id"], "order_by": "at"}, "order_by names 'at'"),
    ]
    for options, reason in wrong:
        with pytest.raises(InitFailed, match=reason):
            await write(postgres, "kept", [], **options)
    await write(postgres, "kept", [{"id": 1, "needed": "n"}])
    assert postgres.query("SELECT * FROM kept") == [(1, "n", 7, 14)]
    with pytest.raises(WriteFailed, match="row 1 of this write has no column 'needed'"):
        await write(postgres, "kept", [{"id": 2, "needed": "n"}, {"id": 3}])
    with pytest.raises(WriteFailed, match="'more' that goes nowhere"):
        await write(postgres, "kept", [{"id": 2, "needed": "n", "more": 1}])
    with pytest.raises(InitFailed, match="there is no table"):
        await write(postgres, "absent", [])
    postgres.query("CREATE VIEW seen AS SELECT * FROM kept")
    with pytest.raises(InitFailed, match="view"):
        await write(postgres, "seen", [])


async def test_it_is_the_number_of_rows_and_their_size_that_flush(postgres: PostgresServer) -> None:
    """A hundred thousand rows in odd pieces, through both strategies, are all there."""
    from semel.sinks.settings import SinkSettings

    postgres.query("CREATE TABLE kept (id bigint, value text)")
    table = pa.table({"id": pa.array(range(100_000)), "value": pa.array([str(n) for n in range(100_000)])})
    for number, strategy in enumerate(("direct", "staged")):
        async with PostgresSink(
            postgres.dsn, "kept", strategy=strategy, settings=SinkSettings(max_buffered=30_000)
        ) as sink:
            await sink.open(strategy)
            plan = await sink.begin(0)
            assert plan is not None
            writer = plan.writer(0)
            for start in range(0, 100_000, 7_001):
                await writer.write(table.slice(start, 7_001))
                assert sink.metrics.buffered_rows < 30_000 + 7_001
            receipt = await writer.finish()
            assert sink.metrics.buffered_rows == 0
            await sink.commit(0, [receipt])
        found = postgres.query("SELECT count(*), sum(id), count(distinct value) FROM kept")
        assert found == [(100_000 * (number + 1), sum(range(100_000)) * (number + 1), 100_000)]
