"""A broker is killed in the middle of a stream, comes back, and every record is there once.

Starts `semel serve` on a free port with a temporary directory, sends it keyed records through `semel produce`
(an idempotent producer), kills the broker with SIGKILL on the way, starts it again on the same port and
directory, lets the producer finish, and reads everything back with `semel consume`.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Final

SEMEL: Final = str(Path(sys.executable).with_name("semel"))
TOPIC: Final = "orders"
PARTITIONS: Final = 3
RECORDS: Final = 60_000
KILL_AFTER: Final = RECORDS // 2
KEYS: Final = 1_000
COMMAND_TIMEOUT_S: Final = 60
LOG_LINES_SHOWN: Final = 20


class BrokerProcess:
    """`semel serve` as a child process."""

    def __init__(self, directory: Path, listen: str) -> None:
        began = time.monotonic()
        with (directory / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                [SEMEL, "serve", "--data", str(directory / "data"), "--listen", listen],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        ready = re.match(r"ready (\S+)", line)
        if ready is None:
            self.stop()
            raise SystemExit(f"the broker did not start; {log_of(directory)}")
        self.bootstrap = ready.group(1)
        self.start_seconds = time.monotonic() - began

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(COMMAND_TIMEOUT_S)


def tell(what: str, happened: str) -> None:
    print(f"  {what:<9} {happened}", flush=True)


def log_of(directory: Path) -> str:
    log = (directory / "broker.log").read_text().splitlines()
    return "\n".join(["the broker's log ends with:", *log[-LOG_LINES_SHOWN:]])


def semel(*arguments: str) -> str:
    """Run a command of the `semel` command line; its output."""
    done = subprocess.run(
        [SEMEL, *arguments], stdout=subprocess.PIPE, text=True, check=True, timeout=COMMAND_TIMEOUT_S
    )
    return done.stdout


def lines(first: int, end: int) -> str:
    return "".join(f"customer-{number % KEYS}:{number}\n" for number in range(first, end))


def main() -> None:
    print(f"A short run through a durable broker ({semel('version').strip()})")
    with tempfile.TemporaryDirectory(prefix="semel-run-") as directory:
        run(Path(directory))


def run(directory: Path) -> None:
    broker = BrokerProcess(directory, "127.0.0.1:0")
    tell("serve", f"ready on {broker.bootstrap} after {broker.start_seconds:.2f} s, pid {broker.pid}")
    try:
        where = ("--bootstrap", broker.bootstrap)
        semel("topic", "create", TOPIC, "--partitions", str(PARTITIONS), *where)
        tell("topic", f"created {TOPIC} with {PARTITIONS} partitions")
        broker = produce_through_a_kill(broker, directory)
        began = time.monotonic()
        output = semel("consume", TOPIC, "--format", r"%p %k %v\n", "--exit-at-end", *where)
        tell("consume", f"{output.count(chr(10)):,} records in {time.monotonic() - began:.1f} s")
        if not judge(output):
            raise SystemExit(f"this must not happen; {log_of(directory)}")
        tell("stop", f"SIGTERM, exit code {broker.stop()}")
    finally:
        broker.kill()


def produce_through_a_kill(broker: BrokerProcess, directory: Path) -> BrokerProcess:
    """Send all records, and kill the broker on the way; its successor."""
    began = time.monotonic()
    producer = subprocess.Popen(
        [SEMEL, "produce", TOPIC, "--key-separator", ":", "--quiet", "--bootstrap", broker.bootstrap],
        stdin=subprocess.PIPE,
        text=True,
    )
    tell("produce", f"sending {RECORDS:,} records with keys, idempotent, acks=all")
    try:
        assert producer.stdin is not None
        producer.stdin.write(lines(0, KILL_AFTER))
        producer.stdin.flush()
        broker.kill()
        tell("kill -9", f"pid {broker.pid}, with {KILL_AFTER:,} records handed to the producer")
        successor = BrokerProcess(directory, broker.bootstrap)
        tell("serve", f"ready again after {successor.start_seconds:.2f} s, pid {successor.pid}")
        producer.stdin.write(lines(KILL_AFTER, RECORDS))
        producer.stdin.close()
        if producer.wait(COMMAND_TIMEOUT_S) != 0:
            successor.kill()
            raise SystemExit(f"the producer failed, as it says above; {log_of(directory)}")
        tell("produce", f"all {RECORDS:,} acknowledged after {time.monotonic() - began:.1f} s")
        return successor
    finally:
        producer.kill()


def judge(output: str) -> bool:
    """Say whether every record is there once, with its key and in its partition's order."""
    seen: Counter[int] = Counter()
    partitions: dict[str, list[int]] = {}
    wrong_keys = 0
    for line in output.splitlines():
        partition, key, value = line.split(" ")
        number = int(value)
        seen[number] += 1
        wrong_keys += key != f"customer-{number % KEYS}"
        partitions.setdefault(partition, []).append(number)
    missing = sum(number not in seen for number in range(RECORDS))
    twice = sum(count > 1 for count in seen.values())
    misplaced = sum(before >= after for numbers in partitions.values() for before, after in pairwise(numbers))
    tell("check", f"{missing} missing, {twice} twice, {misplaced} out of order, {wrong_keys} wrong keys")
    return len(seen) == RECORDS and not (missing or twice or misplaced or wrong_keys)


if __name__ == "__main__":
    main()
