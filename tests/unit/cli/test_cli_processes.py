"""Commands as processes: stdin, pipes, signals, start-up."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from fake_broker import FakeBroker

from semel.wire.batch import read_header
from semel.wire.records import Record, build_batch, read_records

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
COMMAND = [sys.executable, "-c", "from semel.cli import main; main()"]


def test_lines_become_records(broker: FakeBroker, semel: Run) -> None:
    result = semel("produce", "t", "-p", "1", stdin=b"one\ntwo\n\nlast without newline")
    assert result.returncode == 0
    assert result.stderr.startswith(b"4 records")
    assert broker.topics["t"][1].values() == [b"one", b"two", b"", b"last without newline"]


def test_how_many_records_were_sent_is_reported_to_programs(semel: Run) -> None:
    result = semel("produce", "t", "-o", "json", stdin=b"one\ntwo\n")
    report = json.loads(result.stdout)
    assert (report["topic"], report["records"], result.stderr) == ("t", 2, b"")
    assert report["seconds"] >= 0


def test_keys_headers_and_compression_are_applied(broker: FakeBroker, semel: Run) -> None:
    result = semel("produce", "t", "-p", "0", "-k", ":", "-H", "a=1", "-z", "gzip", "-q", stdin=b"k:v:w\n")
    assert (result.returncode, result.stderr) == (0, b"")
    (batch,) = broker.topics["t"][0].batches
    (record,) = read_records(batch)
    assert read_header(batch).codec == 1
    assert (record.key, record.value, list(record.headers)) == (b"k", b"v:w", [("a", b"1")])


def test_a_bad_line_is_named_and_what_came_before_is_sent(broker: FakeBroker, semel: Run) -> None:
    result = semel("produce", "t", "-p", "0", "-f", "json", stdin=b'{"value": "good"}\n{"value": 1}\n')
    assert result.returncode == 2
    assert result.stderr.startswith(b"semel: line 2 was not sent: value must be a string")
    assert broker.topics["t"][0].values() == [b"good"]


def test_what_consume_prints_as_json_produce_takes(broker: FakeBroker, semel: Run) -> None:
    records = [Record(b"\xff", b"v", 5, [("h", None)]), Record(None, None, 6)]
    batch = build_batch(records)
    broker.topics["t"][0].store(batch, read_header(batch))
    printed = semel("consume", "t", "-p", "0", "-e", "-f", "json").stdout
    assert [json.loads(line)["offset"] for line in printed.splitlines()] == [0, 1]
    assert semel("produce", "t", "-p", "1", "-f", "json", stdin=printed).returncode == 0
    copied = [
        (record.key, record.value, record.timestamp, list(record.headers))
        for stored in broker.topics["t"][1].batches
        for record in read_records(stored)
    ]
    assert copied == [(b"\xff", b"v", 5, [("h", None)]), (None, None, 6, [])]


def test_a_reader_that_has_had_enough_is_no_error(broker: FakeBroker, semel: Run) -> None:
    batch = build_batch([Record(None, b"x" * 1000, 0) for _ in range(1000)])
    broker.topics["t"][0].store(batch, read_header(batch))
    consume = subprocess.Popen(
        [*COMMAND, "consume", "t", "-b", broker.bootstrap], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert consume.stdout is not None
    assert consume.stdout.readline() == b"x" * 1000 + b"\n"
    consume.stdout.close()
    assert consume.wait(20) == 0
    assert consume.stderr is not None
    assert consume.stderr.read() == b""
    consume.stderr.close()


def test_an_interrupt_ends_consume_and_produce_quietly(broker: FakeBroker) -> None:
    batch = build_batch([Record(None, b"seen", 0)])
    broker.topics["t"][0].store(batch, read_header(batch))
    consume = subprocess.Popen(
        [*COMMAND, "consume", "t", "-b", broker.bootstrap], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert consume.stdout is not None
    assert consume.stdout.readline() == b"seen\n"
    consume.send_signal(signal.SIGINT)
    assert consume.communicate(timeout=20) == (b"", b"")
    assert consume.returncode == 130

    produce = subprocess.Popen(
        [*COMMAND, "produce", "t", "-p", "1", "-b", broker.bootstrap],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert produce.stdin is not None
    produce.stdin.write(b"one\n")
    produce.stdin.flush()
    deadline = time.monotonic() + 20
    while not broker.topics["t"][1].batches and time.monotonic() < deadline:
        time.sleep(0.01)
    # The line was sent at once, though stdin is still open: this is what a terminal needs.
    assert broker.topics["t"][1].values() == [b"one"]
    produce.send_signal(signal.SIGINT)
    assert produce.wait(20) == 130
    assert produce.communicate()[1] == b""


def test_a_broker_that_dies_under_produce_is_reported(semel: Run) -> None:
    result = semel("produce", "t", "-b", "127.0.0.1:1", stdin=b"x\n")
    assert result.returncode == 3
    assert result.stderr.startswith(b"semel: cannot connect to 127.0.0.1:1")


def test_the_version_does_not_load_what_it_does_not_need() -> None:
    script = (
        "import sys\n"
        "from semel.cli.root import root\n"
        "root.main(['version'], standalone_mode=False)\n"
        "heavy = {'asyncio', 'rich', 'numpy', 'semel.client', 'semel.server'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
