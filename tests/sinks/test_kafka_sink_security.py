"""The client and the sink over TLS with SASL, against Apache Kafka."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kafka_process import why_no_kafka
from secure_kafka import (
    DESCRIBE,
    GROUP,
    LIMITED,
    PASSWORD,
    READ,
    TOPIC,
    TRANSACTIONAL_ID,
    USERNAME,
    WRITE,
    SecureKafka,
    allow,
)
from transaction_cases import make_topic, read_committed

from semel.client.cluster import Cluster
from semel.client.connection import ConnectionOptions
from semel.client.errors import UnreachableError
from semel.client.security import MECHANISMS, PLAIN, SCRAM_SHA_256, Sasl, Tls
from semel.errors import ConfigError, FatalError
from semel.sinks.errors import InitFailed, WriteFailed
from semel.sinks.kafka import KafkaSink


@pytest.fixture(scope="module")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    missing = why_no_kafka() or (None if shutil.which("openssl") else "openssl is not installed")
    if missing is not None:
        pytest.skip(missing)
    process = SecureKafka(tmp_path_factory.mktemp("secure") / "broker")
    try:
        yield process.start()
    finally:
        process.kill()


def options_for(kafka: SecureKafka, mechanism: str) -> ConnectionOptions:
    return ConnectionOptions(tls=Tls(ca_file=str(kafka.ca_file)), sasl=Sasl(USERNAME, PASSWORD, mechanism))


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_a_sink_and_its_writers_authenticate_over_tls(
    secure_kafka: SecureKafka, topic: str, sink_id: str, mechanism: str
) -> None:
    options = options_for(secure_kafka, mechanism)
    async with Cluster(secure_kafka.secure_bootstrap, options) as cluster:
        await make_topic(cluster, topic)
        async with KafkaSink(secure_kafka.secure_bootstrap, topic, connection=options) as sink:
            sink.share()
            await sink.open(sink_id)
            plan = pickle.loads(pickle.dumps(await sink.begin(0)))
            writer = plan.writer(0)
            await writer.write([{"key": b"k", "value": b"x" * 1000}] * 2_000)
            await sink.commit(0, [await writer.finish()])
        assert await read_committed(cluster, topic) == [[b"x" * 1000] * 2_000]


async def test_a_wrong_password_and_an_unknown_authority_are_refused_at_once(
    secure_kafka: SecureKafka, topic: str, sink_id: str
) -> None:
    bootstrap = secure_kafka.secure_bootstrap
    good = options_for(secure_kafka, SCRAM_SHA_256)
    for mechanism in (PLAIN, SCRAM_SHA_256):
        wrong = replace(good, sasl=Sasl(USERNAME, "wrong", mechanism))
        with pytest.raises(
            FatalError, match=f"did not take '{USERNAME}' by {mechanism}: SASL_AUTHENTICATION"
        ):
            await Cluster(bootstrap, wrong).connect()
        with pytest.raises(InitFailed, match="SASL_AUTHENTICATION_FAILED"):
            await KafkaSink(bootstrap, topic, connection=wrong).open(sink_id)
    with pytest.raises(ConfigError, match="is not trusted: self-signed certificate"):
        await Cluster(bootstrap, replace(good, tls=Tls())).connect()
    with pytest.raises(ConfigError, match=r"is not trusted: .*mismatch"):
        await Cluster(f"localhost:{secure_kafka.secure_port}", good).connect()
    careless = replace(good, tls=Tls(verify=False))
    assert (await Cluster(bootstrap, careless).connect()).brokers


async def test_what_a_user_may_not_do_is_named_and_nothing_is_written(
    secure_kafka: SecureKafka, topic: str, sink_id: str
) -> None:
    bootstrap = secure_kafka.secure_bootstrap
    options = replace(options_for(secure_kafka, PLAIN), sasl=Sasl(LIMITED, PASSWORD, PLAIN))
    async with Cluster(secure_kafka.bootstrap) as cluster:
        await make_topic(cluster, topic)

        async def refusal() -> str:
            with pytest.raises(InitFailed) as failure:
                await KafkaSink(bootstrap, topic, connection=options).open(sink_id)
            return str(failure.value)

        assert f"topic {topic!r} cannot be used: TOPIC_AUTHORIZATION_FAILED" in await refusal()
        await allow(cluster, TOPIC, topic, DESCRIBE)
        assert "GROUP_AUTHORIZATION_FAILED" in await refusal()
        await allow(cluster, GROUP, f"{sink_id}.epoch", READ)
        assert "TRANSACTIONAL_ID_AUTHORIZATION_FAILED" in await refusal()
        await allow(cluster, TRANSACTIONAL_ID, f"semel-sink.{sink_id}", WRITE)
        assert "TOPIC_AUTHORIZATION_FAILED" in await refusal()
        await allow(cluster, TOPIC, topic, READ)
        async with KafkaSink(bootstrap, topic, connection=options) as sink:
            await sink.open(sink_id)
            await sink.begin(0)
            writer = sink.writer()
            await writer.write([{"key": b"k", "value": b"refused"}])
            with pytest.raises(WriteFailed, match=f"{topic}-0 was not accepted: TOPIC_AUTHORIZATION_FAILED"):
                await writer.finish()
            await writer.cancel()
            await sink.abort(0)
            await allow(cluster, TOPIC, topic, WRITE)
            await sink.begin(0)
            writer = sink.writer()
            await writer.write([{"key": b"k", "value": b"taken"}])
            await sink.commit(0, [await writer.finish()])
        assert await read_committed(cluster, topic) == [[b"taken"]]


async def test_tls_to_a_plain_listener_says_so(secure_kafka: SecureKafka) -> None:
    with pytest.raises(UnreachableError, match="TLS"):
        await Cluster(secure_kafka.bootstrap, ConnectionOptions(tls=Tls(verify=False))).connect()
