"""Stages: a function between topics, each with a group of its own.

    @stage("orders", to="invoices")
    def invoice(delivery):
        return b"..."

What a stage returns goes to its topic, in the transaction that acknowledges the delivery: bytes (under the
delivery's key), an `Out`, a list of either, or None for nothing. What it raises rolls back, and the delivery
comes again. Stages may be coroutines; those that are not run in a thread each. `run_stages` runs all stages
of a process until it is cancelled.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final, NamedTuple, cast

from semel.client.cluster import Cluster
from semel.errors import ConfigError
from semel.subscriptions.delivery import Delivery, Transaction
from semel.subscriptions.options import SubscriptionOptions
from semel.subscriptions.subscription import Subscription, run_all
from semel.wire.records import Headers

DEFAULT_CONCURRENCY: Final = 8


class Out(NamedTuple):
    """A record that a stage sends: to its own topic unless another is named."""

    value: bytes | None
    key: bytes | None = None
    topic: str | None = None
    headers: Headers = ()


Result = bytes | Out | Sequence[bytes | Out] | None
Handler = Callable[[Delivery], "Result | Awaitable[Result]"]


@dataclass(slots=True, frozen=True)
class Stage:
    """A function that reads topics and perhaps writes to one."""

    name: str
    topics: tuple[str, ...]
    to: str | None
    handler: Handler
    group: str
    concurrency: int
    options: SubscriptionOptions

    def __call__(self, delivery: Delivery) -> "Result | Awaitable[Result]":
        """The function itself, as before it became a stage."""
        return self.handler(delivery)

    async def handle(self, delivery: Delivery) -> None:
        """Calls the function, and publishes what it returns."""
        if inspect.iscoroutinefunction(self.handler):
            result = await cast("Awaitable[Result]", self.handler(delivery))
        else:
            result = cast("Result", await asyncio.to_thread(self.handler, delivery))
        outs = _outs(self.name, result, delivery.key)
        if outs:
            transaction = delivery.transaction()
            await asyncio.gather(*(self._publish(transaction, out) for out in outs))

    async def _publish(self, transaction: Transaction, out: Out) -> None:
        topic = out.topic or self.to
        if topic is None:
            raise ConfigError(
                f"stage {self.name!r} returned a record and has no topic for it: give it `to`, or name one "
                "in Out"
            )
        await transaction.publish(topic, out.value, key=out.key, headers=out.headers)


def stage(
    *topics: str,
    to: str | None = None,
    group: str | None = None,
    concurrency: int = DEFAULT_CONCURRENCY,
    options: SubscriptionOptions | None = None,
) -> Callable[[Handler], Stage]:
    """Makes a stage of a function. Its group is the function's name, unless one is given."""
    if not topics:
        raise ConfigError("a stage needs a topic to read: @stage('orders', to='invoices')")
    chosen = options or SubscriptionOptions(max_in_flight=max(2 * concurrency, 16))

    def make(handler: Handler) -> Stage:
        name = getattr(handler, "__name__", "stage")
        return Stage(name, topics, to, handler, group or name, concurrency, chosen)

    return make


def stages_of(module: ModuleType) -> list[Stage]:
    """The stages that a module has at its top level, in their order there."""
    found = [value for value in vars(module).values() if isinstance(value, Stage)]
    groups = [each.group for each in found]
    doubled = sorted({group for group in groups if groups.count(group) > 1})
    if doubled:
        raise ConfigError(
            f"two stages share the group {doubled[0]!r}: each would get a part of what both should see, so "
            "give one of them a group of its own"
        )
    return found


async def run_stages(bootstrap: str, stages: Iterable[Stage]) -> None:
    """Runs stages until cancelled. An error that stops one stops all of them."""
    async with Cluster(bootstrap) as cluster:
        await run_all([_run_stage(cluster, each) for each in stages])


async def _run_stage(cluster: Cluster, chosen: Stage) -> None:
    async with Subscription(cluster, chosen.topics, chosen.group, chosen.options) as subscription:
        await subscription.channel().run(chosen.handle, concurrency=chosen.concurrency)
        if subscription.failure is not None:
            raise subscription.failure


def _outs(name: str, result: Result, key: bytes | None) -> list[Out]:
    """What a stage returned, as records; plain bytes go under the key of the delivery."""
    if result is None:
        return []
    if isinstance(result, bytes | Out):
        return [_out(name, result, key)]
    if isinstance(result, list | tuple):
        return [_out(name, each, key) for each in result]
    raise _wrong(name, result)


def _out(name: str, result: object, key: bytes | None) -> Out:
    if isinstance(result, Out):
        return result
    if isinstance(result, bytes):
        return Out(result, key)
    raise _wrong(name, result)


def _wrong(name: str, result: object) -> ConfigError:
    return ConfigError(
        f"stage {name!r} returned {type(result).__name__}: it must be bytes, Out, a list of those, or None"
    )
