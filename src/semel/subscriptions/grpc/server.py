"""The gRPC server of a gateway: its service, health and reflection, TLS, and its life.

The gateway is a client of its brokers, Semel or any Kafka. It says that it is healthy while one of them
answers.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.errors import BrokerError, ConfigError, ProtocolError, SemelError
from semel.subscriptions.grpc import subscriptions_pb2 as pb
from semel.subscriptions.grpc.groups import Gateway
from semel.subscriptions.grpc.session import Malformed, Request, Session
from semel.subscriptions.grpc.terms import OtherTermsError
from semel.subscriptions.options import SubscriptionOptions
from semel.wire.errors import ErrorCode

log = logging.getLogger("semel.gateway")

SERVICE: Final = "semel.subscriptions.v1.Subscriptions"
METHOD: Final = "Subscribe"
MAX_STREAMS: Final = 10_000
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""Of one message from a subscriber. Brokers have a limit of their own for a record, 1 MB as a rule."""
SETUP_TIMEOUT_S: Final = 10.0
STOP_GRACE_S: Final = 5.0
HEALTH_INTERVAL_S: Final = 5.0
KEEPALIVE_TIME_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
"""A subscriber whose machine or network is gone without a word is noticed after both."""
MIN_PING_INTERVAL_MS: Final = 5_000
OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a second gateway on the port shall fail, and not share it
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
)


@dataclass(slots=True, frozen=True)
class ServerTls:
    """TLS of a gateway. With `client_ca_file`, subscribers must show a certificate that it has signed."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None


class GatewayServer:
    """A gateway that listens. Use it as an async context manager, or `start` and `stop` it."""

    def __init__(
        self,
        bootstrap: str,
        address: str,
        *,
        tls: ServerTls | None = None,
        connection: ConnectionOptions | None = None,
        defaults: SubscriptionOptions | None = None,
    ) -> None:
        self.port = 0
        self._address = address
        self._tls = tls
        self._gateway = Gateway(bootstrap, connection, defaults)
        self._cluster = Cluster(bootstrap, connection)
        self._server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS)
        self._health = health.aio.HealthServicer()
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Raises ConfigError if it cannot listen, and BrokerError if there is no broker."""
        await self._cluster.connect()
        handler = grpc.stream_stream_rpc_method_handler(
            self._subscribe, request_deserializer=_decode, response_serializer=_encode
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.port = self._bind()
        await self._server.start()
        await self._tell(is_serving=True)
        log.info("gRPC on %s:%d", self._address.rpartition(":")[0], self.port)
        self._watch = asyncio.create_task(self._watch_brokers(), name="health of the gateway")

    def _bind(self) -> int:
        try:
            if self._tls is None:
                port: int = self._server.add_insecure_port(self._address)
            else:
                port = self._server.add_secure_port(self._address, _credentials(self._tls))
        except RuntimeError as error:
            raise ConfigError(f"the gateway cannot listen on {self._address}: {error}") from error
        if not port:
            raise ConfigError(f"the gateway cannot listen on {self._address}: is the port free?")
        return port

    async def stop(self) -> None:
        """Takes back what is open, answers what is acknowledged, and ends every stream."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            await self._health.enter_graceful_shutdown()
        await self._gateway.close()
        await self._server.stop(STOP_GRACE_S)
        await self._cluster.close()

    # Health

    async def _watch_brokers(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            try:
                await self._cluster.metadata(())
            except SemelError as error:
                log.warning("no broker answers: %s", error)
                await self._tell(is_serving=False)
            else:
                await self._tell(is_serving=True)

    async def _tell(self, *, is_serving: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if is_serving else statuses.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)

    # The service

    async def _subscribe(self, requests: object, context: Any) -> None:
        try:
            await self._converse(_Stream(context))
        except SemelError as error:
            log.info("%s was turned away: %s", context.peer(), error)
            await context.abort(_status_of(error), str(error))

    async def _converse(self, stream: "_Stream") -> None:
        setup = await _setup(stream)
        group, differing = await self._gateway.join(setup)
        try:
            session = Session(self._gateway, group, setup, stream.peer)
            await session.converse(stream.read, stream.write, differing)
        finally:
            self._gateway.leave(group)


class _Stream:
    """A call, as a session sees it."""

    def __init__(self, context: Any) -> None:
        self.peer = str(context.peer())
        self._context = context

    async def read(self) -> Request | None:
        request: Request | None = await self._context.read()
        return None if request is grpc.aio.EOF else request

    async def write(self, response: pb.SubscribeResponse) -> None:
        await self._context.write(response)


class SetupTimeoutError(ProtocolError):
    """A stream that says nothing."""


async def _setup(stream: _Stream) -> pb.Setup:
    try:
        async with asyncio.timeout(SETUP_TIMEOUT_S):
            request = await stream.read()
    except TimeoutError:
        raise SetupTimeoutError(f"no Setup came within {SETUP_TIMEOUT_S:.0f} s") from None
    if isinstance(request, Malformed):
        raise ProtocolError(f"the first message must be a Setup, and is none: {request.reason}")
    if request is None or request.WhichOneof("message") != "setup":
        raise ProtocolError("the first message must be a Setup")
    return request.setup


def _decode(message: bytes) -> Request:
    """Never raises: gRPC would end the stream with an error that says nothing."""
    request = pb.SubscribeRequest()
    try:
        request.ParseFromString(message)
    except DecodeError as error:
        return Malformed(f"these {len(message)} bytes are no SubscribeRequest ({error})")
    return request


def _encode(response: pb.SubscribeResponse) -> bytes:
    message: bytes = response.SerializeToString()
    return message


def _status_of(error: SemelError) -> Any:
    if isinstance(error, SetupTimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED
    if isinstance(error, OtherTermsError):
        return grpc.StatusCode.FAILED_PRECONDITION
    if isinstance(error, ConfigError | ProtocolError):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, BrokerError) and error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return grpc.StatusCode.NOT_FOUND
    return grpc.StatusCode.UNAVAILABLE


def _credentials(tls: ServerTls) -> Any:
    pair = (_read("key", tls.key_file), _read("certificate", tls.cert_file))
    client_ca = None if tls.client_ca_file is None else _read("client CA", tls.client_ca_file)
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


def _read(what: str, path: str) -> bytes:
    with suppress(OSError):
        return Path(path).read_bytes()
    raise ConfigError(f"the {what} of the gateway, {path!r}, is no file that can be read")
