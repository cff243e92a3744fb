"""A client that hangs up in the middle of its answers troubles nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from semel.broker.decision import Endpoint
from semel.server.connection import Connection, Slot
from semel.server.intake import Intake
from semel.wire.frames import request_frame
from semel.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse

BUDGET_BYTES = 1024 * 1024


class ClosingTransport(asyncio.Transport):
    """As asyncio's own, from Python 3.12 on: it has been told to close, and fails on a write."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False
        self.written: list[bytes] = []

    def is_closing(self) -> bool:
        return self.closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def writelines(self, list_of_data: Iterable[object]) -> None:
        assert not self.closing, "written to a transport that is closing"
        self.written += [bytes(each) for each in list_of_data]  # type: ignore[call-overload]


class Lazy:
    """A service that answers when the test does."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []

    def handle(self, slot: Slot, body: memoryview, pos: int) -> None:
        self.slots.append(slot)

    def opened(self, connection: Connection) -> bool:
        return True

    def closed(self, connection: Connection) -> None:
        pass


def connected() -> tuple[Connection, Lazy, ClosingTransport, Intake]:
    service, transport, intake = Lazy(), ClosingTransport(), Intake(BUDGET_BYTES, BUDGET_BYTES)
    connection = Connection(service, intake, Endpoint("127.0.0.1", 9092), lambda: 0)
    connection.connection_made(transport)
    for correlation_id in (1, 2):
        frame = b"".join(
            bytes(each) for each in request_frame(ApiVersionsRequest(), 0, correlation_id, "test")
        )
        connection.get_buffer(-1)[: len(frame)] = frame
        connection.buffer_updated(len(frame))
    assert len(service.slots) == 2
    return connection, service, transport, intake


def test_an_answer_is_written_while_the_client_listens() -> None:
    _, service, transport, intake = connected()
    service.slots[0].answer(ApiVersionsResponse())
    service.slots[1].answer(ApiVersionsResponse())
    assert len(transport.written) >= 2
    assert intake.used_bytes == 0


def test_an_answer_to_a_client_that_hung_up_is_dropped_and_its_room_given_back() -> None:
    _, service, transport, intake = connected()
    service.slots[0].answer(ApiVersionsResponse())
    transport.closing = True
    service.slots[1].answer(ApiVersionsResponse())
    assert len(transport.written) == 1
    assert intake.used_bytes == 0
