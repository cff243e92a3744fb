"""How a broker process ends: SIGTERM and one SIGINT let it answer what is under way, a second does not wait.

What is under way is a large answer that its client does not read: more than the sockets hold, so that the
broker waits for the client for as long as the test wants.
"""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Iterator
from struct import Struct
from typing import Final

import pytest
from broker_process import BrokerProcess
from raw_client import FETCH_VERSION, RawClient, create_topic, encoded, fetch_request, produce

from semel.server.listener import DRAIN_S
from semel.wire.batch import iter_batches
from semel.wire.frames import decode_response
from semel.wire.messages.fetch import FetchRequest, FetchResponse
from semel.wire.records import Record, build_batch

SIZE: Final = Struct(">i")
VALUE_BYTES: Final = 900_000
BATCHES: Final = 32
LOG_TIMEOUT_S: Final = 20.0


@pytest.fixture
def slow_reader(broker: BrokerProcess) -> Iterator[RawClient]:
    """A client that has been sent the beginning of a large answer."""
    value = random.Random(1).randbytes(VALUE_BYTES)
    with RawClient(broker.port) as writer:
        create_topic(writer, "large")
        for number in range(BATCHES):
            sent = build_batch([Record(None, b"%d/" % number + value, int(time.time() * 1000))])
            assert produce(writer, "large", bytes(sent)) == (0, number)
    with RawClient(broker.port) as reader:
        reader.send(encoded(fetch_request("large", 0, max_bytes=2 * BATCHES * VALUE_BYTES), FETCH_VERSION))
        assert reader.socket.recv(SIZE.size, socket.MSG_PEEK | socket.MSG_WAITALL)
        yield reader


def wait_until_stopping(broker: BrokerProcess) -> None:
    deadline = time.monotonic() + LOG_TIMEOUT_S
    while "stopping: answering what is under way" not in broker.log:
        assert time.monotonic() < deadline, "the broker does not say that it stops"
        time.sleep(0.01)


def test_a_second_interrupt_does_not_wait(broker: BrokerProcess, slow_reader: RawClient) -> None:
    broker.send_signal(signal.SIGINT)
    wait_until_stopping(broker)
    assert broker.is_alive, "the broker did not wait for the answer that is under way"
    began_s = time.monotonic()
    broker.send_signal(signal.SIGINT)
    assert broker.wait() == 130
    assert time.monotonic() - began_s < DRAIN_S / 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_broker_that_is_told_to_stop_answers_what_is_under_way(
    broker: BrokerProcess, slow_reader: RawClient, number: signal.Signals
) -> None:
    broker.send_signal(number)
    wait_until_stopping(broker)
    with pytest.raises(ConnectionRefusedError):
        RawClient(broker.port)
    answer = decode_response(
        memoryview(slow_reader.read_frame()), FetchRequest.API_KEY, FETCH_VERSION, FetchResponse
    )[1]
    (told,) = answer.responses[0].partitions
    assert told.error_code == 0
    assert told.records is not None
    found = [header.base_offset for header, _ in iter_batches(memoryview(told.records))]
    assert found == list(range(BATCHES))
    assert broker.wait() == 0


def test_what_was_acknowledged_is_there_after_a_second_interrupt(
    broker: BrokerProcess, slow_reader: RawClient
) -> None:
    broker.send_signal(signal.SIGINT)
    wait_until_stopping(broker)
    broker.send_signal(signal.SIGINT)
    assert broker.wait() == 130
    broker.start()
    with RawClient(broker.port) as client:
        batch = build_batch([Record(None, b"next", int(time.time() * 1000))])
        assert produce(client, "large", bytes(batch)) == (0, BATCHES)
