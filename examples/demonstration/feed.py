"""Orders, in transactions, a part of which is aborted: what goes in, and what must come out of it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

from semel.client.cluster import Cluster
from semel.client.errors import UnknownOutcomeError
from semel.client.shared_transaction import State, TransactionOptions
from semel.client.transactional_producer import TransactionalProducer
from semel.errors import AbortableError

ORDERS_A_TRANSACTION = 50
ABORTED_SHARE = 0.2
# Long enough for a broker that is killed and started again in the middle of a commit.
END_TIMEOUT_MS = 120_000


@dataclass(slots=True)
class Fed:
    """What was sent. `committed` gives, for the id of each order that counts, the price to come out."""

    committed: dict[str, int] = field(default_factory=dict)
    sent: int = 0
    aborted: int = 0


async def feed(bootstrap: str, topic: str, fed: Fed, *, orders: int, seconds: float, seed: int) -> None:
    """Sends about so many orders in about so many seconds, whatever happens to the broker meanwhile."""
    dice = random.Random(seed)
    began = time.monotonic()
    async with (
        Cluster(bootstrap) as cluster,
        TransactionalProducer(cluster, "shop", TransactionOptions(end_timeout_ms=END_TIMEOUT_MS)) as producer,
    ):
        while fed.sent < orders:
            batch = {
                f"order-{fed.sent + index:06}": (dice.randint(1, 9), dice.randint(100, 9_999))
                for index in range(ORDERS_A_TRANSACTION)
            }
            await send(producer, topic, batch, fed, commit=dice.random() >= ABORTED_SHARE)
            behind = seconds * fed.sent / orders - (time.monotonic() - began)
            await asyncio.sleep(max(0.0, behind))


async def send(
    producer: TransactionalProducer,
    topic: str,
    batch: dict[str, tuple[int, int]],
    fed: Fed,
    *,
    commit: bool,
) -> None:
    """One transaction. What the broker's death has spoiled counts as aborted: its ids are not used again."""
    is_committed = False
    try:
        await producer.begin()
        for order_id, (quantity, cents) in batch.items():
            value = json.dumps({"id": order_id, "quantity": quantity, "cents": cents}).encode()
            await producer.send(topic, value, key=order_id.encode())
        if commit:
            await commit_for_certain(producer)
            is_committed = True
        else:
            await producer.flush()
            await producer.abort()
    except AbortableError:
        await producer.abort()
    fed.sent += len(batch)
    if is_committed:
        fed.committed.update({order_id: quantity * cents for order_id, (quantity, cents) in batch.items()})
    else:
        fed.aborted += len(batch)


async def commit_for_certain(producer: TransactionalProducer) -> None:
    while True:
        try:
            await producer.commit()
            return
        except UnknownOutcomeError:
            assert producer.state is State.COMMITTING
