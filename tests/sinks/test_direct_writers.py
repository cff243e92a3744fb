"""Writers of strategy `direct` elsewhere: their rows go through the owner into the one transaction."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import pickle
from typing import Any

import pytest
from table_cases import Table, rows, run_epoch

from semel.errors import ConfigError
from semel.sinks.blocking import BlockingWriter
from semel.sinks.errors import CommitFailed, FencedOut, WriteFailed
from semel.sinks.receipts import Attempt
from semel.sinks.service import dial
from semel.sinks.settings import SinkSettings
from semel.sinks.sink import State, WriterPlan
from semel.sinks.sql import intake_service
from semel.sinks.sql.dialect import Form
from semel.sinks.sql.intake_service import FRAME
from semel.sinks.sql.sink import SqlSink


async def bring(writer: Any, given: list[dict[str, Any]]) -> None:
    """Waits for what becomes of the rows, which a writer elsewhere hears of later."""
    await writer.write(given)
    await writer._way.settle()


async def test_writers_elsewhere_bring_their_rows_into_the_one_transaction(table: Table) -> None:
    async with table.shared() as sink:
        for epoch in range(3):
            plan = pickle.loads(pickle.dumps(await sink.begin(epoch)))
            writers = [plan.writer(task, tasks=4) for task in range(4)]
            await asyncio.gather(
                *(writer.write(rows(epoch * 10 + task)) for task, writer in enumerate(writers))
            )
            receipts = [pickle.loads(pickle.dumps(await writer.finish())) for writer in writers]
            assert table.ids() == [number for number in range(epoch * 10) if number % 10 < 4]
            await sink.commit(epoch, receipts)
        assert table.ids() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]


async def test_the_plan_of_a_sink_that_is_not_shared_stays_where_it_is(table: Table) -> None:
    async with table.opened() as sink:
        with pytest.raises(ConfigError, match=r"call the sink's `share\(\)` before `open`"):
            pickle.dumps(await sink.begin(0))


async def test_a_second_attempt_is_refused_once_the_first_has_written(table: Table) -> None:
    async with table.shared(settings=SinkSettings(max_buffered=1)) as sink:
        plan = pickle.loads(pickle.dumps(await sink.begin(0)))
        idle, first, second = (plan.writer(0, attempt) for attempt in ("idle", "first", "second"))
        await bring(first, rows(1))
        with pytest.raises(WriteFailed, match=r"tried twice \(attempts first and second\)"):
            await bring(second, rows(1))
        await idle.cancel()
        # The first is none the worse for it.
        await first.write(rows(2))
        await sink.commit(0, [await first.finish()])
        assert table.ids() == [1, 2]


async def test_what_a_lost_attempt_has_written_is_not_committed(table: Table) -> None:
    async with table.shared(settings=SinkSettings(max_buffered=1)) as sink:
        plan = pickle.loads(pickle.dumps(await sink.begin(0)))
        lost, other = plan.writer(0, "lost"), plan.writer(1)
        await bring(lost, rows(1))
        await lost.cancel()
        await other.write(rows(2))
        with pytest.raises(CommitFailed, match="holds 2 rows and the receipts promise 1") as caught:
            await sink.commit(0, [await other.finish()])
        assert not caught.value.is_permanent
        await sink.abort(0)
        await run_epoch(sink, 0, rows(1, 2))
        assert table.ids() == [1, 2]


async def test_a_late_writer_of_an_epoch_that_is_over_is_refused(table: Table) -> None:
    async with table.shared(settings=SinkSettings(max_buffered=1)) as sink:
        late = pickle.loads(pickle.dumps(await sink.begin(0))).writer(0)
        await sink.abort(0)
        plan = pickle.loads(pickle.dumps(await sink.begin(0)))
        writer = plan.writer(0)
        await writer.write(rows(1))
        with pytest.raises(WriteFailed, match="turn 1, which is over"):
            await bring(late, rows(2))
        await sink.commit(0, [await writer.finish()])
        assert table.ids() == [1]


async def test_a_row_that_the_server_refuses_is_named_to_the_writer_elsewhere(table: Table) -> None:
    async with table.shared(settings=SinkSettings(max_buffered=1)) as sink:
        await run_epoch(sink, 0, rows(1))
        plan = pickle.loads(pickle.dumps(await sink.begin(1)))
        good, bad = plan.writer(0), plan.writer(1)
        await bring(good, rows(2))
        with pytest.raises(WriteFailed, match="uplicate") as caught:
            await bring(bad, rows(1))
        assert caught.value.is_permanent
        with pytest.raises(WriteFailed, match="the epoch is spoiled"):
            await bring(good, rows(3))
        with pytest.raises(CommitFailed, match="uplicate") as failed:
            await sink.commit(1, [])
        assert failed.value.is_permanent
        await sink.abort(1)
        await run_epoch(sink, 1, rows(3))
        assert table.ids() == [1, 3]


async def test_a_row_that_the_server_refuses_is_named_by_finish_at_the_latest(table: Table) -> None:
    async with table.shared(settings=SinkSettings(max_buffered=1)) as sink:
        await run_epoch(sink, 0, rows(1))
        writer = pickle.loads(pickle.dumps(await sink.begin(1))).writer(0)
        await writer.write(rows(1))
        with pytest.raises(WriteFailed, match="uplicate") as caught:
            await writer.finish()
        assert caught.value.is_permanent
        await writer.cancel()
        await sink.abort(1)
        await run_epoch(sink, 1, rows(2))
        assert table.ids() == [1, 2]


async def test_rows_are_made_while_those_before_are_loaded_and_not_too_many(table: Table) -> None:
    """The server waits for somebody else's lock: so does the writer, but not at once."""
    async with table.shared(settings=SinkSettings(max_buffered=1)) as sink:
        writer = pickle.loads(pickle.dumps(await sink.begin(0))).writer(0)
        with table.locked_row(1):
            for number in range(1, intake_service.MAX_UNANSWERED + 1):
                await writer.write(rows(number))
            one_more = asyncio.ensure_future(writer.write(rows(intake_service.MAX_UNANSWERED + 1)))
            await table.until_somebody_waits()
            assert not one_more.done()
        await one_more
        await sink.commit(0, [await writer.finish()])
        assert table.ids() == list(range(1, intake_service.MAX_UNANSWERED + 2))


async def test_a_writer_that_gives_up_lets_go_of_rows_on_their_way(table: Table) -> None:
    async with table.shared(settings=SinkSettings(max_buffered=1, abort_timeout=5.0)) as sink:
        writer = pickle.loads(pickle.dumps(await sink.begin(0))).writer(0)
        with table.locked_row(1):
            await writer.write(rows(1))
            await table.until_somebody_waits()
            # More than sockets hold: it cannot leave while nobody reads it.
            await writer.write([{"id": 2, "value": "v" * 40_000_000}])
            sending = writer._way._sending
            await asyncio.sleep(0)
            assert not sending.done()
            await writer.cancel()
            assert sending.cancelled()
            await sink.abort(0)
        await run_epoch(sink, 0, rows(1))
        assert table.ids() == [1]


async def test_a_writer_that_dies_within_a_frame_leaves_nothing(table: Table) -> None:
    async with table.shared() as sink:
        plan = pickle.loads(pickle.dumps(await sink.begin(0)))
        dying = await dial(plan.service, Attempt.new(plan.place, 0, "dying").fields())
        await dying.send(FRAME.pack(1, 1000) + bytes(500))
        dying.close()
        writer = plan.writer(0, "next")
        await writer.write(rows(1))
        await sink.commit(0, [await writer.finish()])
        assert table.ids() == [1]


async def test_nothing_is_locked_before_the_first_rows_come(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch may be computed for long: whoever takes over meanwhile has nothing to wait for."""
    async with table.shared() as old:
        plan = await old.begin(0)
        with caplog.at_level(logging.WARNING):
            async with table.shared() as new:
                assert "ending the connection" not in caplog.text
                with pytest.raises(FencedOut):
                    await bring(pickle.loads(pickle.dumps(plan)).writer(0), rows(*range(Form.frame_rows)))
                await run_epoch(new, 0, rows(1))
        assert old.state is State.FAILED
    assert table.ids() == [1]


async def test_a_load_that_hangs_does_not_hold_up_the_abort(table: Table) -> None:
    """The server waits for somebody else's lock; the writer is told, and the next turn is as good as ever."""
    async with table.shared(settings=SinkSettings(max_buffered=1, abort_timeout=5.0)) as sink:
        plan = pickle.loads(pickle.dumps(await sink.begin(0)))
        with table.locked_row(7):
            writing = asyncio.ensure_future(bring(plan.writer(0), rows(7)))
            await table.until_somebody_waits()
            await sink.abort(0)
            with pytest.raises(WriteFailed, match="cut short"):
                await writing
        await run_epoch(sink, 0, rows(8))
        assert table.ids() == [8]


async def test_writers_that_compute_for_long_do_not_lose_the_transaction(table: Table) -> None:
    """The server ends what is silent for a second; the owner says something meanwhile."""
    async with table.shared(idle_timeout=1.0, settings=SinkSettings(max_buffered=1)) as sink:
        plan = pickle.loads(pickle.dumps(await sink.begin(0)))
        writer = plan.writer(0)
        await writer.write(rows(1))
        await asyncio.sleep(3.0)  # what it is about
        await writer.write(rows(2))
        await sink.commit(0, [await writer.finish()])
        await run_epoch(sink, 1, rows(3))
        assert table.ids() == [1, 2, 3]


async def test_writers_that_stall_within_a_frame_do_not_keep_others_out_for_ever(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_service, "FRAME_TIMEOUT_S", 0.5)
    async with table.shared() as sink:
        plan = pickle.loads(pickle.dumps(await sink.begin(0)))
        stalled = []
        for number in range(intake_service.MAX_FRAMES):
            channel = await dial(plan.service, Attempt.new(plan.place, number, "stalled").fields())
            await channel.send(FRAME.pack(1, 1000) + bytes(500))
            stalled.append(channel)
        await sink.abort(0)
        plan = pickle.loads(pickle.dumps(await sink.begin(0)))
        writer = plan.writer(0)
        await writer.write(rows(1))
        await sink.commit(0, [await writer.finish()])
        for channel in stalled:
            channel.close()
        assert table.ids() == [1]


async def test_an_owner_that_is_fenced_while_it_commits_says_so(table: Table) -> None:
    """The first load of the epoch, a zombie's, finds out while the commit waits for it."""
    async with table.shared() as old:
        plan = await old.begin(0)
        assert plan is not None
        late = plan.writer(0)
        await late.write(rows(1))
        async with table.shared():
            finishing = asyncio.ensure_future(late.finish())
            await asyncio.sleep(0)
            with pytest.raises(FencedOut):
                await old.commit(0, [])
            with pytest.raises(FencedOut):
                await finishing
        assert old.state is State.FAILED


def test_a_sink_may_be_opened_again_in_another_loop(table: Table) -> None:
    async def live(sink: SqlSink, first: int) -> None:
        last = await sink.open("s")
        plan = await sink.begin(0 if last is None else last + 1)
        assert plan is not None
        writers = [plan.writer(task, tasks=4) for task in range(4)]
        for task, writer in enumerate(writers):
            await writer.write(rows(first + task))
        receipts = await asyncio.gather(*(writer.finish() for writer in writers))
        await sink.commit(plan.place.epoch, receipts)
        await sink.close()

    sink = table.sink()
    asyncio.run(live(sink, 0))
    asyncio.run(live(sink, 10))
    assert table.ids() == [0, 1, 2, 3, 10, 11, 12, 13]


def write_in_fork(plan: WriterPlan, said: Any) -> None:
    try:
        with BlockingWriter(plan.writer(0)) as writer:
            writer.write(rows(1))
            writer.finish()
    except Exception as error:
        said.send(f"{type(error).__name__}: {error}")


async def test_a_plan_that_a_fork_inherits_is_refused(table: Table) -> None:
    async with table.shared() as sink:
        plan = await sink.begin(0)
        heard, said = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=write_in_fork, args=(plan, said))
        child.start()
        assert await asyncio.to_thread(heard.poll, 20), "it hangs"
        assert "a plan that was pickled" in heard.recv()
        child.join()


async def test_rows_are_counted_though_triggers_change_others(table: Table) -> None:
    table.count_by_trigger()
    async with table.shared() as sink:
        await run_epoch(sink, 0, rows(1, 2, 3))
        assert table.ids() == [1, 2, 3]
        assert table.query("SELECT number FROM counted") == [(3,)]


async def test_a_sink_that_stages_no_more_leaves_no_stage(table: Table) -> None:
    async with table.shared(strategy="staged") as sink:
        await run_epoch(sink, 0, rows(1))
        assert await sink._dialect.stages(sink._connection.session, "semel_stage_")  # type: ignore[arg-type]
    async with table.shared(strategy="direct") as sink:
        await run_epoch(sink, 1, rows(2))
        assert not await sink._dialect.stages(sink._connection.session, "semel_stage_")  # type: ignore[arg-type]
    assert table.ids() == [1, 2]


async def test_nobody_keeps_an_epoch_awake_that_is_over(table: Table) -> None:
    async with table.shared() as sink:
        for epoch, ids in enumerate([(), (1,), ()]):
            plan = pickle.loads(pickle.dumps(await sink.begin(epoch)))
            writer = plan.writer(0)
            await writer.write(rows(*ids))
            await sink.commit(epoch, [await writer.finish()])
            assert sink._waking is None
        await sink.begin(3)
        await sink.abort(3)
        assert sink._waking is None
