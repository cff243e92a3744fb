"""How far a pipeline is: what a running one tells its supervisor, one line of JSON at a time.

Batches and rows count when the last sink has them, and once, however many sinks there are.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from semel.sinks.metrics import LATENCY_BUCKETS_S
from semel.spark.source_offsets import of_source

if TYPE_CHECKING:
    from semel.spark.query import PipelineQuery

# Some sink has none yet.
NO_EPOCH: Final = -1


@dataclass(slots=True, frozen=True)
class Progress:
    """One pipeline at one moment. Counts are of this life of its process; `lag` is None if none is known.

    `lag` and `read`, which is of the last batch, are offsets of the sources. `commit_s` is how long the
    commits of all sinks took together, and `commit_buckets` how many took how long, by `LATENCY_BUCKETS_S`.
    """

    pipeline: str
    batch: int
    committed_epoch: int
    rows: int
    rows_per_s: float
    lag: int | None
    read: int
    commits: int
    skips: int
    aborts: int
    dead_letters: int
    commit_s: float
    commit_buckets: list[int]
    is_active: bool

    def encode(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def decode(line: str) -> Progress:
    return Progress(**json.loads(line))


def progress_of(query: "PipelineQuery") -> Progress:
    """What a pipeline can say of itself now. With several sinks: the epoch that the slowest has."""
    last: Mapping[str, Any] = query.lastProgress or {}
    committed = [sink.tracker.last_committed for sink in query.sinks]
    metrics = [sink.metrics for sink in query.sinks]
    return Progress(
        pipeline=query.name,
        batch=int(last.get("batchId", -1)),
        committed_epoch=min(NO_EPOCH if epoch is None else epoch for epoch in committed),
        rows=query.rows,
        rows_per_s=float(last.get("processedRowsPerSecond") or 0.0),
        lag=lag_of(last),
        read=read_of(last),
        commits=query.batches,
        skips=query.skipped,
        aborts=sum(each.aborts for each in metrics),
        dead_letters=sum(each.dead_letters for each in metrics),
        commit_s=sum(each.commit_latency.total_s for each in metrics),
        commit_buckets=[
            sum(same) for same in zip(*(each.commit_latency.buckets for each in metrics), strict=True)
        ],
        is_active=query.isActive,
    )


def lag_of(progress: Mapping[str, Any]) -> int | None:
    """How many offsets the sources are ahead of the last batch: up to the last stable offset."""
    lags = [
        lag
        for source in progress.get("sources", ())
        if (lag := _distance(source.get("endOffset"), source.get("latestOffset"))) is not None
    ]
    return sum(lags) if lags else None


def read_of(progress: Mapping[str, Any]) -> int:
    """How many offsets the last batch was long; of the first batch, which has no start, how many rows."""
    return sum(
        int(source.get("numInputRows") or 0) if length is None else length
        for source in progress.get("sources", ())
        for length in [_distance(source.get("startOffset"), source.get("endOffset"))]
    )


def _distance(begin: object, end: object) -> int | None:
    """How many offsets lie between; None for a source that is no topic."""
    at, to = of_source(begin), of_source(end)
    if at is None or to is None:
        return None
    return sum(max(offset - at.get(where, 0), 0) for where, offset in to.items())


# Name, kind, explanation, and field.
METRICS: Final = (
    ("semel_pipeline_rows_total", "counter", "Rows that every sink has got in this life.", "rows"),
    ("semel_pipeline_commits_total", "counter", "Epochs that every sink has got in this life.", "commits"),
    ("semel_pipeline_skips_total", "counter", "Batches that every sink had already.", "skips"),
    ("semel_pipeline_aborts_total", "counter", "Epochs aborted at any sink, to be run again.", "aborts"),
    ("semel_pipeline_dead_letters_total", "counter", "Rows kept as dead letters.", "dead_letters"),
    ("semel_pipeline_committed_epoch", "gauge", "The last epoch that every sink has.", "committed_epoch"),
    ("semel_pipeline_rows_per_second", "gauge", "Rows a second that the last batch has read.", "rows_per_s"),
    ("semel_pipeline_lag", "gauge", "Offsets up to the last stable offset not yet committed.", "lag"),
    ("semel_pipeline_active", "gauge", "Whether the query runs.", "is_active"),
)
COMMIT_LATENCY: Final = "semel_pipeline_commit_latency_seconds"
# As Prometheus writes the upper bounds of buckets.
BOUNDS: Final = (*(f"{bound:g}" for bound in LATENCY_BUCKETS_S), "+Inf")


def render_metrics(latest: Mapping[str, Progress], restarts: int) -> str:
    """In the text format of Prometheus."""
    lines: list[str] = []
    for name, kind, explanation, field in METRICS:
        lines += [f"# HELP {name} {explanation}", f"# TYPE {name} {kind}"]
        for pipeline, progress in latest.items():
            value = getattr(progress, field)
            if value is not None:
                lines.append(f'{name}{{pipeline="{pipeline}"}} {_number(value)}')
    lines += [
        f"# HELP {COMMIT_LATENCY} How long each commit at any sink took.",
        f"# TYPE {COMMIT_LATENCY} histogram",
    ]
    for progress in latest.values():
        lines += _latency_samples(progress)
    lines += [
        "# HELP semel_pipeline_restarts_total Starts after a crash.",
        "# TYPE semel_pipeline_restarts_total counter",
        f"semel_pipeline_restarts_total {restarts}",
    ]
    return "\n".join(lines) + "\n"


def _latency_samples(progress: Progress) -> Iterator[str]:
    pipeline = f'pipeline="{progress.pipeline}"'
    for bound, count in zip(BOUNDS, accumulate(progress.commit_buckets), strict=True):
        yield f'{COMMIT_LATENCY}_bucket{{{pipeline},le="{bound}"}} {count}'
    yield f"{COMMIT_LATENCY}_sum{{{pipeline}}} {_number(progress.commit_s)}"
    yield f"{COMMIT_LATENCY}_count{{{pipeline}}} {sum(progress.commit_buckets)}"


def _number(value: float) -> str:
    """With all its digits: a counter has to move with every row."""
    return str(value) if value % 1 else str(int(value))
