"""What the benchmarks of Spark say of CPU time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "bench"))
from cpu_meter import CpuMeter

BURNT_S = 0.2
# The kernel shows user and system time in whole ticks, each rounded down, of a process and of its children.
TICKS_S = 2 / os.sysconf("SC_CLK_TCK")
# Starts a process that uses CPU, and outlives it; as Spark's daemon does, or as everyone else.
PARENT = f"""
import os, signal, sys, time
if sys.argv[1] == "ignores":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
child = os.fork()
if child == 0:
    while time.process_time() < {BURNT_S}:
        pass
    print("burnt", flush=True)
    sys.stdin.readline()
    os._exit(0)
try:
    os.waitpid(child, 0)
except ChildProcessError:
    pass
print("gone", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("parent", ["waits", "ignores"])
def test_what_a_process_has_used_is_counted_once_it_is_gone_whether_or_not_it_is_waited_for(
    parent: str,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        meter = CpuMeter(process.pid)
        assert process.stdout.readline() == "burnt\n"
        while_it_lives_s = meter.total_s()
        assert while_it_lives_s >= BURNT_S - TICKS_S
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "gone\n"
        assert while_it_lives_s - TICKS_S <= meter.total_s() < while_it_lives_s + BURNT_S
        process.stdin.close()
