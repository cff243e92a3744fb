"""One TCP connection to one broker: pipelined requests, answered in order.

Rules:

- Opening is dialling (with TLS where it is asked for), then the handshake, which negotiates API versions,
  then authentication. A connection that was handed out is ready for use.
- Every request is sent in the highest version that both sides know, or below a cap that the caller sets.
- A broker answers in order, so the waiting requests are a queue. An answer with another correlation id, or
  one that cannot be decoded, means that the stream is lost: the connection closes and everything in flight
  fails with it.
- Silence is failure: when any request in flight has waited past its deadline, the connection closes. Its fate
  is unknown to the caller, as with every lost connection.
- At most `max_in_flight` requests wait at a time, and none is posted while the socket's buffer is full:
  `ready` waits for both.
"""

import asyncio
import errno
import socket
import ssl
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, Final, Generic, Protocol, TypeVar, cast

from semel.client.errors import UnreachableError, UnsupportedRequestError, check
from semel.client.framing import DEFAULT_MAX_FRAME_BYTES, FrameProtocol
from semel.client.metadata import Address
from semel.client.sasl import exchange_of
from semel.client.security import Sasl, Tls, tls_context
from semel.errors import ConfigError, ProtocolError, SemelError
from semel.version import __version__
from semel.wire.apis import ApiKey
from semel.wire.errors import ErrorCode
from semel.wire.frames import Decodable, Message, decode_response, decode_response_header, request_frame
from semel.wire.lifeline import LIFELINE_SOFTWARE_NAME
from semel.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from semel.wire.messages.sasl_authenticate import SaslAuthenticateRequest, SaslAuthenticateResponse
from semel.wire.messages.sasl_handshake import SaslHandshakeRequest, SaslHandshakeResponse

SOFTWARE_NAME: Final = "semel"
DEFAULT_CLIENT_ID: Final = "semel"
MAX_CORRELATION_ID: Final = 0x7FFFFFFF
ERROR_CODE: Final = Struct(">h")
# An ApiVersions request that is too new is answered in this version, whatever was asked.
UNSUPPORTED_ANSWER_VERSION: Final = 0
R = TypeVar("R")


class Request(Message, Protocol):
    """A generated request."""

    MIN_VERSION: ClassVar[int]
    MAX_VERSION: ClassVar[int]


@dataclass(slots=True, frozen=True)
class ConnectionOptions:
    """What every connection of a client has in common.

    With `is_lifeline`, what transactions it begins over a connection to Semel are aborted when that is gone.
    """

    client_id: str = DEFAULT_CLIENT_ID
    connect_timeout_ms: int = 10_000
    request_timeout_ms: int = 30_000
    max_in_flight: int = 64
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
    tls: Tls | None = None
    sasl: Sasl | None = None
    is_lifeline: bool = False


class InFlight(Generic[R]):
    """A request that waits for its answer."""

    __slots__ = ("answer", "api_key", "correlation_id", "deadline", "response_type", "version")

    def __init__(
        self,
        api_key: int,
        version: int,
        correlation_id: int,
        response_type: Decodable[R],
        answer: asyncio.Future[R],
        deadline: float,
    ) -> None:
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.response_type = response_type
        self.answer = answer
        self.deadline = deadline

    def resolve(self, frame: memoryview) -> None:
        """Decodes the answer for whoever waits; raises ProtocolError where it makes no sense."""
        version = _answer_version(frame, self.api_key, self.version)
        correlation_id, response = decode_response(frame, self.api_key, version, self.response_type)
        if correlation_id != self.correlation_id:
            raise ProtocolError(
                f"an answer has correlation id {correlation_id} where {self.correlation_id} was due"
            )
        if not self.answer.done():
            self.answer.set_result(response)

    def fail(self, error: SemelError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            # Whoever posted it may have gone; that is no reason for asyncio to complain.
            self.answer.exception()


class Connection(FrameProtocol):
    """A connection that is ready for requests; `Connection.open` makes one."""

    def __init__(self, host: str, port: int, options: ConnectionOptions) -> None:
        super().__init__(options.max_frame_bytes)
        self.address = Address(host, port)
        self.peer = str(self.address)
        self.options = options
        self.versions: dict[int, tuple[int, int]] = {}
        self.finalized_features: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._failure: SemelError | None = None
        self._in_flight: deque[InFlight[object]] = deque()
        self._correlation_id = 0
        self._is_paused = False
        self._ready = asyncio.Event()
        self._watchdog: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, host: str, port: int, options: ConnectionOptions | None = None) -> "Connection":
        """Connects and shakes hands; raises UnreachableError where nobody answers."""
        options = options or ConnectionOptions()
        connection = cls(host, port, options)
        try:
            async with asyncio.timeout(options.connect_timeout_ms / 1000):
                await connection._dial(host, port)
                await connection._handshake()
                if options.sasl is not None:
                    await connection._authenticate(options.sasl)
        except TimeoutError:
            connection.close()
            raise UnreachableError(
                f"no answer from {connection.peer} within {options.connect_timeout_ms} ms; "
                "is it a broker, and does a firewall stand between?"
            ) from None
        except BaseException:
            connection.close()
            raise
        return connection

    async def _dial(self, host: str, port: int) -> None:
        context = None if self.options.tls is None else tls_context(self.options.tls)
        try:
            await self._loop.create_connection(lambda: self, host, port, ssl=context)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"the certificate of {self.peer} is not trusted: {error.verify_message}. "
                "Give the authority that signed it (ca_file), and the name that it is made out for"
            ) from None
        except ssl.SSLError as error:
            raise UnreachableError(
                f"no TLS with {self.peer}: {error.reason or error}; does it expect TLS, or a certificate?"
            ) from None
        except socket.gaierror as error:
            raise UnreachableError(
                f"cannot connect to {self.peer}: unknown host name ({error.strerror}); is it spelled right?"
            ) from None
        except ConnectionResetError:
            hint = "" if context is None else "; does it take TLS on that port?"
            raise UnreachableError(f"{self.peer} hung up at once{hint}") from None
        except OSError as error:
            raise UnreachableError(f"cannot connect to {self.peer}: {_why_not(error)}") from None

    async def _handshake(self) -> None:
        """Learns what the broker speaks. A broker too old for our question says so in its first version."""
        response = await self._ask_versions(ApiVersionsRequest.MAX_VERSION)
        if response.error_code == ErrorCode.UNSUPPORTED_VERSION:
            theirs = [key.max_version for key in response.api_keys if key.api_key == ApiKey.API_VERSIONS]
            response = await self._ask_versions(min(max(theirs, default=0), ApiVersionsRequest.MAX_VERSION))
        check(response.error_code, f"the handshake with {self.peer} failed")
        self.versions = {key.api_key: (key.min_version, key.max_version) for key in response.api_keys}
        self.finalized_features = {
            feature.name: feature.max_version_level for feature in response.finalized_features
        }

    async def _authenticate(self, sasl: Sasl) -> None:
        """Proves who we are; a broker that refuses is not asked again."""
        offered = await self.request(SaslHandshakeRequest(mechanism=sasl.mechanism), SaslHandshakeResponse)
        if offered.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM:
            raise ConfigError(
                f"{self.peer} does not take SASL mechanism {sasl.mechanism}; "
                f"it takes {', '.join(offered.mechanisms) or 'none'}"
            )
        check(offered.error_code, f"the SASL handshake with {self.peer} failed")
        exchange = exchange_of(sasl)
        step: bytes | None = exchange.first()
        while step is not None:
            response = await self.request(SaslAuthenticateRequest(auth_bytes=step), SaslAuthenticateResponse)
            check(
                response.error_code,
                f"{self.peer} did not take {sasl.username!r} by {sasl.mechanism}",
                response.error_message,
            )
            step = exchange.next(bytes(response.auth_bytes))

    async def _ask_versions(self, version: int) -> ApiVersionsResponse:
        name = LIFELINE_SOFTWARE_NAME if self.options.is_lifeline else SOFTWARE_NAME
        request = ApiVersionsRequest(client_software_name=name, client_software_version=__version__)
        return await self._post(request, ApiVersionsResponse, version, self.options.connect_timeout_ms)

    # Requests

    async def request(
        self,
        message: Request,
        response_type: Decodable[R],
        *,
        max_version: int | None = None,
        timeout_ms: int | None = None,
    ) -> R:
        """Sends a request when there is room, and returns its answer."""
        await self.ready()
        return await self.post(message, response_type, max_version=max_version, timeout_ms=timeout_ms)

    async def ready(self) -> None:
        """Waits until another request may be posted."""
        while not self._ready.is_set():
            await self._ready.wait()

    def post(
        self,
        message: Request,
        response_type: Decodable[R],
        *,
        max_version: int | None = None,
        timeout_ms: int | None = None,
    ) -> asyncio.Future[R]:
        """Sends a request at once, in the order of the calls. Await `ready` first."""
        version = self.version_of(message, max_version)
        return self._post(message, response_type, version, timeout_ms or self.options.request_timeout_ms)

    def send(self, message: Request, *, max_version: int | None = None) -> None:
        """Sends a request that the broker does not answer (a produce with acks=0)."""
        version = self.version_of(message, max_version)
        self._write(message, version, self._next_correlation_id())

    def version_of(self, message: Request, max_version: int | None = None) -> int:
        """The highest version that both sides know."""
        highest = message.MAX_VERSION if max_version is None else min(max_version, message.MAX_VERSION)
        theirs = self.versions.get(message.API_KEY)
        if theirs is None:
            raise UnsupportedRequestError(f"{self.peer} does not know {ApiKey(message.API_KEY).name}")
        version = min(highest, theirs[1])
        if version < max(message.MIN_VERSION, theirs[0]):
            raise UnsupportedRequestError(
                f"{self.peer} speaks {ApiKey(message.API_KEY).name} in versions {theirs[0]} to {theirs[1]}, "
                f"this client in {message.MIN_VERSION} to {highest}"
            )
        return version

    def _post(
        self, message: Request, response_type: Decodable[R], version: int, timeout_ms: int
    ) -> asyncio.Future[R]:
        correlation_id = self._next_correlation_id()
        answer: asyncio.Future[R] = self._loop.create_future()
        deadline = self._loop.time() + timeout_ms / 1000
        waiting = InFlight(message.API_KEY, version, correlation_id, response_type, answer, deadline)
        self._write(message, version, correlation_id)
        self._in_flight.append(cast("InFlight[object]", waiting))
        self._update_ready()
        if self._watchdog is None:
            self._watchdog = self._loop.call_at(deadline, self._check_deadlines)
        elif deadline < self._watchdog.when():
            self._watchdog.cancel()
            self._watchdog = self._loop.call_at(deadline, self._check_deadlines)
        return answer

    def _write(self, message: Request, version: int, correlation_id: int) -> None:
        assert self._transport is not None, "posted before the connection was made"
        if self._transport.is_closing():
            # The peer has hung up, and asyncio is about to say so. From Python 3.12 on it takes no write now.
            self.connection_lost(None)
        if self._failure is not None:
            raise self._failure
        frame = request_frame(message, version, correlation_id, self.options.client_id)
        self._transport.writelines(cast("Iterable[bytes]", frame))

    def _next_correlation_id(self) -> int:
        self._correlation_id = (self._correlation_id + 1) & MAX_CORRELATION_ID
        return self._correlation_id

    def _update_ready(self) -> None:
        if self._failure is not None or (
            not self._is_paused and len(self._in_flight) < self.options.max_in_flight
        ):
            self._ready.set()
        else:
            self._ready.clear()

    def _check_deadlines(self) -> None:
        self._watchdog = None
        if not self._in_flight:
            return
        earliest = min(waiting.deadline for waiting in self._in_flight)
        if earliest > self._loop.time():
            self._watchdog = self._loop.call_at(earliest, self._check_deadlines)
            return
        late = next(waiting for waiting in self._in_flight if waiting.deadline == earliest)
        self._lose(
            UnreachableError(
                f"{self.peer} did not answer {ApiKey(late.api_key).name} in time: it is overloaded or gone",
                ErrorCode.REQUEST_TIMED_OUT,
            )
        )

    # The end

    @property
    def is_closed(self) -> bool:
        return self._failure is not None

    def close(self) -> None:
        self._lose(UnreachableError(f"the connection to {self.peer} was closed on this side"))

    def _lose(self, error: SemelError) -> None:
        """Ends the connection and everything that waits for it, once."""
        if self._failure is not None:
            return
        self._failure = error
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if self._transport is not None:
            self._transport.abort()
        waiting = list(self._in_flight)
        self._in_flight.clear()
        for each in waiting:
            each.fail(error)
        self._update_ready()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._failure is not None:
            self._transport.abort()
        self._update_ready()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = "it closed the connection" if exc is None else str(exc)
        hint = "" if self.versions else "; is it a Kafka broker, and does it want TLS?"
        self._lose(UnreachableError(f"the connection to {self.peer} was lost: {reason}{hint}"))

    def frame_received(self, frame: memoryview) -> None:
        if not self._in_flight:
            self._lose(ProtocolError(f"{self.peer} sent an answer that nothing had asked for"))
            return
        waiting = self._in_flight.popleft()
        try:
            waiting.resolve(frame)
        except ProtocolError as error:
            failure = ProtocolError(f"{self.peer} broke the protocol: {error}")
            waiting.fail(failure)
            self._lose(failure)
        self._update_ready()

    def framing_failed(self, error: ProtocolError) -> None:
        self._lose(ProtocolError(f"{self.peer} broke the protocol: {error}"))

    def pause_writing(self) -> None:
        self._is_paused = True
        self._update_ready()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._update_ready()


def _why_not(error: OSError) -> str:
    # Where a name has several addresses, asyncio reports all failures in one error without a number.
    if error.errno == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in str(error):
        return "connection refused; is a broker running there?"
    return error.strerror or str(error)


def _answer_version(frame: memoryview, api_key: int, version: int) -> int:
    """The version of an answer: the request's, unless that was an ApiVersions too new for the broker."""
    if api_key != ApiKey.API_VERSIONS:
        return version
    _, pos = decode_response_header(frame, api_key, version)
    if len(frame) >= pos + ERROR_CODE.size:
        error_code: int = ERROR_CODE.unpack_from(frame, pos)[0]
        if error_code == ErrorCode.UNSUPPORTED_VERSION:
            return UNSUPPORTED_ANSWER_VERSION
    return version
