"""What a pipeline tells its supervisor, and the supervisor Prometheus."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from semel.cli import progress_display
from semel.cli.progress_display import Fill, ProgressDisplay, progress_figures
from semel.sinks.metrics import LATENCY_BUCKETS_S, SinkMetrics
from semel.sinks.tracker import EpochTracker
from semel.spark.progress import Progress, decode, lag_of, progress_of, read_of, render_metrics
from semel.spark.supervisor import Supervisor

BUCKETS = [0, 1, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 1]
PROGRESS = Progress("totals", 7, 6, 1234567, 55.5, 12, 50, 6, 1, 2, 3, 0.75, BUCKETS, True)


def test_progress_survives_the_pipe() -> None:
    assert decode(PROGRESS.encode()) == PROGRESS


def test_the_lag_is_counted_up_to_the_latest_offsets_of_all_sources() -> None:
    sources = [
        {"endOffset": '{"a":{"0":5,"1":7}}', "latestOffset": '{"a":{"0":9,"1":7,"2":3}}'},
        {"endOffset": {"b": {"0": 1}}, "latestOffset": {"b": {"0": 2}}},
        {"endOffset": "17", "latestOffset": None},
    ]
    assert lag_of({"sources": sources}) == 4 + 3 + 1


def test_sources_without_kafkas_offsets_have_no_lag() -> None:
    assert lag_of({"sources": [{"endOffset": "17", "latestOffset": "18"}]}) is None
    assert lag_of({}) is None


def test_metrics_are_in_the_format_of_prometheus() -> None:
    text = render_metrics({"totals": PROGRESS}, restarts=3)
    assert 'semel_pipeline_rows_total{pipeline="totals"} 1234567\n' in text
    assert 'semel_pipeline_rows_per_second{pipeline="totals"} 55.5\n' in text
    assert 'semel_pipeline_lag{pipeline="totals"} 12\n' in text
    assert 'semel_pipeline_dead_letters_total{pipeline="totals"} 3\n' in text
    assert 'semel_pipeline_active{pipeline="totals"} 1\n' in text
    assert text.endswith("semel_pipeline_restarts_total 3\n")
    assert (
        "# TYPE semel_pipeline_commit_latency_seconds histogram\n"
        'semel_pipeline_commit_latency_seconds_bucket{pipeline="totals",le="0.005"} 0\n'
        'semel_pipeline_commit_latency_seconds_bucket{pipeline="totals",le="0.01"} 1\n'
        'semel_pipeline_commit_latency_seconds_bucket{pipeline="totals",le="0.025"} 3\n'
    ) in text
    assert (
        'semel_pipeline_commit_latency_seconds_bucket{pipeline="totals",le="30"} 6\n'
        'semel_pipeline_commit_latency_seconds_bucket{pipeline="totals",le="+Inf"} 7\n'
        'semel_pipeline_commit_latency_seconds_sum{pipeline="totals"} 0.75\n'
        'semel_pipeline_commit_latency_seconds_count{pipeline="totals"} 7\n'
    ) in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_the_length_of_the_first_batch_is_that_of_its_rows() -> None:
    later = {"startOffset": '{"a":{"0":5}}', "endOffset": '{"a":{"0":9,"1":7}}', "numInputRows": 3}
    assert read_of({"sources": [later]}) == 4 + 7
    assert read_of({"sources": [{**later, "startOffset": None}]}) == 3
    assert read_of({}) == 0


def query_with(sinks: int) -> Any:
    """A pipeline that has written 30 rows in 2 batches, to so many sinks."""
    metrics = SinkMetrics()
    metrics.rows, metrics.commits, metrics.aborts, metrics.dead_letters = 30, 2, 1, 4
    for seconds in (0.5, 0.25):
        metrics.commit_latency.observe(seconds)
    tracker = EpochTracker()
    tracker.last_committed = 1
    last: Mapping[str, Any] = {"batchId": 1}
    sink = SimpleNamespace(metrics=metrics, tracker=tracker)
    return SimpleNamespace(
        name="p", sinks=[sink] * sinks, lastProgress=last, rows=30, batches=2, skipped=1, isActive=True
    )


@pytest.mark.parametrize("sinks", [1, 2])
def test_a_row_counts_once_however_many_sinks_it_goes_to(sinks: int) -> None:
    told = progress_of(query_with(sinks))
    assert (told.rows, told.commits, told.skips, told.committed_epoch) == (30, 2, 1, 1)
    assert told.aborts == sinks, "each is a transaction of its own"
    assert told.commit_s == 0.75 * sinks
    assert [told.commit_buckets[LATENCY_BUCKETS_S.index(bound)] for bound in (0.25, 0.5)] == [sinks, sinks]
    assert sum(told.commit_buckets) == 2 * sinks
    assert told.dead_letters == 4 * sinks, "what one sink cannot take another may"


def filled(*lags_and_reads: tuple[int | None, int]) -> str:
    fill = Fill()
    for lag, read in lags_and_reads:
        fill.take(replace(PROGRESS, lag=lag, read=read))
    return fill.bar()


def test_the_bar_fills_towards_the_end_of_what_was_there() -> None:
    assert filled((150, 50)) == "[#####---------------]  25 % "
    assert filled((150, 50), (100, 50), (100, 50)) == "[##########----------]  50 % "
    assert filled((150, 50), (0, 150)) == "[####################] 100 % "


def test_a_bar_that_was_full_begins_anew_with_what_comes_later() -> None:
    assert filled((150, 50), (0, 150), (30, 10)) == "[#####---------------]  25 % "


def test_without_a_lag_there_is_no_bar() -> None:
    assert filled((None, 50)) == ""
    assert filled((0, 0)) == "[####################] 100 % "


def displayed(*told: Progress, is_terminal: bool, is_shown: bool = True) -> None:
    supervisor = Supervisor([])
    display = ProgressDisplay(supervisor, is_shown=is_shown, is_terminal=is_terminal)
    for progress in told:
        supervisor.latest[progress.pipeline] = progress
        display.show(progress)
    display.finish()


FIGURES = "batch 7, 1 skipped, epoch 6 committed, 1,234,567 rows, 56 rows/s read, lag 150"


def test_a_terminal_has_a_bar_on_one_line_which_is_cleared_in_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    displayed(replace(PROGRESS, lag=150), is_terminal=True)
    shown = capsys.readouterr()
    line = f"totals [#####---------------]  25 % {FIGURES}"[:59]
    # What is no terminal gets no escapes: a carriage return is left of them.
    assert shown.err == f"\r{line}\r\r"
    assert shown.out == f"totals: {FIGURES}\n"


def test_elsewhere_a_line_tells_of_commits_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replace(PROGRESS, lag=150)
    same, next_one = first, replace(first, committed_epoch=7)
    none_yet = replace(first, batch=-1, committed_epoch=-1)
    displayed(none_yet, first, same, next_one, is_terminal=False)
    assert capsys.readouterr().err == f"totals: {FIGURES}, 25 % read\n"
    monkeypatch.setattr(progress_display, "LINE_INTERVAL_S", 0.0)
    displayed(first, same, next_one, is_terminal=False)
    assert capsys.readouterr().err.count("\n") == 2


def test_no_pipeline_of_a_file_waits_for_the_line_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    totals, copies = replace(PROGRESS, lag=150), replace(PROGRESS, pipeline="copies", lag=150)
    displayed(totals, copies, replace(totals, committed_epoch=7), is_terminal=False)
    assert capsys.readouterr().err == "".join(
        f"{name}: {FIGURES}, 25 % read\n" for name in ("totals", "copies")
    )


def test_what_there_is_none_of_is_told_so_and_what_was_skipped_is_told() -> None:
    none_yet = replace(PROGRESS, batch=-1, committed_epoch=-1, rows=0, rows_per_s=0.0, lag=None, skips=0)
    assert progress_figures(none_yet) == "no batch yet, no epoch committed, 0 rows, 0 rows/s read"
    assert progress_figures(PROGRESS).startswith("batch 7, 1 skipped, epoch 6 committed, ")


def test_who_asks_for_quiet_sees_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    displayed(PROGRESS, is_terminal=True, is_shown=False)
    displayed(PROGRESS, is_terminal=False, is_shown=False)
    assert capsys.readouterr() == ("", "")
