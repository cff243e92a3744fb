"""Sinks and pipelines without the packages that they need."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Without a package, in a process of its own: this one has all of them.
WITHOUT = """
import sys

sys.modules[sys.argv[1]] = None
try:
    exec(sys.argv[2])
except ImportError as error:
    print(type(error).__name__, error.name, error)
"""


@pytest.mark.parametrize(
    ("package", "statement", "extra"),
    [
        ("pymysql", "from semel.sinks import MySQLSink", "mysql"),
        ("pymysql", "from semel.sinks.mysql import MySQLSink", "mysql"),
        ("psycopg", "from semel.sinks import PostgresSink", "postgres"),
        ("psycopg", "from semel.sinks.postgres import PostgresSink", "postgres"),
        ("psycopg", "from semel import transaction", "postgres"),
        ("pyarrow", "from semel.sinks import MySQLSink", "mysql"),
        ("pyarrow", "from semel.sinks import KafkaSink", "sinks"),
        ("pyarrow", "from semel.spark import exactly_once", "spark"),
        ("pyspark", "from semel.spark import exactly_once", "spark"),
        ("pyarrow", "from semel.sinks.kafka import KafkaSink", "sinks"),
    ],
)
def test_who_lacks_a_package_is_told_how_to_install_it(package: str, statement: str, extra: str) -> None:
    command = [sys.executable, "-c", WITHOUT, package, statement]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"ModuleNotFoundError {package} ")
    assert said.rstrip().endswith(
        f"is missing (No module named '{package}'): pip install '.[{extra}]' in a checkout of Semel"
    )
