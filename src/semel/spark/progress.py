"""How far a pipeline is: what a running one tells its supervisor, one line of JSON at a time."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.spark.query import PipelineQuery


@dataclass(slots=True, frozen=True)
class Progress:
    """One pipeline at one moment. Counts are of this life of its process; `lag` is None if none is known."""

    pipeline: str
    batch: int
    committed_epoch: int
    rows: int
    rows_per_s: float
    lag: int | None
    commits: int
    skips: int
    aborts: int
    is_active: bool

    def encode(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def decode(line: str) -> Progress:
    return Progress(**json.loads(line))


def progress_of(query: "PipelineQuery") -> Progress:
    """What a pipeline can say of itself now; sinks that follow are as far as the last of them."""
    last: Mapping[str, Any] = query.lastProgress or {}
    sinks = query.sinks
    committed = [sink.tracker.last_committed for sink in sinks]
    return Progress(
        pipeline=query.name,
        batch=int(last.get("batchId", -1)),
        committed_epoch=min(-1 if epoch is None else epoch for epoch in committed),
        rows=sum(sink.metrics.rows for sink in sinks),
        rows_per_s=float(last.get("processedRowsPerSecond") or 0.0),
        lag=lag_of(last),
        commits=sum(sink.metrics.commits for sink in sinks),
        skips=sum(sink.metrics.skips for sink in sinks),
        aborts=sum(sink.metrics.aborts for sink in sinks),
        is_active=query.isActive,
    )


def lag_of(progress: Mapping[str, Any]) -> int | None:
    """How many offsets the sources are ahead of the last batch: up to the last stable offset."""
    lags = [
        lag
        for source in progress.get("sources", ())
        if (lag := _source_lag(source.get("endOffset"), source.get("latestOffset"))) is not None
    ]
    return sum(lags) if lags else None


def _source_lag(reached: Any, latest: Any) -> int | None:
    try:
        at, end = _offsets(reached), _offsets(latest)
        return sum(max(offset - at.get(where, 0), 0) for where, offset in end.items())
    except (ValueError, TypeError, AttributeError):
        return None  # a source whose offsets are not Kafka's


def _offsets(given: Any) -> dict[tuple[str, str], int]:
    topics = json.loads(given) if isinstance(given, str) else given
    return {
        (topic, partition): int(offset)
        for topic, partitions in topics.items()
        for partition, offset in partitions.items()
    }


METRICS = (
    ("semel_pipeline_rows_total", "counter", "Rows committed in this life of the pipeline.", "rows"),
    ("semel_pipeline_commits_total", "counter", "Epochs committed in this life.", "commits"),
    ("semel_pipeline_skips_total", "counter", "Batches that were committed already.", "skips"),
    ("semel_pipeline_aborts_total", "counter", "Epochs aborted, to be run again.", "aborts"),
    ("semel_pipeline_committed_epoch", "gauge", "The last epoch that every sink has.", "committed_epoch"),
    ("semel_pipeline_rows_per_second", "gauge", "Speed of the last batch.", "rows_per_s"),
    ("semel_pipeline_lag", "gauge", "Offsets up to the last stable offset not yet committed.", "lag"),
    ("semel_pipeline_active", "gauge", "Whether the query runs.", "is_active"),
)


def render_metrics(latest: Mapping[str, Progress], restarts: int) -> str:
    """In the text format of Prometheus."""
    lines: list[str] = []
    for name, kind, explanation, field in METRICS:
        lines += [f"# HELP {name} {explanation}", f"# TYPE {name} {kind}"]
        for pipeline, progress in latest.items():
            value = getattr(progress, field)
            if value is not None:
                lines.append(f'{name}{{pipeline="{pipeline}"}} {float(value):g}')
    lines += [
        "# HELP semel_pipeline_restarts_total Starts after a crash.",
        "# TYPE semel_pipeline_restarts_total counter",
        f"semel_pipeline_restarts_total {restarts}",
    ]
    return "\n".join(lines) + "\n"
