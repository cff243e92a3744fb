"""Executors in other processes: failing tasks, dying executors, lost shuffle files, speculation."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from broker_process import BrokerProcess
from spark_cases import HERE, LOCAL_CLUSTER, Row, StartDriver, committed_records, create_topic, produce

from semel.testing.postgres_server import PostgresServer

sys.path.append(str(Path(__file__).parents[1] / "sinks"))
from postgres_server import postgres, postgres_cluster  # noqa: F401

UNLUCKY: Final = HERE / "pipelines" / "unlucky.py"
WITH_STATE: Final = ("shuffle-state", "executor-state")
MISFORTUNES: Final = ("first-row", "last-row", "shuffle", "speculation", "executor", *WITH_STATE)
TABLE_MISFORTUNES: Final = ("table-first-row", "table-last-row", "table-speculation", "table-executor")
# In these an attempt had written when it was replaced: the epoch must have been spoiled, and run again.
SPOILED: Final = ("last-row", "shuffle", "executor", *WITH_STATE, "table-last-row", "table-executor")
ROWS: Final = 240


def expected(misfortune: str) -> Counter[bytes | None]:
    if misfortune in WITH_STATE:
        return Counter(b"%d=%d" % (digit, ROWS // 10) for digit in range(10))
    return Counter(b"v%d" % i for i in range(ROWS))


@pytest.mark.timeout(900)
def test_whatever_happens_to_tasks_and_executors_every_row_arrives_once(
    broker: BrokerProcess,
    start_driver: StartDriver,
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
) -> None:
    create_topic(broker.bootstrap, "orders", 4)
    rows = [Row(b"v%d" % i, b"k%d" % i, partition=i % 4) for i in range(ROWS)]
    produce(broker.bootstrap, "orders", rows)
    for misfortune in MISFORTUNES:
        create_topic(broker.bootstrap, f"out-{misfortune}", 4)
    for misfortune in TABLE_MISFORTUNES:
        postgres.query(f'CREATE TABLE "out-{misfortune}" (value bytea)')
    driver = start_driver(
        UNLUCKY,
        broker.bootstrap,
        tmp_path / "places",
        master=LOCAL_CLUSTER,
        environment={"TEST_POSTGRES": postgres.dsn},
    )
    log = driver.succeed(timeout_s=600)
    for misfortune in MISFORTUNES:
        found = Counter(
            record.value for _, record in committed_records(broker.bootstrap, f"out-{misfortune}")
        )
        assert found == expected(misfortune), misfortune
    for misfortune in TABLE_MISFORTUNES:
        rows_found = postgres.query(f'SELECT value FROM "out-{misfortune}"')
        assert Counter(value for (value,) in rows_found) == expected(misfortune), misfortune
    tried = dict(re.findall(r"^([\w-]+): tried (\d+)$", log, re.MULTILINE))
    for misfortune in SPOILED:
        assert int(tried[misfortune]) > 1, f"{misfortune} did no harm: {tried}"
