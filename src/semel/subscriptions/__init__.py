"""ACID subscriptions: consume, publish and acknowledge in one transaction; see docs/subscriptions.md."""

from semel.subscriptions.backoff import RedeliveryBackoff
from semel.subscriptions.delivery import Batch, Delivery, Placed, Transaction
from semel.subscriptions.errors import (
    DeliveryLostError,
    DeliveryStateError,
    OutcomeUnknownError,
    SubscriptionClosedError,
    TransactionRejectedError,
)
from semel.subscriptions.options import SubscriptionOptions
from semel.subscriptions.subscription import Channel, Subscription, subscribe

__all__ = [
    "Batch",
    "Channel",
    "Delivery",
    "DeliveryLostError",
    "DeliveryStateError",
    "OutcomeUnknownError",
    "Placed",
    "RedeliveryBackoff",
    "Subscription",
    "SubscriptionClosedError",
    "SubscriptionOptions",
    "Transaction",
    "TransactionRejectedError",
    "subscribe",
]
