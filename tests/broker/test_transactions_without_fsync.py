"""With durability=os producers get new ids after a start, where their epochs are in doubt; they take them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from broker_process import BrokerProcess
from client_java import Java
from raw_client import RawClient
from txn_cases import COMMITTED, LIBRARIES, Library, create_topic, values

from semel.wire.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    made = BrokerProcess(tmp_path_factory.mktemp("lazy") / "broker", {"durability": "os"}).start()
    yield made
    made.kill()
    assert "this is a bug" not in made.log, made.log


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, process: BrokerProcess) -> Iterator[Library]:
    if request.param == "java" and Java.missing() is not None:
        pytest.skip(f"no Java client: {Java.missing()}")
    made = LIBRARIES[request.param](process.bootstrap)
    yield made
    made.close()


def producer_id(process: BrokerProcess, transactional_id: str) -> int:
    with RawClient(process.port) as client:
        request = DescribeTransactionsRequest(transactional_ids=[transactional_id])
        return client.ask(request, 0, DescribeTransactionsResponse).transaction_states[0].producer_id


def test_a_producer_goes_on_over_restarts_also_where_it_is_given_a_new_id(
    process: BrokerProcess, library: Library, request: pytest.FixtureRequest
) -> None:
    name = f"t-{uuid.uuid4().hex[:10]}"
    create_topic(process.bootstrap, name)
    producer = library.producer(name)
    ids = [producer_id(process, name)]
    wanted = []
    for n in range(4):
        producer.begin()
        producer.send(name, 0, f"{n}-before-", 2)
        if n % 2:
            process.restart()
            producer.send(name, 0, f"{n}-after-", 2)
            wanted += [*values(f"{n}-before-", 2), *values(f"{n}-after-", 2)]
        else:
            wanted += values(f"{n}-before-", 2)
        producer.commit()
        ids.append(producer_id(process, name))
    # Clients of version 1 keep their identity over a commit, so theirs is never in doubt.
    raises_epochs = request.node.callspec.params["library"] == "java"
    assert len(set(ids)) == (3 if raises_epochs else 1)
    assert library.read(name, 0, COMMITTED) == wanted
    successor = library.producer(name)
    assert (producer_id(process, name) in ids) == raises_epochs, "a new one, unless it has had one since"
    successor.begin()
    successor.send(name, 0, "successor-")
    successor.commit()
    assert library.read(name, 0, COMMITTED) == [*wanted, "successor-0"]
    for made in (producer, successor):
        made.close()
