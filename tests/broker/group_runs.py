"""Requests about groups, written by hand, to any broker: what matters of each answer is noted by name."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Final

from raw_client import RawClient, encoded

from semel.wire.errors import ErrorCode
from semel.wire.frames import decode_response
from semel.wire.messages import consumer_group_describe as describing_consumers
from semel.wire.messages import consumer_group_heartbeat as consumers
from semel.wire.messages import consumer_protocol_assignment as assigned
from semel.wire.messages import consumer_protocol_subscription as subscribed
from semel.wire.messages import create_topics as creating
from semel.wire.messages import delete_groups as deleting
from semel.wire.messages import describe_groups as describing
from semel.wire.messages import find_coordinator as coordinators
from semel.wire.messages import heartbeat as beating
from semel.wire.messages import join_group as joining
from semel.wire.messages import leave_group as leaving
from semel.wire.messages import list_groups as listing
from semel.wire.messages import offset_commit as committing
from semel.wire.messages import offset_delete as forgetting
from semel.wire.messages import offset_fetch as fetching
from semel.wire.messages import sync_group as syncing

PATIENCE_S: Final = 30.0
PAUSE_S: Final = 0.02
PARTITIONS: Final = 4
SESSION_MS: Final = 10_000
REBALANCE_MS: Final = 30_000
UNKNOWN_GROUP: Final = "nowhere"
NOT_READY: Final = {
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
}
"""What Kafka says while it is not ready; clients ask again."""


class Run:
    """One script against one broker, and what it was answered."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.client = RawClient(port)
        self.topic = f"t-{uuid.uuid4().hex[:10]}"
        self.group = f"g-{uuid.uuid4().hex[:10]}"
        self.trace: dict[str, str] = {}
        topic = creating.CreatableTopic(name=self.topic, num_partitions=PARTITIONS, replication_factor=1)
        request = creating.CreateTopicsRequest(topics=[topic], timeout_ms=10_000)
        created = self.ask(request, 7, lambda response: response.topics[0].error_code)
        self.topic_id: bytes = created.topics[0].topic_id
        for group in (self.group, UNKNOWN_GROUP):
            self.find(group)

    def find(self, group: str) -> None:
        """Wait until the broker is ready for this group."""
        request = coordinators.FindCoordinatorRequest(key_type=0, coordinator_keys=[group])
        self.ask(request, 4, lambda response: response.coordinators[0].error_code)
        wanted = fetching.OffsetFetchRequest(
            groups=[fetching.OffsetFetchRequestGroup(group_id=group, topics=[])]
        )
        self.ask(wanted, 9, lambda response: response.groups[0].error_code)

    def note(self, label: str, *what: object) -> None:
        assert label not in self.trace, f"{label} is used twice"
        self.trace[label] = " ".join(name_of(one) for one in what)

    def ask(self, request: Any, version: int, code_of: Callable[[Any], int] | None = None) -> Any:
        """The answer, once the broker is ready to give one."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            response = self.client.ask(request, version, response_type(request))
            code = response.error_code if code_of is None else code_of(response)
            if code not in NOT_READY or time.monotonic() > give_up:
                return response
            time.sleep(PAUSE_S)

    def member(self, **fields: Any) -> Member:
        return Member(self, **fields)

    def state(self, label: str, version: int = 6, group: str | None = None) -> None:
        request = describing.DescribeGroupsRequest(groups=[group or self.group])
        (told,) = self.ask(request, version, lambda response: response.groups[0].error_code).groups
        shares = sorted(describe_assignment(one.member_assignment) for one in told.members)
        self.note(
            label,
            ErrorCode(told.error_code),
            told.group_state,
            f"type={told.protocol_type}",
            f"protocol={told.protocol_data}",
            f"members={len(told.members)}",
            *shares,
        )

    def commit(self, label: str, version: int = 9, **fields: Any) -> None:
        part = committing.OffsetCommitRequestPartition(
            partition_index=fields.pop("index", 0),
            committed_offset=fields.pop("offset", 7),
            committed_metadata=fields.pop("metadata", "note"),
        )
        topic = committing.OffsetCommitRequestTopic(
            name=fields.pop("topic", self.topic),
            topic_id=fields.pop("topic_id", self.topic_id),
            partitions=[part],
        )
        fields.setdefault("group_id", self.group)
        request = committing.OffsetCommitRequest(topics=[topic], **fields)
        told = self.ask(request, version, lambda response: response.topics[0].partitions[0].error_code)
        self.note(label, ErrorCode(told.topics[0].partitions[0].error_code))

    def fetch(self, label: str, version: int = 9, **fields: Any) -> None:
        indexes = fields.pop("indexes", [0])
        topic_name, topic_id = fields.pop("topic", self.topic), fields.pop("topic_id", self.topic_id)
        everything = fields.pop("everything", False)
        fields.setdefault("group_id", self.group)
        request: Any
        if version < 8:
            old = [fetching.OffsetFetchRequestTopic(name=topic_name, partition_indexes=indexes)]
            request = fetching.OffsetFetchRequest(topics=None if everything else old, **fields)
        else:
            new = [
                fetching.OffsetFetchRequestTopics(
                    name=topic_name, topic_id=topic_id, partition_indexes=indexes
                )
            ]
            group = fetching.OffsetFetchRequestGroup(topics=None if everything else new, **fields)
            request = fetching.OffsetFetchRequest(groups=[group])
        told = self.ask(
            request, version, lambda one: one.groups[0].error_code if version >= 8 else one.error_code
        )
        answer = told.groups[0] if version >= 8 else told
        parts = [part for topic in answer.topics for part in topic.partitions]
        self.note(
            label,
            ErrorCode(answer.error_code),
            *(
                f"{part.partition_index}:{part.committed_offset}:{part.metadata}:{ErrorCode(part.error_code).name}"
                for part in sorted(parts, key=lambda part: part.partition_index)
            ),
        )

    def forget(self, label: str, index: int = 0, **fields: Any) -> None:
        part = forgetting.OffsetDeleteRequestPartition(partition_index=index)
        topic = forgetting.OffsetDeleteRequestTopic(name=fields.pop("topic", self.topic), partitions=[part])
        fields.setdefault("group_id", self.group)
        told = self.ask(forgetting.OffsetDeleteRequest(topics=[topic], **fields), 0)
        parts = [ErrorCode(part.error_code) for topic in told.topics for part in topic.partitions]
        self.note(label, ErrorCode(told.error_code), *parts)

    def delete(self, label: str, *groups: str) -> None:
        request = deleting.DeleteGroupsRequest(groups_names=list(groups))
        told = self.ask(request, 2, lambda response: response.results[0].error_code)
        codes = {result.group_id: ErrorCode(result.error_code) for result in told.results}
        self.note(label, *(codes[group] for group in groups))

    def listed(self, label: str, version: int = 5, **filters: Any) -> None:
        told = self.ask(listing.ListGroupsRequest(**filters), version)
        found = [one for one in told.groups if one.group_id == self.group]
        self.note(
            label,
            ErrorCode(told.error_code),
            *(f"{one.protocol_type}/{one.group_state}/{one.group_type}" for one in found),
        )


def name_of(what: object) -> str:
    return what.name if isinstance(what, ErrorCode) else str(what)


def response_type(request: Any) -> Any:
    module = __import__(type(request).__module__, fromlist=["_"])
    return getattr(module, type(request).__name__.replace("Request", "Response"))


def subscription(*topics: str, version: int = 1) -> bytes:
    out = bytearray(version.to_bytes(2))
    subscribed.ConsumerProtocolSubscription(topics=list(topics)).encode(out, version, [])
    return bytes(out)


def assignment(topic: str, *indexes: int) -> bytes:
    out = bytearray((0, 1))
    given = [assigned.TopicPartition(topic=topic, partitions=list(indexes))]
    assigned.ConsumerProtocolAssignment(assigned_partitions=given).encode(out, 1, [])
    return bytes(out)


def describe_assignment(content: bytes) -> str:
    """The partitions only: topic names differ from run to run."""
    if not content:
        return "-"
    decoded, _ = assigned.ConsumerProtocolAssignment.decode(memoryview(content), 2, 1)
    return ",".join(str(index) for topic in decoded.assigned_partitions for index in topic.partitions)


class Member:
    """A member of the classic protocol, on a connection of its own: its requests may be parked."""

    def __init__(self, run: Run, **fields: Any) -> None:
        self.run = run
        self.client = RawClient(run.port)
        self.member_id = ""
        self.generation = -1
        self.leader = ""
        self.instance_id: str | None = fields.get("instance_id")
        self.protocol_type: str = fields.get("protocol_type", "consumer")
        self.protocols: list[tuple[str, bytes]] = fields.get(
            "protocols", [("range", subscription(run.topic))]
        )
        self.group: str = fields.get("group", run.group)
        self.version: int = fields.get("version", 9)
        self._sent: tuple[Any, int] | None = None

    def send(self, request: Any, version: int) -> None:
        self._sent = request, version
        self.client.send(encoded(request, version, "member"))

    def read(self) -> Any:
        assert self._sent is not None
        request, version = self._sent
        answer = self.client.read_frame()
        return decode_response(memoryview(answer), request.API_KEY, version, response_type(request))[1]

    def ask(self, request: Any, version: int) -> Any:
        self.send(request, version)
        return self.read()

    def join_request(self, **fields: Any) -> joining.JoinGroupRequest:
        fields.setdefault("group_id", self.group)
        fields.setdefault("session_timeout_ms", SESSION_MS)
        fields.setdefault("rebalance_timeout_ms", REBALANCE_MS)
        fields.setdefault("member_id", self.member_id)
        fields.setdefault("group_instance_id", self.instance_id)
        fields.setdefault("protocol_type", self.protocol_type)
        fields.setdefault(
            "protocols",
            [joining.JoinGroupRequestProtocol(name=name, metadata=data) for name, data in self.protocols],
        )
        return joining.JoinGroupRequest(**fields)

    def send_join(self, version: int | None = None, **fields: Any) -> None:
        self.send(self.join_request(**fields), self.version if version is None else version)

    def read_join(self, label: str = "", *, generation: bool = True) -> int:
        told = self.read()
        if told.error_code == 0:
            self.generation, self.leader = told.generation_id, told.leader
        if told.error_code in (0, ErrorCode.MEMBER_ID_REQUIRED):
            self.member_id = told.member_id
        if label:
            self.run.note(
                label,
                ErrorCode(told.error_code),
                f"generation={told.generation_id if generation else 'its own'}",
                f"type={told.protocol_type}",
                f"protocol={told.protocol_name}",
                f"leads={told.error_code == 0 and told.leader == told.member_id}",
                f"id={'given' if told.member_id else 'none'}",
                f"members={len(told.members)}",
                f"skip={told.skip_assignment}",
            )
        return int(told.error_code)

    def join(self, label: str = "", version: int | None = None, **fields: Any) -> int:
        """Join, with the detour for an id where the broker wants it."""
        self.send_join(version, **fields)
        code = self.read_join()
        if code == ErrorCode.MEMBER_ID_REQUIRED:
            self.send_join(version, **fields)
            return self.read_join(label)
        if label:
            self.run.note(label, ErrorCode(code))
        return code

    def sync_request(self, shares: dict[str, bytes] | None = None, **fields: Any) -> syncing.SyncGroupRequest:
        fields.setdefault("group_id", self.group)
        fields.setdefault("generation_id", self.generation)
        fields.setdefault("member_id", self.member_id)
        fields.setdefault("group_instance_id", self.instance_id)
        fields.setdefault("protocol_type", self.protocol_type)
        fields.setdefault("protocol_name", self.protocols[0][0])
        given = [
            syncing.SyncGroupRequestAssignment(member_id=member_id, assignment=share)
            for member_id, share in (shares or {}).items()
        ]
        return syncing.SyncGroupRequest(assignments=given, **fields)

    def sync(
        self, label: str, shares: dict[str, bytes] | None = None, version: int = 5, **fields: Any
    ) -> None:
        self.send(self.sync_request(shares, **fields), version)
        self.read_sync(label)

    def read_sync(self, label: str) -> None:
        told = self.read()
        self.run.note(
            label,
            ErrorCode(told.error_code),
            f"type={told.protocol_type}",
            f"protocol={told.protocol_name}",
            describe_assignment(told.assignment),
        )

    def beat(self, label: str, version: int = 4, **fields: Any) -> int:
        fields.setdefault("group_id", self.group)
        fields.setdefault("generation_id", self.generation)
        fields.setdefault("member_id", self.member_id)
        fields.setdefault("group_instance_id", self.instance_id)
        told = self.ask(beating.HeartbeatRequest(**fields), version)
        if label:
            self.run.note(label, ErrorCode(told.error_code))
        return int(told.error_code)

    def leave(self, label: str, version: int = 5, **fields: Any) -> None:
        fields.setdefault("member_id", self.member_id)
        fields.setdefault("group_instance_id", self.instance_id)
        group = fields.pop("group_id", self.group)
        if version < 3:
            request = leaving.LeaveGroupRequest(group_id=group, member_id=fields["member_id"])
        else:
            request = leaving.LeaveGroupRequest(group_id=group, members=[leaving.MemberIdentity(**fields)])
        told = self.ask(request, version)
        self.run.note(
            label, ErrorCode(told.error_code), *(ErrorCode(member.error_code) for member in told.members)
        )


class Consumer:
    """A member of the consumer protocol."""

    def __init__(self, run: Run, **fields: Any) -> None:
        self.run = run
        self.member_id: str = fields.get("member_id", str(uuid.uuid4()))
        self.instance_id: str | None = fields.get("instance_id")
        self.group: str = fields.get("group", run.group)
        self.epoch = 0
        self.owned: list[int] = []

    def beat(self, label: str, version: int = 1, **fields: Any) -> int:
        fields.setdefault("group_id", self.group)
        fields.setdefault("member_id", self.member_id)
        fields.setdefault("member_epoch", self.epoch)
        fields.setdefault("instance_id", self.instance_id)
        if isinstance(fields.get("topic_partitions"), list) and fields["topic_partitions"]:
            owned = consumers.TopicPartitions(
                topic_id=self.run.topic_id, partitions=fields["topic_partitions"]
            )
            fields["topic_partitions"] = [owned]
        else:
            fields.setdefault("topic_partitions", None)
        told = self.run.ask(consumers.ConsumerGroupHeartbeatRequest(**fields), version)
        if told.error_code == 0:
            self.epoch = told.member_epoch
            if told.assignment is not None:
                self.owned = sorted(
                    index for topic in told.assignment.topic_partitions for index in topic.partitions
                )
        if label:
            self.run.note(label, ErrorCode(told.error_code))
        return int(told.error_code)

    def join(self, label: str, version: int = 1, **fields: Any) -> int:
        fields.setdefault("member_epoch", 0)
        fields.setdefault("rebalance_timeout_ms", REBALANCE_MS)
        fields.setdefault("subscribed_topic_names", [self.run.topic])
        fields.setdefault("topic_partitions", [])
        return self.beat(label, version, **fields)

    def described(self, version: int = 1) -> Any:
        request = describing_consumers.ConsumerGroupDescribeRequest(group_ids=[self.group])
        return self.run.ask(request, version, lambda response: response.groups[0].error_code).groups[0]

    def describe(self, label: str, version: int = 1) -> None:
        """Without epochs: how they are counted is the broker's own business."""
        told = self.described(version)
        self.run.note(
            label,
            ErrorCode(told.error_code),
            told.group_state,
            told.assignor_name,
            *sorted(
                f"{one.instance_id}:{one.member_type}:away={one.member_epoch < 0}:"
                f"{sum(len(topic.partitions) for topic in one.assignment.topic_partitions)}"
                for one in told.members
            ),
        )


def settle(*consumers: Consumer) -> None:
    """Heartbeats all round until everybody has what they shall have; Kafka assigns with some delay."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        for one in consumers:
            before = one.owned
            assert one.beat("") == 0
            if one.owned != before:
                assert one.beat("", topic_partitions=one.owned) == 0
        told = consumers[0].described()
        shared = sum(len(one.owned) for one in consumers)
        if told.group_state == "Stable" and shared == PARTITIONS:
            return
        assert time.monotonic() < give_up, f"{told.group_state}, {shared} partitions are assigned"
        time.sleep(PAUSE_S)


def know_the_topic(run: Run) -> None:
    """Wait until the coordinator of the run's group can assign its topic, and leave no trace of the group.

    A topic that was just made is unknown to Kafka's coordinator for a while. A group is stable without any
    partition then, forgets who had which, and shares them out anew once it knows."""
    scout = Consumer(run)
    scout.join("")
    settle(scout)
    scout.beat("", member_epoch=-1)
    request = deleting.DeleteGroupsRequest(groups_names=[run.group])
    assert run.ask(request, 2, lambda response: response.results[0].error_code).results[0].error_code == 0


def stable_pair(run: Run, **fields: Any) -> tuple[Member, Member]:
    """A leader and a follower in a stable group of generation 2, two partitions each."""
    leader, follower = run.member(**fields), run.member(**fields)
    if "instance_id" in fields:
        follower.instance_id = f"{leader.instance_id}-2"
    leader.join()
    leader.ask(leader.sync_request({leader.member_id: assignment(run.topic, 0, 1, 2, 3)}), 5)
    follower.send_join()
    if follower.instance_id is None:
        assert follower.read_join() == ErrorCode.MEMBER_ID_REQUIRED
        follower.send_join()
    while leader.beat("") != ErrorCode.REBALANCE_IN_PROGRESS:
        time.sleep(PAUSE_S)
    leader.send_join()
    assert leader.read_join() == follower.read_join() == 0
    assert leader.leader == leader.member_id
    follower.send(follower.sync_request(), 5)
    shares = {
        leader.member_id: assignment(run.topic, 0, 1),
        follower.member_id: assignment(run.topic, 2, 3),
    }
    leader.ask(leader.sync_request(shares), 5)
    follower.read()
    return leader, follower
