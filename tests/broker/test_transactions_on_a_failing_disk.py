"""A disk that fails beneath transactions: stock clients ask again by themselves; nothing is lost or doubled.

No call of a client is repeated by a test: each of them returns as if nothing had happened, since the broker
answers with errors that the client itself retries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from client_java import Java
from simulated_server import SimulatedServer
from txn_cases import COMMITTED, LIBRARIES, UNCOMMITTED, Library, create_topic, values

from semel.testing.simdisk import SimDisk

SOME: Final = 5
MOMENTS: Final = (2, 5, 9, 14)
"""After how many syncs of a group at work the disk fails: while it joins, writes, and commits its offsets."""


@pytest.fixture
def server() -> Iterator[SimulatedServer]:
    made = SimulatedServer(SimDisk(1)).start()
    yield made
    made.stop()


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, server: SimulatedServer) -> Iterator[Library]:
    if request.param == "java" and Java.missing() is not None:
        pytest.skip(f"no Java client: {Java.missing()}")
    made = LIBRARIES[request.param](server.bootstrap)
    yield made
    made.close()


@contextmanager
def failing(server: SimulatedServer, kind: str, *moments: int) -> Iterator[None]:
    """Some of the next operations of a kind fail, and must do so while the block runs."""
    with server.faults() as faults:
        planned = [faults.counts[kind] + moment for moment in moments or (1,)]
        for nth in planned:
            faults.fail(kind, nth)
    yield
    with server.faults() as faults:
        assert faults.counts[kind] >= planned[0], "nothing was asked of the disk"
        faults.forget()


@pytest.mark.parametrize("kind", ("write", "sync"))
def test_a_transaction_goes_on_over_a_failure_at_any_of_its_steps(
    server: SimulatedServer, library: Library, kind: str
) -> None:
    create_topic(server.bootstrap, "t")
    with failing(server, kind):
        producer = library.producer("orders")
    producer.begin()
    with failing(server, kind):
        producer.send("t", 0, "sent-", SOME)
    producer.send("t", 0, "more-", SOME)
    producer.commit()
    producer.begin()
    producer.send("t", 0, "committed-", SOME)
    with failing(server, kind):
        producer.commit()
    producer.begin()
    producer.send("t", 0, "aborted-", SOME)
    with failing(server, kind):
        producer.abort()
    producer.begin()
    producer.send("t", 0, "last-", SOME)
    producer.commit()
    committed = [
        value for prefix in ("sent-", "more-", "committed-", "last-") for value in values(prefix, SOME)
    ]
    for _ in range(2):
        assert library.read("t", 0, COMMITTED) == committed
        assert sorted(library.read("t", 0, UNCOMMITTED)) == sorted(committed + values("aborted-", SOME))
        server.lose_power()
        server.start()
    producer.close()


def test_consume_transform_produce_goes_on_over_failures(server: SimulatedServer, library: Library) -> None:
    for topic in ("source", "target"):
        create_topic(server.bootstrap, topic)
    producer = library.producer("worker")
    producer.begin()
    producer.send("source", 0, "order-", 50)
    producer.commit()
    with failing(server, "sync", *MOMENTS):
        producer.transform("source", "target", "workers", 50)
    server.lose_power()
    server.start()
    assert library.read("target", 0, COMMITTED) == [f"{value}'" for value in values("order-", 50)]
    producer.close()
