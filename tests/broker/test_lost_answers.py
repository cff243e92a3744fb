"""Answers that never arrive: stock clients ask again; it is done once, and gets the first answer."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Final

import pytest
from broker_process import BrokerProcess, free_port
from client_java import Java
from losing_proxy import LosingProxy
from txn_cases import COMMITTED, LIBRARIES, UNCOMMITTED, Library, Transactional, create_topic, values

from semel.wire.apis import ApiKey

BATCHES: Final = 6


class Lossy:
    """A broker that its clients reach through the proxy only."""

    def __init__(self, directory: pytest.TempPathFactory) -> None:
        self.process = BrokerProcess(directory.mktemp("lossy") / "broker")
        self.proxy = LosingProxy(self.process.port)
        self._figures = f"127.0.0.1:{free_port()}"
        self.process.settings = {
            "advertised.listeners": self.proxy.address,
            "metrics.listeners": self._figures,
        }
        self.process.start()

    def figure(self, name: str) -> int:
        with urllib.request.urlopen(f"http://{self._figures}/metrics") as response:
            found = re.search(rf"^{name} (\d+)$", response.read().decode(), re.MULTILINE)
        assert found is not None
        return int(found[1])

    def close(self) -> None:
        try:
            assert self.process.stop() == 0, self.process.log
        finally:
            self.process.kill()
            self.proxy.stop()


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lossy]:
    made = Lossy(tmp_path_factory)
    yield made
    made.close()
    assert "this is a bug" not in made.process.log, made.process.log


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest, lossy: Lossy) -> Iterator[Library]:
    if request.param == "java" and Java.missing() is not None:
        pytest.skip(f"no Java client: {Java.missing()}")
    made = LIBRARIES[request.param](lossy.proxy.address)
    yield made
    made.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest, lossy: Lossy) -> str:
    name = re.sub(r"\W", "-", request.node.name)
    create_topic(lossy.proxy.address, name)
    return name


@pytest.fixture
def producer(library: Library, topic: str) -> Iterator[Transactional]:
    made = library.producer(topic)
    yield made
    made.close()


def test_batches_that_are_sent_again_are_there_once_and_in_order(
    lossy: Lossy, library: Library, producer: Transactional, topic: str
) -> None:
    before = lossy.figure("semel_produce_duplicates_total")
    producer.begin()
    for n in range(BATCHES):
        if n % 2:
            lossy.proxy.lose(ApiKey.PRODUCE)
        producer.send(topic, 0, f"{n}-", 5)
        assert not lossy.proxy.left_to_lose(ApiKey.PRODUCE)
    assert library.read(topic, 0, COMMITTED) == []
    producer.commit()
    wanted = [value for n in range(BATCHES) for value in values(f"{n}-", 5)]
    assert library.read(topic, 0, COMMITTED) == wanted
    assert library.read(topic, 0, UNCOMMITTED) == wanted
    assert lossy.figure("semel_produce_duplicates_total") >= before + BATCHES // 2


def test_an_end_that_is_asked_for_again_gets_the_first_answer(
    lossy: Lossy, library: Library, producer: Transactional, topic: str
) -> None:
    committed = lossy.figure("semel_transactions_committed_total")
    aborted = lossy.figure("semel_transactions_aborted_total")
    for n in range(4):
        producer.begin()
        producer.send(topic, 0, f"{n}-", 2)
        lossy.proxy.lose(ApiKey.END_TXN, 2)
        producer.commit() if n % 2 else producer.abort()
        assert not lossy.proxy.left_to_lose(ApiKey.END_TXN)
    assert library.read(topic, 0, COMMITTED) == [*values("1-", 2), *values("3-", 2)]
    assert lossy.figure("semel_transactions_committed_total") == committed + 2
    assert lossy.figure("semel_transactions_aborted_total") == aborted + 2


def test_an_identity_whose_answer_was_lost_is_asked_for_again(
    lossy: Lossy, library: Library, topic: str
) -> None:
    lossy.proxy.lose(ApiKey.INIT_PRODUCER_ID)
    producer = library.producer(topic)
    assert not lossy.proxy.left_to_lose(ApiKey.INIT_PRODUCER_ID)
    producer.begin()
    producer.send(topic, 0, "x")
    producer.commit()
    producer.close()
    assert library.read(topic, 0, COMMITTED) == ["x0"]
