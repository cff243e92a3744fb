"""What is checked and what is set before a pipeline runs, without a Spark."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any, Final

import pyspark
import pytest
from pyspark.errors import PySparkAttributeError
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
)

import semel.spark
from semel.errors import ConfigError
from semel.sinks.kafka import KafkaSink
from semel.spark import session
from semel.spark.columns import prepare_columns
from semel.spark.java import find_java
from semel.spark.pipeline import Trigger, _with_trigger, driver_host
from semel.spark.session import LOG_SETTINGS, limit_log, settings_for

STRING, BINARY = StringType(), BinaryType()


def pairs(**fields: DataType) -> ArrayType:
    return ArrayType(StructType([StructField(name, kind) for name, kind in fields.items()]))


def prepare_with_headers(headers: DataType) -> list[str]:
    schema = StructType([StructField("value", BINARY), StructField("h", headers)])
    frame: Any = SimpleNamespace(schema=schema)
    return prepare_columns(frame, KafkaSink("localhost:1", "out", key=None, headers="h"))


@pytest.mark.parametrize(
    "headers",
    [
        pairs(key=STRING, value=BINARY),
        pairs(value=STRING, key=STRING),
        pairs(key=STRING, value=BINARY, note=IntegerType()),
        MapType(STRING, BINARY),
        MapType(STRING, STRING),
        MapType(STRING, NullType()),
    ],
    ids=DataType.simpleString,
)
def test_headers_are_pairs_of_a_name_and_a_value(headers: DataType) -> None:
    assert prepare_with_headers(headers) == ["value", "h"]


@pytest.mark.parametrize(
    "headers",
    [
        STRING,
        ArrayType(STRING),
        ArrayType(ArrayType(STRING)),
        pairs(name=STRING, value=BINARY),
        pairs(key=BINARY, value=BINARY),
        pairs(key=STRING, value=IntegerType()),
        MapType(STRING, IntegerType()),
        MapType(IntegerType(), BINARY),
    ],
    ids=DataType.simpleString,
)
def test_any_other_column_of_headers_is_refused_and_told_what_it_must_be(headers: DataType) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare_with_headers(headers)
    assert f"column 'h' is of type {headers.simpleString()}" in str(refused.value)
    assert "array<struct<key:string,value:binary>> or map<string,binary>" in str(refused.value)


class Remote:
    """Of Spark Connect, which has no JVM at hand, and says so of whatever needs one."""

    __module__ = "pyspark.sql.connect.session"

    def __getattr__(self, name: str) -> object:
        raise PySparkAttributeError(
            errorClass="JVM_ATTRIBUTE_NOT_SUPPORTED", messageParameters={"attr_name": name}
        )


class RemoteBuilder:
    """What is to be a session on this machine, where the environment asks for Spark Connect."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *given: Remote() if name == "getOrCreate" else self


ON_CONNECT: dict[str, Callable[[Any], object]] = {
    "register": semel.spark.register,
    "read": lambda remote: semel.spark.read(remote, "localhost:1", "in"),
    "read-jvm": lambda remote: semel.spark.read(remote, "localhost:1", "in", connector="jvm"),
    "read_batch": lambda remote: semel.spark.read_batch(remote, "localhost:1", "in"),
    "exactly_once": lambda remote: semel.spark.exactly_once(
        remote, KafkaSink("localhost:1", "out"), name="p", checkpoint="/nowhere"
    ),
    "local_session": lambda remote: semel.spark.local_session("p"),
}


@pytest.mark.parametrize("ask", ON_CONNECT.values(), ids=ON_CONNECT.keys())
def test_spark_connect_is_refused_with_the_reason_wherever_it_is_met(
    ask: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkSession, "builder", RemoteBuilder())
    monkeypatch.setattr(session, "prepare_environment", lambda master: None)
    monkeypatch.setattr(session, "limit_log", lambda: None)
    with pytest.raises(ConfigError, match="Remote is of Spark Connect, where foreachBatch runs in another"):
        ask(Remote())


@pytest.mark.parametrize("master", ["foo", "local[2", "spark:", "localhost:7077", "YARN"])
def test_a_master_that_spark_does_not_know_is_refused_before_a_jvm_is_started(master: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be local\[\*\], spark://HOST:PORT, yarn or k8s://URL"):
        semel.spark.local_session("p", master=master)


# In the place of Java: it lets Spark's launcher run, and prints the command that is to be run then.
JAVA_THAT_SHOWS: Final = """\
#!/bin/sh
case "$*" in
    *org.apache.spark.launcher.Main*) exec {java} "$@" ;;
    *) printf '%s\\n' "$@" ;;
esac
"""


def drivers_java_options(folder: Path, *settings: str) -> list[str]:
    """Those that the JVM of a driver would be started with."""
    java = folder / "bin" / "java"
    java.parent.mkdir()
    java.write_text(JAVA_THAT_SHOWS.format(java=quote(str(find_java().home / "bin" / "java"))))
    java.chmod(0o755)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    done = subprocess.run(
        [submit, *(part for each in settings for part in ("--conf", each)), "pyspark-shell"],
        env={**os.environ, "JAVA_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if line.startswith("-D")]


@pytest.fixture
def conf_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Spark looks for the user's settings."""
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Dof.the.environment=1")
    return tmp_path


LIMITS_THE_LOG: Final = f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}"


def test_java_options_of_the_user_stay_beside_those_that_limit_the_log(conf_dir: Path) -> None:
    (conf_dir / "spark-defaults.conf").write_text(
        "spark.driver.extraJavaOptions -Dof.the.defaults=1\nspark.driver.defaultJavaOptions -Dof.all=1\n"
    )
    limit_log()
    limit_log()
    options = drivers_java_options(conf_dir, *map("=".join, settings_for("yarn").items()))
    ours = [LIMITS_THE_LOG, "-Dof.the.environment=1", "-Dof.all=1", "-Dof.the.defaults=1"]
    assert [option for option in options if option in ours] == ours
    assert LOG_SETTINGS.exists()


def test_what_spark_says_is_left_to_who_has_settings_for_that(conf_dir: Path) -> None:
    (conf_dir / "log4j2.properties").touch()
    limit_log()
    assert LIMITS_THE_LOG not in os.environ["SPARK_SUBMIT_OPTS"]


@pytest.mark.parametrize("master", ["local", "local[*]", "local-cluster[2,1,1024]"])
def test_on_one_machine_there_are_settings_for_a_small_one(master: str) -> None:
    on_a_cluster, here = settings_for("yarn"), settings_for(master)
    assert on_a_cluster.items() < here.items(), "it adds to what is set everywhere, and changes none of it"


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://https://host:6443"])
def test_a_cluster_keeps_its_own_settings(master: str) -> None:
    settings = settings_for(master)
    kept = ("spark.sql.shuffle", "spark.driver.host", "spark.driver.bind", "spark.python")
    assert not {name for name in settings if name.startswith(kept)}
    assert "spark.ui.enabled" not in settings
    assert settings["spark.sql.session.timeZone"] == "UTC"


@pytest.mark.parametrize(
    ("told", "host"), [("10.1.2.3", "10.1.2.3"), ("[fe80::1]", "fe80::1"), (None, "127.0.0.1")]
)
def test_the_drivers_address_is_one_that_can_be_listened_at(told: str | None, host: str) -> None:
    session: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda name, other: told or other))
    assert driver_host(session) == host


@pytest.mark.parametrize(
    ("given", "keywords"),
    [
        ("availableNow", {"availableNow": True}),
        ("5 seconds", {"processingTime": "5 seconds"}),
        ("interval 1 minute", {"processingTime": "interval 1 minute"}),
        ({"processingTime": "1s"}, {"processingTime": "1s"}),
    ],
)
def test_a_trigger_is_given_to_spark_by_its_name(given: Trigger, keywords: dict[str, object]) -> None:
    writer: Any = SimpleNamespace(trigger=lambda **named: named)
    assert _with_trigger(writer, given) == keywords
    assert _with_trigger(writer, None) is writer


@pytest.mark.parametrize("given", ["once", {"once": True}, "never"])
def test_triggers_that_are_not_there_are_refused(given: Trigger) -> None:
    writer: Any = None
    with pytest.raises(
        ConfigError, match=r"there is no trigger '(once|never)': use processingTime, availableNow$"
    ):
        _with_trigger(writer, given)


@pytest.mark.parametrize("given", ["continuous", {"continuous": "1 second"}, {"realTime": "5 minutes"}])
def test_triggers_without_batches_are_refused_with_the_reason(given: Trigger) -> None:
    writer: Any = None
    with pytest.raises(ConfigError, match="has no batches"):
        _with_trigger(writer, given)
