"""Latency without its values."""

from __future__ import annotations

import pytest

from semel.sinks.metrics import LATENCY_BUCKETS_S, Latency, SinkMetrics


def test_a_histogram_has_the_count_the_sum_and_the_buckets() -> None:
    latency = Latency()
    assert latency.count == 0
    for seconds in (0.001, 0.005, 0.02, 100.0):
        latency.observe(seconds)
    assert latency.count == 4
    assert latency.total_s == pytest.approx(100.026)
    assert latency.buckets[0] == 2  # a bound belongs to its bucket
    assert latency.buckets[LATENCY_BUCKETS_S.index(0.025)] == 1
    assert latency.buckets[-1] == 1


def test_sinks_do_not_share_their_histogram() -> None:
    first, second = SinkMetrics(), SinkMetrics()
    first.commit_latency.observe(1)
    assert second.commit_latency.count == 0
