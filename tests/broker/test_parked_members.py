"""Members that wait in a rebalance, when the broker stops or their connection is lost."""

from __future__ import annotations

import time

from group_runs import PAUSE_S, Member, Run, assignment

from semel.embedded import Broker
from semel.wire.errors import ErrorCode


def run_on(broker: Broker) -> Run:
    return Run(int(broker.bootstrap.rpartition(":")[2]))


def settled(run: Run) -> Member:
    member = run.member()
    member.join()
    member.ask(member.sync_request({member.member_id: assignment(run.topic, 0, 1, 2, 3)}), 5)
    return member


def waiting(run: Run, first: Member) -> Member:
    """A second member whose request to join is parked until the first one joins again."""
    second = run.member()
    second.send_join()
    second.read_join()
    second.send_join()
    while first.beat("") == 0:
        time.sleep(PAUSE_S)
    return second


def test_a_broker_that_stops_sends_those_who_wait_to_look_for_another() -> None:
    with Broker() as broker:
        run = run_on(broker)
        second = waiting(run, settled(run))
        begun = time.monotonic()
    assert second.read_join() == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert time.monotonic() - begun < 5, "nobody waits for the rebalance"


def test_a_leader_that_never_syncs_does_not_keep_a_broker_from_stopping() -> None:
    with Broker() as broker:
        run = run_on(broker)
        first = settled(run)
        second = waiting(run, first)
        first.send_join()
        assert first.read_join() == second.read_join() == 0
        second.send(second.sync_request(), 5)
        begun = time.monotonic()
    assert second.read().error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert time.monotonic() - begun < 5


def test_a_member_that_lost_its_connection_gets_the_generation_on_the_next_one() -> None:
    with Broker() as broker:
        run = run_on(broker)
        first = settled(run)
        second = waiting(run, first)
        again = run.member()
        again.member_id, again.protocols = second.member_id, second.protocols
        second.client.socket.close()
        first.send_join()
        assert first.read_join() == 0
        again.send_join()
        assert again.read_join() == 0
        assert again.generation == first.generation == 2
        assert again.leader == first.member_id
