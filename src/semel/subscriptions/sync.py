"""The same subscription for programs without an event loop: one thread runs the loop, calls wait for it.

    with subscribe_sync("localhost:9092", "orders", group="billing") as deliveries:
        for delivery in deliveries:
            with delivery.transaction() as tx:
                tx.publish("invoices", b"...", key=delivery.key)

Everything may be called from several threads. Heartbeats and commits go on in the loop's thread while a
program works, so a long computation does not cost the partitions.
"""

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from semel.client.connection import ConnectionOptions
from semel.client.loop_thread import LoopThread
from semel.subscriptions.backoff import RedeliveryBackoff
from semel.subscriptions.delivery import Batch, Dealt, Delivery, Placed, Transaction
from semel.subscriptions.errors import SubscriptionClosedError
from semel.subscriptions.options import DEFAULTS, Filter, SubscriptionOptions, Transform
from semel.subscriptions.states import DeliveryState
from semel.subscriptions.subscription import Channel, Subscribing, subscribe
from semel.wire.records import Headers, Record


class SyncTransaction:
    """A `Transaction` whose calls wait."""

    def __init__(self, transaction: Transaction, thread: LoopThread) -> None:
        self._transaction = transaction
        self._thread = thread

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._transaction.__aexit__(kind, error, trace))

    def publish(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
        timestamp_ms: int | None = None,
    ) -> Placed:
        return self._thread.run(
            self._transaction.publish(
                topic, value, key=key, partition=partition, headers=headers, timestamp_ms=timestamp_ms
            )
        )

    def publish_many(self, topic: str, records: Sequence[Record]) -> Sequence[Placed]:
        return self._thread.run(self._transaction.publish_many(topic, records))

    def ack(self) -> None:
        self._thread.run(self._transaction.ack())

    def nack(self, reason: str = "", *, delay_ms: int | None = None) -> None:
        self._thread.run(self._transaction.nack(reason, delay_ms=delay_ms))


class SyncDealt:
    """What a delivery and a batch have in common."""

    def __init__(self, dealt: Dealt, thread: LoopThread) -> None:
        self._dealt = dealt
        self._thread = thread
        self.topic = dealt.topic
        self.partition = dealt.partition

    @property
    def state(self) -> DeliveryState:
        return self._dealt.state

    def transaction(self) -> SyncTransaction:
        return SyncTransaction(self._thread.run(_transaction_of(self._dealt)), self._thread)

    def ack(self) -> None:
        self._thread.run(self._dealt.ack())

    def nack(self, reason: str = "", *, delay_ms: int | None = None) -> None:
        self._thread.run(self._dealt.nack(reason, delay_ms=delay_ms))


class SyncDelivery(SyncDealt):
    """A `Delivery` whose calls wait."""

    def __init__(self, delivery: Delivery, thread: LoopThread) -> None:
        super().__init__(delivery, thread)
        self.key = delivery.key
        self.value = delivery.value
        self.headers = delivery.headers
        self.offset = delivery.offset
        self.attempt = delivery.attempt
        self.timestamp_ms = delivery.timestamp_ms


class SyncBatch(SyncDealt):
    """A `Batch` whose calls wait."""

    def __init__(self, batch: Batch, thread: LoopThread) -> None:
        super().__init__(batch, thread)
        self.records: list[Record] = batch.records
        self.attempt = batch.attempt


class SyncDeliveries:
    """The deliveries of a subscription. Use it as a context manager, from any number of threads."""

    def __init__(self, subscribing: Subscribing) -> None:
        self._subscribing = subscribing
        self._thread: LoopThread | None = None
        self._channel: Channel | None = None

    def __enter__(self) -> Self:
        self._thread = LoopThread("semel subscription")
        try:
            self._channel = self._thread.run(self._subscribing.__aenter__())
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread, _ = self._running()
        try:
            thread.run(self._subscribing.__aexit__(kind, error, trace))
        finally:
            thread.close()

    def __iter__(self) -> Iterator[SyncDelivery]:
        while True:
            try:
                delivery = self.take()
            except SubscriptionClosedError:
                return
            yield delivery

    def batches(self) -> Iterator[SyncBatch]:
        while True:
            try:
                batch = self.take_batch()
            except SubscriptionClosedError:
                return
            yield batch

    def take(self) -> SyncDelivery:
        """The next delivery."""
        thread, channel = self._running()
        return SyncDelivery(thread.run(channel.take()), thread)

    def take_batch(self, size: int | None = None) -> SyncBatch:
        """The next records of one partition."""
        thread, channel = self._running()
        return SyncBatch(thread.run(channel.take_batch(size)), thread)

    def _running(self) -> tuple[LoopThread, Channel]:
        if self._thread is None or self._channel is None:
            raise SubscriptionClosedError("use it as a context manager: `with subscribe_sync(...)`")
        return self._thread, self._channel


def subscribe_sync(
    bootstrap: str,
    topics: str | Iterable[str],
    *,
    group: str,
    max_in_flight: int = DEFAULTS.max_in_flight,
    max_attempts: int = DEFAULTS.max_attempts,
    delivery_timeout_ms: int = DEFAULTS.delivery_timeout_ms,
    batch_size: int = DEFAULTS.batch_size,
    max_wait_ms: int = DEFAULTS.max_wait_ms,
    backoff: RedeliveryBackoff | None = None,
    dead_letter_topic: str | None = None,
    start: str = DEFAULTS.start,
    filter: Filter | None = None,  # noqa: A002 - as in `subscribe`
    transform: Transform | None = None,
    options: SubscriptionOptions | None = None,
    connection: ConnectionOptions | None = None,
) -> SyncDeliveries:
    """`subscribe`, as an ordinary context manager."""
    return SyncDeliveries(
        subscribe(
            bootstrap,
            topics,
            group=group,
            max_in_flight=max_in_flight,
            max_attempts=max_attempts,
            delivery_timeout_ms=delivery_timeout_ms,
            batch_size=batch_size,
            max_wait_ms=max_wait_ms,
            backoff=backoff,
            dead_letter_topic=dead_letter_topic,
            start=start,
            filter=filter,
            transform=transform,
            options=options,
            connection=connection,
        )
    )


async def _transaction_of(dealt: Dealt) -> Transaction:
    return dealt.transaction()
