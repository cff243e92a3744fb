"""Whether there is what a query wants to read: looked at before anything is opened."""

import socket
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from fake_broker import FakeBroker, ThreadedBroker, hang_up

from semel.errors import ConfigError
from semel.spark import source_topics
from semel.spark.source_cluster import Source
from semel.spark.source_options import FORMAT
from semel.spark.source_topics import require_topics
from semel.wire.apis import ApiKey

Require: TypeAlias = Callable[[str], None]


@pytest.fixture
def require(monkeypatch: pytest.MonkeyPatch) -> Require:
    """Asks for the topic `t` of brokers."""

    def ask(bootstrap: str) -> None:
        options = {"kafka.bootstrap.servers": bootstrap, "subscribe": "t"}
        monkeypatch.setattr(source_topics, "sources_of", lambda frame: [Source(FORMAT, options)])
        frame: Any = None
        require_topics(frame)

    return ask


def test_a_topic_that_is_not_there_is_refused(require: Require, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_topics, "NEW_TOPIC_PATIENCE_S", 0.0)
    with (
        ThreadedBroker(FakeBroker()) as broker,
        pytest.raises(ConfigError, match=f"no topic 't' to read from at {broker.bootstrap}"),
    ):
        require(broker.bootstrap)


def test_a_source_that_is_away_is_left_to_the_reader_which_waits_for_it(
    require: Require, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        require(f"127.0.0.1:{nobody.getsockname()[1]}")
    assert "its reader waits for it: cannot connect to 127.0.0.1" in caplog.text


def test_a_source_that_goes_away_while_it_is_asked_is_left_to_the_reader(require: Require) -> None:
    with ThreadedBroker(FakeBroker()) as broker:
        broker.misbehave(ApiKey.METADATA, hang_up)
        require(broker.bootstrap)
