"""Ten thousand open transactions: what they take in memory, and how long a restart with them takes.

.venv/bin/python bench/open_transactions.py [--transactions 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Final

from brokers import BrokerUnderTest, semel

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.connection import Connection
from semel.client.errors import check
from semel.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.list_transactions import ListTransactionsRequest, ListTransactionsResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

TOPIC: Final = "open"
PARTITIONS: Final = 10
AT_A_TIME: Final = 50
TIMEOUT_MS: Final = 900_000


async def open_all(bootstrap: str, count: int) -> None:
    async with Cluster(bootstrap) as cluster:
        await Admin(cluster).create_topic(TOPIC, partitions=PARTITIONS)
        connection = await cluster.any_connection()
        for first in range(0, count, AT_A_TIME):
            await asyncio.gather(*(_open(connection, first + n) for n in range(AT_A_TIME)))


async def _open(connection: Connection, number: int) -> None:
    """Begin a transaction and write one record in it."""
    name = f"open-{number}"
    partition = number % PARTITIONS
    identity = await connection.request(
        InitProducerIdRequest(name, TIMEOUT_MS), InitProducerIdResponse, max_version=4
    )
    check(identity.error_code, f"{name} got no producer id")
    joined = await connection.request(
        AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=identity.producer_id,
            v3_and_below_producer_epoch=identity.producer_epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(TOPIC, [partition])],
        ),
        AddPartitionsToTxnResponse,
        max_version=3,
    )
    check(joined.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code, name)
    batch = build_batch(
        [Record(None, b"x" * 100, time.time_ns() // 1_000_000)],
        producer_id=identity.producer_id,
        producer_epoch=identity.producer_epoch,
        base_sequence=0,
        transactional=True,
    )
    data = TopicProduceData(name=TOPIC, partition_data=[PartitionProduceData(partition, batch)])
    request = ProduceRequest(name, -1, 30_000, [data])
    written = await connection.request(request, ProduceResponse, max_version=9)
    check(written.responses[0].partition_responses[0].error_code, f"{name} could not write")


async def count_open(bootstrap: str) -> int:
    async with Cluster(bootstrap) as cluster:
        connection = await cluster.any_connection()
        request = ListTransactionsRequest(state_filters=["Ongoing"])
        answer = await connection.request(request, ListTransactionsResponse, max_version=0)
        return len(answer.transaction_states)


def restart(broker: BrokerUnderTest, count: int, how: str) -> None:
    if how == "SIGTERM":
        broker.stop()
    else:
        broker.kill()
    began = time.perf_counter()
    broker.start()
    found = asyncio.run(count_open(broker.bootstrap))
    assert found == count, f"{found} of {count} transactions are open after {how}"
    print(
        f"restart after {how}: all listed after {time.perf_counter() - began:.2f} s, {broker.rss_mb():.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=10_000, help="a multiple of 50")
    count = parser.parse_args().transactions
    with tempfile.TemporaryDirectory(prefix="semel-bench-", dir=Path.cwd()) as scratch:
        broker = semel(Path(scratch) / "semel", "fsync")
        broker.start()
        try:
            print(f"idle: {broker.rss_mb():.0f} MB")
            asyncio.run(open_all(broker.bootstrap, count))
            print(f"{count} open transactions: {broker.rss_mb():.0f} MB", flush=True)
            for how in ("SIGTERM", "SIGKILL"):
                restart(broker, count, how)
        finally:
            broker.kill()


if __name__ == "__main__":
    main()
