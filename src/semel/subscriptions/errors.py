"""What a subscriber may be told, sorted by what it can do about it."""

from semel.errors import ConfigError, ProtocolError, SemelError


class DeliveryStateError(ProtocolError):
    """A call that the delivery is past: a second ack, a statement after the ack, an unknown delivery."""


class TransactionRejectedError(SemelError):
    """The transaction was rolled back and will not be committed; its delivery comes again."""


class DeliveryLostError(SemelError):
    """Somebody else has the delivery: the partition moved, or the delivery's time was up. Drop the work."""


class OutcomeUnknownError(DeliveryLostError):
    """The commit was sent and the partition was lost: the entry tells the next owner what became of it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} was lost while it was committed: either all of it is, or whoever has the partition now "
            "delivers it again"
        )


class SubscriptionClosedError(SemelError):
    """The subscription was closed while somebody waited for a delivery."""


__all__ = [
    "ConfigError",
    "DeliveryLostError",
    "DeliveryStateError",
    "OutcomeUnknownError",
    "SubscriptionClosedError",
    "TransactionRejectedError",
]
