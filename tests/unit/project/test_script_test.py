"""`script/test` tries once more what failed, unless rows were lost or doubled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from row_checks import ROWS_DIFFER_CODE

TESTS = Path(__file__).resolve().parents[2]
TOLD = "rows were lost or doubled"
TWO_TESTS = """
from row_checks import about_rows, check_rows

def test_of_rows():
    check_rows({found}, "abc")

@about_rows()
def test_of_more():
    assert {found} == list("abc")

def test_of_something_else():
    assert not {fails}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which all is well, but for what pytest says; and that is counted."""
    for name in (
        "script/setup",
        *(f".venv/bin/{tool}" for tool in ("ruff", "mypy", "lint-imports", "python")),
    ):
        make_program(tmp_path / name, "true")
    (tmp_path / "script" / "test").write_bytes((TESTS.parent / "script" / "test").read_bytes())
    return tmp_path


def make_program(path: Path, does: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("first", "then", "runs", "ends"),
    [
        pytest.param(0, 0, 1, 0, id="all is well"),
        pytest.param(1, 0, 2, 0, id="unsteady"),
        pytest.param(1, 1, 2, 1, id="broken"),
        pytest.param(1, ROWS_DIFFER_CODE, 2, 1, id="unsteady, then rows"),
        pytest.param(ROWS_DIFFER_CODE, 0, 1, 1, id="rows"),
        pytest.param(3, 0, 1, 1, id="pytest itself"),
    ],
)
def test_what_failed_is_tried_once_more_unless_rows_were_lost_or_doubled(
    checkout: Path, first: int, then: int, runs: int, ends: int
) -> None:
    counted = checkout / "runs"
    says = f'echo "$@" >>{counted}; [ $(wc -l <{counted}) = 1 ] && exit {first}; exit {then}'
    make_program(checkout / ".venv" / "bin" / "pytest", says)
    command = ["sh", str(checkout / "script" / "test"), "unit"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ends, done.stderr
    assert ["--last-failed" in line for line in counted.read_text().splitlines()] == [False, True][:runs]
    assert (TOLD in done.stdout) == (first == ROWS_DIFFER_CODE)


@pytest.mark.parametrize(
    ("found", "fails", "code"),
    [(["a", "b", "c"], False, 0), (["a", "b", "c"], True, 1), (["a", "b"], True, ROWS_DIFFER_CODE)],
)
def test_pytest_says_by_its_exit_code_that_rows_differ(
    tmp_path: Path, found: list[str], fails: bool, code: int
) -> None:
    (tmp_path / "test_rows.py").write_text(TWO_TESTS.format(found=found, fails=fails))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == code, done.stdout
    told = [f"ROWS LOST OR DOUBLED test_rows.py::{test}" for test in ("test_of_rows", "test_of_more")]
    assert [line for line in done.stdout.splitlines() if line.startswith("ROWS")] == told * (code == 10)
