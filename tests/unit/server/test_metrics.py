"""Claims about the figures that a broker shows."""

import asyncio
import re
import urllib.request

import semel
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.transactional_producer import TransactionalProducer
from semel.server.metrics import Histogram
from semel.server.metrics_endpoint import MetricsEndpoint


def test_a_histogram_counts_each_latency_in_every_bound_above_it() -> None:
    histogram = Histogram()
    for latency_s in (0.0004, 0.003, 60.0):
        histogram.add(latency_s)
    lines = list(histogram.lines("x"))
    assert 'x_bucket{le="0.0005"} 1' in lines
    assert 'x_bucket{le="0.005"} 2' in lines
    assert 'x_bucket{le="5"} 2' in lines
    assert 'x_bucket{le="+Inf"} 3' in lines
    assert "x_count 3" in lines


def test_a_running_broker_serves_its_figures_over_http() -> None:
    with semel.Broker(settings={"metrics.listeners": "127.0.0.1:0"}) as broker:

        async def create() -> None:
            async with Cluster(broker.bootstrap) as cluster:
                await Admin(cluster).create_topic("counted", partitions=1)
                async with TransactionalProducer(cluster, "counting") as producer:
                    for _ in range(3):
                        async with producer.transaction():
                            await producer.send("counted", b"value")

        asyncio.run(create())
        endpoint = broker.server.metrics_endpoint
        assert isinstance(endpoint, MetricsEndpoint)
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics") as response:
            text = response.read().decode()
    assert 'semel_requests_total{api="CreateTopics"} 1' in text
    assert "semel_transactions_active 0" in text
    assert "semel_transactions_committed_total 3" in text
    assert "semel_commit_latency_seconds_count 3" in text
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) .+|[a-z_]+(\{[^}]*\})? [-+0-9.einfIN]+", line), line
