"""`semel bench`: how fast a broker is, seen from a load that costs little itself."""

import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Final, TypeAlias, cast

import click
import uvloop

from semel.cli.load import Answered, Load, Meter, Probe, Timing, encode_frame, run_loads
from semel.cli.options import bootstrap_option
from semel.cli.tables import output_option, print_json, print_table
from semel.cli.txn_load import TxnLoad, TxnMeter
from semel.client.admin import EARLIEST, LATEST, READ_UNCOMMITTED, Admin
from semel.client.cluster import GROUP_COORDINATOR, TRANSACTION_COORDINATOR, Cluster
from semel.client.connection import Connection, Request
from semel.client.consumer import FETCH_VERSION
from semel.client.errors import check
from semel.client.metadata import Address, TopicPartition
from semel.client.producer import ACKS_ALL, PRODUCE_VERSION
from semel.errors import BrokerError, ConfigError
from semel.wire.batch import MAX_SEQUENCE, iter_batches, write_crc
from semel.wire.errors import ErrorCode
from semel.wire.frames import decode_response
from semel.wire.messages.api_versions import ApiVersionsRequest
from semel.wire.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from semel.wire.messages.find_coordinator import FindCoordinatorRequest
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from semel.wire.messages.metadata import MetadataRequest, MetadataRequestTopic
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

SEQUENCE: Final = Struct(">i")
BASE_SEQUENCE_AT: Final = 53
# The same bytes in every run, and none that compress away.
SEED: Final = 1
MB: Final = 1_000_000
GB: Final = 1_000_000_000
TOPIC: Final = "semel-bench"
GROUP: Final = "semel-bench"
FETCH_WAIT_MS: Final = 100
# The newest with which clients of transaction version 1 identify themselves.
INIT_PRODUCER_ID_VERSION: Final = 4
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True, frozen=True)
class Report:
    """What a run measured; None where it does not apply."""

    seconds: float
    requests: int
    requests_per_s: float
    records: int
    records_per_s: float
    mb_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    broker_cpu_s: float | None
    broker_cpu_s_per_gb: float | None
    broker_cpu_s_per_1000_requests: float | None
    broker_rss_mb: float | None


@dataclass(slots=True, frozen=True)
class TxnReport:
    """What a run of transactions measured; None where it does not apply."""

    seconds: float
    transactions: int
    transactions_per_s: float
    records_per_s: float
    transaction_p50_ms: float
    transaction_p99_ms: float
    commit_p50_ms: float
    commit_p99_ms: float
    pauses: int
    """How often the broker asked for patience (CONCURRENT_TRANSACTIONS)."""
    broker_cpu_ms_per_transaction: float | None
    broker_rss_mb: float | None


class ProcessProbe:
    """Reads the CPU time and the memory of a local process, twice."""

    def __init__(self, pid: int) -> None:
        self._directory = Path("/proc") / str(pid)
        self._cpu_s: list[float] = []
        if not self._directory.exists():
            raise ConfigError(f"there is no process {pid} to measure: --pid is the broker's, on this machine")

    def read(self) -> None:
        # The name of the process, in parentheses, may itself contain spaces.
        fields = (self._directory / "stat").read_text().rpartition(")")[2].split()
        self._cpu_s.append((int(fields[11]) + int(fields[12])) / TICKS_PER_S)

    def cpu_s(self) -> float:
        return self._cpu_s[-1] - self._cpu_s[0]

    def rss_mb(self) -> float:
        pages = int((self._directory / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MB


Prepare: TypeAlias = Callable[[Cluster], Awaitable[tuple[Address, list[Load]]]]


# Loads


class ProduceLoad:
    """The same batch again and again, with the next sequence numbers."""

    def __init__(self, connection: Connection, where: TopicPartition, batch: bytearray, records: int) -> None:
        topic = TopicProduceData(
            name=where.topic, partition_data=[PartitionProduceData(index=where.partition, records=batch)]
        )
        request = ProduceRequest(acks=ACKS_ALL, timeout_ms=30_000, topic_data=[topic])
        self._version = connection.version_of(request, PRODUCE_VERSION)
        self._frame = encode_frame(request, self._version)
        self._batch_at = self._frame.index(batch)
        self._batch_end = self._batch_at + len(batch)
        self._where = where
        self._records = records
        self._sequence = 0
        self._answered = Answered(records, len(batch))

    def next_frame(self) -> bytearray:
        # The transport may still hold the last frame, so each is a copy.
        frame = self._frame[:]
        SEQUENCE.pack_into(frame, self._batch_at + BASE_SEQUENCE_AT, self._sequence)
        write_crc(memoryview(frame)[self._batch_at : self._batch_end])
        self._sequence = (self._sequence + self._records) & MAX_SEQUENCE
        return frame

    def take(self, frame: memoryview) -> Answered:
        _, response = decode_response(frame, ProduceRequest.API_KEY, self._version, ProduceResponse)
        answer = response.responses[0].partition_responses[0]
        check(answer.error_code, f"a batch for {self._where} was not accepted", answer.error_message)
        return self._answered


class FetchLoad:
    """Reads partitions from start to end, once or over and over; batches are counted and not opened."""

    def __init__(
        self,
        connection: Connection,
        starts: dict[TopicPartition, int],
        ends: dict[TopicPartition, int],
        *,
        max_bytes: int,
        repeat: bool,
    ) -> None:
        self._starts = starts
        self._ends = ends
        self._positions = dict(starts)
        self._max_bytes = max_bytes
        self._repeat = repeat
        self._version = connection.version_of(FetchRequest(), FETCH_VERSION)

    def next_frame(self) -> bytearray | None:
        unread = [where for where, position in self._positions.items() if position < self._ends[where]]
        if not unread:
            if not self._repeat:
                return None
            self._positions = dict(self._starts)
            unread = list(self._positions)
        partitions = [
            FetchPartition(
                partition=where.partition,
                fetch_offset=self._positions[where],
                partition_max_bytes=self._max_bytes,
            )
            for where in unread
        ]
        request = FetchRequest(
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=self._max_bytes,
            isolation_level=READ_UNCOMMITTED,
            topics=[FetchTopic(topic=unread[0].topic, partitions=partitions)],
        )
        return encode_frame(request, self._version)

    def take(self, frame: memoryview) -> Answered:
        _, response = decode_response(frame, FetchRequest.API_KEY, self._version, FetchResponse)
        records = payload_bytes = 0
        for topic in response.responses:
            for answer in topic.partitions:
                where = TopicPartition(topic.topic, answer.partition_index)
                check(answer.error_code, f"{where} cannot be read")
                # Who was served goes last, so that every partition gets its turn.
                position = self._positions.pop(where)
                for header, _batch in iter_batches(cast("memoryview", answer.records or b"")):
                    records += header.record_count
                    payload_bytes += header.size
                    position = header.last_offset + 1
                self._positions[where] = position
        return Answered(records, payload_bytes)


class RepeatLoad:
    """One small request, again and again."""

    def __init__(self, connection: Connection, request: Request) -> None:
        self._frame = encode_frame(request, connection.version_of(request))

    def next_frame(self) -> bytearray:
        return self._frame[:]

    def take(self, frame: memoryview) -> Answered:
        return Answered(0, len(frame))


# Commands


@click.group
def command() -> None:
    """Measure a broker, Semel or any Kafka.

    Requests are prebuilt and sent over raw connections, so that the load takes little of the CPU that the
    broker could use. With --pid the CPU time of a broker on this machine is reported too.
    """


connections_option = click.option(
    "--connections", "-c", type=click.IntRange(min=1), default=1, show_default=True, help="Connections."
)
in_flight_option = click.option(
    "--in-flight",
    type=click.IntRange(1, 5),
    default=5,
    show_default=True,
    help="Requests in flight per connection.",
)
seconds_option = click.option(
    "--seconds",
    "-s",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="How long to measure.",
)
warmup_option = click.option(
    "--warmup", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Seconds before that."
)
topic_option = click.option(
    "--topic", "-t", default=TOPIC, show_default=True, help="Where to write and read."
)
pid_option = click.option("--pid", type=int, help="The broker's process: report its CPU time and memory.")


@command.command
@topic_option
@click.option(
    "--partitions", "-p", type=click.IntRange(min=1), default=1, show_default=True, help="If it is new."
)
@click.option(
    "--record-bytes", type=click.IntRange(min=1), default=100, show_default=True, help="Value size."
)
@click.option(
    "--batch-records", type=click.IntRange(min=1), default=150, show_default=True, help="Batch size."
)
@connections_option
@in_flight_option
@seconds_option
@warmup_option
@pid_option
@bootstrap_option
@output_option
def produce(
    topic: str,
    partitions: int,
    record_bytes: int,
    batch_records: int,
    connections: int,
    in_flight: int,
    seconds: float,
    warmup: float,
    pid: int | None,
    bootstrap: str,
    output: str,
) -> None:
    """Write batches with acks=all, each connection an idempotent producer of its own."""
    rng = random.Random(SEED)
    records = [Record(None, rng.randbytes(record_bytes), 0) for _ in range(batch_records)]
    prepare = partial(_produce_loads, topic, partitions, records, connections)
    _measure(bootstrap, prepare, in_flight, Timing(warmup, seconds), pid, output)


async def _produce_loads(
    topic: str, partitions: int, records: list[Record], connections: int, cluster: Cluster
) -> tuple[Address, list[Load]]:
    await _make_topic(cluster, topic, partitions)
    found = await cluster.retry(partial(cluster.topic, topic))
    leader = await cluster.connection(found.partitions[0].leader_id)
    loads: list[Load] = []
    for number in range(connections):
        identity = await leader.request(
            InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0), InitProducerIdResponse
        )
        check(identity.error_code, "the broker gave no producer id")
        batch = build_batch(
            records,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=0,
        )
        where = TopicPartition(topic, number % len(found.partitions))
        loads.append(ProduceLoad(leader, where, batch, len(records)))
    return leader.address, loads


@command.command
@topic_option
@connections_option
@click.option(
    "--max-bytes", type=click.IntRange(min=1), default=1024 * 1024, show_default=True, help="Per fetch."
)
@click.option(
    "--seconds",
    "-s",
    type=click.FloatRange(min=0.1),
    help="Read over and over for so long, and not just once.",
)
@pid_option
@bootstrap_option
@output_option
def consume(
    topic: str,
    connections: int,
    max_bytes: int,
    seconds: float | None,
    pid: int | None,
    bootstrap: str,
    output: str,
) -> None:
    """Read a topic from start to end; partitions are shared out among the connections."""
    prepare = partial(_consume_loads, topic, connections, max_bytes, seconds is not None)
    _measure(bootstrap, prepare, 1, Timing(0, seconds), pid, output)


async def _consume_loads(
    topic: str, connections: int, max_bytes: int, repeat: bool, cluster: Cluster
) -> tuple[Address, list[Load]]:
    admin = Admin(cluster)
    found = await admin.describe_topic(topic)
    leader = await cluster.connection(found.partitions[0].leader_id)
    partitions = [TopicPartition(topic, each.partition) for each in found.partitions]
    starts = await admin.list_offsets(dict.fromkeys(partitions, EARLIEST))
    ends = await admin.list_offsets(dict.fromkeys(partitions, LATEST))
    if all(starts[where].offset == ends[where].offset for where in partitions):
        raise ConfigError(f"topic {topic!r} is empty: fill it first, with `semel bench produce`")
    loads: list[Load] = []
    for number in range(min(connections, len(partitions))):
        mine = partitions[number::connections]
        loads.append(
            FetchLoad(
                leader,
                {where: starts[where].offset for where in mine},
                {where: ends[where].offset for where in mine},
                max_bytes=max_bytes,
                repeat=repeat,
            )
        )
    return leader.address, loads


@command.command
@click.option(
    "--api",
    type=click.Choice(["api-versions", "metadata", "list-offsets", "find-coordinator", "init-producer-id"]),
    default="metadata",
    show_default=True,
    help="The request to repeat.",
)
@topic_option
@connections_option
@in_flight_option
@seconds_option
@warmup_option
@pid_option
@bootstrap_option
@output_option
def requests(
    api: str,
    topic: str,
    connections: int,
    in_flight: int,
    seconds: float,
    warmup: float,
    pid: int | None,
    bootstrap: str,
    output: str,
) -> None:
    """Repeat one small request."""
    prepare = partial(_request_loads, _small_request(api, topic), topic, connections)
    _measure(bootstrap, prepare, in_flight, Timing(warmup, seconds), pid, output)


async def _request_loads(
    request: Request, topic: str, connections: int, cluster: Cluster
) -> tuple[Address, list[Load]]:
    await _make_topic(cluster, topic, 1)
    leader = await cluster.connection(
        await cluster.retry(partial(cluster.leader_id, TopicPartition(topic, 0)))
    )
    return leader.address, [RepeatLoad(leader, request) for _ in range(connections)]


def _small_request(api: str, topic: str) -> Request:
    if api == "api-versions":
        return ApiVersionsRequest(client_software_name=GROUP, client_software_version="1")
    if api == "list-offsets":
        partition = ListOffsetsPartition(partition_index=0, timestamp=LATEST)
        return ListOffsetsRequest(
            replica_id=-1, topics=[ListOffsetsTopic(name=topic, partitions=[partition])]
        )
    if api == "find-coordinator":
        return FindCoordinatorRequest(key=GROUP, key_type=GROUP_COORDINATOR, coordinator_keys=[GROUP])
    if api == "init-producer-id":
        return InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0)
    return MetadataRequest(topics=[MetadataRequestTopic(name=topic)])


@command.command
@topic_option
@click.option(
    "--producers", "-c", type=click.IntRange(min=1), default=1, show_default=True, help="Transactional ids."
)
@click.option(
    "--partitions", "-p", type=click.IntRange(min=1), default=1, show_default=True, help="Per transaction."
)
@click.option(
    "--records", type=click.IntRange(min=1), default=1, show_default=True, help="Per partition, in one batch."
)
@click.option(
    "--record-bytes", type=click.IntRange(min=1), default=100, show_default=True, help="Value size."
)
@click.option(
    "--pause-ms",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Pause after CONCURRENT_TRANSACTIONS.",
)
@seconds_option
@warmup_option
@pid_option
@bootstrap_option
@output_option
def txn(
    topic: str,
    producers: int,
    partitions: int,
    records: int,
    record_bytes: int,
    pause_ms: float,
    seconds: float,
    warmup: float,
    pid: int | None,
    bootstrap: str,
    output: str,
) -> None:
    """Commit small transactions, each producer one after the other (transaction version 1)."""
    rng = random.Random(SEED)
    now_ms = time.time_ns() // 1_000_000
    values = [Record(None, rng.randbytes(record_bytes), now_ms) for _ in range(records)]
    meter = TxnMeter()
    prepare = partial(_txn_loads, topic, producers, partitions, values, pause_ms / 1000, meter)
    report = uvloop.run(_run_txn(bootstrap, prepare, meter, Timing(warmup, seconds), pid))
    _print(asdict(report), output)


async def _txn_loads(
    topic: str,
    producers: int,
    partitions: int,
    records: list[Record],
    pause_s: float,
    meter: TxnMeter,
    cluster: Cluster,
) -> tuple[Address, list[Load]]:
    await _make_topic(cluster, topic, partitions)
    found = await cluster.retry(partial(cluster.topic, topic))
    leader = await cluster.connection(found.partitions[0].leader_id)
    indexes = [partition.partition for partition in found.partitions[:partitions]]
    loads: list[Load] = []
    for number in range(producers):
        transactional_id = f"{TOPIC}-{number}"
        identity = await cluster.retry(partial(_identify, cluster, transactional_id))
        loads.append(TxnLoad(transactional_id, identity, topic, indexes, records, pause_s, meter))
    return leader.address, loads


async def _identify(cluster: Cluster, transactional_id: str) -> InitProducerIdResponse:
    coordinator = await cluster.coordinator(TRANSACTION_COORDINATOR, transactional_id)
    identity = await coordinator.request(
        InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=60_000),
        InitProducerIdResponse,
        max_version=INIT_PRODUCER_ID_VERSION,
    )
    check(identity.error_code, f"the broker gave {transactional_id!r} no producer id")
    return identity


async def _run_txn(
    bootstrap: str, prepare: Prepare, meter: TxnMeter, timing: Timing, pid: int | None
) -> TxnReport:
    process = None if pid is None else ProcessProbe(pid)
    probes: list[Probe] = [meter] if process is None else [meter, process]
    async with Cluster(bootstrap) as cluster:
        address, loads = await prepare(cluster)
    answers, elapsed_s = await run_loads(address, loads, 1, timing, probes)
    transactions_s, commits_s = meter.measured()
    if not commits_s:
        raise ConfigError("nothing was committed in the time measured: measure for longer")
    return TxnReport(
        seconds=elapsed_s,
        transactions=len(commits_s),
        transactions_per_s=len(commits_s) / elapsed_s,
        records_per_s=answers.records / elapsed_s,
        transaction_p50_ms=_percentile_ms(transactions_s, 50),
        transaction_p99_ms=_percentile_ms(transactions_s, 99),
        commit_p50_ms=_percentile_ms(commits_s, 50),
        commit_p99_ms=_percentile_ms(commits_s, 99),
        pauses=meter.pauses,
        broker_cpu_ms_per_transaction=None if process is None else process.cpu_s() / len(commits_s) * 1000,
        broker_rss_mb=None if process is None else process.rss_mb(),
    )


async def _make_topic(cluster: Cluster, name: str, partitions: int) -> None:
    try:
        await Admin(cluster).create_topic(name, partitions=partitions)
    except BrokerError as error:
        if error.code != ErrorCode.TOPIC_ALREADY_EXISTS:
            raise


# Measuring and reporting


def _measure(
    bootstrap: str, prepare: Prepare, in_flight: int, timing: Timing, pid: int | None, output: str
) -> None:
    report = uvloop.run(_run(bootstrap, prepare, in_flight, timing, pid))
    _print(asdict(report), output)


def _print(report: dict[str, float | None], output: str) -> None:
    measured = {name: value for name, value in report.items() if value is not None}
    if output == "json":
        print_json(measured)
    else:
        print_table(("MEASURED", "VALUE"), [(name, _figure(value)) for name, value in measured.items()])


async def _run(bootstrap: str, prepare: Prepare, in_flight: int, timing: Timing, pid: int | None) -> Report:
    process = None if pid is None else ProcessProbe(pid)
    probes: list[Probe] = [] if process is None else [process]
    async with Cluster(bootstrap) as cluster:
        address, loads = await prepare(cluster)
    meter, elapsed_s = await run_loads(address, loads, in_flight, timing, probes)
    return _report(meter, elapsed_s, process)


def _report(meter: Meter, elapsed_s: float, process: ProcessProbe | None) -> Report:
    if not meter.requests:
        raise ConfigError("nothing was answered in the time measured: measure for longer")
    latencies_s = sorted(meter.latencies_s)
    cpu_s = None if process is None else process.cpu_s()
    return Report(
        seconds=elapsed_s,
        requests=meter.requests,
        requests_per_s=meter.requests / elapsed_s,
        records=meter.records,
        records_per_s=meter.records / elapsed_s,
        mb_per_s=meter.payload_bytes / elapsed_s / MB,
        p50_ms=_percentile_ms(latencies_s, 50),
        p99_ms=_percentile_ms(latencies_s, 99),
        max_ms=latencies_s[-1] * 1000,
        broker_cpu_s=cpu_s,
        broker_cpu_s_per_gb=None if cpu_s is None else cpu_s / meter.payload_bytes * GB,
        broker_cpu_s_per_1000_requests=None if cpu_s is None else cpu_s / meter.requests * 1000,
        broker_rss_mb=None if process is None else process.rss_mb(),
    )


def _percentile_ms(ordered_s: list[float], percent: int) -> float:
    return ordered_s[min(len(ordered_s) * percent // 100, len(ordered_s) - 1)] * 1000


def _figure(value: float) -> str:
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
