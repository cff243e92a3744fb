"""Executors in other processes: failing tasks, dying executors, lost shuffle files, speculation."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from broker_process import BrokerProcess
from spark_cases import HERE, LOCAL_CLUSTER, Row, StartDriver, committed_records, create_topic, produce

UNLUCKY: Final = HERE / "pipelines" / "unlucky.py"
WITH_STATE: Final = ("shuffle-state", "executor-state")
MISFORTUNES: Final = ("first-row", "last-row", "shuffle", "speculation", "executor", *WITH_STATE)
# In these an attempt had written when it was replaced: the epoch must have been spoiled, and run again.
SPOILED: Final = ("last-row", "shuffle", "executor", *WITH_STATE)
ROWS: Final = 240


def expected(misfortune: str) -> Counter[bytes | None]:
    if misfortune in WITH_STATE:
        return Counter(b"%d=%d" % (digit, ROWS // 10) for digit in range(10))
    return Counter(b"v%d" % i for i in range(ROWS))


@pytest.mark.timeout(900)
def test_whatever_happens_to_tasks_and_executors_every_row_arrives_once(
    broker: BrokerProcess, start_driver: StartDriver, tmp_path: Path
) -> None:
    create_topic(broker.bootstrap, "orders", 4)
    rows = [Row(b"v%d" % i, b"k%d" % i, partition=i % 4) for i in range(ROWS)]
    produce(broker.bootstrap, "orders", rows)
    for misfortune in MISFORTUNES:
        create_topic(broker.bootstrap, f"out-{misfortune}", 4)
    driver = start_driver(UNLUCKY, broker.bootstrap, tmp_path / "places", master=LOCAL_CLUSTER)
    log = driver.succeed(timeout_s=600)
    for misfortune in MISFORTUNES:
        found = Counter(
            record.value for _, record in committed_records(broker.bootstrap, f"out-{misfortune}")
        )
        assert found == expected(misfortune), misfortune
    tried = dict(re.findall(r"^([\w-]+): tried (\d+)$", log, re.MULTILINE))
    for misfortune in SPOILED:
        assert int(tried[misfortune]) > 1, f"{misfortune} did no harm: {tried}"
