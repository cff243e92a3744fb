"""The writers of a SQL sink, without a server: what they say of rows that the table does not take."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from semel.sinks.errors import WriteFailed
from semel.sinks.postgres import PostgresSink
from semel.sinks.postgres.binary_copy import CopyForm
from semel.sinks.sink import State, WriterPlan
from semel.sinks.sql.columns import TableColumn, lay_out
from semel.sinks.sql.failures import Cause, SqlFailure
from semel.sinks.sql.stage import Stage

TOO_LONG = "value too long for type character varying(3); COPY small, line 38, column key (SQLSTATE 22001)"
NAMED = "rows of sink 'totals' cannot be written to small: "
MENDED = (
    ". Mend the rows; or have those that do not fit their columns kept as dead letters, with "
    "SinkSettings(on_bad_row=OnBadRow.DEAD_LETTER)"
)
ROWS = [{"key": "four"}]
WAYS = ("direct", "direct, elsewhere", "staged")


@asynccontextmanager
async def begun(way: str, failure: SqlFailure, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WriterPlan]:
    """The plan of a sink whose server answers so to what is loaded."""

    async def load(*given: object) -> None:
        raise failure

    async def nothing(*given: object) -> None:
        pass

    async def connect(*given: object) -> Any:
        return SimpleNamespace(load=load, rollback=nothing, close=nothing, form=CopyForm)

    monkeypatch.setattr("semel.sinks.postgres.dialect.connect", connect)
    sink = PostgresSink("", "small", strategy=way.partition(",")[0])
    sink.share()
    sink.sink_id, sink._state, sink._connection.session = "totals", State.IDLE, await connect()
    sink._layout = lay_out(sink.target, [TableColumn("key", "text")], sink._dialect)
    sink._stage = Stage(sink._dialect, "totals", sink._layout, refuses_nulls=False)
    await sink._start_service()
    plan = await sink.begin(0)
    assert plan is not None
    sink._has_begun = True
    try:
        yield pickle.loads(pickle.dumps(plan)) if way == "direct, elsewhere" else plan
    finally:
        await sink._close()


@pytest.mark.parametrize("way", WAYS)
async def test_a_row_that_does_not_fit_is_told_with_its_sink_and_with_what_to_do(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(way, SqlFailure(TOO_LONG, Cause.ROW), monkeypatch) as plan:
        writer = plan.writer(0)
        await writer.write(ROWS)
        with pytest.raises(WriteFailed) as caught:
            await writer.finish()
        await writer.cancel()
    assert str(caught.value) == f"{NAMED}{TOO_LONG}{MENDED}"
    assert caught.value.is_permanent


@pytest.mark.parametrize("way", WAYS)
async def test_who_may_not_write_is_not_told_to_mend_rows(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = "permission denied for table small (SQLSTATE 42501)"
    async with begun(way, SqlFailure(denied, Cause.DENIED), monkeypatch) as plan:
        writer = plan.writer(0)
        await writer.write(ROWS)
        with pytest.raises(WriteFailed) as caught:
            await writer.finish()
        await writer.cancel()
    assert str(caught.value) == f"{NAMED}{denied}"


@pytest.mark.parametrize("way", WAYS)
async def test_what_may_pass_is_not_told_as_what_can_never_be_written(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(way, SqlFailure("a deadlock", Cause.CONFLICT), monkeypatch) as plan:
        writer = plan.writer(0)
        await writer.write(ROWS)
        with pytest.raises(WriteFailed) as caught:
            await writer.finish()
        await writer.cancel()
    assert (str(caught.value), caught.value.is_permanent) == ("a deadlock", False)


async def test_a_column_of_a_wrong_type_is_told_with_its_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    async with begun("direct", SqlFailure(TOO_LONG, Cause.ROW), monkeypatch) as plan:
        writer = plan.writer(0)
        with pytest.raises(WriteFailed, match=rf"^{NAMED}column 'key' \(int64\) does not fit small.key"):
            await writer.write([{"key": 4}])
        await writer.cancel()


def test_the_reason_of_a_dead_letter_is_what_the_server_said() -> None:
    failure = SqlFailure(TOO_LONG, Cause.ROW)
    assert failure.reason == TOO_LONG
    assert str(failure) == f"{TOO_LONG}{MENDED}"
