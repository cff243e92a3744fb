"""Apache Kafka as a broker process for tests: one KRaft node from the jars of Maven Central.

The jars come once, into `.deps/kafka` of the checkout. Where Java or Maven are missing, or the jars cannot be
had, the tests are skipped and say why.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from functools import cache
from pathlib import Path
from typing import Final

from broker_process import free_port

from semel.client.cluster import Cluster
from semel.errors import SemelError

CHECKOUT: Final = Path(__file__).parents[2]
POM: Final = CHECKOUT / "tests" / "java" / "kafka"
JARS: Final = CHECKOUT / ".deps" / "kafka"
DOWNLOAD_TIMEOUT_S: Final = 600
FORMAT_TIMEOUT_S: Final = 60
START_TIMEOUT_S: Final = 90
POLL_S: Final = 0.2

PROPERTIES: Final = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
transaction.abort.timed.out.transaction.cleanup.interval.ms=500
group.initial.rebalance.delay.ms=0
"""


@cache
def why_no_kafka() -> str | None:
    """Fetch what is needed; the reason if that is not possible."""
    if shutil.which("java") is None:
        return "java is not installed (apt install openjdk-17-jre-headless)"
    if list(JARS.glob("kafka_2.13-*.jar")):
        return None
    if shutil.which("mvn") is None:
        return "mvn is not installed (apt install maven)"
    fetched = subprocess.run(
        ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={JARS}"],
        cwd=POM,
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_TIMEOUT_S,
        check=False,
    )
    if fetched.returncode == 0:
        return None
    return f"the jars could not be fetched: {(fetched.stderr or fetched.stdout).strip()[-500:]}"


class KafkaProcess:
    """One node of Apache Kafka. The ports and the directory stay the same across restarts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._properties = directory / "server.properties"
        self._log_path = directory / "kafka.log"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True)
        self._properties.write_text(
            PROPERTIES.format(port=self.port, controller_port=free_port(), data=directory / "data")
        )
        self._format()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def start(self) -> KafkaProcess:
        """Start, and wait until it answers."""
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                _java("kafka.Kafka", str(self._properties)), stdout=log, stderr=subprocess.STDOUT
            )
        give_up = time.monotonic() + START_TIMEOUT_S
        while not asyncio.run(_answers(self.bootstrap)):
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise AssertionError(f"Kafka does not answer; its log:\n{self.log[-3000:]}")
            time.sleep(POLL_S)
        return self

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """Kill -9 and start again."""
        self.kill()
        self.start()

    def _format(self) -> None:
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        done = subprocess.run(
            _java(
                "kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", str(self._properties)
            ),
            capture_output=True,
            text=True,
            timeout=FORMAT_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def _java(main: str, *arguments: str) -> list[str]:
    return [
        "java",
        "-Xmx512m",
        "-XX:TieredStopAtLevel=1",
        f"-Dlog4j2.configurationFile={POM / 'log4j2.xml'}",
        "-cp",
        f"{JARS}/*",
        main,
        *arguments,
    ]


async def _answers(bootstrap: str) -> bool:
    """Whether a broker is there and has registered: only then does its metadata name it."""
    try:
        async with Cluster(bootstrap) as cluster:
            return bool((await cluster.view()).brokers)
    except SemelError:
        return False
