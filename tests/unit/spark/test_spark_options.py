"""The options of the reader."""

import pytest

from semel.client.admin import EARLIEST, LATEST, READ_COMMITTED, READ_UNCOMMITTED
from semel.client.connection import ConnectionOptions
from semel.client.metadata import TopicPartition
from semel.client.security import Sasl, Tls
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
        connection=ConnectionOptions(client_id="semel-spark"),
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
        ("startingOffset", "latest", r"'startingOffset'. Did you mean 'startingOffsets'\? It has kafka.boot"),
        ("checkpointLocation", "ck", r"no option 'checkpointLocation'. It has kafka.bootstrap.servers, "),
    ],
)
def test_a_wrong_option_is_named(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SourceOptions.of({**LEAST, name: value})


def test_tls_and_sasl_are_given_as_to_kafkas_java_clients() -> None:
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    options = SourceOptions.of(
        {
            **LEAST,
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": f'{module} required username="anna" password="a\\"b\'c";',
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": "ca.pem",
            "kafka.ssl.endpoint.identification.algorithm": "",
        }
    )
    assert options.connection.sasl == Sasl("anna", "a\"b'c", "SCRAM-SHA-512")
    assert options.connection.tls == Tls(ca_file="ca.pem", check_hostname=False)
    assert 'a"b' not in repr(options)


def test_without_a_protocol_there_is_neither() -> None:
    connection = SourceOptions.of(LEAST).connection
    assert (connection.tls, connection.sasl) == (None, None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kafka.security.protocol": "TLS"}, "one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
        ({"kafka.security.protocol": "SSL", "kafka.ssl.truststore.location": "a.jks"}, "must be a PEM file"),
        ({"kafka.security.protocol": "SASL_SSL"}, "must have a name and a password"),
        (
            {
                "kafka.security.protocol": "SASL_SSL",
                "kafka.sasl.jaas.config": 'x required username="a" password="b";',
                "kafka.sasl.mechanism": "GSSAPI",
            },
            "GSSAPI",
        ),
    ],
)
def test_security_that_cannot_be_had_is_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SourceOptions.of({**LEAST, **given})
