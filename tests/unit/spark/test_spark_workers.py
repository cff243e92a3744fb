"""The Python that Spark's workers run on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from semel.spark.workers import SPARK_HOME, WORKER_PYTHON, choose_worker_python

ZIP = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"
# What a worker has to say of itself, and of its PySpark; and what it was given.
ASK = "import sys, pyspark; print(sys.executable); print(pyspark.__file__); print(*sys.argv[1:])"


def test_a_worker_on_this_machine_has_the_pyspark_that_is_installed_and_not_sparks_zip(
    tmp_path: Path,
) -> None:
    environment: dict[str, str] = {}
    choose_worker_python(environment, is_local=True, cache=tmp_path / "a cache")
    wrapper = environment[WORKER_PYTHON]
    path = os.pathsep.join([str(ZIP), str(tmp_path)])
    without = said_by(sys.executable, path)
    assert Path(without[1]).is_relative_to(ZIP), "Spark's zip would not come first anyway"
    assert said_by(wrapper, path) == [sys.executable, pyspark.__file__, "a b c"]
    assert said_by(wrapper, "") == [sys.executable, pyspark.__file__, "a b c"]


def said_by(python: str, path: str) -> list[str]:
    told = subprocess.run(
        [python, "-c", ASK, "a b", "c"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.splitlines()


def test_what_the_user_says_of_workers_stays(tmp_path: Path) -> None:
    environment = {WORKER_PYTHON: "./env/bin/python"}
    for is_local in (True, False):
        choose_worker_python(environment, is_local=is_local, cache=tmp_path)
        assert environment == {WORKER_PYTHON: "./env/bin/python"}
    assert not list(tmp_path.iterdir())


def test_a_cluster_gets_the_python_itself_also_after_a_session_on_this_machine(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    for is_local, is_wrapped in ((False, False), (True, True), (True, True), (False, False)):
        choose_worker_python(environment, is_local=is_local, cache=tmp_path)
        assert (environment[WORKER_PYTHON] != sys.executable) is is_wrapped


@pytest.mark.parametrize("home", [ZIP.parents[2], Path("/opt/spark")], ids=["the package's", "another"])
def test_another_spark_keeps_its_own_pyspark(home: Path, tmp_path: Path) -> None:
    environment = {SPARK_HOME: str(home)}
    choose_worker_python(environment, is_local=True, cache=tmp_path)
    assert (environment[WORKER_PYTHON] == sys.executable) is (home == Path("/opt/spark"))
