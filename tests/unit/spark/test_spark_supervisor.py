"""What keeps a pipeline alive, without a Spark: its lives are small programs here."""

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from semel.spark import running
from semel.spark.progress import Progress
from semel.spark.supervisor import ECHO_S, MAX_BACKOFF_S, STOP_TIMEOUT_S, Supervisor, backoff_s

COMMITTED = Progress("p", 0, 0, 1, 1.0, 0, 1, 1, 0, 0, 0, 0.01, [0, 1, *[0] * 11], True)
# Says which of its lives this is, and how to tell the supervisor of a commit.
LIFE = f"""
import os, signal, sys, time
from pathlib import Path
lives = Path(sys.argv[1])
life = len(lives.read_text()) + 1 if lives.exists() else 1
lives.write_text("x" * life)
def tell():
    os.write(int(sys.argv[-1]), {COMMITTED.encode()!r}.encode() + bytes([10]))
"""


def supervise(tmp_path: Path, life: str, max_crashes: int = 3, first_backoff_s: float = 0.001) -> Supervisor:
    return Supervisor(
        [str(tmp_path / "lives")],
        max_crashes,
        life=[sys.executable, "-c", LIFE + life],
        first_backoff_s=first_backoff_s,
    )


def nobody_listens(progress: Progress) -> None: ...


def lives(tmp_path: Path) -> int:
    return len((tmp_path / "lives").read_text())


@pytest.mark.parametrize("max_crashes", [1, 3])
def test_after_so_many_crashes_as_it_was_told_it_gives_up(
    tmp_path: Path, max_crashes: int, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = supervise(tmp_path, "sys.exit(7)", max_crashes)
    assert supervisor.run(nobody_listens) == 7
    assert lives(tmp_path) == max_crashes
    assert supervisor.restarts == max_crashes - 1
    assert f"ended with 7, crash {max_crashes} in a row: giving up" in caplog.text


def test_a_commit_in_between_lets_crashes_count_anew(tmp_path: Path) -> None:
    told: list[Progress] = []
    supervisor = supervise(tmp_path, "if life == 3: tell()\nsys.exit(1)", max_crashes=4)
    assert supervisor.run(told.append) == 1
    assert lives(tmp_path) == 3 + 3
    assert told == [COMMITTED]


def test_pauses_double_from_crash_to_crash_up_to_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = supervise(tmp_path, "sys.exit(1)", max_crashes=4)
    supervisor.run(nobody_listens)
    pauses = [str(message).split()[-2] for message in caplog.messages if "started again" in message]
    assert pauses == ["0.001", "0.002", "0.004"]
    assert [backoff_s(crashes) for crashes in (1, 2, 6, 7, 900)] == [1, 2, 32, MAX_BACKOFF_S, MAX_BACKOFF_S]


@pytest.mark.parametrize("code", [0, running.FINAL_EXIT])
def test_an_end_that_another_start_would_not_change_is_final(tmp_path: Path, code: int) -> None:
    supervisor = supervise(tmp_path, f"sys.exit({code})")
    assert supervisor.run(nobody_listens) == code
    assert lives(tmp_path) == 1


# A signal that comes just before a sleep is not handled until the sleep is over; this one is waited for.
LISTENS = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
tell()
signal.sigwait({signal.SIGTERM})
sys.exit(0)
"""
DOES_NOT_LISTEN_YET = """
tell()
time.sleep(60)
"""


@pytest.mark.parametrize("life", [LISTENS, DOES_NOT_LISTEN_YET], ids=["running", "starting"])
def test_a_stop_is_handed_on_and_is_no_crash(tmp_path: Path, life: str) -> None:
    supervisor = Supervisor(
        [str(tmp_path / "lives")],
        life=[sys.executable, "-c", LIFE + life],
    )
    assert supervisor.run(lambda progress: supervisor.stop()) == 0
    assert lives(tmp_path) == 1


TELLS_OF_EACH_REQUEST = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
while True:
    tell()
    signal.sigwait({signal.SIGTERM})
"""


def test_a_process_that_does_not_end_when_asked_is_killed_after_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[float] = []

    def ask_once(progress: Progress) -> None:
        if not asked:
            asked.append(time.monotonic())
            supervisor.stop()

    supervisor = Supervisor(
        [str(tmp_path / "lives")],
        life=[sys.executable, "-c", LIFE + TELLS_OF_EACH_REQUEST],
        stop_timeout_s=0.5,
    )
    assert supervisor.run(ask_once) == -signal.SIGKILL
    assert 0.5 <= time.monotonic() - asked[0] < STOP_TIMEOUT_S
    assert lives(tmp_path) == 1
    assert "does not end, and is killed" in caplog.text


ENDS_IN_ORDER = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
tell()
signal.sigwait({signal.SIGTERM})
time.sleep(0.3)
"""


def test_a_request_that_arrives_twice_is_one(tmp_path: Path) -> None:
    def ask_twice(progress: Progress) -> None:
        supervisor.stop()
        supervisor.stop()

    life = [sys.executable, "-c", LIFE + ENDS_IN_ORDER]
    supervisor = Supervisor([str(tmp_path / "lives")], life=life)
    assert supervisor.run(ask_twice) == 0


WITH_A_CHILD = """
child = os.fork()
if not child:
    time.sleep(600)
    os._exit(0)
(lives.parent / "child").write_text(str(child))
"""


def test_a_second_request_kills_at_once_the_process_and_what_it_started(tmp_path: Path) -> None:
    asked: list[float] = []

    def ask_twice(progress: Progress) -> None:
        if len(asked) == 2:
            return  # it has told of the second request, too, before it was dead
        while asked and time.monotonic() < asked[-1] + ECHO_S:
            time.sleep(0.01)
        supervisor.stop()
        asked.append(time.monotonic())

    supervisor = Supervisor(
        [str(tmp_path / "lives")],
        life=[sys.executable, "-c", LIFE + WITH_A_CHILD + TELLS_OF_EACH_REQUEST],
    )
    assert supervisor.run(ask_twice) == -signal.SIGKILL
    assert len(asked) == 2
    assert time.monotonic() - asked[-1] < STOP_TIMEOUT_S
    until_gone(int((tmp_path / "child").read_text()))


def until_gone(pid: int) -> None:
    """Or dead, where nobody asks for its exit code."""
    give_up = time.monotonic() + STOP_TIMEOUT_S
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < give_up, f"process {pid} is still there"
            time.sleep(0.01)


def test_a_process_that_falls_silent_and_does_not_end_is_killed_and_counts_as_a_crash(tmp_path: Path) -> None:
    supervisor = Supervisor(
        [str(tmp_path / "lives")],
        max_crashes=2,
        life=[sys.executable, "-c", LIFE + "os.close(int(sys.argv[-1]))\ntime.sleep(600)"],
        first_backoff_s=0.001,
        stop_timeout_s=0.01,
    )
    assert supervisor.run(nobody_listens) == -signal.SIGKILL
    assert lives(tmp_path) == 2


def test_an_end_is_noticed_though_a_child_of_the_process_keeps_the_pipe_open(tmp_path: Path) -> None:
    told: list[Progress] = []
    supervisor = supervise(tmp_path, WITH_A_CHILD + "tell()\nsys.exit(0)")
    try:
        assert supervisor.run(told.append) == 0
        assert told == [COMMITTED]
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_a_line_that_death_has_cut_short_is_not_heard(tmp_path: Path) -> None:
    told: list[Progress] = []
    supervisor = supervise(tmp_path, "tell()\nos.write(int(sys.argv[-1]), b'{')\nsys.exit(0)")
    assert supervisor.run(told.append) == 0
    assert told == [COMMITTED]


def test_a_stop_in_a_pause_is_the_end(tmp_path: Path) -> None:
    supervisor = supervise(tmp_path, "sys.exit(1)", first_backoff_s=60.0)

    class StopAtPause(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            supervisor.stop()

    pausing = StopAtPause()
    logger = logging.getLogger("semel.spark.supervisor")
    logger.addHandler(pausing)
    try:
        assert supervisor.run(nobody_listens) == 0
    finally:
        logger.removeHandler(pausing)
    assert lives(tmp_path) == 1
