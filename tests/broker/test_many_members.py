"""A thousand members in a hundred groups: some fall silent, the broker is killed while they rebalance, and no
offset that was acknowledged is ever lost or moved back."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from broker_process import BrokerProcess, StartBroker

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.connection import Connection, ConnectionOptions
from semel.client.group_offsets import fetch_offsets
from semel.client.groups import describe_group
from semel.errors import SemelError
from semel.wire.errors import ErrorCode
from semel.wire.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from semel.wire.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from semel.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from semel.wire.messages.sync_group import (
    SyncGroupRequest,
    SyncGroupRequestAssignment,
    SyncGroupResponse,
)

GROUPS: Final = 100
MEMBERS: Final = 10
TOPIC: Final = "read-by-many"
LONG_SESSION_MS: Final = 20_000
SHORT_SESSION_MS: Final = 1_500
HEARTBEAT_S: Final = 0.5
REBALANCE_MS: Final = 20_000
RECONNECT_S: Final = 0.1
PATIENCE_S: Final = 45.0
JOIN_VERSION: Final = 5
SYNC_VERSION: Final = 3
HEARTBEAT_VERSION: Final = 3
COMMIT_VERSION: Final = 7
OPTIONS: Final = ConnectionOptions(request_timeout_ms=2 * REBALANCE_MS)


@dataclass(slots=True)
class Offsets:
    """What a group was told, and the most that it may find."""

    acknowledged: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)


class Member:
    """One raw member: joins, heartbeats, and commits ever higher offsets of its own partition."""

    def __init__(
        self, port: int, group: str, partition: int, offsets: Offsets, session_ms: int = LONG_SESSION_MS
    ) -> None:
        self.group = group
        self.partition = partition
        self.session_ms = session_ms
        self.generation = -1
        """Of the group while the member is settled in it, else -1."""
        self.group_size = 0
        """Members in that generation; only its leader knows."""
        self.awake = asyncio.Event()
        """Cleared, the member does nothing for a while, and so does not notice that others rebalance."""
        self.awake.set()
        self._port = port
        self._offsets = offsets
        self._member_id = ""
        self._connection: Connection | None = None
        self._task = asyncio.create_task(self._run())

    async def fall_silent(self) -> None:
        """Do nothing any more, and leave the connection open."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self.generation = -1

    async def close(self) -> None:
        await self.fall_silent()
        if self._connection is not None:
            self._connection.close()

    async def _run(self) -> None:
        while True:
            try:
                if self._connection is None or self._connection.is_closed:
                    self._connection = await Connection.open("127.0.0.1", self._port, OPTIONS)
                if await self._join(self._connection):
                    await self._stay(self._connection)
            except SemelError:
                await asyncio.sleep(RECONNECT_S)
            finally:
                self.generation = -1

    async def _join(self, connection: Connection) -> bool:
        request = JoinGroupRequest(
            group_id=self.group,
            session_timeout_ms=self.session_ms,
            rebalance_timeout_ms=REBALANCE_MS,
            member_id=self._member_id,
            protocol_type="consumer",
            protocols=[JoinGroupRequestProtocol(name="range", metadata=b"")],
        )
        joined = await connection.request(request, JoinGroupResponse, max_version=JOIN_VERSION)
        if joined.error_code == ErrorCode.UNKNOWN_MEMBER_ID:
            self._member_id = ""
        elif joined.error_code in (0, ErrorCode.MEMBER_ID_REQUIRED):
            self._member_id = joined.member_id
        if joined.error_code != 0:
            return False
        is_leader = joined.leader == joined.member_id
        shares = [SyncGroupRequestAssignment(each.member_id, b"share") for each in joined.members]
        sync = SyncGroupRequest(
            group_id=self.group,
            generation_id=joined.generation_id,
            member_id=self._member_id,
            assignments=shares if is_leader else [],
        )
        synced = await connection.request(sync, SyncGroupResponse, max_version=SYNC_VERSION)
        if synced.error_code != 0:
            return False
        assert bytes(synced.assignment) == b"share"
        self.group_size = len(joined.members) if is_leader else 0
        self.generation = joined.generation_id
        return True

    async def _stay(self, connection: Connection) -> None:
        while True:
            await self.awake.wait()
            await self._commit(connection)
            beat = HeartbeatRequest(
                group_id=self.group, generation_id=self.generation, member_id=self._member_id
            )
            answer = await connection.request(beat, HeartbeatResponse, max_version=HEARTBEAT_VERSION)
            if answer.error_code != 0:
                return
            await asyncio.sleep(HEARTBEAT_S)

    async def _commit(self, connection: Connection) -> None:
        offset = self._offsets.sent.get(self.partition, 0) + 1
        self._offsets.sent[self.partition] = offset
        part = OffsetCommitRequestPartition(partition_index=self.partition, committed_offset=offset)
        request = OffsetCommitRequest(
            group_id=self.group,
            generation_id_or_member_epoch=self.generation,
            member_id=self._member_id,
            topics=[OffsetCommitRequestTopic(name=TOPIC, partitions=[part])],
        )
        answer = await connection.request(request, OffsetCommitResponse, max_version=COMMIT_VERSION)
        if answer.topics[0].partitions[0].error_code == 0:
            self._offsets.acknowledged[self.partition] = offset


def settled(members: list[Member]) -> bool:
    """Whether these members are all in one generation, and nobody else is."""
    generations = {member.generation for member in members}
    return (
        len(generations) == 1
        and -1 not in generations
        and any(member.group_size == len(members) for member in members)
    )


async def until_settled(what: str, groups: list[list[Member]], enough: int = GROUPS) -> None:
    """Wait until so many of the groups are settled."""
    give_up = asyncio.get_running_loop().time() + PATIENCE_S
    while (count := sum(settled(members) for members in groups)) < enough:
        assert asyncio.get_running_loop().time() < give_up, f"{what}: only {count} groups"
        await asyncio.sleep(0.05)


async def check_offsets(broker: BrokerProcess, offsets: dict[str, Offsets]) -> None:
    async with Cluster(broker.bootstrap) as cluster:
        for group, known in offsets.items():
            found = {
                where.partition: each.offset
                for where, each in (await fetch_offsets(cluster, group, require_stable=False)).items()
            }
            for partition, acknowledged in known.acknowledged.items():
                # A commit whose answer was lost may count or not.
                assert acknowledged <= found[partition] <= known.sent[partition], (group, partition)


async def live(broker: BrokerProcess) -> None:
    async with Cluster(broker.bootstrap) as cluster:
        await Admin(cluster).create_topic(TOPIC, partitions=MEMBERS)
    offsets = {f"group-{number}": Offsets() for number in range(GROUPS)}
    groups = []
    for group, known in offsets.items():
        sessions = [SHORT_SESSION_MS, *[LONG_SESSION_MS] * (MEMBERS - 1)]
        groups.append([Member(broker.port, group, index, known, ms) for index, ms in enumerate(sessions)])
    everybody = [member for members in groups for member in members]
    try:
        await until_settled("all have joined", groups)
        await check_offsets(broker, offsets)

        silent = [members.pop(0) for members in groups]
        await asyncio.gather(*(member.fall_silent() for member in silent))
        await until_settled("the silent ones are out", groups)

        for members in groups[GROUPS // 2 :]:
            for member in members:
                member.awake.clear()
        for (group, known), members in zip(offsets.items(), groups, strict=True):
            members.append(Member(broker.port, group, 0, known))
        everybody += [members[-1] for members in groups]
        # Some groups have finished by now, some rebalance, and half of them wait for members that sleep.
        await until_settled("some have rebalanced", groups, enough=GROUPS // 4)
        await asyncio.to_thread(broker.restart)
        await check_offsets(broker, offsets)
        for member in everybody:
            member.awake.set()
        await until_settled("all have come back", groups)

        async with Cluster(broker.bootstrap) as cluster:
            described = await describe_group(cluster, "group-0")
            assert (described.state, len(described.members)) == ("Stable", MEMBERS)
    finally:
        await asyncio.gather(*(member.close() for member in everybody))
    await check_offsets(broker, offsets)
    assert all(len(known.acknowledged) == MEMBERS for known in offsets.values())


def test_a_thousand_members_outlive_silence_and_a_kill(start_broker: StartBroker) -> None:
    broker = start_broker(group_min_session_timeout_ms=1_000)
    asyncio.run(live(broker))
    assert "this is a bug" not in broker.log
