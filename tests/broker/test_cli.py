"""The command line against a real broker, both as processes."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker_process import SEMEL, BrokerProcess, StartBroker

from semel.journal.format import FILE_HEADER_BYTES

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


class Shell:
    """Runs commands against one broker."""

    def __init__(self, process: BrokerProcess) -> None:
        self.process = process

    def semel(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Runs a command that must succeed; returns its output."""
        result = self.run(*arguments, stdin=stdin)
        assert result.returncode == 0, result.stderr.decode()
        return result.stdout

    def run(self, *arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        environment = {**os.environ, "SEMEL_BOOTSTRAP": self.process.bootstrap}
        return subprocess.run(
            [SEMEL, *arguments], input=stdin, capture_output=True, timeout=60, env=environment, check=False
        )


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    process = BrokerProcess(tmp_path_factory.mktemp("cli") / "broker", in_memory=True).start()
    try:
        yield Shell(process)
        assert process.stop() == 0, process.log
    finally:
        process.kill()


def lines(count: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(count))


def test_topics_from_creation_to_deletion(shell: Shell) -> None:
    created = shell.semel("topic", "create", "life", "-p", "2", "-c", "retention.ms=60000")
    assert created == b"created life with 2 partitions\n"
    listed = {topic["name"]: topic for topic in json.loads(shell.semel("topic", "list", "-o", "json"))}
    assert listed["life"]["partitions"] == 2
    assert shell.semel("topic", "alter", "life", "-p", "3") == b"altered life\n"
    changes = ("-c", "max.message.bytes=5000", "--unset", "retention.ms")
    assert json.loads(shell.semel("topic", "alter", "life", *changes, "-o", "json")) == {
        "topic": "life",
        "partitions": None,
        "configs": {"max.message.bytes": "5000"},
        "unset": ["retention.ms"],
    }
    described = json.loads(shell.semel("topic", "describe", "life", "-o", "json"))
    assert len(described["partitions"]) == 3
    assert described["configs"] == {"max.message.bytes": {"value": "5000", "source": "topic"}}
    assert shell.semel("topic", "delete", "life") == b"deleted life\n"
    assert shell.run("topic", "describe", "life").returncode == 4
    assert shell.run("topic", "delete", "life").returncode == 4


def test_creating_a_topic_twice_is_exit_code_4(shell: Shell) -> None:
    assert shell.semel("topic", "create", "twice") == b"created twice with 1 partition\n"
    assert shell.run("topic", "create", "twice").returncode == 4
    assert shell.run("topic", "create", "twice", "--if-not-exists").returncode == 0


@pytest.mark.parametrize("name", ["a/b", "..", "x" * 250])
def test_a_name_that_is_no_topic_is_refused(shell: Shell, name: str) -> None:
    result = shell.run("topic", "create", name)
    assert result.returncode == 1
    assert b"INVALID_TOPIC" in result.stderr


@pytest.mark.parametrize("codec", CODECS)
def test_lines_come_back_as_they_went_in(shell: Shell, codec: str) -> None:
    topic = f"lines-{codec}"
    shell.semel("topic", "create", topic)
    shell.semel("produce", topic, "--compression", codec, stdin=lines(20_000))
    assert shell.semel("consume", topic, "--exit-at-end") == lines(20_000)


def test_json_comes_back_as_it_went_in(shell: Shell) -> None:
    shell.semel("topic", "create", "json", "-p", "3")
    sent = [
        {"key": "k", "value": "ü", "headers": [["h", "v"], ["n", None]], "timestamp": 5, "partition": 2},
        {"key": {"base64": "/w=="}, "value": None, "headers": [], "timestamp": 6, "partition": 2},
        {"key": None, "value": {"base64": "gIA="}, "headers": [], "timestamp": 7, "partition": 2},
    ]
    shell.semel("produce", "json", "-f", "json", stdin="\n".join(map(json.dumps, sent)).encode())
    printed = shell.semel("consume", "json", "-f", "json", "-e").splitlines()
    expected = [{**record, "topic": "json", "offset": offset} for offset, record in enumerate(sent)]
    assert [json.loads(line) for line in printed] == expected


def test_reading_begins_where_it_is_told(shell: Shell) -> None:
    shell.semel("topic", "create", "places")
    records = [{"value": str(number), "timestamp": 1000 + number} for number in range(100)]
    shell.semel("produce", "places", "-f", "json", stdin="\n".join(map(json.dumps, records)).encode())
    assert shell.semel("consume", "places", "--from", "98", "-e") == b"98\n99\n"
    assert shell.semel("consume", "places", "--from", "@1097", "-e") == b"97\n98\n99\n"
    assert shell.semel("consume", "places", "--from", "end", "-e") == b""
    assert shell.semel("consume", "places", "--max", "2") == b"0\n1\n"
    assert shell.run("consume", "places", "--from", "101", "-e").returncode == 1


def test_keys_keep_to_their_partitions(shell: Shell) -> None:
    shell.semel("topic", "create", "keys", "-p", "4")
    stdin = b"".join(b"k%d:%d\n" % (number % 10, number) for number in range(1000))
    shell.semel("produce", "keys", "-k", ":", stdin=stdin)
    partitions: dict[bytes, set[bytes]] = {}
    values: dict[bytes, list[int]] = {}
    for line in shell.semel("consume", "keys", "-e", "-f", "%p %k %v\\n").splitlines():
        partition, key, value = line.split()
        partitions.setdefault(key, set()).add(partition)
        values.setdefault(key, []).append(int(value))
    assert all(len(where) == 1 for where in partitions.values())
    assert values == {b"k%d" % key: list(range(key, 1000, 10)) for key in range(10)}


@pytest.mark.parametrize(
    "arguments",
    [
        ("produce", "--batch-records", "10", "--warmup", "0.1"),
        ("consume",),
        ("requests", "--api", "metadata", "--warmup", "0.1"),
        ("requests", "--api", "api-versions", "--warmup", "0.1"),
        ("requests", "--api", "init-producer-id", "--warmup", "0.1"),
    ],
    ids=" ".join,
)
def test_bench_measures(shell: Shell, arguments: tuple[str, ...]) -> None:
    pid = str(shell.process.pid)
    report = json.loads(shell.semel("bench", *arguments, "--seconds", "0.3", "--pid", pid, "-o", "json"))
    assert report["requests"] > 0
    assert report["p50_ms"] <= report["p99_ms"] <= report["max_ms"]
    assert report["broker_cpu_s"] >= 0


def test_bench_commits_transactions(shell: Shell) -> None:
    arguments = ("--producers", "3", "--partitions", "2", "--records", "4", "--topic", "bench-txn")
    timing = ("--warmup", "0", "--seconds", "0.5", "--pid", str(shell.process.pid), "-o", "json")
    report = json.loads(shell.semel("bench", "txn", *arguments, *timing))
    assert report["transactions"] > 0
    assert report["commit_p50_ms"] <= report["commit_p99_ms"] <= report["transaction_p99_ms"]
    assert report["broker_cpu_ms_per_transaction"] >= 0
    assert report["pauses"] == 0, "the broker ends a transaction in one step, and has nobody wait for it"
    read = shell.semel("consume", "bench-txn", "-e", "--isolation", "read_committed", "--format", "%o\n")
    assert len(read.splitlines()) >= report["transactions"] * 8


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_what_was_acknowledged_is_there_after_a_restart(start_broker: StartBroker, how: str) -> None:
    process = start_broker()
    shell = Shell(process)
    shell.semel("topic", "create", "kept", "-p", "2", "-c", "max.message.bytes=500000")
    shell.semel("produce", "kept", "-p", "0", stdin=lines(1000))
    if how == "stop":
        assert process.stop() == 0
    else:
        process.kill()
    process.start()
    assert shell.semel("consume", "kept", "-p", "0", "-e") == lines(1000)
    described = json.loads(shell.semel("topic", "describe", "kept", "-o", "json"))
    assert described["configs"]["max.message.bytes"]["value"] == "500000"
    shell.semel("produce", "kept", "-p", "0", stdin=b"more\n")
    assert shell.semel("consume", "kept", "-p", "0", "-e", "--from", "1000") == b"more\n"


def test_a_second_broker_on_the_same_files_is_refused(start_broker: StartBroker) -> None:
    process = start_broker()
    second = Shell(process).run("serve", "--data", str(process.directory), "--listen", "127.0.0.1:0")
    assert second.returncode == 2
    assert str(process.pid).encode() in second.stderr
    assert b"Traceback" not in second.stderr


def test_a_port_that_is_taken_is_said_in_one_line(shell: Shell) -> None:
    result = shell.run("serve", "--in-memory", "--listen", shell.process.bootstrap)
    assert result.returncode in (1, 2)
    assert shell.process.bootstrap.encode() in result.stderr
    assert b"Traceback" not in result.stderr


def test_the_journal_is_checked_while_the_broker_is_stopped(start_broker: StartBroker) -> None:
    process = start_broker()
    shell = Shell(process)
    directory = str(process.directory)
    shell.semel("topic", "create", "t")
    shell.semel("produce", "t", stdin=lines(10))
    running = shell.run("journal", "check", directory)
    assert running.returncode == 2
    assert str(process.pid).encode() in running.stderr
    assert process.stop() == 0
    report = json.loads(shell.semel("journal", "check", directory, "-o", "json"))
    assert report["ok"]
    assert report["end"] > 0
    assert shell.semel("journal", "repair", directory) == b"nothing to repair\n"
    nothing = {"repaired": False, "cut_at": None, "generation": None, "removed_snapshots": []}
    assert json.loads(shell.semel("journal", "repair", directory, "-o", "json")) == nothing


def test_a_directory_without_a_journal_is_refused(shell: Shell, tmp_path: Path) -> None:
    result = shell.run("journal", "check", str(tmp_path))
    assert result.returncode == 2
    assert b"is no data directory" in result.stderr


def test_a_damaged_journal_is_reported_and_repaired_only_with_consent(start_broker: StartBroker) -> None:
    process = start_broker()
    shell = Shell(process)
    directory = str(process.directory)
    shell.semel("topic", "create", "t")
    for number in range(20):
        shell.semel("produce", "t", "-q", stdin=b"%d\n" % number)
    process.kill()
    (journal,) = sorted((process.directory / "journal").glob("*.journal"))
    damage(journal)
    started = process.run_to_end()
    assert started.returncode == 1
    assert "semel journal check" in started.stderr
    assert "Traceback" not in started.stderr
    checked = shell.run("journal", "check", directory)
    assert checked.returncode == 1
    assert b"corrupt at position" in checked.stdout
    refused = shell.run("journal", "repair", directory)
    assert refused.returncode == 2
    assert b"--accept-loss" in refused.stderr
    corrupt_at = json.loads(shell.run("journal", "check", directory, "-o", "json").stdout)["corrupt_at"]
    repaired = json.loads(shell.semel("journal", "repair", directory, "--accept-loss", "-o", "json"))
    assert (repaired["repaired"], repaired["cut_at"]) == (True, corrupt_at)
    assert b"nothing to repair" in shell.semel("journal", "repair", directory)
    process.start()
    kept = shell.semel("consume", "t", "-e").split()
    assert kept == [b"%d" % number for number in range(len(kept))]
    assert 0 < len(kept) < 20


def damage(path: Path) -> None:
    """Changes one byte in the middle of the file's groups."""
    content = bytearray(path.read_bytes())
    used = len(content.rstrip(b"\0"))
    content[(FILE_HEADER_BYTES + used) // 2] ^= 0xFF
    path.write_bytes(content)
