"""DeleteRecords and retention may pass an open transaction: what is left of it ends like any other."""

from __future__ import annotations

import time

import pytest
from broker_process import BrokerProcess, StartBroker
from client_confluent import Confluent as Admin
from confluent_kafka import Consumer, TopicPartition
from txn_cases import COMMITTED, UNCOMMITTED, Confluent, create_topic, values

SOME = 5
MORE = 3
WAIT_S = 20.0


def read_from_the_start(broker: BrokerProcess, topic: str, isolation: str) -> list[str]:
    """What a new consumer finds: it begins where the log begins."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "unused",
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "fetch.error.backoff.ms": 10,
            "retry.backoff.ms": 20,
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[str] = []
    while (message := consumer.poll(WAIT_S)) is not None:
        if message.error() is not None:
            break
        found.append((message.value() or b"").decode())
    consumer.close()
    return found


@pytest.mark.parametrize("commit", (True, False), ids=("commit", "abort"))
def test_what_is_left_of_a_transaction_is_committed_or_aborted(broker: BrokerProcess, commit: bool) -> None:
    create_topic(broker.bootstrap, "t")
    producer = Confluent(broker.bootstrap).producer("orders")
    producer.begin()
    producer.send("t", 0, "deleted-", SOME)
    Admin(broker.bootstrap).delete_records("t", 0, SOME)
    assert read_from_the_start(broker, "t", UNCOMMITTED) == []
    producer.send("t", 0, "left-", MORE)
    assert read_from_the_start(broker, "t", UNCOMMITTED) == values("left-", MORE)
    assert read_from_the_start(broker, "t", COMMITTED) == [], "it is still open"
    broker.restart()
    assert read_from_the_start(broker, "t", COMMITTED) == []
    producer.commit() if commit else producer.abort()
    for _ in range(2):
        assert read_from_the_start(broker, "t", COMMITTED) == (values("left-", MORE) if commit else [])
        broker.restart()


def test_retention_passes_a_transaction_that_is_open(start_broker: StartBroker) -> None:
    broker = start_broker(log_retention_check_interval_ms=50)
    admin = Admin(broker.bootstrap)
    admin.create_topic("t", 1, {"segment.bytes": "20000", "retention.bytes": "20000"})
    producer = Confluent(broker.bootstrap).producer("orders")
    producer.begin()
    producer.send("t", 0, "x" * 1000, 10)
    for n in range(20):
        producer.send("t", 0, "y" * 1000 + f"{n}-", 5)
    deadline = time.monotonic() + WAIT_S
    while admin.watermarks("t", 0)[0] < 10:
        assert time.monotonic() < deadline, "an open transaction keeps what retention should delete"
        time.sleep(0.05)
    producer.commit()
    start, _ = admin.watermarks("t", 0)
    left = read_from_the_start(broker, "t", COMMITTED)
    sent = values("x" * 1000, 10) + [value for n in range(20) for value in values("y" * 1000 + f"{n}-", 5)]
    assert left == sent[start:]
