"""The options of the reader."""

import pytest

from semel.client.admin import EARLIEST, LATEST, READ_COMMITTED, READ_UNCOMMITTED
from semel.client.metadata import TopicPartition
from semel.errors import ConfigError
from semel.spark.source_options import SourceOptions

LEAST = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": "orders"}


def test_committed_records_from_the_earliest_on_are_what_one_gets_without_asking() -> None:
    options = SourceOptions.of(LEAST)
    assert options.topics == ("orders",)
    assert options.isolation_level == READ_COMMITTED
    assert (options.starting, options.ending) == (EARLIEST, LATEST)
    assert options.fail_on_data_loss
    assert options.include_headers


def test_every_option_is_understood_in_any_case_of_letters() -> None:
    given = {
        "KAFKA.BOOTSTRAP.SERVERS": "a:1,b:2",
        "subscribe": "x, y,x",
        "kafka.isolation.level": "READ_UNCOMMITTED",
        "startingoffsets": '{"x": {"0": 3}, "y": {"0": -1}}',
        "endingOffsets": "latest",
        "maxOffsetsPerTrigger": "100",
        "failOnDataLoss": "False",
        "minpartitions": "8",
        "includeHeaders": "false",
    }
    options = SourceOptions.of(given)
    assert options == SourceOptions(
        bootstrap="a:1,b:2",
        topics=("x", "y"),
        isolation_level=READ_UNCOMMITTED,
        starting={TopicPartition("x", 0): 3, TopicPartition("y", 0): -1},
        ending=LATEST,
        max_offsets=100,
        fail_on_data_loss=False,
        min_partitions=8,
        include_headers=False,
    )


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("subscribe", " , ", "no topic"),
        ("kafka.bootstrap.servers", "", "no broker address"),
        ("kafka.isolation.level", "serializable", "read_committed or read_uncommitted"),
        ("maxOffsetsPerTrigger", "0", "above 0"),
        ("minPartitions", "many", "above 0"),
        ("failOnDataLoss", "perhaps", "true or false"),
        ("startingOffsets", "yesterday", "are no offsets"),
        ("endingOffsets", "earliest", "ends where it begins"),
        ("subscribePattern", "a.*", "has no option 'subscribePattern'"),
    ],
)
def test_a_wrong_option_is_named(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SourceOptions.of({**LEAST, name: value})
