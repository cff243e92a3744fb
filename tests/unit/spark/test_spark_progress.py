"""What a pipeline tells its supervisor, and the supervisor Prometheus."""

from semel.spark.progress import Progress, decode, lag_of, render_metrics

PROGRESS = Progress("totals", 7, 6, 1234, 55.5, 12, 6, 1, 2, True)


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
    assert 'semel_pipeline_rows_total{pipeline="totals"} 1234\n' in text
    assert 'semel_pipeline_lag{pipeline="totals"} 12\n' in text
    assert 'semel_pipeline_active{pipeline="totals"} 1\n' in text
    assert text.endswith("semel_pipeline_restarts_total 3\n")
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
