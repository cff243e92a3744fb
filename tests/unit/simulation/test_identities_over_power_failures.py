"""No identity is given twice, whatever the durability and whatever a power failure takes back."""

from __future__ import annotations

import pytest

from semel.journal.settings import Durability
from semel.simulate.machine import Call, Machine
from semel.wire.errors import ErrorCode
from semel.wire.frames import Message
from semel.wire.messages.create_topics import CreatableTopic, CreateTopicsRequest
from semel.wire.messages.end_txn import EndTxnRequest, EndTxnResponse
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from semel.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from semel.wire.records import Record, build_batch

TRANSACTIONAL_ID = "app"
Identity = tuple[int, int]


async def ask(machine: Machine, request: Message, version: int) -> Message:
    call = Call()
    machine.deliver(call, request, version)
    await machine.rest()
    assert call.response is not None
    return call.response


async def started(durability: Durability) -> Machine:
    machine = Machine(1, durability=durability)
    topic = CreatableTopic(name="topic", num_partitions=1, replication_factor=1)
    await ask(machine, CreateTopicsRequest(topics=[topic]), 5)
    # The topic shall survive: it is the end of a transaction that must be lost.
    machine.stop()
    return machine


async def init(machine: Machine, named: Identity = (-1, -1)) -> Identity:
    request = InitProducerIdRequest(
        transactional_id=TRANSACTIONAL_ID,
        transaction_timeout_ms=60_000,
        producer_id=named[0],
        producer_epoch=named[1],
    )
    answer = await ask(machine, request, 5)
    assert isinstance(answer, InitProducerIdResponse)
    assert answer.error_code == ErrorCode.NONE
    return answer.producer_id, answer.producer_epoch


async def produce(machine: Machine, identity: Identity) -> int:
    batch = build_batch(
        [Record(None, b"value")],
        producer_id=identity[0],
        producer_epoch=identity[1],
        base_sequence=0,
        transactional=True,
    )
    part = PartitionProduceData(index=0, records=memoryview(batch))
    topic = TopicProduceData(name="topic", partition_data=[part])
    request = ProduceRequest(transactional_id=TRANSACTIONAL_ID, acks=-1, topic_data=[topic])
    answer = await ask(machine, request, 12)
    assert isinstance(answer, ProduceResponse)
    return answer.responses[0].partition_responses[0].error_code


async def commit(machine: Machine, identity: Identity) -> Identity:
    request = EndTxnRequest(
        transactional_id=TRANSACTIONAL_ID,
        producer_id=identity[0],
        producer_epoch=identity[1],
        committed=True,
    )
    answer = await ask(machine, request, 5)
    assert isinstance(answer, EndTxnResponse)
    assert answer.error_code == ErrorCode.NONE
    return answer.producer_id, answer.producer_epoch


def lose_power(machine: Machine) -> Machine:
    """What is left when nothing survives that was not synced."""
    return machine.fork(unlucky=True)


async def test_an_epoch_that_a_power_failure_took_back_is_not_given_to_another() -> None:
    machine = await started("os")
    identity = await init(machine)
    assert await produce(machine, identity) == ErrorCode.NONE
    told = await commit(machine, identity)
    after = lose_power(machine)
    transaction = after.life.broker.transactions.by_id[TRANSACTIONAL_ID]
    assert (transaction.producer_id, transaction.epoch) == identity, "nothing was lost: this shows nothing"
    successor = await init(after)
    assert successor[0] != told[0]
    assert await produce(after, told) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert await produce(after, successor) == ErrorCode.NONE


async def test_it_is_remembered_over_a_stop_in_good_order_a_snapshot_and_another_durability() -> None:
    machine = await started("os")
    identity = await init(machine)
    assert await produce(machine, identity) == ErrorCode.NONE
    told = await commit(machine, identity)
    after = lose_power(machine)
    later = Machine(1, durability="fsync", disk=after.disk)
    later.begin_checkpoint(flush=True)
    await later.rest()
    later.stop()
    assert (await init(later))[0] != told[0]


async def test_the_first_end_that_is_not_synced_counts_already() -> None:
    machine = await started("fsync")
    identity = await init(machine)
    assert await produce(machine, identity) == ErrorCode.NONE
    machine.stop()
    lazy = Machine(1, durability="os", disk=machine.disk)
    told = await commit(lazy, identity)
    assert await init(lose_power(lazy)) != told


async def test_whoever_goes_on_after_a_restart_has_a_new_id_from_the_end_of_its_transaction() -> None:
    machine = await started("os")
    identity = await init(machine)
    assert await produce(machine, identity) == ErrorCode.NONE
    machine.kill()
    raised = await commit(machine, identity)
    assert raised[0] != identity[0]
    assert await commit(machine, identity) == raised, "a retry gets the same answer"
    assert await produce(machine, raised) == ErrorCode.NONE
    assert await commit(machine, raised) == (raised[0], raised[1] + 1)


@pytest.mark.parametrize("named", (False, True))
async def test_where_everything_is_synced_an_id_keeps_its_epochs_over_restarts(named: bool) -> None:
    machine = await started("fsync")
    identity = await init(machine)
    assert await produce(machine, identity) == ErrorCode.NONE
    raised = await commit(machine, identity)
    assert raised == (identity[0], identity[1] + 1)
    after = lose_power(machine)
    assert await init(after, raised if named else (-1, -1)) == (identity[0], identity[1] + 2)
