"""Kafka's own command-line tools against Semel: what people type must work as it does with Kafka."""

from __future__ import annotations

import json
import re
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from client_java import CLASSES, Java
from kafka_process import JARS, POM, why_no_kafka

from semel.embedded import Broker

TOOLS: Final = "org.apache.kafka.tools."
TOPICS: Final = TOOLS + "TopicCommand"
CONFIGS: Final = "kafka.admin.ConfigCommand"
GROUPS: Final = TOOLS + "consumer.group.ConsumerGroupCommand"
TRANSACTIONS: Final = TOOLS + "TransactionsCommand"
PRODUCER: Final = TOOLS + "ProducerPerformance"
CONSUMER: Final = TOOLS + "ConsumerPerformance"
RECORDS: Final = 3_000
RECORD_BYTES: Final = 500


class Tools:
    """Runs tools against one broker, all in one virtual machine."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        java = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
        java += [f"-Dlog4j2.configurationFile={POM / 'log4j2.xml'}", "-cp", f"{CLASSES}:{JARS}/*", "Tools"]
        self._process = subprocess.Popen(java, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def attempt(self, tool: str, *arguments: str) -> tuple[int, str]:
        """The exit code, and all that was printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\t".join((tool, "--bootstrap-server", self._bootstrap, *arguments)) + "\n")
        self._process.stdin.flush()
        code, encoded = self._process.stdout.readline().rstrip("\n").split("\t")
        return int(code), b64decode(encoded).decode()

    def run(self, tool: str, *arguments: str) -> str:
        code, output = self.attempt(tool, *arguments)
        assert code == 0, output
        return output

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    missing = why_no_kafka() or Java.missing()
    if missing is not None:
        pytest.skip(missing)
    with Broker() as broker:
        tools = Tools(broker.bootstrap)
        yield tools
        tools.close()


def rows(output: str) -> list[list[str]]:
    """The words of each line that is not empty."""
    return [line.split() for line in output.splitlines() if line.strip()]


def create(tools: Tools, topic: str, *configs: str, partitions: int = 3) -> None:
    settings = [word for config in configs for word in ("--config", config)]
    tools.run(TOPICS, "--create", "--topic", topic, "--partitions", str(partitions), *settings)


def produce(tools: Tools, topic: str, *arguments: str, records: int = RECORDS) -> str:
    size = ("--record-size", str(RECORD_BYTES), "--throughput", "-1")
    return tools.run(PRODUCER, "--topic", topic, "--num-records", str(records), *size, *arguments)


def test_topics_are_created_described_grown_and_deleted(tools: Tools, topic: str) -> None:
    create(tools, topic, "retention.ms=60000")
    assert topic in tools.run(TOPICS, "--list").split()
    tools.run(TOPICS, "--alter", "--topic", topic, "--partitions", "5")
    described = tools.run(TOPICS, "--describe", "--topic", topic)
    assert re.search(r"PartitionCount: 5\s+ReplicationFactor: 1\s+Configs: retention.ms=60000", described)
    assert len(re.findall(r"Partition: \d\s+Leader: 1\s+Replicas: 1\s+Isr: 1", described)) == 5
    tools.run(TOPICS, "--delete", "--topic", topic)
    assert topic not in tools.run(TOPICS, "--list").split()


def test_configs_of_topics_are_changed_and_those_of_the_broker_are_refused(tools: Tools, topic: str) -> None:
    create(tools, topic)
    of_topic = ("--entity-type", "topics", "--entity-name", topic)
    tools.run(CONFIGS, "--alter", *of_topic, "--add-config", "max.message.bytes=3000000")
    assert "max.message.bytes=3000000" in tools.run(CONFIGS, "--describe", *of_topic)
    tools.run(CONFIGS, "--alter", *of_topic, "--delete-config", "max.message.bytes")
    assert "max.message.bytes" not in tools.run(CONFIGS, "--describe", *of_topic)
    of_broker = ("--entity-type", "brokers", "--entity-name", "1")
    assert "num.partitions=1" in tools.run(CONFIGS, "--describe", "--all", *of_broker)
    code, output = tools.attempt(CONFIGS, "--alter", *of_broker, "--add-config", "num.io.threads=9")
    assert code != 0
    assert "change its own settings in its file" in output


def test_quotas_are_set_shown_enforced_and_removed(tools: Tools, topic: str) -> None:
    create(tools, topic)
    who = ("--entity-type", "clients", "--entity-name", topic)
    tools.run(CONFIGS, "--alter", *who, "--add-config", "producer_byte_rate=100000")
    assert "producer_byte_rate=100000.0" in tools.run(CONFIGS, "--describe", *who)
    # What may be saved up is 1 MB, and a fifth more than that is sent: it takes two seconds at least.
    output = produce(tools, topic, "--command-property", f"client.id={topic}", records=2_400)
    slowest_ms = re.search(r"(\d+)\.\d+ ms max latency", output.splitlines()[-1])
    assert slowest_ms is not None and int(slowest_ms[1]) >= 1_000, output
    tools.run(CONFIGS, "--alter", *who, "--delete-config", "producer_byte_rate")
    assert "producer_byte_rate" not in tools.run(CONFIGS, "--describe", *who)


def test_performance_tools_and_consumer_groups(tools: Tools, topic: str) -> None:
    create(tools, topic)
    produce(tools, topic)
    group = ("--group", f"group-of-{topic}")
    output = tools.run(
        CONSUMER, "--topic", topic, "--num-records", str(RECORDS), "--timeout", "20000", *group
    )
    assert int(output.splitlines()[-1].split(", ")[4]) == RECORDS
    assert group[1] in tools.run(GROUPS, "--list").split()
    described = [row for row in rows(tools.run(GROUPS, "--describe", *group)) if row[1] == topic]
    assert len(described) == 3
    assert sum(int(row[3]) for row in described) == RECORDS
    assert [row[5] for row in described] == ["0"] * 3
    reset = tools.run(GROUPS, "--reset-offsets", *group, "--topic", topic, "--to-earliest", "--execute")
    assert [row[3] for row in rows(reset)[1:]] == ["0"] * 3
    shifted = tools.run(GROUPS, "--reset-offsets", *group, "--all-topics", "--shift-by", "7", "--dry-run")
    assert [row[3] for row in rows(shifted)[1:]] == ["7"] * 3
    assert "Successful" in tools.run(GROUPS, "--delete-offsets", *group, "--topic", f"{topic}:0")
    assert "was successful" in tools.run(GROUPS, "--delete", *group)
    assert group[1] not in tools.run(GROUPS, "--list").split()


def test_records_are_counted_read_deleted_and_timed(tools: Tools, topic: str, tmp_path: Path) -> None:
    create(tools, topic, partitions=1)
    produce(tools, topic, records=30)
    counted = ("--topic", topic, "--time")
    assert tools.run(TOOLS + "GetOffsetShell", *counted, "latest").split() == [f"{topic}:0:30"]
    plan = tmp_path / "delete.json"
    before = {"topic": topic, "partition": 0, "offset": 12}
    plan.write_text(json.dumps({"version": 1, "partitions": [before]}))
    assert "low_watermark: 12" in tools.run(TOOLS + "DeleteRecordsCommand", "--offset-json-file", str(plan))
    assert tools.run(TOOLS + "GetOffsetShell", *counted, "earliest").split() == [f"{topic}:0:12"]
    reading = ("--topic", topic, "--from-beginning", "--max-messages", "18", "--timeout-ms", "20000")
    read = tools.run(
        TOOLS + "consumer.ConsoleConsumer", *reading, "--formatter-property", "print.offset=true"
    )
    offsets = [int(offset) for offset in re.findall(r"^Offset:(\d+)\t", read, re.MULTILINE)]
    assert offsets == list(range(12, 30))
    timing = ("--topic", topic, "--num-records", "20", "--producer-acks", "all", "--record-size", "50")
    assert "Avg latency" in tools.run(TOOLS + "EndToEndLatency", *timing)


def test_versions_are_shown(tools: Tools) -> None:
    versions = tools.run(TOOLS + "BrokerApiVersionsCommand")
    assert re.search(r"Produce\(0\): 0 to 13 \[usable: 13\]", versions), versions
    assert re.search(r"ConsumerGroupHeartbeat\(68\): 0 to 1 \[usable: 1\]", versions)


def test_transactions_are_listed_and_described(tools: Tools, topic: str) -> None:
    create(tools, topic, partitions=1)
    produce(tools, topic, "--transactional-id", topic, "--transaction-duration-ms", "50")
    listed = [row for row in rows(tools.run(TRANSACTIONS, "list")) if row[0] == topic]
    assert listed == [[topic, "1", listed[0][2], "CompleteCommit"]]
    described = rows(tools.run(TRANSACTIONS, "describe", "--transactional-id", topic))
    assert described[1][:3] == ["1", topic, listed[0][2]]
    producers = rows(tools.run(TRANSACTIONS, "describe-producers", "--topic", topic, "--partition", "0"))
    assert [row[0] for row in producers[1:]] == [listed[0][2]]
    hanging = tools.run(TRANSACTIONS, "find-hanging", "--broker-id", "1", "--topic", topic)
    assert len(rows(hanging)) == 1, "only the title"


def test_tools_for_many_brokers_make_sense_of_one(tools: Tools, topic: str, tmp_path: Path) -> None:
    create(tools, topic, partitions=1)
    elected = tools.run(
        TOOLS + "LeaderElectionCommand",
        *("--election-type", "preferred", "--topic", topic, "--partition", "0"),
    )
    assert "Valid replica already elected" in elected
    quorum = tools.run(TOOLS + "MetadataQuorumCommand", "describe", "--status")
    assert re.search(r"LeaderId:\s+1\n", quorum) and re.search(r"MaxFollowerLag:\s+0\n", quorum)
    feature = tools.run(TOOLS + "FeatureCommand", "describe")
    assert re.search(r"transaction.version .*FinalizedVersionLevel: 2", feature)
    assert re.search(r"group.version .*FinalizedVersionLevel: 1", feature)
    log_dirs = tools.run(TOOLS + "LogDirsCommand", "--describe", "--topic-list", topic)
    (directory,) = json.loads(log_dirs.splitlines()[-1])["brokers"][0]["logDirs"]
    assert [part["partition"] for part in directory["partitions"]] == [f"{topic}-0"]
    plan = tmp_path / "plan.json"
    move = {"topic": topic, "partition": 0, "replicas": [1], "log_dirs": [directory["logDir"]]}
    plan.write_text(json.dumps({"version": 1, "partitions": [move]}))
    reassign = TOOLS + "reassign.ReassignPartitionsCommand"
    tools.run(reassign, "--reassignment-json-file", str(plan), "--execute")
    verified = tools.run(reassign, "--reassignment-json-file", str(plan), "--verify")
    assert f"Reassignment of partition {topic}-0 is completed" in verified
    _, output = tools.attempt(TOOLS + "AclCommand", "--list")
    assert "SecurityDisabledException" in output
