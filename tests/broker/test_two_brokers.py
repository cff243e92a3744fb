"""Two brokers on one directory: the second is turned away, and takes over only when the first is gone."""

from __future__ import annotations

from broker_process import BrokerProcess, StartBroker
from client_confluent import Confluent
from interop_cases import at_offsets, sample_records

WRONG_USAGE = 2


def test_the_second_is_refused_in_one_line_with_the_pid_of_the_first(start_broker: StartBroker) -> None:
    first = start_broker()
    client = Confluent(first.bootstrap)
    client.create_topic("t")
    second = BrokerProcess(first.directory, log_path=first.log_path.with_suffix(".second"))
    for _ in range(2):
        refused = second.run_to_end()
        assert refused.returncode == WRONG_USAGE
        assert refused.stdout == ""
        (line,) = refused.stderr.splitlines()
        assert f"pid {first.pid}" in line and str(first.directory) in line
    assert client.produce("t", sample_records(10)) == list(range(10)), "the first has noticed nothing"


def test_the_second_takes_over_after_the_first_was_killed(start_broker: StartBroker) -> None:
    first = start_broker()
    client = Confluent(first.bootstrap)
    client.create_topic("t")
    records = sample_records(10)
    client.produce("t", records)
    first.kill()
    second = start_broker(first.directory)
    assert Confluent(second.bootstrap).consume("t", 0, 0, 10) == at_offsets(records)
