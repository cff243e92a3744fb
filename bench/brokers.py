"""The two brokers that are compared, each a process of its own with a fresh directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Final

from semel.client.cluster import Cluster
from semel.client.producer import Producer
from semel.errors import ConfigError, SemelError

CHECKOUT: Final = Path(__file__).parents[1]
POM: Final = CHECKOUT / "tests" / "java" / "kafka"
JARS: Final = CHECKOUT / ".deps" / "kafka"
START_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.01

# One node as a user would run it: everything else is Kafka's default, no fsync included.
KAFKA_PROPERTIES: Final = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BrokerUnderTest:
    """A process that takes Kafka's protocol."""

    def __init__(self, name: str, directory: Path, command: list[str], port: int) -> None:
        self.name = name
        self.bootstrap = f"127.0.0.1:{port}"
        self._command = command
        self._log_path = directory.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was not started"
        return self._process.pid

    def start(self) -> float:
        """Start it; how many seconds it took until the first record was acknowledged."""
        began = time.perf_counter()
        self.launch()
        assert self._process is not None
        while not asyncio.run(_takes_a_record(self.bootstrap)):
            if self._process.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                self.kill()
                raise ConfigError(f"{self.name} does not answer; see {self._log_path}")
            time.sleep(POLL_S)
        return time.perf_counter() - began

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def cpu_s(self) -> float:
        """Of the process, in user and in system mode."""
        after_name = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1_000_000


async def _takes_a_record(bootstrap: str) -> bool:
    try:
        async with Cluster(bootstrap) as cluster:
            if not (await cluster.view()).brokers:
                return False
            await cluster.metadata(("first",), create=True)
            async with Producer(cluster) as producer:
                await producer.send("first", b"record")
            return True
    except SemelError:
        return False


def semel(directory: Path, durability: str) -> BrokerUnderTest:
    port = free_port()
    command = [str(Path(sys.executable).with_name("semel")), "serve", "--data", str(directory)]
    command += ["--listen", f"127.0.0.1:{port}", "--durability", durability]
    return BrokerUnderTest(f"Semel ({durability})", directory, command, port)


def kafka(directory: Path) -> BrokerUnderTest:
    fetch_jars()
    port = free_port()
    directory.mkdir(parents=True)
    properties = directory / "server.properties"
    properties.write_text(
        KAFKA_PROPERTIES.format(port=port, controller_port=free_port(), data=directory / "data")
    )
    cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    subprocess.run(
        _java("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)),
        check=True,
        capture_output=True,
    )
    return BrokerUnderTest("Kafka", directory, _java("kafka.Kafka", str(properties)), port)


def fetch_jars() -> None:
    """Apache Kafka comes from Maven Central, once."""
    if list(JARS.glob("kafka_2.13-*.jar")):
        return
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            raise ConfigError(f"{tool} is needed to run Apache Kafka: apt install default-jre-headless maven")
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={JARS}"]
    subprocess.run(command, cwd=POM, check=True)


def _java(main: str, *arguments: str) -> list[str]:
    # The heap that Kafka's own start script gives.
    settings = ["-Xms1G", "-Xmx1G", f"-Dlog4j2.configurationFile={POM / 'log4j2.xml'}"]
    return ["java", *settings, "-cp", f"{JARS}/*", main, *arguments]
