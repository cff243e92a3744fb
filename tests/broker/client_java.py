"""Java's kafka-clients as a stock client: one virtual machine that does what it is told, line by line.

The jars come from Maven Central once, into `.deps/java` of the checkout. Where Java or Maven are missing, or
the jars cannot be had, the tests are skipped and say why.
"""

from __future__ import annotations

import shutil
import subprocess
from base64 import b64decode, b64encode
from functools import cache
from pathlib import Path
from typing import Final

from interop_cases import Headers, Record, Stored

CHECKOUT: Final = Path(__file__).parents[2]
SOURCES: Final = CHECKOUT / "tests" / "java"
JARS: Final = CHECKOUT / ".deps" / "java"
CLASSES: Final = CHECKOUT / ".deps" / "classes"
DOWNLOAD_TIMEOUT_S: Final = 300
NULL: Final = "-"


@cache
def _why_missing() -> str | None:
    """Fetch and compile what is needed; the reason if that is not possible."""
    for tool in ("java", "javac"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (apt install openjdk-17-jdk-headless)"
    if not list(JARS.glob("kafka-clients-*.jar")):
        if shutil.which("mvn") is None:
            return "mvn is not installed (apt install maven)"
        fetched = _run("mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={JARS}")
        if fetched is not None:
            return f"the jars could not be fetched: {fetched}"
    compiled = _run("javac", "-d", str(CLASSES), "-cp", f"{JARS}/*", *map(str, SOURCES.glob("*.java")))
    return None if compiled is None else f"the Java sources do not compile: {compiled}"


def _run(*command: str) -> str | None:
    """Run a tool in the folder of the sources; what it said if it failed."""
    done = subprocess.run(
        command, cwd=SOURCES, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
    )
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip()[-500:]


class Java:
    """`Servant.java` with kafka-clients on its class path."""

    def __init__(self, bootstrap: str) -> None:
        missing = self.missing()
        assert missing is None, missing
        self._process = subprocess.Popen(
            [
                "java",
                "-XX:TieredStopAtLevel=1",
                "-Xmx256m",
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
                "-cp",
                f"{CLASSES}:{JARS}/*",
                "Servant",
                bootstrap,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    @staticmethod
    def missing() -> str | None:
        """Why there is no Java client here, or None."""
        return _why_missing()

    def create_topic(self, name: str, partitions: int = 1, configs: dict[str, str] | None = None) -> None:
        self._call("create", name, partitions, *(f"{key}={value}" for key, value in (configs or {}).items()))

    def delete_topic(self, name: str) -> None:
        self._call("delete", name)

    def topics(self) -> set[str]:
        return set(self._call("topics"))

    def produce(self, topic: str, records: list[Record], codec: str = "none") -> list[int]:
        lines = [
            "\t".join(
                (
                    str(record.partition),
                    _encoded(record.key),
                    _encoded(record.value),
                    str(record.timestamp_ms),
                    *(f"{name}={_encoded(value)}" for name, value in record.headers),
                )
            )
            for record in records
        ]
        return [int(offset) for offset in self._call("produce", topic, codec, len(records), lines=lines)]

    def consume(self, topic: str, partition: int, start: int, count: int) -> list[Stored]:
        return [_stored(line) for line in self._call("consume", topic, partition, start, count)]

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        low, high = self._call("watermarks", topic, partition)
        return int(low), int(high)

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        (found,) = self._call("offset-for-time", topic, partition, timestamp_ms)
        return None if found == NULL else int(found)

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        self._call("delete-records", topic, partition, before_offset)

    def configs(self, topic: str) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._call("configs", topic))

    def alter_config(self, topic: str, name: str, value: str) -> None:
        self._call("alter-config", topic, name, value)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _call(self, verb: str, *arguments: object, lines: list[str] | None = None) -> list[str]:
        """Send a command and return the lines of its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        command = "\t".join((verb, *map(str, arguments)))
        self._process.stdin.write("\n".join([command, *(lines or ())]) + "\n")
        self._process.stdin.flush()
        answer: list[str] = []
        while True:
            line = self._process.stdout.readline().rstrip("\n")
            if line == "ok":
                return answer
            assert line and not line.startswith("error "), f"Java, asked to {verb}: {line or 'ended'}"
            answer.append(line.removeprefix(" "))


def _encoded(field: bytes | None) -> str:
    return NULL if field is None else b64encode(field).decode("ascii")


def _decoded(text: str) -> bytes | None:
    return None if text == NULL else b64decode(text)


def _stored(line: str) -> Stored:
    partition, offset, timestamp_ms, append_time, key, value, *pairs = line.split("\t")
    headers: Headers = tuple((pair.partition("=")[0], _decoded(pair.partition("=")[2])) for pair in pairs)
    record = Record(_decoded(key), _decoded(value), int(timestamp_ms), headers, int(partition))
    return Stored(record, int(offset), append_time == "true")
