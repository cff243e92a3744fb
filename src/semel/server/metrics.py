"""Figures for the people who run a broker, in the text format that Prometheus reads.

Counting must cost next to nothing, so it is done in plain integers on the event loop. What can be looked up,
such as open transactions, is looked up when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final

from semel.broker.core import Broker
from semel.broker.entries import Append, Entry
from semel.broker.transaction_messages import TransactionEnded, TransactionJoined

LATENCY_BOUNDS_S: Final[tuple[float, ...]] = (
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
)
MAX_LABELLED_PARTITIONS: Final = 100
"""The partitions whose readers are furthest behind get a line each, and no more than these."""


class Histogram:
    """Counts of latencies by upper bound."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, latency_s: float) -> None:
        self._counts[bisect_left(LATENCY_BOUNDS_S, latency_s)] += 1
        self._sum_s += latency_s

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*LATENCY_BOUNDS_S, float("inf")), self._counts, strict=True):
            total += count
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{name}_bucket{{le="{label}"}} {total}'
        yield f"{name}_sum {self._sum_s:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """What has happened since the process started."""

    __slots__ = (
        "commit_latency",
        "markers",
        "requests",
        "transactions_aborted",
        "transactions_committed",
        "transactions_started",
    )

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.transactions_started = 0
        self.transactions_committed = 0
        self.transactions_aborted = 0
        self.markers = 0
        self.commit_latency = Histogram()

    def requested(self, api: str) -> None:
        self.requests[api] = self.requests.get(api, 0) + 1

    def deciding(self, broker: Broker, entries: Iterable[Entry]) -> bool:
        """Count what is about to be applied; tells whether a transaction commits by it."""
        commits = False
        started: set[str] = set()
        for entry in entries:
            if isinstance(entry, Append):
                if entry.header.is_control:
                    self.markers += 1
            elif isinstance(entry, TransactionJoined):
                if not broker.transactions.by_id[entry.transactional_id].is_open:
                    started.add(entry.transactional_id)
            elif isinstance(entry, TransactionEnded):
                commits = commits or entry.committed
                if entry.committed:
                    self.transactions_committed += 1
                elif broker.transactions.by_id[entry.transactional_id].is_open:
                    self.transactions_aborted += 1
        self.transactions_started += len(started)
        return commits

    def render(self, broker: Broker, connections: int, now_ms: int) -> str:
        """All figures, as Prometheus reads them."""
        return "\n".join(self._lines(broker, connections, now_ms)) + "\n"

    def _lines(self, broker: Broker, connections: int, now_ms: int) -> Iterator[str]:
        yield from _family("semel_connections", "gauge", "Open client connections", connections)
        yield "# HELP semel_requests_total Requests by API"
        yield "# TYPE semel_requests_total counter"
        for api, count in sorted(self.requests.items()):
            yield f'semel_requests_total{{api="{api}"}} {count}'
        yield from self._transaction_lines(broker, now_ms)
        yield from _lag_lines(broker)

    def _transaction_lines(self, broker: Broker, now_ms: int) -> Iterator[str]:
        counters = (
            ("started", self.transactions_started, "Transactions begun"),
            ("committed", self.transactions_committed, "Transactions committed"),
            ("aborted", self.transactions_aborted, "Transactions aborted, for whatever reason"),
            ("timed_out", broker.counters.timed_out, "Transactions aborted because their time was over"),
            ("fenced", broker.counters.fenced, "Requests of fenced producers"),
            ("asked_again", broker.counters.asked_again, "Requests by an older connection of their producer"),
        )
        for name, value, about in counters:
            yield from _family(f"semel_transactions_{name}_total", "counter", about, value)
        open_ones = [item for item in broker.transactions.by_id.values() if item.is_open]
        prepared = sum(item.two_phase for item in open_ones)
        oldest_ms = max((now_ms - item.started_ms for item in open_ones), default=0)
        yield from _family("semel_transactions_active", "gauge", "Open transactions", len(open_ones))
        yield from _family(
            "semel_transactions_prepared",
            "gauge",
            "Open two-phase transactions, which have no timeout",
            prepared,
        )
        yield from _family(
            "semel_transaction_oldest_seconds",
            "gauge",
            "Age of the oldest open transaction",
            oldest_ms / 1000,
        )
        yield from _family(
            "semel_transaction_markers_total", "counter", "Markers written to partitions", self.markers
        )
        yield from _family(
            "semel_produce_duplicates_total",
            "counter",
            "Batches that came again and were recognised",
            broker.counters.duplicates,
        )
        yield "# HELP semel_commit_latency_seconds From EndTxn(commit) until it is durable"
        yield "# TYPE semel_commit_latency_seconds histogram"
        yield from self.commit_latency.lines("semel_commit_latency_seconds")


def _lag_lines(broker: Broker) -> Iterator[str]:
    yield "# HELP semel_last_stable_offset_lag Offsets that read_committed readers cannot see yet"
    yield "# TYPE semel_last_stable_offset_lag gauge"
    lags = [
        (partition.log.high_watermark - partition.log.last_stable_offset, topic.name, partition.index)
        for topic in broker.catalog
        for partition in topic.partitions
        if partition.log.unstable
    ]
    for lag, name, index in sorted(lags, reverse=True)[:MAX_LABELLED_PARTITIONS]:
        yield f'semel_last_stable_offset_lag{{topic="{name}",partition="{index}"}} {lag}'


def _family(name: str, kind: str, about: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    # Not by its type: compiled, a whole number that is given as a float is one.
    yield f"{name} {value:g}" if value % 1 else f"{name} {int(value)}"
