"""A load through confluent-kafka with its defaults: produce with idempotence, then consume committed records.

Prints what it measured as JSON, the CPU time of the broker's process included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from typing import Final

from confluent_kafka import Consumer, Producer, TopicPartition

from semel.cli.bench import ProcessProbe

GB: Final = 1_000_000_000
QUIET_TIMEOUT_S: Final = 20.0
"""A broker from which nothing comes for so long has failed."""


def produce(bootstrap: str, topic: str, record_bytes: int, records: int) -> None:
    """Send the records, and wait until all of them are acknowledged."""
    value = random.Random(1).randbytes(record_bytes)
    failures: list[str] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "queue.buffering.max.messages": 1_000_000,
            "message.timeout.ms": int(QUIET_TIMEOUT_S * 1000),
            "log_level": 3,
        },
        on_delivery=lambda error, _: failures.append(str(error)) if error else None,
    )
    for _ in range(records):
        while True:
            try:
                producer.produce(topic, value)
                break
            except BufferError:
                producer.poll(0.05)
        producer.poll(0)
    producer.flush()
    if failures:
        sys.exit(f"{len(failures)} records were not written: {failures[0]}")


def consume(bootstrap: str, topic: str, records: int) -> None:
    """Read so many committed records from the beginning."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": topic,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "log_level": 3,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    received = 0
    heard_at = time.monotonic()
    while received < records:
        messages = consumer.consume(10_000, 0.5)
        received += len(messages)
        if messages:
            heard_at = time.monotonic()
        elif time.monotonic() - heard_at > QUIET_TIMEOUT_S:
            sys.exit(f"only {received} of {records} records came")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("produce", "consume"))
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--record-bytes", type=int, required=True)
    parser.add_argument("--records", type=int, required=True)
    given = parser.parse_args()
    probe = ProcessProbe(given.pid)
    probe.read()
    began = time.perf_counter()
    if given.what == "produce":
        produce(given.bootstrap, given.topic, given.record_bytes, given.records)
    else:
        consume(given.bootstrap, given.topic, given.records)
    elapsed_s = time.perf_counter() - began
    probe.read()
    measured = {
        "records_per_s": given.records / elapsed_s,
        "broker_cpu_s_per_gb": probe.cpu_s() / (given.records * given.record_bytes) * GB,
    }
    print(json.dumps(measured), flush=True)
    os._exit(0)  # librdkafka takes its time to close a consumer, and there is nothing to close.


if __name__ == "__main__":
    main()
