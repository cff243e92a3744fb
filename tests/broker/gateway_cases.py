"""What tests of the gateway have in common: a subscriber that speaks gRPC, and gateway processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import grpc
from broker_process import SEMEL, _environment, _first_line

from semel.subscriptions.grpc import subscriptions_pb2 as pb

METHOD: Final = "/semel.subscriptions.v1.Subscriptions/Subscribe"
WAIT_S: Final = 60.0
PROGRAM: Final = Path(__file__).with_name("gateway_process.py")


class GrpcSubscriber:
    """One stream. Messages that were received stay in `seen`."""

    def __init__(self, address: str, channel: Any = None) -> None:
        self._channel = channel or grpc.aio.insecure_channel(address)
        self._is_own = channel is None
        self.call: Any = self._channel.stream_stream(
            METHOD,
            request_serializer=_serialize,
            response_deserializer=pb.SubscribeResponse.FromString,
        )()
        self.seen: list[pb.SubscribeResponse] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cuts the stream, if it is still there."""
        self.call.cancel()
        if self._is_own:
            await self._channel.close()

    async def send(self, message: pb.SubscribeRequest | bytes | None = None, **parts: Any) -> None:
        await self.call.write(pb.SubscribeRequest(**parts) if message is None else message)

    async def setup(self, topic: str, *, open_at_once: int = 1, **more: Any) -> pb.Ready:
        """Subscribes to a topic, in the group of the same name."""
        await self.send(setup=pb.Setup(group=topic, topics=[topic], credits=open_at_once, **more))
        return (await self.receive("ready")).ready

    async def receive(self, kind: str | None = None, timeout_s: float = WAIT_S) -> pb.SubscribeResponse:
        """The next message, which is of this kind."""
        async with asyncio.timeout(timeout_s):
            response = await self.call.read()
        assert response is not grpc.aio.EOF, f"the stream has ended: {await self.status()}"
        self.seen.append(response)
        found = response.WhichOneof("message")
        assert kind in (None, found), f"{found} came instead of {kind}: {response}"
        return response

    async def delivery(self) -> pb.Delivery:
        return (await self.receive("delivery")).delivery

    async def begin(self, delivery_id: int) -> None:
        await self.send(begin=pb.Begin(delivery_id=delivery_id))

    async def state(
        self, delivery_id: int, statement_id: int, topic: str, value: bytes | None, **more: Any
    ) -> None:
        statement = pb.Statement(
            delivery_id=delivery_id, statement_id=statement_id, topic=topic, value=value, **more
        )
        await self.send(statement=statement)

    async def ack(self, delivery_id: int) -> None:
        await self.send(ack=pb.Ack(delivery_id=delivery_id))

    async def nack(self, delivery_id: int, reason: str = "", **more: Any) -> None:
        await self.send(nack=pb.Nack(delivery_id=delivery_id, reason=reason, **more))

    async def copy(self, delivery: pb.Delivery, output: str) -> None:
        """Sends all that copies a delivery's records to another topic, and waits for nothing."""
        await self.begin(delivery.delivery_id)
        for number, record in enumerate(delivery.records):
            await self.state(delivery.delivery_id, number, output, record.value, key=record.key)
        await self.ack(delivery.delivery_id)

    async def leave(self) -> tuple[grpc.StatusCode, str]:
        """Closes this side, and reads to the end."""
        await self.call.done_writing()
        return await self.ended()

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """Reads to the end, and tells how it ended."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    response = await self.call.read()
                except grpc.aio.AioRpcError:
                    break
                if response is grpc.aio.EOF:
                    break
                self.seen.append(response)
            return await self.status()

    async def status(self) -> tuple[grpc.StatusCode, str]:
        return await self.call.code(), await self.call.details()


def _serialize(message: pb.SubscribeRequest | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


async def copy_all(
    subscriber: GrpcSubscriber, output: str, is_done: Callable[[], bool], took: list[int] | None = None
) -> None:
    """Copies what it is given until cancelled, or `is_done` after a commit."""
    while not is_done():
        response = await subscriber.receive()
        kind = response.WhichOneof("message")
        if kind == "delivery":
            if took is not None:
                took += [record.offset for record in response.delivery.records]
            await subscriber.copy(response.delivery, output)
        else:
            assert kind in ("applied", "committed"), response


class GatewayProcess:
    """A gateway as a process: `semel gateway`, or the test program that dies at a step."""

    def __init__(self, bootstrap: str, port: int, log_path: Path, **fate: str) -> None:
        self.address = f"127.0.0.1:{port}"
        self.log_path = log_path
        if fate:
            self._command = [sys.executable, str(PROGRAM), bootstrap, self.address]
        else:
            self._command = [SEMEL, "gateway", "--bootstrap", bootstrap, "--grpc", self.address]
        self._environment = {
            **_environment(),
            **{f"TEST_{name.upper()}": value for name, value in fate.items()},
        }
        self._process: subprocess.Popen[str] | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def start(self) -> Self:
        with self.log_path.open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        line = _first_line(self._process, WAIT_S)
        assert line.startswith("ready"), f"the gateway said {line!r}:\n{self.log}"
        return self

    async def died(self) -> None:
        await asyncio.to_thread(self.process.wait, WAIT_S)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


class ProcessLines:
    """A subscriber process, and what it prints."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += iter(self.process.stdout.readline, "")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
