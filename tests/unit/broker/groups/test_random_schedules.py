"""Groups under random schedules: clients that come, go, hang and lie, a clock that jumps, restarts."""

from __future__ import annotations

import os
import random

import pytest
from group_cases import GROUP, Asked, Bench, Client

from semel.broker.groups.classic import ClassicMembership, Member, State
from semel.broker.groups.settings import NEW_MEMBER_JOIN_TIMEOUT_MS, GroupSettings
from semel.broker.groups.sync_group import sync_group
from semel.wire.errors import ErrorCode
from semel.wire.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment

SEEDS = int(os.environ.get("TEST_SIMULATION_SEEDS", "30"))
STEPS = 80
REBALANCE_MS = 8_000
SESSION_MS = 10_000
PROTOCOLS = [[("range", b"1")], [("range", b"2"), ("sticky", b"3")], [("sticky", b"4"), ("range", b"5")]]


class Schedule:
    """One random history of one group."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.bench = Bench(GroupSettings(initial_rebalance_delay_ms=self.dice.choice((0, 0, 3_000))))
        self.bench.create_topic("events")
        self.clients: list[Client] = []
        self.asked: list[Asked] = []
        self.offset = 0
        self.committed = -1

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
            self.check()

    def step(self) -> None:
        often = (self.join, self.sync, self.sync, self.beat, self.wait)
        seldom = (self.arrive, self.leave, self.commit, self.hang_up, self.come_back, self.restart)
        self.dice.choice((*often, *often, *seldom))()

    def client(self) -> Client | None:
        return self.dice.choice(self.clients) if self.clients else None

    def arrive(self) -> None:
        if len(self.clients) >= 5:
            return
        name = f"c{len(self.clients)}"
        client = Client(
            self.bench,
            name,
            instance_id=name if self.dice.random() < 0.3 else None,
            version=self.dice.choice((0, 3, 4, 6, 7, 9)),
            protocols=self.dice.choice(PROTOCOLS),
            session_ms=SESSION_MS,
            rebalance_ms=REBALANCE_MS,
        )
        if client.instance_id is not None:
            client.version = max(client.version, 5)
        self.clients.append(client)

    def join(self) -> None:
        client = self.client()
        if client is None or (client.asked is not None and not client.asked.is_answered):
            return
        client.protocols = self.dice.choice(PROTOCOLS)
        self.asked.append(client.send_join())
        self.read(client)

    def read(self, client: Client) -> None:
        """Take in an answer, as a client would."""
        if client.asked is None or not client.asked.is_answered:
            return
        response = client.asked.reply
        if response.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            client.member_id = response.member_id
        elif response.error_code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
            client.member_id, client.generation = "", -1
        else:
            client.read_join()

    def sync(self) -> None:
        client = self.client()
        if client is None or client.generation < 0:
            return
        for one in self.clients:
            self.read(one)
        membership = self.membership
        shares = [
            SyncGroupRequestAssignment(member_id=member_id, assignment=member_id.encode())
            for member_id in membership.members
        ]
        request = SyncGroupRequest(
            group_id=GROUP,
            generation_id=client.generation,
            member_id=client.member_id,
            group_instance_id=client.instance_id,
            assignments=shares if membership.leader == client.member_id else [],
        )
        self.asked.append(self.bench.ask(sync_group, request, 3))

    def beat(self) -> None:
        client = self.client()
        if client is not None and client.beat() in (
            ErrorCode.UNKNOWN_MEMBER_ID,
            ErrorCode.FENCED_INSTANCE_ID,
        ):
            client.member_id, client.generation = "", -1

    def leave(self) -> None:
        client = self.client()
        if client is not None and self.dice.random() < 0.4:
            client.leave()

    def come_back(self) -> None:
        """The process died; another one takes its place and remembers nothing."""
        client = self.client()
        if client is not None:
            self.clients.remove(client)
            reborn = Client(
                self.bench,
                client.name,
                instance_id=client.instance_id,
                version=client.version,
                protocols=client.protocols,
                session_ms=SESSION_MS,
                rebalance_ms=REBALANCE_MS,
            )
            self.clients.append(reborn)

    def hang_up(self) -> None:
        waiting = [asked for asked in self.asked if not asked.is_answered]
        if waiting:
            gone = self.dice.choice(waiting)
            self.bench.broker.groups.forget_waiter(gone)
            self.asked.remove(gone)
            for client in self.clients:
                if client.asked is gone:
                    client.asked = None

    def wait(self) -> None:
        self.bench.advance(self.dice.choice((50, 500, 3_000, 8_000, 11_000)), step_ms=500)
        for client in self.clients:
            self.read(client)

    def commit(self) -> None:
        self.offset += 1
        client = self.client()
        if self.bench.commit("events", self.offset, member=client) == 0:
            self.committed = self.offset

    def restart(self) -> None:
        if self.dice.random() < 0.3:
            self.bench.restart()
            self.asked.clear()
            for client in self.clients:
                client.asked = None

    # What must always hold.

    @property
    def membership(self) -> ClassicMembership:
        return self.bench.broker.groups.get_or_create(GROUP).membership

    def check(self) -> None:
        self.check_members()
        self.check_deadlines()
        self.check_journal()
        assert self.bench.fetch("events").committed_offset == self.committed

    def check_members(self) -> None:
        membership = self.membership
        members = membership.members.values()
        assert membership.joining_count == sum(member.is_joining for member in members)
        assert membership.static_ids == {
            member.instance_id: member.member_id for member in members if member.instance_id is not None
        }
        assert all(membership.members[member.member_id] is member for member in members)
        assert membership.leader is None or membership.leader in membership.members
        assert membership.metadata_bytes == sum(member.metadata_bytes() for member in members)
        assert (membership.state is State.EMPTY) == (not membership.members)
        if membership.state is not State.PREPARING_REBALANCE:
            assert membership.joining_count == 0
        if membership.state is not State.COMPLETING_REBALANCE:
            assert all(member.syncing is None for member in members)
        else:
            assert membership.leader in membership.members
        if membership.state in (State.COMPLETING_REBALANCE, State.STABLE):
            assert membership.protocol_name == membership.select_protocol()

    def check_deadlines(self) -> None:
        groups, membership = self.bench.broker.groups, self.membership
        waiting = {
            waiter
            for member in membership.members.values()
            for waiter in (member.joining, member.syncing)
            if waiter is not None
        }
        assert set(groups.parked) == waiting == {asked for asked in self.asked if not asked.is_answered}
        silent = [member for member in membership.members.values() if not waits(member)]
        assert all(member in groups.sessions for member in silent)
        assert all(pending in groups.sessions for pending in membership.pending.values())
        assert len(groups.sessions) <= len(membership.members) + len(membership.pending)
        assert (membership in groups.joins) == (membership.state is State.PREPARING_REBALANCE)
        assert (membership in groups.syncs) == bool(membership.unsynced)
        if membership.unsynced:
            assert membership.state in (State.COMPLETING_REBALANCE, State.STABLE)

    def check_journal(self) -> None:
        """A restart would find the last finished rebalance, and nothing else."""
        before = self.bench.broker
        roster = self.membership.roster
        state = self.membership.state
        self.bench.restart()
        replayed = self.membership
        self.bench.broker = before
        assert (replayed.roster is None) == (roster is None)
        if roster is None:
            return
        assert replayed.roster == roster
        assert [replayed.members[stored.member_id].assignment for stored in roster.members] == [
            stored.assignment for stored in roster.members
        ]
        assert replayed.state is (State.STABLE if roster.members else State.EMPTY)
        assert replayed.metadata_bytes == sum(
            len(protocol.metadata) for stored in roster.members for protocol in stored.protocols
        )
        if state is State.STABLE:
            assert list(self.membership.members) == list(replayed.members)

    def finish(self) -> None:
        """Everybody falls silent: in the end nobody is left, and nobody waits for an answer."""
        self.bench.advance(NEW_MEMBER_JOIN_TIMEOUT_MS + 4 * SESSION_MS, step_ms=1_000)
        groups = self.bench.broker.groups
        assert all(asked.is_answered for asked in self.asked)
        assert self.membership.state is State.EMPTY
        assert (len(groups.sessions), len(groups.joins), len(groups.syncs)) == (0, 0, 0)


def waits(member: Member) -> bool:
    """Whether its session stands still: a request of it is here."""
    return not member.is_new and (member.is_joining or member.syncing is not None)


@pytest.mark.parametrize("first_seed", range(0, SEEDS, 10))
def test_a_group_holds_together_under_any_schedule(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        schedule = Schedule(seed)
        try:
            schedule.run()
            schedule.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
