"""What keeps a pipeline alive, without a Spark: its lives are small programs here."""

import logging
import sys
from pathlib import Path

import pytest

from semel.errors import ConfigError
from semel.sinks.errors import FencedOut, InitFailed, MarkerMismatch
from semel.spark import running
from semel.spark.progress import Progress
from semel.spark.supervisor import MAX_BACKOFF_S, Supervisor, backoff_s

COMMITTED = Progress("p", 0, 0, 1, 1.0, 0, 1, 1, 0, 0, True)
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


def supervise(
    tmp_path: Path, life: str, max_crashes: int = 3, first_backoff_s: float = 0.001
) -> tuple[Supervisor, list[Progress]]:
    told: list[Progress] = []
    supervisor = Supervisor(
        [str(tmp_path / "lives")],
        told.append,
        max_crashes,
        life=[sys.executable, "-c", LIFE + life],
        first_backoff_s=first_backoff_s,
    )
    return supervisor, told


def lives(tmp_path: Path) -> int:
    return len((tmp_path / "lives").read_text())


@pytest.mark.parametrize("max_crashes", [1, 3])
def test_after_so_many_crashes_as_it_was_told_it_gives_up(
    tmp_path: Path, max_crashes: int, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, _ = supervise(tmp_path, "sys.exit(7)", max_crashes)
    assert supervisor.run() == 7
    assert lives(tmp_path) == max_crashes
    assert supervisor.restarts == max_crashes - 1
    assert f"ended with 7, crash {max_crashes} in a row: giving up" in caplog.text


def test_a_commit_in_between_lets_crashes_count_anew(tmp_path: Path) -> None:
    supervisor, told = supervise(tmp_path, "if life == 3: tell()\nsys.exit(1)", max_crashes=4)
    assert supervisor.run() == 1
    assert lives(tmp_path) == 3 + 3
    assert told == [COMMITTED]


def test_pauses_double_from_crash_to_crash_up_to_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, _ = supervise(tmp_path, "sys.exit(1)", max_crashes=4)
    supervisor.run()
    pauses = [str(message).split()[-2] for message in caplog.messages if "started again" in message]
    assert pauses == ["0.001", "0.002", "0.004"]
    assert [backoff_s(crashes) for crashes in (1, 2, 6, 7, 900)] == [1, 2, 32, MAX_BACKOFF_S, MAX_BACKOFF_S]


@pytest.mark.parametrize("code", [0, running.FINAL_EXIT])
def test_an_end_that_another_start_would_not_change_is_final(tmp_path: Path, code: int) -> None:
    supervisor, _ = supervise(tmp_path, f"sys.exit({code})")
    assert supervisor.run() == code
    assert lives(tmp_path) == 1


LISTENS = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
tell()
time.sleep(60)
"""
DOES_NOT_LISTEN_YET = """
tell()
time.sleep(60)
"""


@pytest.mark.parametrize("life", [LISTENS, DOES_NOT_LISTEN_YET], ids=["running", "starting"])
def test_a_stop_is_handed_on_and_is_no_crash(tmp_path: Path, life: str) -> None:
    supervisor = Supervisor(
        [str(tmp_path / "lives")],
        lambda progress: supervisor.stop(),
        life=[sys.executable, "-c", LIFE + life],
    )
    assert supervisor.run() == 0
    assert lives(tmp_path) == 1


def test_a_stop_in_a_pause_is_the_end(tmp_path: Path) -> None:
    supervisor, _ = supervise(tmp_path, "sys.exit(1)", first_backoff_s=60.0)

    class StopAtPause(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            supervisor.stop()

    pausing = StopAtPause()
    logger = logging.getLogger("semel.spark.supervisor")
    logger.addHandler(pausing)
    try:
        assert supervisor.run() == 0
    finally:
        logger.removeHandler(pausing)
    assert lives(tmp_path) == 1


@pytest.fixture
def raising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose pipeline raises what the test says; there is no session."""
    monkeypatch.setattr(running, "local_session", lambda *given, **settings: None)
    return tmp_path / "pipeline.py"


@pytest.mark.parametrize("kind", [ConfigError, MarkerMismatch, FencedOut])
def test_what_another_start_would_meet_again_is_told_by_the_exit_code(
    raising: Path, kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    raising.write_text(f"from {kind.__module__} import *\ndef pipeline(spark): raise {kind.__name__}('so')\n")
    assert running.main([str(raising)]) == running.FINAL_EXIT
    assert capsys.readouterr().err == f"{kind.__name__}: so\n"


def test_what_may_go_right_the_next_time_is_a_crash(raising: Path) -> None:
    raising.write_text(
        "from semel.sinks.errors import InitFailed\ndef pipeline(spark): raise InitFailed('not yet')\n"
    )
    with pytest.raises(InitFailed, match="not yet"):
        running.main([str(raising)])
