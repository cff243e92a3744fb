"""A broker is killed in the middle of a stream, comes back, and every record is there once.

Starts `semel serve` on a free port with a temporary directory, sends it keyed records through `semel produce`
(an idempotent producer), kills the broker with SIGKILL on the way, starts it again on the same port and
directory, lets the producer finish, and reads everything back with `semel consume`.
"""

from __future__ import annotations

import re
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
    """`semel serve` as a child process, which may be killed and started again on its port and directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.bootstrap = "127.0.0.1:0"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        began = time.monotonic()
        data = str(self._directory / "data")
        with (self._directory / "broker.log").open("ab") as log:
            process = subprocess.Popen(
                [SEMEL, "serve", "--data", data, "--listen", self.bootstrap],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert process.stdout is not None
        ready = re.match(r"ready (\S+)", process.stdout.readline())
        if ready is None:
            process.kill()
            raise SystemExit(f"the broker did not start; {self.log_end()}")
        self.bootstrap = ready.group(1)
        tell("serve", f"ready on {self.bootstrap} after {time.monotonic() - began:.2f} s, pid {process.pid}")
        return process

    def restart(self) -> None:
        self.process = self._start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(COMMAND_TIMEOUT_S)

    def log_end(self) -> str:
        log = (self._directory / "broker.log").read_text().splitlines()
        return "\n".join(["its log ends with:", *log[-LOG_LINES_SHOWN:]])


def tell(what: str, happened: str) -> None:
    print(f"  {what:<9} {happened}", flush=True)


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
    broker = BrokerProcess(directory)
    where = ("--bootstrap", broker.bootstrap)
    try:
        semel("topic", "create", TOPIC, "--partitions", str(PARTITIONS), *where)
        tell("topic", f"created {TOPIC} with {PARTITIONS} partitions")
        produce_through_a_kill(broker)
        began = time.monotonic()
        output = semel("consume", TOPIC, "--format", r"%p %k %v\n", "--exit-at-end", *where)
        tell("consume", f"{output.count(chr(10)):,} records in {time.monotonic() - began:.1f} s")
        if not judge(output):
            raise SystemExit(f"the broker lost or doubled records; {broker.log_end()}")
        tell("stop", f"SIGTERM, exit code {broker.stop()}")
    finally:
        broker.kill()


def produce_through_a_kill(broker: BrokerProcess) -> None:
    """Send all records, and kill the broker on the way."""
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
        tell("kill -9", f"pid {broker.process.pid}, with {KILL_AFTER:,} records handed to the producer")
        broker.restart()
        producer.communicate(lines(KILL_AFTER, RECORDS), COMMAND_TIMEOUT_S)
    finally:
        producer.kill()
    if producer.returncode != 0:
        raise SystemExit(f"the producer failed, as it says above; the broker: {broker.log_end()}")
    tell("produce", f"all {RECORDS:,} acknowledged after {time.monotonic() - began:.1f} s")


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
