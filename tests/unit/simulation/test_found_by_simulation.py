"""What the simulation found, each in the shortest schedule that shows it."""

from __future__ import annotations

import asyncio

from semel.simulate.machine import Call, Machine
from semel.simulate.reading import read_whole
from semel.verify.ledger import Place
from semel.wire.errors import ErrorCode
from semel.wire.messages.create_topics import CreatableTopic, CreateTopicsRequest
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

PLACE: Place = ("topic", 0)


def ask(machine: Machine, request: CreateTopicsRequest | InitProducerIdRequest | ProduceRequest) -> Call:
    call = Call()
    machine.deliver(call, request, 5 if not isinstance(request, ProduceRequest) else 9)
    return call


async def machine_with_topic() -> Machine:
    machine = Machine(1)
    topic = CreatableTopic(name=PLACE[0], num_partitions=1, replication_factor=1)
    ask(machine, CreateTopicsRequest(topics=[topic]))
    await machine.rest()
    return machine


async def producer_id(machine: Machine) -> int:
    call = ask(machine, InitProducerIdRequest(transaction_timeout_ms=1000))
    await machine.rest()
    assert isinstance(call.response, InitProducerIdResponse)
    return call.response.producer_id


def produce(value: bytes, producer: int, sequence: int) -> ProduceRequest:
    batch = build_batch([Record(None, value)], producer_id=producer, producer_epoch=0, base_sequence=sequence)
    part = PartitionProduceData(index=PLACE[1], records=memoryview(batch))
    return ProduceRequest(acks=-1, topic_data=[TopicProduceData(name=PLACE[0], partition_data=[part])])


async def test_a_retry_is_not_acknowledged_if_the_journal_did_not_take_the_first_attempt() -> None:
    machine = await machine_with_topic()
    producer = await producer_id(machine)
    ask(machine, produce(b"first", producer, 0))
    # The second write of the cycle is the one to the segment: the journal has the batch, and fails.
    machine.disk.faults.fail("write", machine.disk.faults.counts["write"] + 2)
    machine.write()
    assert machine.journal.failure is not None
    # The loop has not heard of it yet. This one is decided and applied, and then the journal refuses it.
    ask(machine, produce(b"second", producer, 1))
    again = ask(machine, produce(b"second", producer, 1))
    await machine.rest()
    assert read_whole(machine.life, PLACE).stored == {0: b"first"}
    assert again.response is None, "acknowledged, and it is nowhere"
    retried = ask(machine, produce(b"second", producer, 1))
    await machine.rest()
    assert isinstance(retried.response, ProduceResponse)
    assert retried.response.responses[0].partition_responses[0].error_code == ErrorCode.NONE
    assert read_whole(machine.life, PLACE).stored == {0: b"first", 1: b"second"}


async def test_a_flush_keeps_the_journal_of_what_is_not_visible_yet() -> None:
    machine = await machine_with_topic()
    producer = await producer_id(machine)
    ask(machine, produce(b"first", producer, 0))
    machine.write()
    assert machine.life.shown < machine.journal.released
    machine.begin_checkpoint(flush=True)
    await machine.breathe()
    await machine.rest()
    machine.crash()
    assert read_whole(machine.life, PLACE).stored == {0: b"first"}


async def test_a_broker_recovers_if_a_flush_and_the_journal_fail_at_once() -> None:
    machine = await machine_with_topic()
    producer = await producer_id(machine)
    ask(machine, produce(b"first", producer, 0))
    await machine.rest()
    ask(machine, produce(b"second", producer, 1))
    machine.disk.faults.fail("write", machine.disk.faults.counts["write"] + 2)
    machine.write()
    assert machine.journal.failure is not None
    machine.begin_checkpoint(flush=True)
    await asyncio.sleep(0)
    machine.disk.faults.fail_next("sync")
    machine.work()
    await machine.breathe()
    await machine.breathe()
    assert machine.is_recovering
    await machine.rest()
    assert read_whole(machine.life, PLACE).stored == {0: b"first", 1: b"second"}
