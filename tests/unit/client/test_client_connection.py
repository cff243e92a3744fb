"""One connection: versions, order, silence, nonsense and the end."""

import asyncio
from typing import Any

import pytest
from fake_broker import FakeBroker, NoAnswer, RawFrame, hang_up, stay_silent

from semel.client.connection import Connection, ConnectionOptions
from semel.client.errors import UnreachableError, UnsupportedRequestError
from semel.errors import ProtocolError
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.frames import Message, response_frame
from semel.wire.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse

QUICK = ConnectionOptions(connect_timeout_ms=2_000, request_timeout_ms=100)


def raw_frame(api_key: int, version: int, correlation_id: int, response: Message) -> RawFrame:
    buffers = response_frame(api_key, version, correlation_id, response)
    return RawFrame(b"".join(bytes(buffer) for buffer in buffers)[4:])  # type: ignore[call-overload]


def ask(*names: str) -> MetadataRequest:
    return MetadataRequest(topics=[MetadataRequestTopic(name=name) for name in names])


async def test_pipelined_requests_get_their_own_answers() -> None:
    async with FakeBroker({f"t{i}": i + 1 for i in range(20)}) as broker:
        connection = await Connection.open("127.0.0.1", broker.port)
        answers = [connection.post(ask(f"t{i}"), MetadataResponse) for i in range(20)]
        counts = [len((await answer).topics[0].partitions) for answer in answers]
        assert counts == list(range(1, 21))
        connection.close()


async def test_the_highest_common_version_is_used_and_a_cap_is_kept() -> None:
    async with FakeBroker() as broker:
        broker.versions[ApiKey.METADATA] = (1, 9)
        connection = await Connection.open("127.0.0.1", broker.port)
        await connection.request(ask(), MetadataResponse)
        await connection.request(ask(), MetadataResponse, max_version=4)
        assert broker.versions_seen(ApiKey.METADATA) == [9, 4]
        connection.close()


@pytest.mark.parametrize("versions", [(14, 20), None])
async def test_no_common_version_is_an_error_that_names_the_api(versions: tuple[int, int] | None) -> None:
    async with FakeBroker() as broker:
        connection = await Connection.open("127.0.0.1", broker.port)
        if versions is None:
            del connection.versions[ApiKey.METADATA]
        else:
            connection.versions[ApiKey.METADATA] = versions
        with pytest.raises(UnsupportedRequestError, match="METADATA"):
            await connection.request(ask(), MetadataResponse)
        assert not connection.is_closed
        connection.close()


def answer_like_an_old_broker(broker: FakeBroker, request: ApiVersionsRequest) -> RawFrame:
    """A broker that does not know the version asked for answers in version 0, whatever that was."""
    response = ApiVersionsResponse(
        error_code=ErrorCode.UNSUPPORTED_VERSION, api_keys=[ApiVersion(ApiKey.API_VERSIONS, 0, 2)]
    )
    return raw_frame(ApiKey.API_VERSIONS, 0, 1, response)


async def test_a_broker_too_old_for_our_handshake_is_asked_again_in_its_own_version() -> None:
    async with FakeBroker() as broker:
        broker.misbehave(ApiKey.API_VERSIONS, answer_like_an_old_broker)
        connection = await Connection.open("127.0.0.1", broker.port)
        assert broker.versions_seen(ApiKey.API_VERSIONS) == [ApiVersionsRequest.MAX_VERSION, 2]
        assert ApiKey.METADATA in connection.versions
        connection.close()


async def test_silence_past_the_timeout_fails_everything_in_flight() -> None:
    async with FakeBroker() as broker:
        broker.misbehave(ApiKey.METADATA, stay_silent)
        connection = await Connection.open("127.0.0.1", broker.port, QUICK)
        late = connection.post(ask(), MetadataResponse)
        waiting = connection.post(ask(), MetadataResponse, timeout_ms=60_000)
        with pytest.raises(UnreachableError, match="METADATA in time") as caught:
            await late
        assert caught.value.code == ErrorCode.REQUEST_TIMED_OUT
        with pytest.raises(UnreachableError):
            await waiting
        assert connection.is_closed


async def test_a_shorter_timeout_counts_also_behind_a_longer_one() -> None:
    async with FakeBroker() as broker:
        broker.misbehave(ApiKey.METADATA, stay_silent, stay_silent)
        connection = await Connection.open("127.0.0.1", broker.port)
        connection.post(ask(), MetadataResponse, timeout_ms=60_000)
        async with asyncio.timeout(5):
            with pytest.raises(UnreachableError):
                await connection.request(ask(), MetadataResponse, timeout_ms=50)


async def test_a_hang_up_fails_what_is_in_flight_and_what_comes_later() -> None:
    async with FakeBroker() as broker:
        broker.misbehave(ApiKey.METADATA, hang_up)
        connection = await Connection.open("127.0.0.1", broker.port)
        answers = [connection.post(ask(), MetadataResponse) for _ in range(3)]
        for answer in answers:
            with pytest.raises(UnreachableError, match=broker.bootstrap):
                await answer
        with pytest.raises(UnreachableError):
            await connection.request(ask(), MetadataResponse)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\0", id="shorter than a header"),
        pytest.param((2).to_bytes(4, "big") + b"\0" + b"\xff" * 30, id="a body that makes no sense"),
    ],
)
async def test_an_answer_that_makes_no_sense_ends_the_connection(frame: bytes) -> None:
    async with FakeBroker() as broker:
        broker.misbehave(ApiKey.METADATA, lambda _broker, _request: RawFrame(frame))
        connection = await Connection.open("127.0.0.1", broker.port)
        with pytest.raises(ProtocolError, match="broke the protocol"):
            await connection.request(ask(), MetadataResponse)
        assert connection.is_closed


async def test_the_answer_to_another_request_ends_the_connection() -> None:
    def answer_another(broker: FakeBroker, request: MetadataRequest) -> RawFrame:
        return raw_frame(ApiKey.METADATA, MetadataRequest.MAX_VERSION, 99, broker.metadata(request))

    async with FakeBroker() as broker:
        broker.misbehave(ApiKey.METADATA, answer_another)
        connection = await Connection.open("127.0.0.1", broker.port)
        with pytest.raises(ProtocolError, match="correlation id 99 where 2 was due"):
            await connection.request(ask(), MetadataResponse)
        assert connection.is_closed


async def test_an_answer_nobody_asked_for_ends_the_connection() -> None:
    async with FakeBroker() as broker:
        connection = await Connection.open("127.0.0.1", broker.port)
        connection.frame_received(memoryview(bytes(8)))
        with pytest.raises(ProtocolError, match="nothing had asked"):
            await connection.request(ask(), MetadataResponse)


async def test_requests_past_the_limit_wait_for_room() -> None:
    release = asyncio.Event()

    async def answer_later(broker: FakeBroker, request: Any) -> Any:
        await release.wait()
        return broker.handle(request)

    async with FakeBroker() as broker:
        broker.misbehave(ApiKey.METADATA, answer_later)
        connection = await Connection.open("127.0.0.1", broker.port, ConnectionOptions(max_in_flight=2))
        first = [connection.post(ask(), MetadataResponse) for _ in range(2)]
        third = asyncio.create_task(connection.request(ask(), MetadataResponse))
        await asyncio.sleep(0)
        await asyncio.wait(first, timeout=0.05)
        assert len(broker.seen(ApiKey.METADATA)) == 1
        assert not third.done()
        release.set()
        await third
        assert len(broker.seen(ApiKey.METADATA)) == 3
        connection.close()


async def test_a_request_that_was_given_up_does_not_disturb_the_next() -> None:
    async with FakeBroker({"a": 1, "b": 2}) as broker:
        connection = await Connection.open("127.0.0.1", broker.port)
        connection.post(ask("a"), MetadataResponse).cancel()
        response = await connection.request(ask("b"), MetadataResponse)
        assert [topic.name for topic in response.topics] == ["b"]
        connection.close()


async def test_an_unanswered_request_takes_no_place_in_the_queue() -> None:
    async with FakeBroker() as broker:
        broker.misbehave(ApiKey.INIT_PRODUCER_ID, lambda _broker, _request: NoAnswer())
        connection = await Connection.open("127.0.0.1", broker.port)
        connection.send(InitProducerIdRequest(transactional_id=None))
        answer = await connection.request(
            InitProducerIdRequest(transactional_id=None), InitProducerIdResponse
        )
        assert answer.producer_id > 0
        connection.close()


async def test_refused_connections_say_where_and_what_to_look_at() -> None:
    async with FakeBroker() as broker:
        port = broker.port
    with pytest.raises(
        UnreachableError, match=rf"127\.0\.0\.1:{port}: connection refused; is a broker running"
    ):
        await Connection.open("127.0.0.1", port)


async def test_an_unknown_host_is_named() -> None:
    with pytest.raises(UnreachableError, match=r"no-such-host\.invalid"):
        await Connection.open("no-such-host.invalid", 9092)


async def test_a_peer_that_never_answers_the_handshake_is_given_up() -> None:
    async with FakeBroker() as broker:
        broker.misbehave(ApiKey.API_VERSIONS, stay_silent)
        with pytest.raises(UnreachableError, match=r"no answer|in time"):
            await Connection.open("127.0.0.1", broker.port, ConnectionOptions(connect_timeout_ms=50))


async def test_a_web_server_is_recognised_as_no_broker() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ProtocolError, match="another protocol"):
        await Connection.open("127.0.0.1", port)
    server.close()
    await server.wait_closed()
