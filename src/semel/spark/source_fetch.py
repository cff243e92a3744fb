"""Fetching a range of one partition: whole batches that a reader may see, up to a given end.

Rules:

- The end is an offset and never a count: what compaction, markers and aborted transactions leave out moves
  the position like everything else. A fetch may bring more than the range; that is the caller's to cut off.
- The next fetch leaves before the batches of the last are looked at, and none leaves once the end is reached.
- A fetch asks for about the bytes that the rest of the range takes, as far as that can be told: where batches
  are kept small, most of what a large fetch brings would be thrown away.
- What may pass (a broker restarts, a leader moves) is retried for as long as it may go on without progress.
  Only time in which batches are waited for counts: Spark may hold a task back for as long as it likes, and
  meanwhile nobody listens to the broker.
- For the same reason a fetch that left ahead of time and failed is as good as one that was never sent.
- Records that were there when the range was planned and are gone now are an error, or are skipped with a
  warning where the user said so (`failOnDataLoss`).
"""

import asyncio
import logging
from typing import Final, cast

from semel.client.admin import EARLIEST, READ_COMMITTED, Admin
from semel.client.cluster import Backoff, Cluster
from semel.client.consumer import FETCH_VERSION, AbortedFilter
from semel.client.errors import broker_error, check
from semel.errors import ProtocolError, RetriableError, SemelError
from semel.spark.source_offsets import OffsetRange
from semel.spark.source_options import FAIL_ON_DATA_LOSS
from semel.wire.batch import BatchHeader, check_crc, iter_batches
from semel.wire.errors import ErrorCode
from semel.wire.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)

MAX_FETCH_BYTES: Final = 4 * 1024 * 1024
MIN_FETCH_BYTES: Final = 64 * 1024
# What a record is taken to have until some were seen.
GUESSED_RECORD_BYTES: Final = 1024
FETCH_WAIT_MS: Final = 500
# Longer than a broker takes to restart; Spark's own source waits as long for records.
RETRY_TIMEOUT_MS: Final = 120_000

log = logging.getLogger(__name__)


class DataLostError(SemelError):
    """Records that were to be read are gone."""


def report_loss(what: str, *, is_error: bool) -> None:
    """Records are gone: an error, or a warning where the user said so."""
    if is_error:
        raise DataLostError(
            f"{what}; reading stopped because records may be lost: set {FAIL_ON_DATA_LOSS} to false to go on "
            "without them"
        )
    log.warning("%s; reading goes on without", what)


class RangeFetch:
    """Reads one range. Close it."""

    __slots__ = (
        "_admin",
        "_backoff",
        "_bytes_seen",
        "_cluster",
        "_fails_on_data_loss",
        "_fetching",
        "_isolation_level",
        "_left_at",
        "_moved_at",
        "_retry_timeout_ms",
        "position",
        "wanted",
    )

    def __init__(
        self,
        cluster: Cluster,
        wanted: OffsetRange,
        *,
        isolation_level: int,
        fails_on_data_loss: bool,
        retry_timeout_ms: int = RETRY_TIMEOUT_MS,
    ) -> None:
        self.position = wanted.start
        self._cluster = cluster
        self._admin = Admin(cluster)
        self.wanted = wanted  # it begins later where the first of its records turn out to be gone
        self._isolation_level = isolation_level
        self._fails_on_data_loss = fails_on_data_loss
        self._retry_timeout_ms = retry_timeout_ms
        self._fetching: asyncio.Task[PartitionData] | None = None
        self._backoff = Backoff()
        self._bytes_seen = 0
        # When there was progress, put off by the time spent elsewhere; and since when it is spent there.
        self._moved_at = self._left_at = asyncio.get_running_loop().time()

    @property
    def is_done(self) -> bool:
        return self.position >= self.wanted.end

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
            self._fetching = None

    async def next_batches(self) -> list[tuple[BatchHeader, memoryview]]:
        """What has come next, perhaps nothing."""
        loop = asyncio.get_running_loop()
        self._moved_at += loop.time() - self._left_at
        try:
            return await self._next_batches()
        finally:
            self._left_at = loop.time()

    async def _next_batches(self) -> list[tuple[BatchHeader, memoryview]]:
        ahead, self._fetching = self._fetching, None
        before = self.position
        try:
            found = await self._take(await (ahead or self._fetch()))
        except RetriableError as error:
            if ahead is None:
                await self._pause(error)
            return []
        if self.position > before:
            self._backoff.reset()
            self._moved_at = asyncio.get_running_loop().time()
        if not self.is_done:
            self._fetching = asyncio.create_task(self._fetch())
        return found

    async def _fetch(self) -> PartitionData:
        where = self.wanted.where
        leader_id = await self._cluster.leader_id(where)
        connection = await self._cluster.connection(leader_id)
        response = await connection.request(
            self._request(),
            FetchResponse,
            max_version=FETCH_VERSION,
            timeout_ms=self._cluster.options.request_timeout_ms + FETCH_WAIT_MS,
        )
        check(response.error_code, "a fetch was refused")
        return response.responses[0].partitions[0]

    def _fetch_bytes(self) -> int:
        read = self.position - self.wanted.start
        record_bytes = self._bytes_seen / read if read > 0 and self._bytes_seen else GUESSED_RECORD_BYTES
        rest_bytes = int((self.wanted.end - self.position) * record_bytes)
        return min(max(rest_bytes + rest_bytes // 8, MIN_FETCH_BYTES), MAX_FETCH_BYTES)

    def _request(self) -> FetchRequest:
        fetch_bytes = self._fetch_bytes()
        partition = FetchPartition(
            partition=self.wanted.where.partition,
            fetch_offset=self.position,
            partition_max_bytes=fetch_bytes,
        )
        return FetchRequest(
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=fetch_bytes,
            isolation_level=self._isolation_level,
            topics=[FetchTopic(topic=self.wanted.where.topic, partitions=[partition])],
        )

    async def _take(self, answer: PartitionData) -> list[tuple[BatchHeader, memoryview]]:
        if answer.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            await self._skip_what_is_gone()
            return []
        if answer.error_code != ErrorCode.NONE:
            raise broker_error(
                answer.error_code, f"{self.wanted.where} cannot be read at offset {self.position}"
            )
        if not answer.records:
            self._check_end(answer)
            return []
        return self._visible(answer)

    def _visible(self, answer: PartitionData) -> list[tuple[BatchHeader, memoryview]]:
        is_committed = self._isolation_level == READ_COMMITTED
        unseen = AbortedFilter(answer.aborted_transactions if is_committed else None)
        found: list[tuple[BatchHeader, memoryview]] = []
        position, end = self.position, self.wanted.end
        for header, batch in iter_batches(cast("memoryview", answer.records)):
            visible = unseen.is_visible(header, batch)
            if header.last_offset < position:
                continue
            position = header.last_offset + 1
            self._bytes_seen += header.size
            if visible and header.record_count and header.base_offset < end:
                check_crc(batch, header)
                found.append((header, batch))
            if position >= end:
                break
        if position == self.position:
            raise ProtocolError(
                f"{self.wanted.where} at offset {position}: bytes came and no whole batch of format 2; "
                "is the broker older than Kafka 0.11?"
            )
        self.position = position
        return found

    async def _skip_what_is_gone(self) -> None:
        where, position, end = self.wanted.where, self.position, self.wanted.end
        found = await self._admin.list_offsets({where: EARLIEST}, isolation_level=self._isolation_level)
        earliest = found[where].offset
        if position < earliest:
            resume_at = min(earliest, end)
            self._report_loss(
                f"offsets {position} to {resume_at - 1} of {where} are gone, it begins at {earliest}"
            )
            self.position = resume_at
            # The batch that holds the first record still there holds others that must not be seen.
            self.wanted = OffsetRange(where, resume_at, end)
        else:
            self._report_loss(f"{where} ends before offset {position}: was the topic made anew?")
            self.position = end

    def _check_end(self, answer: PartitionData) -> None:
        """Nothing came: whoever planned the range has seen records up to its end, so they were there."""
        is_committed = self._isolation_level == READ_COMMITTED
        readable_end = answer.last_stable_offset if is_committed else answer.high_watermark
        if self._stalled_ms() > self._retry_timeout_ms:
            where, end = self.wanted.where, self.wanted.end
            self._report_loss(
                f"{where} ends at offset {readable_end}, where offsets up to {end - 1} were seen before"
            )
            self.position = end

    def _report_loss(self, what: str) -> None:
        report_loss(what, is_error=self._fails_on_data_loss)

    def _stalled_ms(self) -> float:
        return (asyncio.get_running_loop().time() - self._moved_at) * 1000

    async def _pause(self, error: RetriableError) -> None:
        if self._stalled_ms() > self._retry_timeout_ms:
            raise error
        self._cluster.forget_all()
        await asyncio.sleep(self._backoff.next_pause_s(error))
