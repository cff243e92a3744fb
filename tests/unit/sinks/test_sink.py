"""The contract's core: states, skips, hooks, failures."""

from __future__ import annotations

import asyncio

import pytest
from memory_sink import MemorySink, MemoryTarget, failing

from semel.errors import ConfigError
from semel.sinks.errors import (
    AbortFailed,
    BeginFailed,
    CommitFailed,
    FencedOut,
    InitFailed,
    MarkerMismatch,
    SinkError,
    UnknownOutcome,
)
from semel.sinks.marker import ANY_QUERY, NO_MARKER, Marker
from semel.sinks.settings import SinkSettings
from semel.sinks.sink import ALLOWED_FROM, MAX_SINK_ID_CHARACTERS, State
from semel.sinks.tracker import Fate


async def opened(target: MemoryTarget, settings: SinkSettings | None = None) -> MemorySink:
    sink = MemorySink(target, settings)
    await sink.open("sink")
    return sink


async def write_epoch(sink: MemorySink, epoch: int, rows: int = 1) -> None:
    if await sink.begin(epoch) is not None:
        writer = sink.writer()
        await writer.write([{"row": epoch}] * rows)
        await sink.commit(epoch, [await writer.finish()])


async def test_epochs_are_committed_one_after_the_other_and_counted() -> None:
    target = MemoryTarget()
    async with MemorySink(target) as sink:
        assert await sink.open("sink") is None
        for epoch in range(3):
            await write_epoch(sink, epoch, rows=2)
        assert sink.marker.epoch == 2
        assert sink.tracker.last_committed == 2
        assert (sink.metrics.commits, sink.metrics.rows, sink.metrics.bytes) == (3, 6, 60)
        assert sink.metrics.commit_latency.count == 3
    assert target.rows == [{"row": epoch} for epoch in (0, 0, 1, 1, 2, 2)]
    assert target.calls[-1] == "close"


async def test_an_epoch_that_is_there_is_not_written_again() -> None:
    target = MemoryTarget()
    await write_epoch(await opened(target), 0)
    again = await opened(target)
    assert again.tracker.last_committed == 0
    await write_epoch(again, 0)
    assert again.state is State.IDLE
    assert again.metrics.skips == 1
    assert target.rows == [{"row": 0}]


async def test_a_marker_that_does_not_fit_is_an_error_and_begins_nothing() -> None:
    sink = await opened(MemoryTarget())
    with pytest.raises(MarkerMismatch, match="has no marker"):
        await sink.begin(1)
    assert sink.state is State.IDLE
    assert "begin" not in sink.target.calls


@pytest.mark.parametrize("query_id", ["", "another query"])
async def test_nobody_is_fenced_for_epochs_of_another_query(query_id: str) -> None:
    target = MemoryTarget()
    target.marker = Marker(4, "a query", "offsets")
    sink = MemorySink(target)
    with pytest.raises(MarkerMismatch, match="another query"):
        await sink.open("sink", query_id)
    assert "open" not in target.calls
    assert sink.state is State.CLOSED


@pytest.mark.parametrize("marker", [NO_MARKER, Marker(4, "a query", ""), Marker(4, ANY_QUERY, "")])
async def test_a_sink_is_opened_for_the_query_of_its_marker_and_for_any_if_it_has_none(
    marker: Marker,
) -> None:
    target = MemoryTarget()
    target.marker = marker
    assert await MemorySink(target).open("sink", "a query") == (None if marker is NO_MARKER else 4)


async def test_an_aborted_epoch_may_be_begun_again() -> None:
    target = MemoryTarget()
    sink = await opened(target)
    assert await sink.begin(0) is not None
    writer = sink.writer()
    await writer.write([{"row": "aborted"}])
    await writer.finish()
    await sink.abort(0, "a test")
    await write_epoch(sink, 0)
    assert target.rows == [{"row": 0}]
    assert sink.metrics.aborts == 1
    assert [tracked.reason for tracked in sink.tracker.epochs if tracked.reason] == ["a test"]


@pytest.mark.parametrize("call", ["begin", "writer", "commit", "abort"])
async def test_calls_out_of_their_state_are_refused(call: str) -> None:
    sink = MemorySink(MemoryTarget())
    with pytest.raises(BeginFailed, match="is closed, and this needs it"):
        if call == "begin":
            await sink.begin(0)
        elif call == "writer":
            sink.writer()
        elif call == "commit":
            await sink.commit(0, [])
        else:
            await sink.abort(0)


async def test_another_epoch_than_the_active_one_is_neither_committed_nor_aborted() -> None:
    sink = await opened(MemoryTarget())
    await sink.begin(0)
    with pytest.raises(BeginFailed, match="has epoch 0 active, not 1"):
        await sink.commit(1, [])
    with pytest.raises(BeginFailed, match="has epoch 0 active, not 1"):
        await sink.abort(1)
    await sink.commit(0, [])


async def test_a_commit_that_certainly_failed_leaves_the_epoch_to_be_aborted() -> None:
    sink = await opened(failing("commit", CommitFailed("no")))
    await sink.begin(0)
    with pytest.raises(CommitFailed):
        await sink.commit(0, [])
    assert sink.state is State.ACTIVE
    await sink.abort(0)
    await write_epoch(sink, 0)
    assert sink.target.rows == [{"row": 0}]


async def test_after_an_unknown_outcome_only_open_goes_on() -> None:
    sink = await opened(failing("commit", UnknownOutcome("silence")))
    await sink.begin(0)
    with pytest.raises(UnknownOutcome):
        await sink.commit(0, [])
    assert sink.state is State.FAILED
    with pytest.raises(BeginFailed, match="is failed"):
        await sink.abort(0)
    assert "abort" not in sink.target.calls
    await sink.close()
    assert "abort" not in sink.target.calls
    await sink.open("sink")
    await write_epoch(sink, 0)


async def test_a_cancelled_commit_is_never_aborted() -> None:
    sink = await opened(failing("commit", asyncio.CancelledError()))
    await sink.begin(0)
    with pytest.raises(asyncio.CancelledError):
        await sink.commit(0, [])
    assert sink.state is State.FAILED
    await sink.close()
    assert "abort" not in sink.target.calls


@pytest.mark.parametrize("step", ["open", "begin", "commit", "abort"])
async def test_fencing_is_final_at_every_step(step: str) -> None:
    target = failing(step, FencedOut("by process 7"))
    sink = MemorySink(target)
    with pytest.raises(FencedOut):
        await sink.open("sink")
        await sink.begin(0)
        await (sink.abort(0) if step == "abort" else sink.commit(0, []))
    assert sink.state is State.FAILED
    calls = list(target.calls)
    for again in (sink.open("sink"), sink.begin(0), sink.commit(0, []), sink.abort(0)):
        with pytest.raises(FencedOut, match="by process 7"):
            await again
    assert target.calls == calls


async def test_an_abort_that_takes_too_long_fails_and_the_next_open_goes_on() -> None:
    class Silent(MemorySink):
        async def _abort(self) -> None:
            await asyncio.Event().wait()

    sink = Silent(MemoryTarget(), SinkSettings(abort_timeout=0.01))
    await sink.open("sink")
    await sink.begin(0)
    with pytest.raises(AbortFailed, match=r"not confirmed within 0.01 s"):
        await sink.abort(0)
    assert sink.state is State.FAILED
    await sink.open("sink")
    await write_epoch(sink, 0)


async def test_a_hook_vetoes_by_raising_and_sees_the_epoch() -> None:
    seen: list[int] = []

    def veto(epoch: int) -> None:
        seen.append(epoch)
        if len(seen) == 1:
            raise ValueError("not yet")

    sink = await opened(MemoryTarget(), SinkSettings(before_commit=(veto,)))
    await sink.begin(0)
    with pytest.raises(CommitFailed, match="vetoed epoch 0: not yet") as failure:
        await sink.commit(0, [])
    assert failure.value.is_permanent
    assert "commit" not in sink.target.calls
    await sink.abort(0)
    await write_epoch(sink, 0)
    assert seen == [0, 0]


async def test_a_receipt_of_another_run_is_not_committed() -> None:
    target = MemoryTarget()
    older = await opened(target)
    await older.begin(0)
    receipt = await older.writer().finish()
    newer = await opened(target)
    await newer.begin(0)
    with pytest.raises(CommitFailed, match="A late writer's work is never committed"):
        await newer.commit(0, [receipt])
    assert newer.state is State.ACTIVE


async def test_close_aborts_what_is_active_and_forgives_a_failed_abort() -> None:
    for target in (MemoryTarget(), failing("abort", AbortFailed("gone"))):
        sink = await opened(target)
        await sink.begin(0)
        await sink.close()
        await sink.close()
        assert target.calls[-2:] == ["abort", "close"]
        assert sink.state is State.CLOSED


async def test_a_failed_open_may_be_tried_again() -> None:
    sink = MemorySink(failing("open", InitFailed("no such table")))
    with pytest.raises(InitFailed):
        await sink.open("sink")
    assert await sink.open("sink") is None
    with pytest.raises(ConfigError, match="is open already"):
        await sink.open("sink")


async def test_a_failed_begin_leaves_it_idle() -> None:
    sink = await opened(failing("begin", BeginFailed("busy")))
    with pytest.raises(BeginFailed):
        await sink.begin(0)
    assert sink.state is State.IDLE
    await write_epoch(sink, 0)


@pytest.mark.parametrize("sink_id", ["", "x" * (MAX_SINK_ID_CHARACTERS + 1)])
async def test_a_sink_needs_a_name_of_its_own(sink_id: str) -> None:
    with pytest.raises(ConfigError, match="1 to 200 characters"):
        await MemorySink(MemoryTarget()).open(sink_id)


async def test_every_open_is_another_run() -> None:
    sink = await opened(MemoryTarget())
    first = sink.run
    await sink.close()
    await sink.open("sink")
    assert sink.run != first


async def test_the_tracker_remembers_what_failed() -> None:
    sink = await opened(failing("commit", UnknownOutcome("silence")))
    await sink.begin(0)
    with pytest.raises(SinkError):
        await sink.commit(0, [])
    assert [(tracked.fate, tracked.reason) for tracked in sink.tracker.epochs] == [(Fate.FAILED, "silence")]
    assert sink.metrics.failures == 1


def test_every_state_can_be_left_and_reached() -> None:
    assert set(ALLOWED_FROM) == set(State)
    for state in State:
        assert any(state in sources for target, sources in ALLOWED_FROM.items() if target is not state)
    assert State.ABORTING not in ALLOWED_FROM[State.COMMITTING]
    assert State.COMMITTING not in ALLOWED_FROM[State.ABORTING]


@pytest.mark.parametrize("wrong", [{"commit_timeout": 0}, {"abort_timeout": -1}, {"max_buffered": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SinkSettings(**wrong)  # type: ignore[arg-type]
