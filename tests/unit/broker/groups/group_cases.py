"""A broker core under a virtual clock, and clients that talk to its groups without any network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semel.broker.core import Broker, Identity, Limits
from semel.broker.decision import Caller, Decision, Endpoint, Now, Parked
from semel.broker.entries import decode_entry, encode_entry
from semel.broker.groups.group import Group
from semel.broker.groups.heartbeat import heartbeat
from semel.broker.groups.join_group import join_group
from semel.broker.groups.leave_group import leave_group
from semel.broker.groups.offset_commit import offset_commit
from semel.broker.groups.offset_fetch import offset_fetch
from semel.broker.groups.settings import GroupSettings
from semel.broker.groups.sync_group import sync_group
from semel.broker.journal_messages import TopicCreated
from semel.broker.tick import tick
from semel.wire.frames import Message
from semel.wire.messages.consumer_protocol_subscription import ConsumerProtocolSubscription
from semel.wire.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from semel.wire.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from semel.wire.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from semel.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from semel.wire.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponsePartitions,
)
from semel.wire.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment, SyncGroupResponse

GROUP = "readers"
SESSION_MS = 10_000
REBALANCE_MS = 60_000
WALL_MS = 1_700_000_000_000


class Asked:
    """A request and, once it is there, its answer."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.answers: list[Message | None] = []

    def refuse(self) -> None:
        raise AssertionError("the disk never fails here")

    def answer(self, response: Message | None) -> None:
        if response is not None:
            response.encode(bytearray(), self.version, [])  # What cannot be encoded is no answer.
        self.answers.append(response)

    @property
    def is_answered(self) -> bool:
        return bool(self.answers)

    @property
    def reply(self) -> Any:
        assert len(self.answers) == 1, f"{len(self.answers)} answers"
        return self.answers[0]


class Bench:
    """The core with its journal, as a node would drive it."""

    def __init__(self, settings: GroupSettings | None = None) -> None:
        self.settings = settings or GroupSettings()
        self.journal: list[bytes] = []
        self.monotonic_ms = 1_000_000
        self._ids = 0
        self.broker = self._new_broker()
        self.tick()  # The first one starts the sessions of members that a restart has brought back.

    def _new_broker(self) -> Broker:
        return Broker(
            1,
            identity=Identity("cluster", 1),
            limits=Limits(),
            group_settings=self.settings,
            topic_defaults={},
            settings=[],
            new_id=self._new_id,
        )

    def _new_id(self) -> bytes:
        self._ids += 1
        return self._ids.to_bytes(16)

    @property
    def now(self) -> Now:
        return Now(WALL_MS + self.monotonic_ms, self.monotonic_ms)

    def ask(
        self,
        handler: Callable[[Broker, Any, Caller, Now], Decision],
        request: Message,
        version: int,
        client_id: str = "client",
    ) -> Asked:
        asked = Asked(version)
        caller = Caller(version, client_id, "10.0.0.1", Endpoint("localhost", 9092), asked)
        self.submit(asked, handler(self.broker, request, caller, self.now))
        return asked

    def submit(self, asked: Asked | None, decision: Decision) -> None:
        for entry in decision.entries:
            self.broker.apply(entry)
            self.journal.append(b"".join(bytes(buffer) for buffer in encode_entry(entry)))
        for waiter, reply in decision.others:
            waiter.answer(reply)
        if asked is not None and not isinstance(decision.reply, Parked):
            asked.answer(decision.reply)

    def advance(self, ms: int, step_ms: int = 50) -> None:
        """Let time pass, with a tick every `step_ms`."""
        end_ms = self.monotonic_ms + ms
        while self.monotonic_ms < end_ms:
            self.monotonic_ms = min(end_ms, self.monotonic_ms + step_ms)
            self.tick()

    def tick(self) -> None:
        for decision in tick(self.broker, self.now):
            self.submit(None, decision)

    def restart(self) -> None:
        """A new life: all that is left is what the journal says."""
        self.broker = self._new_broker()
        for stored in self.journal:
            self.broker.apply(decode_entry(memoryview(stored)))
        self.tick()

    def create_topic(self, name: str, partitions: int = 3) -> bytes:
        topic_id = self._new_id()
        entry = TopicCreated(topic_id=topic_id, name=name, partitions=partitions, configs=[])
        self.submit(None, Decision(None, [entry]))
        return topic_id

    @property
    def group(self) -> Group:
        return self.broker.groups.by_id[GROUP]

    @property
    def state(self) -> str:
        return self.group.membership.state.value

    # Offsets.

    def commit(
        self,
        topic: str,
        offset: int,
        *,
        partition: int = 0,
        member: Client | None = None,
        version: int = 9,
        metadata: str = "",
        group_id: str = GROUP,
        retention_ms: int = -1,
    ) -> int:
        request = OffsetCommitRequest(
            group_id=group_id,
            generation_id_or_member_epoch=-1 if member is None else member.generation,
            member_id="" if member is None else member.member_id,
            group_instance_id=None if member is None else member.instance_id,
            retention_time_ms=retention_ms,
            topics=[
                OffsetCommitRequestTopic(
                    name=topic,
                    partitions=[
                        OffsetCommitRequestPartition(
                            partition_index=partition, committed_offset=offset, committed_metadata=metadata
                        )
                    ],
                )
            ],
        )
        response = self.ask(offset_commit, request, version).reply
        error: int = response.topics[0].partitions[0].error_code
        return error

    def fetch(
        self, topic: str, partition: int = 0, *, stable: bool = False, group_id: str = GROUP
    ) -> OffsetFetchResponsePartitions:
        request = OffsetFetchRequest(
            groups=[
                OffsetFetchRequestGroup(
                    group_id=group_id,
                    topics=[OffsetFetchRequestTopics(name=topic, partition_indexes=[partition])],
                )
            ],
            require_stable=stable,
        )
        response = self.ask(offset_fetch, request, 9).reply
        found: OffsetFetchResponsePartitions = response.groups[0].topics[0].partitions[0]
        return found


def subscription(*topics: str) -> bytes:
    out = bytearray((0, 1))
    ConsumerProtocolSubscription(topics=list(topics)).encode(out, 1, [])
    return bytes(out)


class Client:
    """A group member that speaks as real ones do, and remembers what it was told."""

    def __init__(
        self,
        bench: Bench,
        name: str = "client",
        *,
        instance_id: str | None = None,
        version: int = 9,
        protocols: list[tuple[str, bytes]] | None = None,
        session_ms: int = SESSION_MS,
        rebalance_ms: int = REBALANCE_MS,
        group_id: str = GROUP,
    ) -> None:
        self.bench = bench
        self.name = name
        self.group_id = group_id
        self.instance_id = instance_id
        self.version = version
        self.protocols = protocols or [("range", subscription("events"))]
        self.protocol_type = "consumer"
        self.session_ms = session_ms
        self.rebalance_ms = rebalance_ms
        self.member_id = ""
        self.generation = -1
        self.asked: Asked | None = None

    def send_join(self) -> Asked:
        request = JoinGroupRequest(
            group_id=self.group_id,
            session_timeout_ms=self.session_ms,
            rebalance_timeout_ms=self.rebalance_ms,
            member_id=self.member_id,
            group_instance_id=self.instance_id,
            protocol_type=self.protocol_type,
            protocols=[JoinGroupRequestProtocol(name=name, metadata=meta) for name, meta in self.protocols],
        )
        self.asked = self.bench.ask(join_group, request, self.version, self.name)
        return self.asked

    def join(self) -> Asked:
        """Ask to join, with the detour for an id if the broker wants it; take in the answer if any."""
        asked = self.send_join()
        if asked.is_answered and asked.reply.error_code == 79:
            self.member_id = asked.reply.member_id
            asked = self.send_join()
        self.read_join()
        return asked

    def read_join(self) -> JoinGroupResponse | None:
        assert self.asked is not None
        if not self.asked.is_answered:
            return None
        response: JoinGroupResponse = self.asked.reply
        if response.error_code == 0:
            self.member_id = response.member_id
            self.generation = response.generation_id
        return response

    @property
    def leads(self) -> bool:
        assert self.asked is not None
        response: JoinGroupResponse = self.asked.reply
        return response.leader == response.member_id

    def sync(self, assignments: dict[str, bytes] | None = None) -> Asked:
        return self.bench.ask(
            sync_group,
            SyncGroupRequest(
                group_id=self.group_id,
                generation_id=self.generation,
                member_id=self.member_id,
                group_instance_id=self.instance_id,
                protocol_type=self.protocol_type,
                protocol_name=self.protocols[0][0],
                assignments=[
                    SyncGroupRequestAssignment(member_id=member_id, assignment=assignment)
                    for member_id, assignment in (assignments or {}).items()
                ],
            ),
            5,
        )

    def synced(self, assignments: dict[str, bytes] | None = None) -> SyncGroupResponse:
        response: SyncGroupResponse = self.sync(assignments).reply
        return response

    def beat(self) -> int:
        response: HeartbeatResponse = self.bench.ask(
            heartbeat,
            HeartbeatRequest(
                group_id=self.group_id,
                generation_id=self.generation,
                member_id=self.member_id,
                group_instance_id=self.instance_id,
            ),
            4,
        ).reply
        return response.error_code

    def leave(self) -> LeaveGroupResponse:
        identity = MemberIdentity(member_id=self.member_id, group_instance_id=self.instance_id)
        response: LeaveGroupResponse = self.bench.ask(
            leave_group, LeaveGroupRequest(group_id=self.group_id, members=[identity]), 5
        ).reply
        return response


def settle(*clients: Client) -> None:
    """Bring these clients into one stable generation, each with its own name as assignment."""
    for client in clients:
        client.join()
    while any(client.read_join() is None for client in clients):
        next(client for client in clients if client.read_join() is not None).join()
    parked = [client.sync() for client in clients if not client.leads]
    leader = next(client for client in clients if client.leads)
    leader.synced({client.member_id: client.name.encode() for client in clients})
    assert all(asked.is_answered for asked in parked)
    assert clients[0].bench.state == "Stable"
