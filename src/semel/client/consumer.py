"""A consumer of given partitions, from a given place, with Kafka's isolation levels.

One fetch per leader is in flight, on a lane of its own, and the next one leaves before the records of the
last are looked at. Positions move batch by batch, past everything that a reader does not get to see: control
batches, and under read_committed the batches of aborted transactions. A broker under read_committed sends
nothing past the last stable offset, and with each partition the aborted transactions that overlap what it
sent: (producer id, first offset). From its first offset up to its abort marker, what that producer wrote in a
transaction is dropped.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, Self, cast

from semel.client.admin import EARLIEST, LATEST, READ_COMMITTED, READ_UNCOMMITTED, Admin
from semel.client.cluster import DEFAULT_RETRY_TIMEOUT_MS, Backoff, Cluster
from semel.client.errors import broker_error
from semel.client.metadata import TopicPartition
from semel.errors import ProtocolError, RetriableError
from semel.wire.batch import BatchHeader, check_crc, iter_batches
from semel.wire.errors import ErrorCode
from semel.wire.messages.fetch import (
    AbortedTransaction,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)
from semel.wire.records import Record, read_end_marker, read_records

FETCH_LANE: Final = "fetch"
# Later versions name topics by id, which says nothing more to us.
FETCH_VERSION: Final = 12


class Start(NamedTuple):
    """Where to begin: at an offset, or else at the first record of a timestamp (or EARLIEST, LATEST)."""

    offset: int | None = None
    timestamp_ms: int = EARLIEST


BEGINNING: Final = Start(timestamp_ms=EARLIEST)
END: Final = Start(timestamp_ms=LATEST)


@dataclass(slots=True, frozen=True)
class ConsumerOptions:
    isolation_level: int = READ_UNCOMMITTED
    max_wait_ms: int = 500
    min_bytes: int = 1
    max_bytes: int = 50 * 1024 * 1024
    partition_max_bytes: int = 1024 * 1024
    retry_timeout_ms: int = DEFAULT_RETRY_TIMEOUT_MS


class FetchedBatch:
    """A batch that the reader may see; its first records may lie before the position that was asked for."""

    __slots__ = ("batch", "from_offset", "header", "where")

    def __init__(
        self, where: TopicPartition, header: BatchHeader, batch: memoryview, from_offset: int
    ) -> None:
        self.where = where
        self.header = header
        self.batch = batch
        self.from_offset = from_offset

    def records(self) -> list[Record]:
        """Those from that position on."""
        records = read_records(self.batch)
        if self.header.base_offset >= self.from_offset:
            return records
        return [record for record in records if record.offset >= self.from_offset]


class Asked(NamedTuple):
    """A fetch under way: whom, and for which offsets."""

    leader_id: int
    offsets: dict[TopicPartition, int]


class Consumer:
    """Reads the assigned partitions. Close it, or use it as an async context manager."""

    def __init__(self, cluster: Cluster, options: ConsumerOptions | None = None) -> None:
        self.options = options or ConsumerOptions()
        self._cluster = cluster
        self._admin = Admin(cluster)
        # The order is the order of the next fetch: who was served goes last.
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._fetches: dict[asyncio.Task[FetchResponse], Asked] = {}
        self._backoff = Backoff()
        self._failing_since: float | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        fetches = list(self._fetches)
        self._fetches.clear()
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    # Places

    async def partitions_of(self, topic: str) -> list[TopicPartition]:
        found = await self._cluster.retry(partial(self._cluster.topic, topic))
        return [TopicPartition(topic, each.partition) for each in found.partitions]

    async def assign(self, partitions: Iterable[TopicPartition], start: Start = BEGINNING) -> None:
        """Reads these partitions too, from there on."""
        wanted = list(partitions)
        if start.offset is not None:
            self._positions.update(dict.fromkeys(wanted, start.offset))
            return
        found = await self._find(wanted, start.timestamp_ms)
        missing = [where for where, offset in found.items() if offset < 0]
        if missing:
            # Nothing is as young as the timestamp: whatever comes next is.
            found.update(await self._find(missing, LATEST))
        self._positions.update(found)

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        """Reads these no longer; what is on its way is dropped."""
        for where in partitions:
            self._positions.pop(where, None)
            self._paused.discard(where)

    def pause(self, where: TopicPartition) -> None:
        """Fetches no more of this partition for now. What is on its way still comes."""
        self._paused.add(where)

    def resume(self, where: TopicPartition) -> None:
        self._paused.discard(where)

    async def end_offsets(self) -> dict[TopicPartition, int]:
        """Where the assigned partitions end now, for this consumer's isolation level."""
        return await self._find(list(self._positions), LATEST)

    def position(self, where: TopicPartition) -> int:
        """The offset that is read next."""
        return self._positions[where]

    async def _find(self, partitions: list[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        found = await self._admin.list_offsets(
            dict.fromkeys(partitions, timestamp_ms), isolation_level=self.options.isolation_level
        )
        return {where: answer.offset for where, answer in found.items()}

    # Fetching

    async def poll(self, timeout_ms: int) -> list[FetchedBatch]:
        """What has come in, waiting for it up to the timeout; perhaps nothing."""
        try:
            await self._start_fetches()
        except RetriableError as error:
            await self._pause(error)
            return []
        if not self._fetches:
            await asyncio.sleep(timeout_ms / 1000)
            return []
        done, _ = await asyncio.wait(
            self._fetches, timeout=timeout_ms / 1000, return_when=asyncio.FIRST_COMPLETED
        )
        fetched: list[FetchedBatch] = []
        failure: RetriableError | None = None
        for fetch in done:
            asked = self._fetches.pop(fetch)
            try:
                fetched.extend(self._take(fetch.result(), asked.offsets))
            except RetriableError as error:
                failure = error
        if failure is not None:
            if not fetched:
                await self._pause(failure)
        elif done:
            self._failing_since = None
            self._backoff.reset()
            with suppress(RetriableError):  # the next poll meets it again, and this one has records to return
                await self._start_fetches()
        return fetched

    async def _start_fetches(self) -> None:
        """Asks every leader that is not being asked already."""
        busy = {asked.leader_id for asked in self._fetches.values()}
        wanted: dict[int, list[TopicPartition]] = {}
        for where in list(self._positions):
            if where in self._paused:
                continue
            leader_id = await self._cluster.leader_id(where)
            if leader_id not in busy:
                wanted.setdefault(leader_id, []).append(where)
        for leader_id, partitions in wanted.items():
            # What was unassigned while leaders were looked up is not asked for.
            offsets = {where: self._positions[where] for where in partitions if where in self._positions}
            if offsets:
                fetch = asyncio.create_task(self._fetch(leader_id, self._request(offsets)))
                self._fetches[fetch] = Asked(leader_id, offsets)

    def _request(self, offsets: dict[TopicPartition, int]) -> FetchRequest:
        topics: list[FetchTopic] = []
        for where, offset in offsets.items():
            if not topics or topics[-1].topic != where.topic:
                topics.append(FetchTopic(topic=where.topic))
            topics[-1].partitions.append(
                FetchPartition(
                    partition=where.partition,
                    fetch_offset=offset,
                    partition_max_bytes=self.options.partition_max_bytes,
                )
            )
        return FetchRequest(
            max_wait_ms=self.options.max_wait_ms,
            min_bytes=self.options.min_bytes,
            max_bytes=self.options.max_bytes,
            isolation_level=self.options.isolation_level,
            topics=topics,
        )

    async def _fetch(self, leader_id: int, request: FetchRequest) -> FetchResponse:
        connection = await self._cluster.connection(leader_id, FETCH_LANE)
        return await connection.request(
            request,
            FetchResponse,
            max_version=FETCH_VERSION,
            timeout_ms=self._cluster.options.request_timeout_ms + self.options.max_wait_ms,
        )

    def _take(self, response: FetchResponse, asked: dict[TopicPartition, int]) -> list[FetchedBatch]:
        if response.error_code != ErrorCode.NONE:
            raise broker_error(response.error_code, "a fetch was refused")
        fetched: list[FetchedBatch] = []
        failure: RetriableError | None = None
        for topic in response.responses:
            for answer in topic.partitions:
                where = TopicPartition(topic.topic, answer.partition_index)
                if self._positions.get(where) != asked.get(where):
                    continue  # unassigned, or assigned from another place, since it was asked for
                try:
                    fetched.extend(self._take_partition(where, answer))
                except RetriableError as error:
                    self._cluster.forget_topic(where.topic)
                    failure = error
        if failure is not None and not fetched:
            raise failure
        return fetched

    def _take_partition(self, where: TopicPartition, answer: PartitionData) -> Iterator[FetchedBatch]:
        position = self._positions[where]
        if answer.error_code != ErrorCode.NONE:
            raise broker_error(
                answer.error_code, f"{where} cannot be read at offset {position}", _range(answer)
            )
        if not answer.records:
            return
        self._positions[where] = self._positions.pop(where)
        unseen = AbortedFilter(
            answer.aborted_transactions if self.options.isolation_level == READ_COMMITTED else None
        )
        found_any = False
        for header, batch in iter_batches(cast("memoryview", answer.records)):
            found_any = True
            check_crc(batch, header)
            visible = unseen.is_visible(header, batch)
            if header.last_offset < position:
                continue
            if visible:
                yield FetchedBatch(where, header, batch, position)
            position = header.last_offset + 1
            self._positions[where] = position
        if not found_any:
            raise ProtocolError(
                f"{where} at offset {position}: {len(answer.records)} bytes came and no whole batch; "
                "is the broker older than Kafka 0.11, or is partition_max_bytes too small?"
            )

    async def _pause(self, error: RetriableError) -> None:
        """After a failure that may pass; raises it when it has gone on for too long."""
        now = asyncio.get_running_loop().time()
        if self._failing_since is None:
            self._failing_since = now
        if (now - self._failing_since) * 1000 > self.options.retry_timeout_ms:
            raise error
        self._cluster.forget_all()
        await asyncio.sleep(self._backoff.next_pause_s())


class AbortedFilter:
    """Tells, batch by batch in log order, what a reader may see of one fetched partition."""

    __slots__ = ("_aborted", "_next", "_open")

    def __init__(self, aborted: list[AbortedTransaction] | None) -> None:
        self._aborted = sorted(aborted or (), key=_first_offset)
        self._next = 0
        self._open: set[int] = set()  # producers whose aborted transaction we are inside of

    def is_visible(self, header: BatchHeader, batch: memoryview) -> bool:
        while (
            self._next < len(self._aborted) and self._aborted[self._next].first_offset <= header.last_offset
        ):
            self._open.add(self._aborted[self._next].producer_id)
            self._next += 1
        if header.is_control:
            marker = read_end_marker(batch)
            if marker is not None and not marker.commit:
                self._open.discard(header.producer_id)
            return False
        return not (header.is_transactional and header.producer_id in self._open)


def _first_offset(aborted: AbortedTransaction) -> int:
    return aborted.first_offset


def _range(answer: PartitionData) -> str | None:
    if answer.error_code != ErrorCode.OFFSET_OUT_OF_RANGE or answer.high_watermark < 0:
        return None
    return f"the log has offsets {answer.log_start_offset} to {answer.high_watermark - 1}"
