"""Clients of the consumer protocol, without a network: they give up and take over as real ones do."""

from __future__ import annotations

from group_cases import GROUP, Bench

from semel.broker.groups.assignors import Partitions
from semel.broker.groups.consumer import ConsumerMembership
from semel.broker.groups.consumer_group_heartbeat import consumer_group_heartbeat
from semel.wire.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

REBALANCE_MS = 60_000
NOTHING: Partitions = frozenset()


class ConsumerClient:
    """A member that does what it is told, one heartbeat at a time."""

    def __init__(
        self,
        bench: Bench,
        name: str,
        *,
        topics: tuple[str, ...] = ("events",),
        regex: str | None = None,
        instance_id: str | None = None,
        assignor: str | None = None,
        rebalance_ms: int = REBALANCE_MS,
    ) -> None:
        self.bench = bench
        self.name = name
        self.topics = topics
        self.regex = regex
        self.instance_id = instance_id
        self.assignor = assignor
        self.rebalance_ms = rebalance_ms
        self.member_id = name
        self.epoch = 0
        self.owned: Partitions = NOTHING
        self.has_news = False
        """It has given something up or taken something over, and must say so."""

    def send(
        self, request: ConsumerGroupHeartbeatRequest, version: int = 1
    ) -> ConsumerGroupHeartbeatResponse:
        reply: ConsumerGroupHeartbeatResponse = self.bench.ask(
            consumer_group_heartbeat, request, version, self.name
        ).reply
        return reply

    def request(self, **fields: object) -> ConsumerGroupHeartbeatRequest:
        request = ConsumerGroupHeartbeatRequest(
            group_id=GROUP, member_id=self.member_id, member_epoch=self.epoch, instance_id=self.instance_id
        )
        request.topic_partitions = None
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    def join_request(self) -> ConsumerGroupHeartbeatRequest:
        return self.request(
            member_epoch=0,
            rebalance_timeout_ms=self.rebalance_ms,
            subscribed_topic_names=list(self.topics),
            subscribed_topic_regex=self.regex,
            server_assignor=self.assignor,
            topic_partitions=[],
        )

    def join(self) -> int:
        self.owned = NOTHING
        return self.take(self.send(self.join_request()))

    def beat(self) -> int:
        request = self.request()
        if self.has_news:
            request.topic_partitions = topic_partitions(self.owned)
            self.has_news = False
        return self.take(self.send(request))

    def subscribe(self, *topics: str) -> int:
        self.topics = topics
        return self.take(self.send(self.request(subscribed_topic_names=list(topics))))

    def take(self, response: ConsumerGroupHeartbeatResponse) -> int:
        """Follow the answer."""
        if response.error_code == 0:
            self.epoch = response.member_epoch
            if response.assignment is not None:
                assigned = frozenset(
                    (topic.topic_id, index)
                    for topic in response.assignment.topic_partitions
                    for index in topic.partitions
                )
                self.has_news = self.has_news or assigned != self.owned
                self.owned = assigned
        return response.error_code

    def leave(self, epoch: int = -1) -> int:
        self.owned = NOTHING
        return self.send(self.request(member_epoch=epoch)).error_code


def topic_partitions(partitions: Partitions) -> list[TopicPartitions]:
    topics: dict[bytes, list[int]] = {}
    for topic_id, index in sorted(partitions):
        topics.setdefault(topic_id, []).append(index)
    return [TopicPartitions(topic_id=topic_id, partitions=indexes) for topic_id, indexes in topics.items()]


def converge(*clients: ConsumerClient) -> None:
    """Heartbeats all round until nothing moves any more; nobody ever has what another one has."""
    for _ in range(4 * len(clients) + 4):
        for client in clients:
            assert client.beat() == 0
            check_disjoint(*clients)
    assert state_of(clients[0].bench) == "Stable"


def check_disjoint(*clients: ConsumerClient) -> None:
    owned = [partition for client in clients for partition in client.owned]
    assert len(owned) == len(set(owned)), "a partition has two owners"


def membership_of(bench: Bench) -> ConsumerMembership:
    membership = bench.group.membership
    assert isinstance(membership, ConsumerMembership)
    return membership


def state_of(bench: Bench) -> str:
    return bench.group.membership.state_name
