"""Semel against Apache Kafka: both on this machine, one after the other, the same loads, and the ratios.

    .venv/bin/python bench/vs_kafka.py                   all of it, about five minutes
    .venv/bin/python bench/vs_kafka.py --only txn        start, produce, consume or txn

Semel runs with its default durability, an fsync before every acknowledgement, and Kafka with its own, none.
CPU time is that of the broker's process alone, and is what to trust on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from brokers import BrokerUnderTest, kafka, semel

HERE: Final = Path(__file__).parent
SEMEL: Final = str(Path(sys.executable).with_name("semel"))
LOAD_TIMEOUT_S: Final = 300.0
SETTLE_S: Final = 5.0
"""How long a broker is left alone before its idle memory is read."""
RECORD_BYTES: Final = (100, 1000)
# Producers, and the pause in ms after CONCURRENT_TRANSACTIONS at which Kafka does best with so many.
PRODUCERS: Final = ((1, 1.0), (10, 1.0), (50, 5.0), (200, 20.0))

Figures = dict[str, float]


def measure(broker: BrokerUnderTest, parts: set[str], gigabytes: float, seconds: float) -> Figures:
    """Every figure of one broker."""
    figures: Figures = {}
    started_s = broker.start()
    try:
        if "start" in parts:
            figures["start to first produce, s"] = started_s
            time.sleep(SETTLE_S)
            figures["resident when idle, MB"] = broker.rss_mb()
        if parts & {"produce", "consume"}:
            for record_bytes in RECORD_BYTES:
                _stream(broker, record_bytes, gigabytes, parts, figures)
        if "txn" in parts:
            for producers, pause_ms in PRODUCERS:
                _transactions(broker, producers, pause_ms, seconds, figures)
    finally:
        broker.stop()
    return figures


def _stream(
    broker: BrokerUnderTest, record_bytes: int, gigabytes: float, parts: set[str], figures: Figures
) -> None:
    records = int(gigabytes * 1_000_000_000 / record_bytes)
    topic = f"records-{record_bytes}"
    options = ["--bootstrap", broker.bootstrap, "--pid", str(broker.pid), "--topic", topic]
    options += ["--record-bytes", str(record_bytes)]
    load = [sys.executable, str(HERE / "confluent_load.py")]
    # The first records warm up the broker and are not counted.
    _run([*load, "produce", *options, "--records", str(records // 4)])
    for what in ("produce", "consume"):
        measured = _run([*load, what, *options, "--records", str(records)])
        if what in parts:
            figures[f"{what} {record_bytes} B, records/s"] = measured["records_per_s"]
            figures[f"{what} {record_bytes} B, broker CPU s per GB"] = measured["broker_cpu_s_per_gb"]


def _transactions(
    broker: BrokerUnderTest, producers: int, pause_ms: float, seconds: float, figures: Figures
) -> None:
    command = [SEMEL, "bench", "txn", "--producers", str(producers), "--pause-ms", str(pause_ms)]
    command += ["--seconds", str(seconds), "--warmup", str(seconds), "--topic", f"transactions-{producers}"]
    command += ["--pid", str(broker.pid), "--bootstrap", broker.bootstrap, "--output", "json"]
    measured = _run(command)
    name = f"{producers} transactional producers"
    figures[f"{name}, transactions/s"] = measured["transactions_per_s"]
    figures[f"{name}, whole p50 ms"] = measured["transaction_p50_ms"]
    figures[f"{name}, whole p99 ms"] = measured["transaction_p99_ms"]
    figures[f"{name}, broker CPU ms each"] = measured["broker_cpu_ms_per_transaction"]


def _run(command: list[str]) -> Figures:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    figures: Figures = json.loads(done.stdout)
    return figures


def report(results: list[tuple[str, Figures]]) -> None:
    """A table of all figures, with the last broker's as the measure."""
    names = [name for name, _ in results]
    print(f"{'':<50}" + "".join(f"{name:>16}" for name in names) + f"{'ratio':>10}")
    for figure, reference in results[-1][1].items():
        values = [figures[figure] for _, figures in results]
        ratio = f"{values[0] / reference:>10.2f}" if len(results) > 1 and reference else ""
        print(f"{figure:<50}" + "".join(f"{value:>16,.2f}" for value in values) + ratio, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = ("start", "produce", "consume", "txn")
    parser.add_argument("--only", choices=parts, action="append", help="a part; may be given again")
    parser.add_argument("--gigabytes", type=float, default=0.5, help="record bytes in each stream")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each number of producers")
    parser.add_argument("--durability", choices=("fsync", "os"), default="fsync", help="Semel's")
    parser.add_argument("--without-kafka", action="store_true", help="Semel alone")
    given = parser.parse_args()
    chosen = set(given.only or parts)
    with tempfile.TemporaryDirectory(prefix="semel-bench-", dir=Path.cwd()) as scratch:
        brokers = [semel(Path(scratch) / "semel", given.durability)]
        if not given.without_kafka:
            brokers.append(kafka(Path(scratch) / "kafka"))
        results = []
        for broker in brokers:
            print(f"measuring {broker.name} ...", file=sys.stderr, flush=True)
            results.append((broker.name, measure(broker, chosen, given.gigabytes, given.seconds)))
        report(results)


if __name__ == "__main__":
    main()
