"""What SQL sinks promise, held to on a real PostgreSQL and on a real MariaDB."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from table_cases import KINDS, STRATEGIES, MakeTable, Row, Table, rows, run_epoch, write_all

from semel.errors import ConfigError
from semel.sinks.blocking import BlockingSink
from semel.sinks.errors import (
    CommitFailed,
    ConnectionLost,
    FencedOut,
    InitFailed,
    MarkerMismatch,
    UnknownOutcome,
    WriteFailed,
)
from semel.sinks.keepalive import ACKNOWLEDGED_WITHIN_MS
from semel.sinks.receipts import Origin
from semel.sinks.settings import OnBadRow, SinkSettings
from semel.sinks.sink import State, WriterPlan
from semel.sinks.sql import sink as sink_module
from semel.sinks.sql.columns import Column, Layout
from semel.sinks.sql.dialect import Form, Part, SqlSession
from semel.sinks.sql.names import TableName
from semel.sinks.sql.registry import SqlRegistry
from semel.sinks.sql.sink import SqlSink
from semel.sinks.sql.target import Strategy

SHORT = SinkSettings(commit_timeout=2.0, abort_timeout=2.0)
# What would hang is given up, and shown to hang, after so long.
PATIENCE_S = 30.0


async def begun(sink: SqlSink, epoch: int) -> WriterPlan:
    plan = await sink.begin(epoch)
    assert plan is not None
    return plan


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - the server does not call
        await asyncio.sleep(0.01)


# Epochs


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_epoch_is_there_when_it_is_committed_and_not_before(table: Table, strategy: str) -> None:
    async with table.opened(strategy=strategy) as sink:
        receipts = await write_all(sink, 0, rows(1, 2))
        assert table.kept() == []
        await sink.commit(0, receipts)
        assert table.kept() == [(1, "v"), (2, "v")]
        assert sink.metrics.commits == 1
        assert sink.metrics.rows == 2
        assert sink.metrics.bytes > 0
        assert sink.tracker.last_committed == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_aborted_epoch_leaves_nothing_and_may_be_run_again(table: Table, strategy: str) -> None:
    async with table.opened(strategy=strategy) as sink:
        late = await write_all(sink, 0, rows(1))
        await sink.abort(0, "changed my mind")
        receipts = await write_all(sink, 0, rows(2))
        with pytest.raises(CommitFailed, match="late writer"):
            await sink.commit(0, late)
        await sink.commit(0, receipts)
        assert table.ids() == [2]
        assert [tracked.reason for tracked in sink.tracker.epochs if tracked.reason] == ["changed my mind"]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_committed_epoch_is_skipped_and_one_that_does_not_fit_is_an_error(
    table: Table, strategy: str
) -> None:
    async with table.opened(strategy=strategy) as sink:
        await run_epoch(sink, 0, rows(1), query_id="q", offsets_digest="a")
    async with table.sink(strategy=strategy) as sink:
        assert await sink.open("s") == 0
        assert await sink.begin(0, Origin("q", "a")) is None
        with pytest.raises(MarkerMismatch, match="other source offsets"):
            await sink.begin(0, Origin("q", "b"))
        with pytest.raises(MarkerMismatch, match="another query"):
            await sink.begin(1, Origin("p", "b"))
        with pytest.raises(MarkerMismatch, match="never committed here"):
            await sink.begin(2, Origin("q", "b"))
        await run_epoch(sink, 1, rows(2), query_id="q", offsets_digest="b")
    assert table.ids() == [1, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_epoch_without_rows_moves_the_marker(table: Table, strategy: str) -> None:
    async with table.opened(strategy=strategy) as sink:
        await sink.begin(0)
        await sink.commit(0, [])
        await run_epoch(sink, 1, [])
        assert sink.marker.epoch == 1
    assert table.query("SELECT epoch FROM semel_sinks") == [(1,)]


async def test_many_writers_in_other_processes_make_one_epoch(table: Table) -> None:
    async with table.opened(strategy="staged") as sink:
        for epoch in range(3):
            plan = pickle.loads(pickle.dumps(await sink.begin(epoch)))
            receipts = []
            for task in range(4):
                lost = plan.writer(task, "first", tasks=4)  # an attempt that fails, or that speculation lost
                await lost.write(rows(1000 + task))
                await lost.finish()
                writer = plan.writer(task, "second", tasks=4)
                await writer.write(rows(epoch * 10 + task))
                receipts.append(pickle.loads(pickle.dumps(await writer.finish())))
            await sink.commit(epoch, receipts)
        assert table.ids() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]


async def test_rows_of_a_direct_writer_that_gave_no_receipt_are_not_committed(table: Table) -> None:
    async with table.opened(settings=SinkSettings(max_buffered=1)) as sink:
        plan = await sink.begin(0)
        assert plan is not None
        writer = plan.writer(0)
        await writer.write(rows(1))
        await writer.cancel()
        with pytest.raises(CommitFailed, match="holds 1 rows and the receipts promise 0"):
            await sink.commit(0, [])
        await sink.abort(0)
    assert table.ids() == []


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_writer_that_has_failed_gives_no_receipt(table: Table, strategy: str) -> None:
    async with table.opened(strategy=strategy) as sink:
        plan = await sink.begin(0)
        assert plan is not None
        writer = plan.writer(0)
        await writer.write(rows(1))
        with pytest.raises(WriteFailed, match="has no column 'value'"):
            await writer.write([{"id": 2}])
        with pytest.raises(WriteFailed, match="has failed"):
            await writer.finish()
        await writer.cancel()


async def test_a_hook_vetoes_an_epoch(table: Table) -> None:
    def veto(epoch: int) -> None:
        if epoch == 1:
            raise ValueError("not on Sundays")

    async with table.opened(settings=SinkSettings(before_commit=(veto,))) as sink:
        await run_epoch(sink, 0, rows(1))
        with pytest.raises(CommitFailed, match="not on Sundays"):
            await run_epoch(sink, 1, rows(2))
        await sink.abort(1)
    assert table.ids() == [1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_without_an_event_loop(table: Table, strategy: str) -> None:
    with BlockingSink(table.sink(strategy=strategy)) as sink:
        assert sink.open("s") is None
        sink.begin(0)
        with sink.writer() as writer:
            writer.write(rows(1))
            sink.commit(0, [writer.finish()])
        sink.begin(1)
        sink.abort(1)
    assert table.ids() == [1]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_writes_of_types_that_do_not_go_together_are_taken_all_the_same(
    make_table: MakeTable, strategy: str
) -> None:
    """Python's numbers, say: as Arrow sees them no type has room for both."""
    table = make_table("id bigint PRIMARY KEY, value numeric(10, 2)")
    values: list[object] = [Decimal("1.25"), 2, None, 3]
    async with table.opened(strategy=strategy) as sink:
        await sink.begin(0)
        writer = sink.writer()
        for number, value in enumerate(values):
            await writer.write([{"id": number, "value": value}])
        receipt = await writer.finish()
        assert receipt.rows == len(values)
        await sink.commit(0, [receipt])
    assert table.kept() == [*enumerate(values)]


# Upserts and deletions


def change(number: int, value: str, at: int, op: str = "u") -> Row:
    return {"id": number, "value": value, "at": at, "op": op}


@pytest.fixture
def changed(make_table: MakeTable) -> Table:
    return make_table("id bigint PRIMARY KEY, value text, at bigint")


CHANGES: dict[str, Any] = {"mode": "upsert", "keys": ["id"], "order_by": "at", "change_column": "op"}


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_last_row_of_a_key_wins(changed: Table, strategy: str) -> None:
    async with changed.opened(strategy=strategy, **CHANGES) as sink:
        await run_epoch(sink, 0, [change(1, "b", 2), change(1, "a", 1), change(2, "x", 1)])
        assert changed.kept() == [(1, "b", 2), (2, "x", 1)]
        await run_epoch(sink, 1, [change(2, "y", 2), change(3, "new", 1)])
        assert changed.kept() == [(1, "b", 2), (2, "y", 2), (3, "new", 1)]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_deletions_are_done_in_the_same_order(changed: Table, strategy: str) -> None:
    async with changed.opened(strategy=strategy, **CHANGES) as sink:
        await run_epoch(sink, 0, [change(1, "a", 1, "c"), change(2, "b", 1, "c"), change(3, "c", 1, "r")])
        await run_epoch(
            sink,
            1,
            [
                change(1, "", 3, "D"),  # deleted after its update
                change(1, "a2", 2),
                change(2, "", 2, "delete"),  # deleted and made again
                change(2, "b2", 3, "insert"),
                change(9, "", 1, "d"),  # never was there
            ],
        )
        assert changed.kept() == [(2, "b2", 3), (3, "c", 1)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("order_by", [None, "at"])
async def test_two_rows_that_nothing_tells_apart_are_an_error_naming_the_key(
    changed: Table, strategy: str, order_by: str | None
) -> None:
    options = {"mode": "upsert", "keys": ["id"], "order_by": order_by, "strategy": strategy}
    async with changed.opened(**options) as sink:
        clash = [{"id": 7, "value": "a", "at": 1}, {"id": 8, "value": "b", "at": 1}]
        with pytest.raises(CommitFailed, match="key id = 7 of kept") as caught:
            await run_epoch(sink, 0, [*clash, clash[0]])
        assert caught.value.is_permanent
        await sink.abort(0)
        await run_epoch(sink, 0, clash)
        assert changed.ids() == [7, 8]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_delete_mode_deletes_every_key_it_is_given(table: Table, strategy: str) -> None:
    async with table.opened("first") as sink:
        await run_epoch(sink, 0, rows(1, 2, 3))
    async with table.opened(
        "second", mode="delete", keys=["id"], columns={"id": "id"}, strategy=strategy
    ) as sink:
        await run_epoch(sink, 0, [{"id": 1}, {"id": 3}])
    assert table.ids() == [2]


async def test_the_order_may_be_in_a_column_that_is_not_kept(table: Table) -> None:
    import pyarrow as pa

    schema = pa.schema({"id": pa.int64(), "value": pa.string(), "lsn": pa.decimal128(20, 0)})
    options = {"mode": "upsert", "keys": ["id"], "order_by": ["lsn"], "schema": schema}
    for strategy in STRATEGIES:
        async with table.opened(strategy, strategy=strategy, **options) as sink:
            await run_epoch(
                sink, 0, [{"id": 1, "value": "late", "lsn": 10}, {"id": 1, "value": "early", "lsn": 9}]
            )
        assert table.kept() == [(1, "late")]


async def test_nulls_and_unknown_words_where_a_merge_needs_values_are_refused(
    changed: Table,
) -> None:
    wrong = [
        (change(1, "a", 1, "vanish"), "'vanish' in row 0"),
        ({**change(1, "a", 1), "op": None}, "is None in row 0|may not be null"),
        ({**change(1, "a", 1), "id": None}, "'id' is null in row 0"),
        ({**change(1, "a", 1), "at": None}, "'at' is null in row 0"),
    ]
    async with changed.opened(**CHANGES) as sink:
        for row, reason in wrong:
            with pytest.raises(WriteFailed, match=reason):
                await run_epoch(sink, 0, [row])
            await sink.abort(0)


# Owners


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_of_two_sinks_with_one_id_the_older_stops(table: Table, strategy: str) -> None:
    async with table.opened(strategy=strategy) as old:
        await run_epoch(old, 0, rows(1))
        async with table.opened(strategy=strategy) as new:
            with pytest.raises(FencedOut, match=f"process {os.getpid()} on .* {new.run}.*owner number 2"):
                for epoch in (1, 2):
                    await run_epoch(old, epoch, rows(100 + epoch))
            assert old.state is State.FAILED
            with pytest.raises(FencedOut):
                await old.begin(1)
            with pytest.raises(FencedOut):
                await old.open("s")
            await run_epoch(new, 1, rows(2))
    assert table.ids() == [1, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ending", ["commit", "abort"])
async def test_an_owner_in_the_middle_of_an_epoch_is_fenced(table: Table, strategy: str, ending: str) -> None:
    async with table.opened(strategy=strategy) as old:
        receipts = await write_all(old, 0, rows(1))
        async with table.opened(strategy=strategy) as new:
            with pytest.raises(FencedOut, match="was taken by"):
                if ending == "commit":
                    await old.commit(0, receipts)
                else:
                    await old.abort(0)
                    await old.begin(0)  # a staged abort has nothing to ask the server for
            await run_epoch(new, 0, rows(2))
    assert table.ids() == [2]


async def test_open_waits_for_its_predecessor_before_it_ends_it(table: Table) -> None:
    """The predecessor commits in time: its epoch is there, and the successor knows."""
    async with table.opened() as old, table.sink() as new:
        receipts = await write_all(old, 0, rows(1))
        opening = asyncio.create_task(new.open("s"))
        await table.until_somebody_waits()
        assert not opening.done()
        await old.commit(0, receipts)
        assert await opening == 0
        assert await new.begin(0) is None
    assert table.ids() == [1]


async def test_an_opener_that_has_died_while_it_waited_keeps_nobody_out(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not look at a client that waits for a lock, and then makes a dead one the owner."""
    monkeypatch.setattr(sink_module, "PREDECESSOR_GRACE_S", PATIENCE_S)  # nobody ends the first
    async with table.opened() as first, table.sink() as dead, table.sink() as next_one:
        await write_all(first, 0, rows(1))
        dying = asyncio.create_task(dead.open("s"))
        await table.until_somebody_waits()
        assert dead._connection.session is not None
        with table.wire(dead._connection.session) as wire:
            wire.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionLost):
            await dying
        opening = asyncio.create_task(next_one.open("s"))
        await table.until_somebody_waits(2)
        # A commit would change the row, and PostgreSQL has those who wait for it race for what it is then.
        await first.abort(0)
        with pytest.raises(InitFailed, match=f"was taken by process {os.getpid()}.*open it again") as caught:
            await opening
        assert not caught.value.is_permanent
        assert await next_one.open("s") is None
        await run_epoch(next_one, 0, rows(2))
    assert table.ids() == [2]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_opener_that_wakes_up_late_leaves_its_successor_the_stage(
    table: Table, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has taken the sink, and sleeps before it drops the stages that are there."""
    asleep, awake = asyncio.Event(), asyncio.Event()
    # Columns of its own: what it stages goes elsewhere.
    options = {"columns": {"id": "id"}} if strategy == "staged" else {}
    async with table.sink(strategy=strategy, **options) as late, table.sink(strategy="staged") as living:
        make_stages = late._make_stages

        async def wake_up_late(session: SqlSession, layout: Layout) -> None:
            asleep.set()
            await awake.wait()
            await make_stages(session, layout)

        monkeypatch.setattr(late, "_make_stages", wake_up_late)
        opening = asyncio.create_task(late.open("s"))
        await asleep.wait()
        await living.open("s")
        writer = (await begun(living, 0)).writer(0)
        awake.set()
        with pytest.raises(FencedOut, match="owner number 2"):
            await opening
        await writer.write(rows(1))
        await living.commit(0, [await writer.finish()])
    assert table.ids() == [1]


async def test_with_fencing_off_open_leaves_a_living_owner_alone(table: Table) -> None:
    polite = SinkSettings(fence_on_open=False)
    async with table.opened() as old:
        async with table.sink(settings=polite) as new:
            with pytest.raises(InitFailed, match=f"open in process {os.getpid()}.*stop that one first"):
                await new.open("s")
        await run_epoch(old, 0, rows(1))
    async with table.sink(settings=polite) as new:
        assert await new.open("s") == 0


async def test_who_cannot_listen_for_its_writers_fences_nobody(table: Table) -> None:
    async with table.opened() as old:
        async with table.sink() as new:
            new.share("192.0.2.1")  # an address for documents, of no machine
            with pytest.raises(InitFailed, match="cannot listen at '192"):
                await new.open("s")
        await run_epoch(old, 0, rows(1))
    assert table.ids() == [1]


async def test_what_dead_runs_have_staged_is_removed_at_open(table: Table) -> None:
    async with table.opened(strategy="staged") as sink:
        await write_all(sink, 0, rows(1, 2, 3))
        stage = sink._stage.rows.name
        table.query("CREATE TABLE semel_stage_other_sink (id int)")
        # Another layout of the same sink, from before a column was added.
        old = stage.replace(stage[-8:], "00000000")
        table.query(f"CREATE TABLE {old} (id int)")
        assert table.query(f"SELECT count(*) FROM {stage}") == [(3,)]
        async with table.opened(strategy="staged") as new:
            assert table.query(f"SELECT count(*) FROM {stage}") == [(0,)]
            assert "semel_stage_other_sink" in table.stages()
            assert old not in table.stages()
            await run_epoch(new, 0, rows(1))
            await new._swept()
            assert table.query(f"SELECT count(*) FROM {stage}") == [(0,)]


async def test_a_writer_that_hangs_in_a_load_does_not_keep_the_stage_from_being_emptied(
    table: Table,
) -> None:
    async with table.opened(strategy="staged") as sink:
        receipts = await write_all(sink, 0, rows(1))
        with table.hanging_writer(sink) as zombie:
            await sink.commit(0, receipts)
            await sink._swept()
            with pytest.raises(table.ERROR):
                zombie.execute("SELECT 1")
        assert table.query(f"SELECT count(*) FROM {sink._stage.rows.name}") == [(0,)]
        await run_epoch(sink, 1, rows(2))


# Failures


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_unique_violation_names_key_and_constraint(table: Table, strategy: str) -> None:
    async with table.opened(strategy=strategy) as sink:
        await run_epoch(sink, 0, rows(1))
        with pytest.raises((WriteFailed, CommitFailed), match=table.DUPLICATE) as caught:
            await run_epoch(sink, 1, rows(5, 1))
        assert caught.value.is_permanent
        await sink.abort(1)
        await run_epoch(sink, 1, rows(5))
        assert table.ids() == [1, 5]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_column_that_was_dropped_meanwhile_fails_the_epoch(table: Table, strategy: str) -> None:
    async with table.opened(strategy=strategy) as sink:
        await run_epoch(sink, 0, rows(1))
        table.query("ALTER TABLE kept DROP COLUMN value")
        with pytest.raises((WriteFailed, CommitFailed), match=table.NO_COLUMN) as caught:
            await run_epoch(sink, 1, rows(2))
        assert caught.value.is_permanent
        await sink.abort(1)
    assert table.ids() == [1]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_deadlock_loses_nothing(changed: Table, strategy: str) -> None:
    """Another program locks the same rows in the other order; the server ends one of the two."""
    options = {"mode": "upsert", "keys": ["id"], "strategy": strategy}
    async with changed.opened(**options) as sink:
        start = [{"id": number, "value": "0", "at": 0} for number in (1, 2)]
        await run_epoch(sink, 0, start)
        receipts = await write_all(sink, 1, [{**row, "value": "1"} for row in start])
        with changed.stubborn_transaction() as other:
            other.execute("UPDATE kept SET at = 1 WHERE id = 2")
            commit = asyncio.create_task(sink.commit(1, receipts))
            await changed.until_somebody_waits()
            await asyncio.to_thread(other.execute, "UPDATE kept SET at = 1 WHERE id = 1")
            other.execute("COMMIT")
        try:
            await commit
            assert strategy == "staged"  # its rows are still there to be moved again
        except CommitFailed as error:
            assert "deadlock" in str(error).lower()
            assert not error.is_permanent
            await sink.abort(1)
            await run_epoch(sink, 1, [{**row, "value": "1"} for row in start])
    assert [row[:2] for row in changed.kept()] == [(1, "1"), (2, "1")]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_connection_lost_before_the_commit_loses_nothing(table: Table, strategy: str) -> None:
    async with table.opened(strategy=strategy) as sink:
        receipts = await write_all(sink, 0, rows(1))
        table.end_owner(sink)
        if strategy == "staged":  # the rows are staged, and the commit goes on with another connection
            await sink.commit(0, receipts)
        else:
            with pytest.raises(CommitFailed):
                await sink.commit(0, receipts)
            await sink.abort(0)
            await run_epoch(sink, 0, rows(1))
        table.end_owner(sink)  # between epochs
        try:
            await run_epoch(sink, 1, rows(2))
        except ConnectionLost:
            await run_epoch(sink, 1, rows(2))
    assert table.ids() == [1, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_connection_lost_while_writing_spoils_the_epoch_only(table: Table, strategy: str) -> None:
    async with table.opened(strategy=strategy, settings=SinkSettings(max_buffered=1)) as sink:
        plan = await sink.begin(0)
        assert plan is not None
        writer = plan.writer(0)
        await writer.write(rows(1))
        (table.end_writers if strategy == "staged" else table.end_owner)(sink)
        with pytest.raises(ConnectionLost):
            await writer.write(rows(2))
        await writer.cancel()
        await sink.abort(0)
        await run_epoch(sink, 0, rows(1))
    assert table.ids() == [1]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_writers_that_compute_for_longer_than_the_server_lets_others_be_idle_lose_nothing(
    table: Table, strategy: str
) -> None:
    settings = SinkSettings(max_buffered=1)
    with table.ending_idle_sessions():
        async with table.opened(strategy=strategy, settings=settings) as sink:
            writer = (await begun(sink, 0)).writer(0)
            await writer.write(rows(1))
            await table.until_it_ends_another()
            await writer.write(rows(2))
            await sink.commit(0, [await writer.finish()])
    assert table.ids() == [1, 2]


@pytest.mark.parametrize("ending", ["write", "commit"])
@pytest.mark.parametrize("on_bad_row", OnBadRow)
async def test_a_stage_that_was_dropped_is_there_again_when_the_sink_is_opened_anew(
    table: Table, ending: str, on_bad_row: OnBadRow
) -> None:
    settings = SinkSettings(on_bad_row=on_bad_row)
    async with table.opened(strategy="staged", settings=settings) as sink:
        writer = (await begun(sink, 0)).writer(0)
        await writer.write(rows(1))
        receipts = [await writer.finish()] if ending == "commit" else []
        table.query(f"DROP TABLE {sink._stage.rows.name}")
        with pytest.raises((WriteFailed, CommitFailed), match=r"staging table was dropped.*anew") as caught:
            await sink.commit(0, receipts or [await writer.finish()])
        assert isinstance(caught.value, CommitFailed if ending == "commit" else WriteFailed)
        assert not caught.value.is_permanent
        await writer.cancel()
    async with table.opened(strategy="staged", settings=settings) as sink:
        await run_epoch(sink, 0, rows(1))
    assert table.ids() == [1]


async def test_an_epoch_that_pauses_too_long_is_ended_by_the_server(table: Table) -> None:
    async with table.opened(idle_timeout=table.SHORTEST_PAUSE_S) as sink:
        receipts = await write_all(sink, 0, rows(1))
        await until(lambda: not table.has_owner(sink))
        with pytest.raises(CommitFailed, match=table.PAUSED):
            await sink.commit(0, receipts)
        await sink.abort(0)
        await run_epoch(sink, 0, rows(1))
    assert table.ids() == [1]


# The connection is lost in COMMIT


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_answer_lost_after_the_commit_is_found_out(table: Table, strategy: str) -> None:
    async with table.proxied(strategy=strategy) as (proxy, sink):
        receipts = await write_all(sink, 0, rows(1))
        proxy.arm("lose the answer")
        await sink.commit(0, receipts)
        assert proxy.has_fired
        await run_epoch(sink, 1, rows(2))
    assert table.ids() == [1, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_commit_that_never_arrived_is_found_out(table: Table, strategy: str) -> None:
    async with table.proxied(strategy=strategy) as (proxy, sink):
        receipts = await write_all(sink, 0, rows(1))
        proxy.arm("lose the request")
        with pytest.raises(CommitFailed, match="rolled it back"):
            await sink.commit(0, receipts)
        assert proxy.has_fired
        await sink.abort(0)
        await run_epoch(sink, 0, rows(1))
    assert table.ids() == [1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("arrives", [True, False])
async def test_an_outcome_that_stays_unknown_is_told_by_the_next_open(
    table: Table, strategy: str, arrives: bool
) -> None:
    async with table.proxied(strategy=strategy, settings=SHORT) as (proxy, sink):
        receipts = await write_all(sink, 0, rows(1))
        proxy.arm("swallow the answer" if arrives else "swallow the request")
        started = time.monotonic()
        with pytest.raises(UnknownOutcome, match="open the sink anew"):
            await sink.commit(0, receipts)
        assert time.monotonic() - started < SHORT.commit_timeout + 2
        assert sink.state is State.FAILED
        proxy.disarm()
        assert await sink.open("s") == (0 if arrives else None)
        if not arrives:
            await run_epoch(sink, 0, rows(1))
        await run_epoch(sink, 1, rows(2))
    assert table.ids() == [1, 2]


# The server dies


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "restarted"])
async def test_a_server_that_dies_between_writing_and_commit_keeps_the_epoch_whole_or_loses_it(
    table: Table, strategy: str, is_killed: bool
) -> None:
    async with table.opened(strategy=strategy) as sink:
        await run_epoch(sink, 0, rows(1))
        receipts = await write_all(sink, 1, rows(2, 3))
        (table.server.kill if is_killed else table.server.stop)()
        table.server.start()
        try:
            await sink.commit(1, receipts)
            assert strategy == "staged", "only that keeps what was written"
            assert not (is_killed and table.LOSES_STAGES), "what was staged is lost in a crash"
        except CommitFailed as error:
            if strategy == "staged" and table.LOSES_STAGES:
                assert "promise 2 rows in semel_stage" in str(error) and "0 are there" in str(error)
            assert not error.is_permanent
            assert table.ids() == [1]
            await sink.abort(1)
            await run_epoch(sink, 1, rows(2, 3))
        await run_epoch(sink, 2, rows(4))
    assert table.ids() == [1, 2, 3, 4]


async def test_a_server_that_is_away_at_commit_is_waited_for(table: Table) -> None:
    async with table.opened(strategy="staged") as sink:
        receipts = await write_all(sink, 0, rows(1))
        table.server.stop()
        commit = asyncio.create_task(sink.commit(0, receipts))
        await asyncio.sleep(0.3)
        assert not commit.done()
        await asyncio.to_thread(table.server.start)
        await commit
    assert table.ids() == [1]


async def test_a_server_that_stays_away_fails_the_epoch_and_open_says_why(table: Table) -> None:
    async with table.opened(strategy="staged", settings=SHORT) as sink:
        receipts = await write_all(sink, 0, rows(1))
        table.server.stop()
        try:
            with pytest.raises(CommitFailed, match="within 2 s"):
                await sink.commit(0, receipts)
            await sink.abort(0)
            with pytest.raises(ConnectionLost, match="refused"):
                await sink.begin(0)
            async with table.sink() as other:
                with pytest.raises(ConnectionLost, match="could not be opened"):
                    await other.open("s")
        finally:
            table.server.start()
        await run_epoch(sink, 0, rows(1))
    assert table.ids() == [1]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_server_that_freezes_does_not_freeze_the_sink(table: Table, strategy: str) -> None:
    async with table.opened(strategy=strategy, settings=SHORT) as sink:
        receipts = await write_all(sink, 0, rows(1))
        with table.frozen():
            started = time.monotonic()
            with pytest.raises(CommitFailed, match="within 2 s"):
                await sink.commit(0, receipts)
            assert time.monotonic() - started < SHORT.commit_timeout + 2
        await sink.abort(0)
        await run_epoch(sink, 0, rows(1))
    assert table.ids() == [1]


async def test_a_rollback_that_takes_long_is_left_to_the_server(table: Table) -> None:
    async with table.opened(settings=SHORT) as sink:
        await write_all(sink, 0, rows(1))
        with table.frozen():
            await sink.abort(0)
        await run_epoch(sink, 0, rows(2))
        assert table.ids() == [2]


async def test_so_is_one_of_an_epoch_that_took_too_long_to_commit(table: Table) -> None:
    """Until it is done the sink's row is locked: that is waited for when the epoch begins again."""
    async with table.opened(settings=SinkSettings(commit_timeout=3.0, abort_timeout=1.5)) as sink:
        receipts = await write_all(sink, 0, rows(1))
        with table.frozen():
            with pytest.raises(CommitFailed, match="within 3 s"):
                await sink.commit(0, receipts)
            await sink.abort(0)
            with pytest.raises(ConnectionLost, match="could not be begun"):
                await sink.begin(0)
        await run_epoch(sink, 0, rows(2))
    assert table.ids() == [2]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_server_that_freezes_while_rows_are_written_spoils_the_epoch_only(
    table: Table, strategy: str
) -> None:
    settings = SinkSettings(abort_timeout=1.5, max_buffered=1, write_timeout=3.0)
    async with table.opened(strategy=strategy, settings=settings) as sink:
        plan = await sink.begin(0)
        assert plan is not None
        writer = plan.writer(0)
        await writer.write(rows(1))
        async with asyncio.timeout(PATIENCE_S):
            with table.frozen():
                with pytest.raises(ConnectionLost, match="silent for 3 s"):
                    await writer.write(rows(2))
                await writer.cancel()
                await sink.abort(0)
                with pytest.raises(ConnectionLost):
                    await sink.begin(0)
        await run_epoch(sink, 0, rows(3))
    assert table.ids() == [3]


async def test_a_server_that_leaves_rows_unread_for_long_is_not_taken_for_one_that_is_gone(
    table: Table,
) -> None:
    """Of those the connection is given up in half a minute. About rows `write_timeout` decides."""

    def limit_ms() -> int:
        return wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    limits_ms: list[int] = []

    def parts(form: Form) -> Iterator[Part]:
        limits_ms.append(limit_ms())
        yield from form.parts(pa.table({"id": [1], "value": ["v"]}))

    session = await table.dialect().connect("test")
    try:
        with table.wire(session) as wire:
            columns = Column("id", "id", "bigint"), Column("value", "value", "text")
            form = session.form(TableName(None, "kept"), columns, None)
            assert limit_ms() == ACKNOWLEDGED_WITHIN_MS
            assert (await session.load(form, parts(form))).taken == 1
            assert limit_ms() == ACKNOWLEDGED_WITHIN_MS
    finally:
        await session.close()
    assert limits_ms == [0]
    assert table.ids() == [1]


async def test_a_server_that_freezes_before_the_first_rows_is_asked_again(table: Table) -> None:
    """Nothing was on the connection: another one is as good."""
    async with table.opened(settings=SinkSettings(write_timeout=3.0)) as sink, asyncio.timeout(PATIENCE_S):
        first = sink._connection.session
        with table.frozen():
            writing = asyncio.create_task(write_all(sink, 0, rows(1)))
            await until(lambda: sink._connection.session is not first)
        await sink.commit(0, await writing)
    assert table.ids() == [1]


async def test_a_commit_may_take_longer_than_a_server_may_be_silent_about_rows(table: Table) -> None:
    """What it moves is limited by `commit_timeout` alone."""
    async with table.opened(strategy="staged", settings=SinkSettings(write_timeout=0.5)) as sink:
        receipts = await write_all(sink, 0, rows(1))
        with table.locked_row(1):
            commit = asyncio.create_task(sink.commit(0, receipts))
            await table.until_somebody_waits()
            moving = sink._connection.session
            await asyncio.sleep(1.0)  # what it is about
            assert sink._connection.session is moving
        await commit
    assert table.ids() == [1]


async def test_a_lock_that_open_waits_for_is_named(table: Table) -> None:
    async with table.opened():
        pass
    with table.locked_table("semel_sinks"):
        async with table.sink(settings=SinkSettings(open_timeout=2.0)) as sink, asyncio.timeout(PATIENCE_S):
            with pytest.raises(InitFailed, match=r"within 2 s \(open_timeout.*lock") as caught:
                await sink.open("s")
            assert not caught.value.is_permanent
    async with table.opened() as sink:
        await run_epoch(sink, 0, rows(1))


async def test_a_server_that_freezes_does_not_freeze_what_opens(table: Table) -> None:
    async with table.opened() as old:
        await write_all(old, 0, rows(1))
        async with table.sink(settings=SinkSettings(open_timeout=6.0)) as new, asyncio.timeout(PATIENCE_S):
            opening = asyncio.create_task(new.open("s"))
            await table.until_somebody_waits()
            with table.frozen(), pytest.raises(InitFailed, match="within 6 s"):
                await opening
            assert await new.open("s") is None
            await run_epoch(new, 0, rows(2))
    assert table.ids() == [2]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_cancelled_commit_fails_the_sink_and_open_resolves_it(table: Table, strategy: str) -> None:
    async with table.proxied(strategy=strategy) as (proxy, sink):
        receipts = await write_all(sink, 0, rows(1))
        proxy.arm("swallow the answer")
        commit = asyncio.create_task(sink.commit(0, receipts))
        await proxy.fired.wait()
        await until(lambda: bool(table.ids()))  # it has arrived
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        assert sink.state is State.FAILED
        proxy.disarm()
        assert await sink.open("s") == 0
    assert table.ids() == [1]


# Bad rows


async def test_bad_rows_are_kept_aside_in_the_same_transaction(make_table: MakeTable) -> None:
    table = make_table("id bigint PRIMARY KEY, value varchar(3)")
    settings = SinkSettings(on_bad_row=OnBadRow.DEAD_LETTER)
    given = [{"id": number, "value": "toolong" if number % 10 == 3 else "ok"} for number in range(50)]
    given[7]["value"] = "a\0b"
    bad = [3, 13, 23, 33, 43] if table.TAKES_NULS else [3, 7, 13, 23, 33, 43]
    async with table.opened(strategy="staged", settings=settings) as sink:
        await write_all(sink, 0, given)
        await sink.abort(0)
        assert table.query("SELECT count(*) FROM semel_dead_letters") == [(0,)]
        receipts = await write_all(sink, 0, given)
        assert (receipts[0].rows, receipts[0].dead_letters) == (50 - len(bad), len(bad))
        assert table.query("SELECT count(*) FROM semel_dead_letters") == [(0,)]
        await sink.commit(0, receipts)
        assert sink.metrics.dead_letters == len(bad)
    assert table.ids() == [number for number in range(50) if number not in bad]
    letters = table.query("SELECT sink_id, epoch, row_text, reason FROM semel_dead_letters")
    assert sorted((sink_id, epoch, json.loads(row)["id"]) for sink_id, epoch, row, _ in letters) == [
        ("s", 0, number) for number in bad
    ]
    assert sum(table.TOO_LONG in reason for *_, reason in letters) == 5, letters
    assert not any("Mend the rows" in reason for *_, reason in letters), letters


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_row_that_does_not_fit_is_told_with_its_sink_and_with_what_to_do(
    make_table: MakeTable, strategy: str
) -> None:
    table = make_table("id bigint PRIMARY KEY, value varchar(3)")
    async with table.opened(strategy=strategy) as sink:
        with pytest.raises(
            WriteFailed, match=r"^rows of sink 's' cannot be written to kept: .*DEAD_LETTER"
        ) as caught:
            await write_all(sink, 0, rows(1, value="four"))
        assert table.TOO_LONG in str(caught.value)
        assert caught.value.is_permanent


async def test_a_null_where_none_may_be_is_a_bad_row(table: Table) -> None:
    table.query("ALTER TABLE kept ADD needed int NOT NULL")
    given: list[Row] = [
        {"id": number, "value": "v", "needed": None if number == 2 else number} for number in range(4)
    ]
    settings = SinkSettings(on_bad_row=OnBadRow.DEAD_LETTER)
    async with table.opened(strategy="staged", settings=settings) as sink:
        await run_epoch(sink, 0, given)
    assert table.ids() == [0, 1, 3]
    ((row, reason),) = table.query("SELECT row_text, reason FROM semel_dead_letters")
    assert json.loads(row)["id"] == 2
    assert "needed" in reason
    # A deletion need not name more than its key.
    deletions = {"mode": "upsert", "keys": ["id"], "change_column": "op"}
    async with table.opened("t", strategy="staged", settings=settings, **deletions) as sink:
        await run_epoch(sink, 0, [{"id": 0, "value": None, "needed": None, "op": "delete"}])
    assert table.ids() == [1, 3]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.SERVER)
def test_dead_letters_need_the_staged_strategy_and_choose_it(kind: type[Table]) -> None:
    settings = SinkSettings(on_bad_row=OnBadRow.DEAD_LETTER)
    with pytest.raises(ConfigError, match="needs strategy 'staged'"):
        kind.SINK(kind.NOWHERE, "kept", strategy="direct", settings=settings)
    assert kind.SINK(kind.NOWHERE, "kept", settings=settings).strategy is Strategy.STAGED


# By hand


async def test_sinks_can_be_listed_adopted_and_forgotten(table: Table) -> None:
    registry = SqlRegistry(table.dialect())
    assert await registry.sinks() == []
    assert await registry.read("s") is None
    async with table.opened(strategy="staged") as sink:
        await run_epoch(sink, 0, rows(1), query_id="q")
        (status,) = await registry.sinks()
        assert (status.sink_id, status.marker.epoch, status.is_alive) == ("s", 0, True)
        assert status.owner is not None and status.owner.run == sink.run
        await registry.adopt("s", 41)
        with pytest.raises(FencedOut):
            await run_epoch(sink, 1, rows(2), query_id="q")
            await run_epoch(sink, 2, rows(3), query_id="q")
    async with table.opened(strategy="staged") as sink:
        assert sink.marker.epoch == 41
        assert await sink.begin(41, Origin("another", "x")) is None
        await run_epoch(sink, 42, rows(42), query_id="another")
    status = await registry.read("s")
    assert status is not None and not status.is_alive
    assert await registry.forget("s")
    assert not await registry.forget("s")
    assert table.stages() == []
    assert table.ids() == [1, 42]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.SERVER)
async def test_a_password_is_in_no_text(kind: type[Table]) -> None:
    sink = kind.SINK(kind.NOWHERE, "t")
    with pytest.raises(ConnectionLost) as caught:
        await sink.open("s")
    assert "secret-word" not in str(caught.value) + repr(sink._dialect)
