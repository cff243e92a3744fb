"""InitProducerId (22): an id for an idempotent producer.

A producer without a transactional id gets a fresh id at epoch 0, or, if it names its own (KIP-360), the
next epoch of it.
"""

from __future__ import annotations

from typing import Final

from semel.broker.core import Broker
from semel.broker.decision import Caller, Decision, Now
from semel.wire.errors import ErrorCode
from semel.wire.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

MAX_EPOCH: Final = 2**15 - 1


def init_producer_id(broker: Broker, request: InitProducerIdRequest, caller: Caller, now: Now) -> Decision:
    if request.transactional_id is not None:
        return Decision(
            InitProducerIdResponse(
                error_code=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, producer_epoch=-1
            )
        )
    producer_id, reserved = broker.producer_ids.take()
    reply = InitProducerIdResponse(error_code=0, producer_id=producer_id, producer_epoch=0)
    return Decision(reply, [] if reserved is None else [reserved], sync=reserved is not None)
