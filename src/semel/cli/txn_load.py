"""A load of transactions: join, write, commit, and again; each connection is a transactional producer.

The requests are those of transaction version 1 (AddPartitionsToTxn v3, Produce v9, EndTxn v3), which every
broker speaks, so that brokers can be compared. A broker that is still writing the markers of the last
transaction answers CONCURRENT_TRANSACTIONS; the request is then repeated after a fixed pause.
"""

import time
from array import array
from struct import Struct
from typing import Final

from semel.cli.load import Answered, encode_frame
from semel.client.errors import check
from semel.wire.batch import BASE_SEQUENCE_AT, MAX_SEQUENCE, write_crc
from semel.wire.errors import ErrorCode
from semel.wire.frames import decode_response
from semel.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from semel.wire.messages.end_txn import EndTxnRequest, EndTxnResponse
from semel.wire.messages.init_producer_id import InitProducerIdResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

ADD_PARTITIONS_VERSION: Final = 3
PRODUCE_VERSION: Final = 9
END_TXN_VERSION: Final = 3
ACKS_ALL: Final = -1
_SEQUENCE: Final = Struct(">i")
_ADD: Final = 0
_PRODUCE: Final = 1
_END: Final = 2


class TxnMeter:
    """How long transactions and their commits took; `read` it at both ends of the measured time."""

    __slots__ = ("_marks", "commits_s", "pauses", "transactions_s")

    def __init__(self) -> None:
        self.transactions_s: array[float] = array("d")
        self.commits_s: array[float] = array("d")
        self.pauses = 0
        self._marks: list[int] = []

    def read(self) -> None:
        self._marks.append(len(self.commits_s))

    def measured(self) -> tuple[list[float], list[float]]:
        """Whole transactions and commits alone, in order of their length."""
        begin, end = self._marks[0], self._marks[-1]
        return sorted(self.transactions_s[begin:end]), sorted(self.commits_s[begin:end])


class TxnLoad:
    """One transactional producer, one transaction after the other. Give it one request in flight."""

    def __init__(
        self,
        transactional_id: str,
        identity: InitProducerIdResponse,
        topic: str,
        partitions: list[int],
        records: list[Record],
        pause_s: float,
        meter: TxnMeter,
    ) -> None:
        producer = (identity.producer_id, identity.producer_epoch)
        self._transactional_id = transactional_id
        self._meter = meter
        self._step = _ADD
        self._began = 0.0
        self._sent = 0.0
        self._sequence = 0
        self._records = len(records)
        batch = build_batch(
            records, producer_id=producer[0], producer_epoch=producer[1], base_sequence=0, transactional=True
        )
        self._batch_bytes = len(batch)
        self._nothing = Answered(0, 0)
        self._committed = Answered(len(records) * len(partitions), len(batch) * len(partitions))
        self._paused = Answered(0, 0, pause_s)
        self._add = encode_frame(
            AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=transactional_id,
                v3_and_below_producer_id=producer[0],
                v3_and_below_producer_epoch=producer[1],
                v3_and_below_topics=[AddPartitionsToTxnTopic(name=topic, partitions=partitions)],
            ),
            ADD_PARTITIONS_VERSION,
        )
        data = TopicProduceData(
            name=topic,
            partition_data=[PartitionProduceData(index=index, records=batch) for index in partitions],
        )
        self._produce = encode_frame(
            ProduceRequest(
                transactional_id=transactional_id, acks=ACKS_ALL, timeout_ms=30_000, topic_data=[data]
            ),
            PRODUCE_VERSION,
        )
        self._batches_at = _all_places(self._produce, batch)
        self._end = encode_frame(
            EndTxnRequest(transactional_id, producer[0], producer[1], committed=True), END_TXN_VERSION
        )

    def next_frame(self) -> bytearray:
        self._sent = time.perf_counter()
        if self._step == _ADD:
            self._began = self._began or self._sent
            return self._add[:]
        if self._step == _PRODUCE:
            return self._next_produce()
        return self._end[:]

    def _next_produce(self) -> bytearray:
        frame = self._produce[:]
        for at in self._batches_at:
            _SEQUENCE.pack_into(frame, at + BASE_SEQUENCE_AT, self._sequence)
            write_crc(memoryview(frame)[at : at + self._batch_bytes])
        self._sequence = (self._sequence + self._records) & MAX_SEQUENCE
        return frame

    def take(self, frame: memoryview) -> Answered:
        if self._step == _ADD:
            return self._take_add(frame)
        if self._step == _PRODUCE:
            self._take_produce(frame)
            self._step = _END
            return self._nothing
        return self._take_end(frame)

    def _take_add(self, frame: memoryview) -> Answered:
        _, response = decode_response(
            frame, AddPartitionsToTxnRequest.API_KEY, ADD_PARTITIONS_VERSION, AddPartitionsToTxnResponse
        )
        code = response.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
        if code == ErrorCode.CONCURRENT_TRANSACTIONS:
            return self._pause()
        check(code, f"partitions could not join the transaction of {self._transactional_id!r}")
        self._step = _PRODUCE
        return self._nothing

    def _take_produce(self, frame: memoryview) -> None:
        _, response = decode_response(frame, ProduceRequest.API_KEY, PRODUCE_VERSION, ProduceResponse)
        for answer in response.responses[0].partition_responses:
            check(answer.error_code, f"a batch of {self._transactional_id!r} was not accepted")

    def _take_end(self, frame: memoryview) -> Answered:
        _, response = decode_response(frame, EndTxnRequest.API_KEY, END_TXN_VERSION, EndTxnResponse)
        if response.error_code == ErrorCode.CONCURRENT_TRANSACTIONS:
            return self._pause()
        check(response.error_code, f"the transaction of {self._transactional_id!r} was not committed")
        now = time.perf_counter()
        self._meter.commits_s.append(now - self._sent)
        self._meter.transactions_s.append(now - self._began)
        self._began = 0.0
        self._step = _ADD
        return self._committed

    def _pause(self) -> Answered:
        self._meter.pauses += 1
        return self._paused


def _all_places(frame: bytearray, batch: bytearray) -> list[int]:
    places: list[int] = []
    at = frame.find(batch)
    while at >= 0:
        places.append(at)
        at = frame.find(batch, at + len(batch))
    return places
