"""The states of deliveries, transactions and statements, and every change that there is.

A delivery is open until its subscriber acknowledges it (sealed: from then on only the owner of its partition
decides), gives it back (returned), or loses it with its partition (lost). A transaction is pending, then
committed or rejected; each statement is pending, applied, then committed or rejected.
"""

from enum import Enum
from typing import Final


class DeliveryState(Enum):
    OPEN = "open"
    SEALED = "sealed"
    ACKNOWLEDGED = "acknowledged"
    RETURNED = "returned"
    LOST = "lost"


class TransactionState(Enum):
    PENDING = "pending"
    COMMITTED = "committed"
    REJECTED = "rejected"


class StatementState(Enum):
    PENDING = "pending"
    APPLIED = "applied"
    COMMITTED = "committed"
    REJECTED = "rejected"

    # Of large batches each record is a statement, and Enum computes its hash in Python.
    __hash__ = object.__hash__


DELIVERY_ALLOWED_FROM: Final = {
    DeliveryState.OPEN: set[DeliveryState](),
    DeliveryState.SEALED: {DeliveryState.OPEN},
    DeliveryState.ACKNOWLEDGED: {DeliveryState.SEALED},
    DeliveryState.RETURNED: {DeliveryState.OPEN, DeliveryState.SEALED},
    DeliveryState.LOST: {DeliveryState.OPEN, DeliveryState.SEALED},
}

TRANSACTION_ALLOWED_FROM: Final = {
    TransactionState.PENDING: set[TransactionState](),
    TransactionState.COMMITTED: {TransactionState.PENDING},
    TransactionState.REJECTED: {TransactionState.PENDING},
}

STATEMENT_ALLOWED_FROM: Final = {
    StatementState.PENDING: set[StatementState](),
    StatementState.APPLIED: {StatementState.PENDING},
    StatementState.COMMITTED: {StatementState.APPLIED},
    StatementState.REJECTED: {StatementState.PENDING, StatementState.APPLIED},
}
