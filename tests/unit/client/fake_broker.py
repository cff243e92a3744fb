"""A broker of a few hundred lines for client tests: real sockets, real frames, a log in lists.

It keeps batches, checks sequences as Kafka does, raises the epochs of transactional ids (and knows nothing
else of transactions: what they write is there at once), and can be told to misbehave: `broker.misbehave(key,
*tricks)` makes the next requests of an API meet these tricks, one each, before it goes on as usual.
"""

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, cast

from semel.wire.apis import ApiKey
from semel.wire.batch import BatchHeader, check_batch, place_batch, read_header
from semel.wire.errors import ErrorCode
from semel.wire.frames import decode_request_header, response_frame
from semel.wire.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from semel.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopicResult,
)
from semel.wire.messages.api_versions import ApiVersion, ApiVersionsResponse, FinalizedFeatureKey
from semel.wire.messages.create_topics import CreatableTopicResult, CreateTopicsRequest, CreateTopicsResponse
from semel.wire.messages.delete_topics import DeletableTopicResult, DeleteTopicsRequest, DeleteTopicsResponse
from semel.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
)
from semel.wire.messages.end_txn import EndTxnRequest, EndTxnResponse
from semel.wire.messages.fetch import (
    AbortedTransaction,
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from semel.wire.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.list_offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from semel.wire.messages.metadata import (
    MetadataRequest,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from semel.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetFetchResponsePartition,
    OffsetFetchResponseTopic,
)
from semel.wire.messages.produce import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from semel.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from semel.wire.records import read_records

NODE_ID: Final = 7
Answer: TypeAlias = Any
Trick: TypeAlias = Callable[["FakeBroker", Any], Answer]


class HangUp:
    """An answer that closes the connection instead."""


class Silence:
    """No answer, and nothing more on this connection."""


class NoAnswer:
    """No answer, as a produce with acks=0 gets none."""


class RawFrame:
    """An answer of exactly these bytes, after the size."""

    def __init__(self, frame: bytes) -> None:
        self.frame = frame


def hang_up(broker: "FakeBroker", request: object) -> HangUp:
    """Closes the connection without looking at the request."""
    return HangUp()


def stay_silent(broker: "FakeBroker", request: object) -> Silence:
    return Silence()


def lose_answer(broker: "FakeBroker", request: Any) -> HangUp:
    """Does what was asked and then closes the connection."""
    broker.handle(request)
    return HangUp()


class Partition:
    """The log of one partition."""

    def __init__(self) -> None:
        self.batches: list[bytearray] = []
        self.log_start_offset = 0
        self.end_offset = 0
        self.last_stable_offset: int | None = None
        self.aborted: list[AbortedTransaction] = []
        # Producer and epoch to (first, next, base offset) of its last batches.
        self.sequences: dict[tuple[int, int], list[tuple[int, int, int]]] = {}

    def append(self, batch: bytes | bytearray) -> tuple[int, int]:
        """Error code and base offset."""
        header = check_batch(batch)
        if header.producer_id >= 0:
            identity = (header.producer_id, header.producer_epoch)
            for first, _, base_offset in self.sequences.get(identity, []):
                if first == header.base_sequence:
                    return ErrorCode.NONE, base_offset
            known = self.sequences.setdefault(identity, [])
            # Kafka takes any sequence from a producer that it does not know yet in this partition.
            if known and known[-1][1] != header.base_sequence:
                return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
            known.append((header.base_sequence, header.base_sequence + header.record_count, self.end_offset))
            del known[:-5]
        return ErrorCode.NONE, self.store(batch, header)

    def store(self, batch: bytes | bytearray, header: BatchHeader) -> int:
        kept = bytearray(batch)
        base_offset = self.end_offset
        place_batch(kept, base_offset, 0)
        self.batches.append(kept)
        self.end_offset += header.last_offset_delta + 1
        return base_offset

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Whole batches: the first whatever its size, and others as long as there is room."""
        found = bytearray()
        for batch in self.batches:
            if read_header(batch).last_offset < offset:
                continue
            if found and len(found) + len(batch) > max_bytes:
                break
            found += batch
        return bytes(found)

    def values(self) -> list[bytes | None]:
        return [record.value for batch in self.batches for record in read_records(batch)]


class FakeBroker:
    """One node that leads everything. Use it as an async context manager, or `in_thread`."""

    def __init__(self, topics: dict[str, int] | None = None) -> None:
        self.topics: dict[str, list[Partition]] = {
            name: [Partition() for _ in range(count)] for name, count in (topics or {}).items()
        }
        self.configs: dict[str, dict[str, str | None]] = {}
        self.versions: dict[int, tuple[int, int]] = {}
        self.requests: list[tuple[int, int, Any]] = []
        self.port = 0
        self._tricks: dict[int, deque[Trick]] = defaultdict(deque)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.transaction_version = 2
        self.identities: dict[str, tuple[int, int]] = {}
        self.ends: list[tuple[int, bool]] = []  # epochs, and whether they committed; a retry counts once
        self.offsets: dict[tuple[str, int], int] = {}
        self._next_producer_id = 1000
        self._heard = asyncio.Event()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def misbehave(self, api_key: int, *tricks: Trick) -> None:
        self._tricks[api_key].extend(tricks)

    def seen(self, api_key: int) -> list[Any]:
        """The requests of one API so far."""
        return [request for key, _, request in self.requests if key == api_key]

    async def heard(self, api_key: int, count: int = 1) -> None:
        """Waits until so many requests of an API have come."""
        while len(self.seen(api_key)) < count:
            self._heard.clear()
            await self._heard.wait()

    def versions_seen(self, api_key: int) -> list[int]:
        return [version for key, version, _ in self.requests if key == api_key]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                frame = memoryview(await reader.readexactly(size))
                header, at = decode_request_header(frame)
                request = decode_request(frame, at, header.api_key, header.api_version)
                self.requests.append((header.api_key, header.api_version, request))
                self._heard.set()
                tricks = self._tricks[header.api_key]
                answer = tricks.popleft()(self, request) if tricks else self.handle(request)
                if asyncio.iscoroutine(answer):
                    answer = await answer
                if isinstance(answer, HangUp):
                    return
                if isinstance(answer, Silence):
                    await reader.read()
                    return
                if isinstance(answer, NoAnswer) or getattr(request, "acks", None) == 0:
                    continue
                if isinstance(answer, RawFrame):
                    writer.write(len(answer.frame).to_bytes(4, "big") + answer.frame)
                else:
                    buffers = response_frame(
                        header.api_key, header.api_version, header.correlation_id, answer
                    )
                    writer.writelines(cast("list[bytes]", buffers))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    # What it knows

    def handle(self, request: Any) -> Answer:
        return HANDLERS[request.API_KEY](self, request)

    def api_versions(self, request: object) -> ApiVersionsResponse:
        ranges = {key: request_range(key) for key in HANDLERS} | self.versions
        version = self.transaction_version
        return ApiVersionsResponse(
            api_keys=[ApiVersion(key, low, high) for key, (low, high) in ranges.items()],
            finalized_features=[FinalizedFeatureKey("transaction.version", version, version)],
        )

    def metadata(self, request: MetadataRequest) -> MetadataResponse:
        names = list(self.topics) if request.topics is None else [topic.name for topic in request.topics]
        return MetadataResponse(
            brokers=[MetadataResponseBroker(NODE_ID, "127.0.0.1", self.port)],
            cluster_id="fake",
            controller_id=NODE_ID,
            topics=[self.topic_metadata(name or "") for name in names],
        )

    def topic_metadata(self, name: str) -> MetadataResponseTopic:
        if name not in self.topics:
            return MetadataResponseTopic(error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name=name)
        return MetadataResponseTopic(
            name=name,
            is_internal=name.startswith("__"),
            partitions=[
                MetadataResponsePartition(
                    partition_index=index, leader_id=NODE_ID, replica_nodes=[NODE_ID], isr_nodes=[NODE_ID]
                )
                for index in range(len(self.topics[name]))
            ],
        )

    def create_topics(self, request: CreateTopicsRequest) -> CreateTopicsResponse:
        results = []
        for topic in request.topics:
            exists = topic.name in self.topics
            code = ErrorCode.TOPIC_ALREADY_EXISTS if exists else ErrorCode.NONE
            total = max(topic.num_partitions, 1)
            results.append(CreatableTopicResult(name=topic.name, error_code=code, num_partitions=total))
            if not exists:
                self.topics[topic.name] = [Partition() for _ in range(total)]
                self.configs[topic.name] = {config.name: config.value for config in topic.configs}
        return CreateTopicsResponse(topics=results)

    def delete_topics(self, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
        results = []
        for name in request.topic_names:
            known = self.topics.pop(name, None) is not None
            code = ErrorCode.NONE if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            results.append(DeletableTopicResult(name=name, error_code=code))
        return DeleteTopicsResponse(responses=results)

    def describe_configs(self, request: DescribeConfigsRequest) -> DescribeConfigsResponse:
        results = []
        for resource in request.resources:
            configs = [
                DescribeConfigsResourceResult(name=name, value=value, config_source=1)
                for name, value in self.configs.get(resource.resource_name, {}).items()
            ]
            configs.append(
                DescribeConfigsResourceResult(name="cleanup.policy", value="delete", config_source=5)
            )
            results.append(
                DescribeConfigsResult(
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                    configs=configs,
                )
            )
        return DescribeConfigsResponse(results=results)

    def init_producer_id(self, request: InitProducerIdRequest) -> InitProducerIdResponse:
        known = self.identities.get(request.transactional_id or "")
        if known is not None:
            if request.producer_epoch not in (-1, known[1]):
                return InitProducerIdResponse(error_code=ErrorCode.PRODUCER_FENCED)
            identity = (known[0], known[1] + 1)
        else:
            self._next_producer_id += 1
            identity = (self._next_producer_id, 0)
        if request.transactional_id is not None:
            self.identities[request.transactional_id] = identity
        return InitProducerIdResponse(producer_id=identity[0], producer_epoch=identity[1])

    def add_partitions_to_txn(self, request: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
        results = [
            AddPartitionsToTxnTopicResult(
                topic.name, [AddPartitionsToTxnPartitionResult(index, 0) for index in topic.partitions]
            )
            for topic in request.v3_and_below_topics
        ]
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results)

    def add_offsets_to_txn(self, request: AddOffsetsToTxnRequest) -> AddOffsetsToTxnResponse:
        return AddOffsetsToTxnResponse()

    def txn_offset_commit(self, request: TxnOffsetCommitRequest) -> TxnOffsetCommitResponse:
        topics = []
        for topic in request.topics:
            for each in topic.partitions:
                self.offsets[topic.name, each.partition_index] = each.committed_offset
            answers = [TxnOffsetCommitResponsePartition(each.partition_index) for each in topic.partitions]
            topics.append(TxnOffsetCommitResponseTopic(topic.name, answers))
        return TxnOffsetCommitResponse(topics=topics)

    def offset_fetch(self, request: OffsetFetchRequest) -> OffsetFetchResponse:
        topics = []
        for topic in request.topics or []:
            answers = [
                OffsetFetchResponsePartition(index, self.offsets.get((topic.name, index), -1))
                for index in topic.partition_indexes
            ]
            topics.append(OffsetFetchResponseTopic(topic.name, answers))
        return OffsetFetchResponse(topics=topics)

    def end_txn(self, request: EndTxnRequest) -> EndTxnResponse:
        """As KIP-890 has it: version 5 raises the epoch, and a retry with the epoch before is answered."""
        producer_id, epoch = self.identities[request.transactional_id]
        raises_epoch = self.versions_seen(ApiKey.END_TXN)[-1] >= 5
        is_retry = self.ends[-1:] == [(request.producer_epoch, request.committed)]
        if request.producer_epoch == epoch:
            if not is_retry or raises_epoch:
                self.ends.append((epoch, request.committed))
            if raises_epoch:
                epoch += 1
                self.identities[request.transactional_id] = (producer_id, epoch)
        elif not (is_retry and raises_epoch and request.producer_epoch == epoch - 1):
            return EndTxnResponse(error_code=ErrorCode.PRODUCER_FENCED)
        return EndTxnResponse(producer_id=producer_id, producer_epoch=epoch)

    def find_coordinator(self, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
        return FindCoordinatorResponse(node_id=NODE_ID, host="127.0.0.1", port=self.port)

    def produce(self, request: ProduceRequest) -> ProduceResponse:
        topics = []
        for topic in request.topic_data:
            answers = []
            for given in topic.partition_data:
                batch = bytes(cast("memoryview", given.records))
                code, base_offset = self.topics[topic.name][given.index].append(batch)
                answers.append(
                    PartitionProduceResponse(index=given.index, error_code=code, base_offset=base_offset)
                )
            topics.append(TopicProduceResponse(name=topic.name, partition_responses=answers))
        return ProduceResponse(responses=topics)

    def list_offsets(self, request: ListOffsetsRequest) -> ListOffsetsResponse:
        topics = []
        for topic in request.topics:
            answers = []
            for asked in topic.partitions:
                partition = self.topics[topic.name][asked.partition_index]
                offset = _offset_at(partition, asked.timestamp, request.isolation_level)
                answers.append(
                    ListOffsetsPartitionResponse(partition_index=asked.partition_index, offset=offset)
                )
            topics.append(ListOffsetsTopicResponse(name=topic.name, partitions=answers))
        return ListOffsetsResponse(topics=topics)

    async def fetch(self, request: FetchRequest) -> FetchResponse:
        response = FetchResponse(
            responses=[
                FetchableTopicResponse(
                    topic=topic.topic,
                    partitions=[
                        self.fetch_partition(
                            topic.topic, asked.partition, asked.fetch_offset, asked.partition_max_bytes
                        )
                        for asked in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )
        if not any(answer.records for topic in response.responses for answer in topic.partitions):
            await asyncio.sleep(min(request.max_wait_ms, 20) / 1000)
        return response

    def fetch_partition(self, name: str, index: int, offset: int, max_bytes: int) -> PartitionData:
        partition = self.topics[name][index]
        answer = PartitionData(
            partition_index=index,
            high_watermark=partition.end_offset,
            last_stable_offset=partition.end_offset,
            log_start_offset=partition.log_start_offset,
            aborted_transactions=partition.aborted,
        )
        if not partition.log_start_offset <= offset <= partition.end_offset:
            answer.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
        else:
            answer.records = partition.read(offset, max_bytes)
        return answer


HANDLERS: Final[dict[int, Callable[[FakeBroker, Any], Answer]]] = {
    ApiKey.API_VERSIONS: FakeBroker.api_versions,
    ApiKey.METADATA: FakeBroker.metadata,
    ApiKey.CREATE_TOPICS: FakeBroker.create_topics,
    ApiKey.DELETE_TOPICS: FakeBroker.delete_topics,
    ApiKey.DESCRIBE_CONFIGS: FakeBroker.describe_configs,
    ApiKey.INIT_PRODUCER_ID: FakeBroker.init_producer_id,
    ApiKey.FIND_COORDINATOR: FakeBroker.find_coordinator,
    ApiKey.PRODUCE: FakeBroker.produce,
    ApiKey.LIST_OFFSETS: FakeBroker.list_offsets,
    ApiKey.FETCH: FakeBroker.fetch,
    ApiKey.ADD_PARTITIONS_TO_TXN: FakeBroker.add_partitions_to_txn,
    ApiKey.ADD_OFFSETS_TO_TXN: FakeBroker.add_offsets_to_txn,
    ApiKey.TXN_OFFSET_COMMIT: FakeBroker.txn_offset_commit,
    ApiKey.OFFSET_FETCH: FakeBroker.offset_fetch,
    ApiKey.END_TXN: FakeBroker.end_txn,
}


def _offset_at(partition: Partition, timestamp: int, isolation_level: int) -> int:
    if timestamp == -2:
        return partition.log_start_offset
    if timestamp == -1:
        stable = partition.last_stable_offset
        return partition.end_offset if stable is None or not isolation_level else stable
    for batch in partition.batches:
        for record in read_records(batch):
            if record.timestamp >= timestamp:
                return record.offset
    return -1


def request_class(api_key: int) -> Any:
    name = ApiKey(api_key).name.lower()
    camel = "".join(part.capitalize() for part in name.split("_"))
    return getattr(import_module(f"semel.wire.messages.{name}"), f"{camel}Request")


def request_range(api_key: int) -> tuple[int, int]:
    found = request_class(api_key)
    return found.MIN_VERSION, found.MAX_VERSION


def decode_request(frame: memoryview, at: int, api_key: int, version: int) -> Any:
    request, end = request_class(api_key).decode(frame, at, version)
    assert end == len(frame), f"{len(frame) - end} bytes after a request"
    return request


class ThreadedBroker:
    """A fake broker on a loop of its own, for commands that run theirs."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeBroker:
        self._thread.start()
        assert self._ready.wait(10)
        return self.broker

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with self.broker:
            self._ready.set()
            await self._stop.wait()
