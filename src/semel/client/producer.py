"""An idempotent producer: every record is in the log once, in order, or the producer says that it failed.

Records are gathered into one open batch per partition. A batch is sealed when it is full or has lingered,
gets its sequence numbers, and joins its partition's queue. One task per partition posts sealed batches, each
as a request of its own. Rules:

- At most `MAX_IN_FLIGHT` batches of a partition are in flight: a broker remembers that many, so a batch that
  is sent again is recognised. The first batch travels alone: a broker takes any sequence from a producer it
  does not know yet, so if the first were refused for a moment and the second not, the first could never
  follow.
- When one of them fails in a way that may pass, all answers in flight are awaited and the whole window is
  sent again, same bytes, same sequences, same order. What the broker has already is answered as a duplicate,
  which is a success.
- A batch that fails for good, or is not accepted in time, fails the producer: its successors could not be
  told from a gap. Every record not yet acknowledged fails with it, and so does every later `send` and
  `flush`.
- Without idempotence (`acks` other than all) one batch is in flight at a time, so that retries keep the
  order, but they may write records twice.
- Inside a transaction (`TransactionScope`) the identity is the transaction's, a partition joins it before its
  first batch leaves, and a failure is told as what it means for the transaction: abort, or give up.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, Self

from semel.client.cluster import Backoff, Cluster, waits_for_markers
from semel.client.connection import Connection
from semel.client.errors import broker_error, check, spoiling
from semel.client.metadata import TopicPartition
from semel.errors import ConfigError, FatalError, ProtocolError, RetriableError, SemelError
from semel.wire.batch import (
    MAX_SEQUENCE,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    read_header,
)
from semel.wire.compression import Codec
from semel.wire.errors import ErrorCode
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from semel.wire.partitioner import partition_for_key
from semel.wire.records import Headers, Record, build_batch

MAX_IN_FLIGHT: Final = 5
ACKS_ALL: Final = -1
ACKS_NONE: Final = 0
# Later versions name topics by id, which says nothing more to us.
PRODUCE_VERSION: Final = 12
NO_TRANSACTION_TIMEOUT_MS: Final = 0
UNKNOWN_OFFSET: Final = -1
# What a record takes besides its key, value and headers, at most.
RECORD_OVERHEAD_BYTES: Final = 32


class ProducerIdentity(NamedTuple):
    """What marks a producer's batches, so that the broker can tell a retry from something new."""

    producer_id: int
    producer_epoch: int


NO_IDENTITY: Final = ProducerIdentity(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


class TransactionScope:
    """The transaction that a producer writes in, for as long as both last."""

    __slots__ = ("identity", "join", "produce_version", "transactional_id")

    def __init__(
        self,
        transactional_id: str,
        identity: ProducerIdentity,
        produce_version: int,
        join: Callable[[TopicPartition], Awaitable[None]],
    ) -> None:
        self.transactional_id = transactional_id
        self.identity = identity
        self.produce_version = produce_version
        self.join = join  # makes a partition part of the transaction


@dataclass(slots=True, frozen=True)
class ProducerOptions:
    codec: Codec = Codec.NONE
    acks: int = ACKS_ALL
    linger_ms: int = 5
    batch_bytes: int = 256 * 1024
    buffer_bytes: int = 32 * 1024 * 1024
    delivery_timeout_ms: int = 120_000
    request_timeout_ms: int = 30_000

    @property
    def is_idempotent(self) -> bool:
        return self.acks == ACKS_ALL


class PendingBatch:
    """Records that share a batch, and with it their fate."""

    __slots__ = ("_waiters", "base_sequence", "born", "done", "encoded", "records", "size_bytes", "where")

    def __init__(self, where: TopicPartition, born: float, done: asyncio.Future[int]) -> None:
        self.where = where
        self.born = born
        self.done = done  # becomes the batch's base offset
        self.records: list[Record] = []
        self.size_bytes = 0
        self.base_sequence = NO_SEQUENCE
        self.encoded: bytearray | None = None
        self._waiters: list[asyncio.Future[int]] = []

    def wait(self) -> asyncio.Future[int]:
        """For one who waits, and may be cancelled: others wait for the same batch.

        What `asyncio.shield` does, without its turn of the loop.
        """
        if self.done.done():
            return self.done
        waiter: asyncio.Future[int] = self.done.get_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def succeed(self, base_offset: int) -> None:
        self.records = []
        for future in (self.done, *self._waiters):
            if not future.done():
                future.set_result(base_offset)

    def fail(self, error: SemelError) -> None:
        self.records = []
        for future in (self.done, *self._waiters):
            if not future.done():
                future.set_exception(error)
                # The error is the producer's as well, and every later call raises it.
                future.exception()


class PendingRecord:
    """A record on its way. Await it for its offset (-1 where the broker did not say)."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: PendingBatch, index: int) -> None:
        self._batch = batch
        self._index = index

    @property
    def where(self) -> TopicPartition:
        return self._batch.where

    def __await__(self) -> Generator[None, None, int]:
        base_offset = yield from self._batch.wait().__await__()
        return base_offset if base_offset == UNKNOWN_OFFSET else base_offset + self._index


class PendingRun(PendingRecord):
    """Records sent one after the other that lie so in a batch. Await it for the first one's offset."""

    __slots__ = ("count",)

    def __init__(self, batch: PendingBatch, index: int, count: int) -> None:
        super().__init__(batch, index)
        self.count = count

    def goes_on(self, batch: PendingBatch, count: int) -> bool:
        """Whether the last records of a batch follow this run; then they are a part of it."""
        if batch is not self._batch or len(batch.records) != self._index + self.count + count:
            return False
        self.count += count
        return True

    def offsets(self, first: int) -> Sequence[int]:
        """Where all of them are, if the first is there."""
        if first == UNKNOWN_OFFSET:
            return [UNKNOWN_OFFSET] * self.count
        return range(first, first + self.count)


class PartitionQueue:
    """The batches of one partition, from open to acknowledged."""

    __slots__ = ("is_known", "linger", "next_sequence", "open", "sealed", "wake", "where", "window")

    def __init__(self, where: TopicPartition) -> None:
        self.where = where
        self.open: PendingBatch | None = None
        self.linger: asyncio.TimerHandle | None = None
        self.sealed: deque[PendingBatch] = deque()
        self.window: deque[PendingBatch] = deque()  # sent at least once and not acknowledged
        self.next_sequence = 0
        self.is_known = False  # the broker has accepted a batch of ours
        # Set when there is something to do: a sealed batch, an answer, a failure.
        self.wake = asyncio.Event()

    def seal(self) -> None:
        """Closes the open batch, if there is one: it is ready to go."""
        if self.linger is not None:
            self.linger.cancel()
            self.linger = None
        if self.open is not None:
            self.sealed.append(self.open)
            self.open = None
            self.wake.set()

    def unfinished(self) -> list[PendingBatch]:
        open_batch = [] if self.open is None else [self.open]
        return [*self.window, *self.sealed, *open_batch]

    def answered(self, _answer: asyncio.Future[ProduceResponse]) -> None:
        self.wake.set()


class Producer:
    """Sends records to topics. Close it, or use it as an async context manager: both flush."""

    def __init__(
        self,
        cluster: Cluster,
        options: ProducerOptions | None = None,
        transaction: TransactionScope | None = None,
    ) -> None:
        self.options = options or ProducerOptions()
        if self.options.acks not in (ACKS_ALL, ACKS_NONE, 1):
            raise ConfigError(f"acks is {self.options.acks}: it must be -1 (all), 0 or 1")
        if transaction is not None and not self.options.is_idempotent:
            raise ConfigError(f"acks is {self.options.acks}: in a transaction it must be -1 (all)")
        self._cluster = cluster
        self._transaction = transaction
        self._identity: ProducerIdentity | None = None if transaction is None else transaction.identity
        self._partition_counts: dict[str, int] = {}
        self._sticky: dict[str, PartitionQueue] = {}
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        self._senders: set[asyncio.Task[None]] = set()
        self._buffered_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._failure: SemelError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        else:
            await self.abandon()

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> PendingRecord:
        """Queues a record, waiting for room if there is none; await the result for the record's offset."""
        timestamp = NO_TIMESTAMP if timestamp_ms is None else timestamp_ms
        return (await self.send_many(topic, [Record(key, value, timestamp, headers)], partition))[0]

    async def send_many(
        self, topic: str, records: Sequence[Record], partition: int | None = None
    ) -> list[PendingRun]:
        """As many times `send`, for less. A record without a timestamp gets the present one."""
        await self.wait_for_room()
        count = self._partition_counts.get(topic)
        if count is None:
            count = await self._open_topic(topic)
            self._require_going()  # it may have been abandoned meanwhile
        if partition is not None and not 0 <= partition < count:
            raise ConfigError(f"topic {topic!r} has no partition {partition}: it has 0 to {count - 1}")
        now_ms = int(time.time() * 1000)
        if not records:
            return []
        only = 0 if count == 1 else partition
        fixed = None if only is None else self._queue(TopicPartition(topic, only))
        runs: list[PendingRun] = []
        start = 0
        while start < len(records):
            if not self._has_room.is_set():
                await self.wait_for_room()
            record = records[start]
            queue = fixed or self._choose_queue(topic, count, record.key, _record_bytes(record))
            batch, taken = self._fill(queue, records, start, now_ms, takes_keys=fixed is not None)
            if not (runs and runs[-1].goes_on(batch, taken)):
                runs.append(PendingRun(batch, len(batch.records) - taken, taken))
            start += taken
        return runs

    async def wait_for_room(self) -> None:
        """Waits until the buffer has room; raises if the producer has failed."""
        while not self._has_room.is_set() and self._failure is None:
            await self._has_room.wait()
        self._require_going()

    def _require_going(self) -> None:
        if self._failure is not None:
            raise self._failure

    def next_sequence(self, where: TopicPartition) -> int:
        """The base sequence of the next batch that `queue_encoded` takes for a partition."""
        queue = self._queues.get(where)
        return 0 if queue is None else queue.next_sequence

    def queue_encoded(self, where: TopicPartition, encoded: bytearray) -> asyncio.Future[int]:
        """Queues a batch that was encoded elsewhere, with this producer's identity and the next sequence.

        The result becomes its base offset. A partition takes encoded batches or single records, not both.
        """
        header = read_header(encoded)
        sequence = self.next_sequence(where)
        given = ProducerIdentity(header.producer_id, header.producer_epoch)
        if given != self._identity or header.base_sequence != sequence:
            raise ConfigError(
                f"a batch for {where} has {given} and sequence {header.base_sequence}, "
                f"and {self._identity} and {sequence} were due: encode batches in the order of writing"
            )
        queue = self._queue(where)
        loop = asyncio.get_running_loop()
        batch = PendingBatch(where, loop.time(), loop.create_future())
        batch.encoded = encoded
        batch.base_sequence = sequence
        queue.next_sequence = (sequence + header.record_count) & MAX_SEQUENCE
        queue.open = batch
        self._hold(batch, len(encoded))
        queue.seal()
        return batch.done

    def begin_at(self, where: TopicPartition, sequence: int) -> None:
        """Others have written to the partition with this identity, up to here; all of ours is acknowledged.

        The caller knows that nobody else writes to it until what comes next is acknowledged, too.
        """
        queue = self._queue(where)
        assert not queue.unfinished(), f"batches for {where} are under way"
        queue.next_sequence = sequence

    async def flush(self, where: TopicPartition | None = None) -> None:
        """Sends everything, or what is for one partition, and waits until it is acknowledged."""
        queues = list(self._queues.values()) if where is None else [self._queue(where)]
        for queue in queues:
            queue.seal()
        unfinished = [batch.done for queue in queues for batch in queue.unfinished()]
        if unfinished:
            await asyncio.wait(unfinished)
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Flushes and stops; raises if anything was not acknowledged."""
        try:
            await self.flush()
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """Stops at once; what is not acknowledged may or may not be in the log."""
        self.stop()
        await asyncio.gather(*self._senders, return_exceptions=True)

    def stop(self) -> None:
        """The same without waiting for its tasks: enough after a `flush`, when they have nothing to do."""
        self._fail(FatalError("the producer was closed before this record was acknowledged", ErrorCode.NONE))

    # Gathering

    async def _open_topic(self, name: str) -> int:
        topic = await self._cluster.retry(partial(self._cluster.topic, name))
        if self._identity is None:
            self._identity = await self._cluster.retry(self._init_producer_id)
        self._partition_counts[name] = len(topic.partitions)
        return len(topic.partitions)

    async def _init_producer_id(self) -> ProducerIdentity:
        if not self.options.is_idempotent:
            return NO_IDENTITY
        connection = await self._cluster.any_connection()
        request = InitProducerIdRequest(
            transactional_id=None, transaction_timeout_ms=NO_TRANSACTION_TIMEOUT_MS
        )
        response = await connection.request(request, InitProducerIdResponse)
        check(response.error_code, "the broker gave no producer id")
        return ProducerIdentity(response.producer_id, response.producer_epoch)

    def _choose_queue(self, topic: str, count: int, key: bytes | None, size_bytes: int) -> PartitionQueue:
        """Keys decide; records without one fill a batch and then go on to the next partition."""
        if key is not None:
            return self._queue(TopicPartition(topic, partition_for_key(key, count)))
        queue = self._sticky.get(topic)
        if queue is not None and self._fits(queue, size_bytes):
            return queue
        partition = 0 if queue is None else (queue.where.partition + 1) % count
        queue = self._sticky[topic] = self._queue(TopicPartition(topic, partition))
        return queue

    def _fits(self, queue: PartitionQueue, size_bytes: int) -> bool:
        return queue.open is not None and queue.open.size_bytes + size_bytes <= self.options.batch_bytes

    def _queue(self, where: TopicPartition) -> PartitionQueue:
        queue = self._queues.get(where)
        if queue is None:
            queue = self._queues[where] = PartitionQueue(where)
            sender = asyncio.create_task(self._send_batches(queue), name=f"produce {where}")
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return queue

    def _fill(
        self, queue: PartitionQueue, records: Sequence[Record], start: int, now_ms: int, *, takes_keys: bool
    ) -> tuple[PendingBatch, int]:
        """Puts as many records into the queue's batch as fit, one at least, none that belongs elsewhere."""
        size_bytes = _record_bytes(records[start])
        if not self._fits(queue, size_bytes):
            queue.seal()
        batch = queue.open
        if batch is None:
            loop = asyncio.get_running_loop()
            batch = queue.open = PendingBatch(queue.where, loop.time(), loop.create_future())
            queue.linger = loop.call_later(self.options.linger_ms / 1000, queue.seal)
        room = self.options.batch_bytes - batch.size_bytes
        stop = start + 1
        if takes_keys or records[start].key is None:
            while stop < len(records) and (takes_keys or records[stop].key is None):
                following = size_bytes + _record_bytes(records[stop])
                if following > room:
                    break
                size_bytes = following
                stop += 1
        batch.records += [
            Record(each.key, each.value, now_ms, each.headers) if each.timestamp == NO_TIMESTAMP else each
            for each in records[start:stop]
        ]
        self._hold(batch, size_bytes)
        if batch.size_bytes >= self.options.batch_bytes:
            queue.seal()
        return batch, stop - start

    def _hold(self, batch: PendingBatch, size_bytes: int) -> None:
        """Counts bytes against the buffer until their batch is acknowledged."""
        batch.size_bytes += size_bytes
        self._buffered_bytes += size_bytes
        if self._buffered_bytes >= self.options.buffer_bytes:
            self._has_room.clear()

    # Sending

    async def _send_batches(self, queue: PartitionQueue) -> None:
        """The life of a partition's sender: send, and after a failure that may pass, send again."""
        backoff = Backoff()
        while True:
            try:
                if self._transaction is not None:
                    await self._transaction.join(queue.where)
                leader_id = await self._cluster.leader_id(queue.where)
                connection = await self._cluster.connection(leader_id)
                await self._stream(queue, connection, backoff)
            except RetriableError as error:
                if not self._may_retry(queue, error):
                    return
                if not waits_for_markers(error):
                    self._cluster.forget_topic(queue.where.topic)
                await asyncio.sleep(backoff.next_pause_s(error))
            except SemelError as error:
                self._fail(error)
                return

    async def _stream(self, queue: PartitionQueue, connection: Connection, backoff: Backoff) -> None:
        """Posts batches and takes answers on one connection until something fails."""
        answers: deque[asyncio.Future[ProduceResponse]] = deque()
        try:
            for batch in queue.window:
                answers.append(await self._post(queue, connection, batch))
            while True:
                while answers and answers[0].done():
                    self._acknowledge(queue, answers.popleft().result())
                    backoff.reset()
                while queue.sealed and len(queue.window) < self._limit(queue):
                    batch = queue.sealed.popleft()
                    queue.window.append(batch)
                    answers.append(await self._post(queue, connection, batch))
                queue.wake.clear()
                if not (answers and answers[0].done()):
                    await queue.wake.wait()
        except RetriableError:
            if answers:
                # Nothing may be in flight when the window is sent again.
                await asyncio.wait(answers)
            raise

    def _limit(self, queue: PartitionQueue) -> int:
        return MAX_IN_FLIGHT if self.options.is_idempotent and queue.is_known else 1

    async def _post(
        self, queue: PartitionQueue, connection: Connection, batch: PendingBatch
    ) -> asyncio.Future[ProduceResponse]:
        await connection.ready()
        if batch.encoded is None:
            batch.encoded = self._encode(queue, batch)
        transaction = self._transaction
        version = PRODUCE_VERSION if transaction is None else transaction.produce_version
        request = ProduceRequest(
            transactional_id=None if transaction is None else transaction.transactional_id,
            acks=self.options.acks,
            timeout_ms=self.options.request_timeout_ms,
            topic_data=[
                TopicProduceData(
                    name=batch.where.topic,
                    partition_data=[PartitionProduceData(index=batch.where.partition, records=batch.encoded)],
                )
            ],
        )
        if self.options.acks == ACKS_NONE:
            connection.send(request, max_version=version)
            answer = _unanswered(batch.where)
        else:
            answer = connection.post(request, ProduceResponse, max_version=version)
        answer.add_done_callback(queue.answered)
        return answer

    def _encode(self, queue: PartitionQueue, batch: PendingBatch) -> bytearray:
        identity = self._identity or NO_IDENTITY
        if self.options.is_idempotent:
            batch.base_sequence = queue.next_sequence
            queue.next_sequence = (queue.next_sequence + len(batch.records)) & MAX_SEQUENCE
        return build_batch(
            batch.records,
            codec=self.options.codec,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=batch.base_sequence,
            transactional=self._transaction is not None,
        )

    def _acknowledge(self, queue: PartitionQueue, response: ProduceResponse) -> None:
        """Takes the answer to the oldest batch of the window; raises if it was not accepted."""
        batch = queue.window[0]
        base_offset = _accepted_offset(batch.where, response)
        queue.window.popleft()
        queue.is_known = True
        batch.succeed(base_offset)
        self._buffered_bytes -= batch.size_bytes
        self._has_room.set()

    def _may_retry(self, queue: PartitionQueue, error: RetriableError) -> bool:
        """Whether the oldest batch still has time; if not, the producer has failed."""
        unfinished = queue.unfinished()
        if not unfinished:
            return True
        waited_ms = (asyncio.get_running_loop().time() - unfinished[0].born) * 1000
        if waited_ms <= self.options.delivery_timeout_ms:
            return True
        self._fail(
            FatalError(
                f"records for {queue.where} were not acknowledged within "
                f"{self.options.delivery_timeout_ms} ms; they may or may not be in the log. "
                f"The last error was: {error}",
                error.code,
            )
        )
        return False

    def _fail(self, error: SemelError) -> None:
        """Fails what is unfinished and whatever comes later."""
        if self._failure is None:
            self._failure = error if self._transaction is None else spoiling(error)
        for queue in self._queues.values():
            unfinished = queue.unfinished()
            queue.seal()
            queue.sealed.clear()
            queue.window.clear()
            for batch in unfinished:
                batch.fail(self._failure)
        for sender in self._senders:
            sender.cancel()
        self._has_room.set()


def _record_bytes(record: Record) -> int:
    size_bytes = RECORD_OVERHEAD_BYTES
    if record.key is not None:
        size_bytes += len(record.key)
    if record.value is not None:
        size_bytes += len(record.value)
    for name, value in record.headers:
        size_bytes += RECORD_OVERHEAD_BYTES + len(name) + (0 if value is None else len(value))
    return size_bytes


def _accepted_offset(where: TopicPartition, response: ProduceResponse) -> int:
    """The base offset that an answer gives a batch; raises what it says otherwise."""
    answer = _only_partition(where, response)
    if answer.error_code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
        return UNKNOWN_OFFSET
    if answer.error_code != ErrorCode.NONE:
        raise broker_error(answer.error_code, f"a batch for {where} was not accepted", answer.error_message)
    return answer.base_offset


def _only_partition(where: TopicPartition, response: ProduceResponse) -> PartitionProduceResponse:
    for topic in response.responses:
        for partition in topic.partition_responses:
            if partition.index == where.partition:
                return partition
    raise ProtocolError(f"the broker's answer to a batch for {where} does not mention that partition")


def _unanswered(where: TopicPartition) -> asyncio.Future[ProduceResponse]:
    """Stands in for the answer that a broker does not give to acks=0."""
    answer: asyncio.Future[ProduceResponse] = asyncio.get_running_loop().create_future()
    partition = PartitionProduceResponse(index=where.partition, base_offset=UNKNOWN_OFFSET)
    answer.set_result(
        ProduceResponse(responses=[TopicProduceResponse(name=where.topic, partition_responses=[partition])])
    )
    return answer
