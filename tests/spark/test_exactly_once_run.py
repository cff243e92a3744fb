"""`semel run`: a pipeline is kept alive, told about, and not started again where that would not help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

from broker_process import BrokerProcess, free_port
from spark_cases import HERE, Row, committed_records, create_topic, produce

SUPERVISED: Final = HERE / "pipelines" / "supervised.py"
SEMEL_RUN: Final = (sys.executable, "-c", "from semel.cli.run import command; command()")
RUN_TIMEOUT_S: Final = 240.0
ROWS: Final = 200


def start_run(file: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SEMEL_RUN, str(file), "--master", "local[2]", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_a_pipeline_that_dies_is_started_again_and_ends_when_it_has_caught_up(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    for topic, partitions in (("orders", 2), ("out", 3)):
        create_topic(broker.bootstrap, topic, partitions)
    produce(broker.bootstrap, "orders", [Row(b"v%d" % i, b"k%d" % i) for i in range(ROWS)])
    port = free_port()
    run = start_run(
        SUPERVISED,
        "--until-caught-up",
        "--metrics",
        f"127.0.0.1:{port}",
        TEST_DIRECTORY=str(tmp_path),
        TEST_BOOTSTRAP=broker.bootstrap,
    )
    seen = watch_metrics(run, port)
    out, err = run.communicate(timeout=RUN_TIMEOUT_S)
    assert run.returncode == 0, err
    assert "started again" in err
    assert (tmp_path / "died").exists()
    assert re.match(r"supervised: batch \d, epoch \d committed, .* lag 0 ", out)
    assert "1 restarts" in out
    found = Counter(record.value for _, record in committed_records(broker.bootstrap, "out"))
    assert found == Counter(b"v%d" % i for i in range(ROWS))
    assert "semel_pipeline_restarts_total 1" in seen
    assert 'semel_pipeline_skips_total{pipeline="supervised"} 1' in seen


def watch_metrics(run: subprocess.Popen[str], port: int) -> str:
    """The last that the endpoint said."""
    seen = ""
    give_up = time.monotonic() + RUN_TIMEOUT_S
    while run.poll() is None and time.monotonic() < give_up:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                seen = answer.read().decode()
        except (URLError, OSError):
            pass  # not there yet, or gone
        time.sleep(0.1)
    return seen


def test_a_file_without_a_pipeline_is_not_started_again(tmp_path: Path) -> None:
    file = tmp_path / "empty.py"
    file.write_text("nothing = None\n")
    run = start_run(file)
    _, err = run.communicate(timeout=RUN_TIMEOUT_S)
    assert run.returncode == 2
    assert "no function pipeline(spark)" in err
    assert "started again" not in err
