"""`script/run` answers a question, or a wrong option, before it installs anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WRONG = {
    "an option that there is not": (["--kep"], "there is no option '--kep'"),
    "a word": (["postgres"], "there is no option 'postgres'"),
    "a database that it does not know": (["--sink", "mysql"], "--sink is kafka or postgres, and not 'mysql'"),
    "no value": (["--keep", "--orders"], "--orders needs a value"),
    "no orders": (["--orders", "0"], "--orders is a number of at least 100, and not '0'"),
    "fewer than none": (["--orders=-5"], "and not '-5'"),
    "no number": (["--orders", "many"], "and not 'many'"),
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which nothing can be installed or run: it is only told of."""
    for name, says in (("script/setup", "setup"), (".venv/bin/python", "python")):
        program = tmp_path / name
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\necho {says} "$@"\n')
        program.chmod(0o755)
    (tmp_path / "script" / "run").write_bytes((ROOT / "script" / "run").read_bytes())
    return tmp_path


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(checkout / "script" / "run"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_given_before_anything_is_installed(checkout: Path, option: str) -> None:
    done = run(checkout, "--keep", option)
    assert done.returncode == 0
    assert "setup" not in done.stdout
    for shown in ("script/run --sink postgres ", "--keep ", "--orders N ", "60,000"):
        assert shown in done.stdout


@pytest.mark.parametrize(("arguments", "says"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_refused_before_anything_is_installed(
    checkout: Path, arguments: list[str], says: str
) -> None:
    done = run(checkout, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["--keep"], ["--sink", "kafka", "--orders=500", "--seed", "1", "--keep"]], ids=len
)
def test_what_is_right_is_handed_on_as_it_was_given(checkout: Path, arguments: list[str]) -> None:
    done = run(checkout, *arguments)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == "setup run\n" + " ".join(["python", "examples/demonstration/run.py", *arguments]) + "\n"
    )
