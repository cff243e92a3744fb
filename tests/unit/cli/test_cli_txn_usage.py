"""`semel txn` without a broker: what it reads, what it refuses, what it prints of a duration."""

import click
import pytest
from click.testing import CliRunner

from semel.cli.root import root
from semel.cli.txn import _duration_text, _remedy, parse_duration_ms
from semel.client.metadata import TopicPartition
from semel.client.producer import ProducerIdentity
from semel.client.transaction_admin import ActiveProducer, BlockingTransaction


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("500ms", 500),
        ("30s", 30_000),
        ("30", 30_000),
        ("5m", 300_000),
        ("1h", 3_600_000),
        ("2d", 172_800_000),
    ],
)
def test_durations_are_read(text: str, expected_ms: int) -> None:
    assert parse_duration_ms(text) == expected_ms


@pytest.mark.parametrize("text", ["", "s", "-1s", "1.5s", "1w", "1 s", "1m30s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write 500ms, 30s, 5m, 1h or 2d"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("duration_ms", "expected"),
    [(None, None), (0, "0.0 s"), (59_940, "59.9 s"), (61_000, "1 min 1 s"), (7_380_000, "2 h 3 min")],
)
def test_durations_are_printed_for_people(duration_ms: int | None, expected: str | None) -> None:
    assert _duration_text(duration_ms) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["abort"], "give a transactional id, or --topic, --partition and --producer-id"),
        (["abort", "--topic", "t", "-p", "0"], "give a transactional id, or --topic"),
        (["abort", "id", "--topic", "t"], "not both"),
        (["list", "--match", "("], "is no regular expression"),
        (["list", "--longer-than", "soon"], "is no duration"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_asked(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(root, ["txn", *arguments, "-b", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_remedy_can_be_pasted_into_a_shell() -> None:
    producer = ActiveProducer(TopicPartition("t", 3), ProducerIdentity(7, 0), 0, 0, 0, 0)
    named = BlockingTransaction(producer, "it's; rm", 0, 0, 1)
    assert _remedy(named) == """semel txn abort 'it'"'"'s; rm'"""
    two_phase = BlockingTransaction(producer, "2pc", 0, 0, 1, is_two_phase=True)
    assert _remedy(two_phase) == "semel txn abort --force 2pc"
    unnamed = BlockingTransaction(producer, None, None, 0, 1)
    assert _remedy(unnamed) == "semel txn abort --topic t -p 3 --producer-id 7"
