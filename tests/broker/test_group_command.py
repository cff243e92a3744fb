"""`semel group` against Semel and Apache Kafka: lag true on transactional topics, resets, deletion."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from semel.cli.root import root
from semel.embedded import Broker

TIMEOUT_S = 20


@pytest.fixture(scope="module", params=["semel", "kafka"])
def bootstrap(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "kafka":
        yield request.getfixturevalue("kafka_broker").bootstrap
        return
    with Broker() as broker:
        yield broker.bootstrap


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:8]}"


def semel(bootstrap: str, *arguments: str) -> Result:
    return CliRunner().invoke(root, ["group", *arguments, "--bootstrap", bootstrap])


def ask(bootstrap: str, *arguments: str) -> list[dict[str, object]]:
    result = semel(bootstrap, *arguments, "--output", "json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    return answer["partitions"] if isinstance(answer, dict) else answer  # type: ignore[no-any-return]


def create(bootstrap: str, topic: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions)])[topic].result()


def transact(bootstrap: str, topic: str, *commits: bool, records: int = 10) -> None:
    """Transactions of some records each, committed or aborted."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"to-{topic}"})
    producer.init_transactions(TIMEOUT_S)
    for commit in commits:
        producer.begin_transaction()
        for number in range(records):
            producer.produce(topic, str(number).encode(), partition=0)
        producer.flush(TIMEOUT_S)
        if commit:
            producer.commit_transaction(TIMEOUT_S)
        else:
            producer.abort_transaction(TIMEOUT_S)


def commit(bootstrap: str, group: str, topic: str, *offsets: int) -> None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    parts = [TopicPartition(topic, index, offset) for index, offset in enumerate(offsets)]
    for part in consumer.commit(offsets=parts, asynchronous=False):
        assert part.error is None
    consumer.close()


def read_all(bootstrap: str, group: str, topic: str, records: int) -> None:
    """Read as an application does, commit after the last record, and leave."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    for _ in range(records):
        message = consumer.poll(TIMEOUT_S)
        assert message is not None and message.error() is None
    consumer.commit(message=message, asynchronous=False)
    consumer.close()


def test_lag_reaches_0_behind_markers_and_aborted_records(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, topic)
    transact(bootstrap, topic, True, False, True, False, False)
    read_all(bootstrap, group, topic, 20)
    (part,) = ask(bootstrap, "describe", group)
    assert part["end"] == 55
    assert part["committed"] == 32, "the commit marker, two aborted transactions and their markers follow"
    assert (part["lag"], part["lag_is_exact"]) == (0, True)


def test_lag_counts_what_a_reader_would_get(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, topic)
    transact(bootstrap, topic, True, False, True)
    commit(bootstrap, group, topic, 3)
    (part,) = ask(bootstrap, "describe", group)
    assert (part["lag"], part["lag_is_exact"]) == (17, True)
    assert "17" in semel(bootstrap, "describe", group).stdout


def test_a_large_gap_is_an_upper_bound(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, topic)
    transact(bootstrap, topic, True, False)
    commit(bootstrap, group, topic, 0)
    (part,) = ask(bootstrap, "describe", group, "--count-up-to", "21")
    assert (part["lag"], part["lag_is_exact"]) == (22, False)
    assert "<= 22" in semel(bootstrap, "describe", group, "--count-up-to", "21").stdout
    (part,) = ask(bootstrap, "describe", group, "--count-up-to", "22")
    assert (part["lag"], part["lag_is_exact"]) == (10, True)


def test_what_an_open_transaction_holds_back_is_no_lag(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, topic)
    transact(bootstrap, topic, True)
    commit(bootstrap, group, topic, 11)
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"open-{topic}"})
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, b"not yet", partition=0)
    producer.flush(TIMEOUT_S)
    (part,) = ask(bootstrap, "describe", group)
    assert (part["stable_end"], part["end"], part["lag"]) == (11, 12, 0)
    producer.commit_transaction(TIMEOUT_S)
    (part,) = ask(bootstrap, "describe", group)
    assert (part["stable_end"], part["end"], part["lag"]) == (13, 13, 1)


@pytest.mark.parametrize(
    ("place", "after"),
    [("earliest", 0), ("latest", 12), ("5", 5), ("+2", 9), ("-3", 4), ("-100", 0), ("999", 12), ("@0", 0)],
)
def test_a_reset_goes_where_it_is_told(
    bootstrap: str, group: str, topic: str, place: str, after: int
) -> None:
    create(bootstrap, topic)
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(12):
        producer.produce(topic, str(number).encode(), timestamp=1 + number, partition=0)
    assert producer.flush(TIMEOUT_S) == 0
    commit(bootstrap, group, topic, 7)
    expected = [{"topic": topic, "partition": 0, "before": 7, "after": after}]
    assert ask(bootstrap, "reset", group, "--to", place, "--dry-run") == expected
    assert ask(bootstrap, "describe", group)[0]["committed"] == 7, "a rehearsal changes nothing"
    assert ask(bootstrap, "reset", group, "--to", place) == expected
    assert ask(bootstrap, "describe", group)[0]["committed"] == after


def test_a_reset_by_time_and_of_chosen_partitions(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, topic, partitions=3)
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(30):
        producer.produce(topic, b"", timestamp=1_000 * (1 + number // 3), partition=number % 3)
    assert producer.flush(TIMEOUT_S) == 0
    resets = ask(bootstrap, "reset", group, "--to", "@4000", "--topic", f"{topic}:0,2")
    assert [(each["partition"], each["after"]) for each in resets] == [(0, 3), (2, 3)]
    resets = ask(bootstrap, "reset", group, "--to", "@1970-01-01T00:00:08", "--topic", topic)
    assert [(each["before"], each["after"]) for each in resets] == [(3, 7), (None, 7), (3, 7)]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_with_members_is_neither_reset_nor_deleted(
    bootstrap: str, group: str, topic: str, protocol: str
) -> None:
    create(bootstrap, topic)
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "group.protocol": protocol})
    consumer.subscribe([topic])
    while not consumer.assignment():
        consumer.poll(0.1)
    refused = semel(bootstrap, "reset", group, "--to", "earliest", "--topic", topic)
    assert refused.exit_code == 1
    assert "cannot be moved while it has members: stop " in refused.stderr
    assert semel(bootstrap, "delete", group).exit_code == 1
    listed = {each["group"]: (each["state"], each["type"]) for each in ask(bootstrap, "list")}
    assert listed[group] == ("Stable", protocol)
    (part,) = ask(bootstrap, "describe", group)
    assert (part["topic"], part["committed"]) == (topic, None)
    assert str(part["member"]) in refused.stderr
    consumer.close()
    assert ask(bootstrap, "reset", group, "--to", "earliest", "--topic", topic)[0]["after"] == 0
    assert semel(bootstrap, "delete", group).exit_code == 0
    assert group not in {each["group"] for each in ask(bootstrap, "list")}


def test_offsets_of_a_topic_that_is_gone_are_no_trouble(bootstrap: str, group: str, topic: str) -> None:
    create(bootstrap, topic)
    commit(bootstrap, group, topic, 0)
    create(bootstrap, topic + "-too")
    commit(bootstrap, group, topic + "-too", 0)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics([topic])[topic].result()
    assert topic + "-too" in {each["topic"] for each in ask(bootstrap, "describe", group)}


def test_a_group_that_does_not_exist_is_said_so(bootstrap: str, group: str) -> None:
    for arguments in (["describe", group], ["delete", group]):
        missing = semel(bootstrap, *arguments)
        assert missing.exit_code == 4
        assert group in missing.stderr
    wrong = semel(bootstrap, "reset", group, "--to", "soon")
    assert (wrong.exit_code, "none of: earliest" in wrong.stderr) == (2, True)
    assert semel(bootstrap, "reset", group, "--to", "earliest").exit_code == 2
