"""Exactly-once pipelines on Spark, through PySpark.

    orders = semel.spark.read(spark, bootstrap, "orders")

What is named here is imported when it is first asked for: executors load the reader of topics alone, and
whoever only looks for a Java does not load PySpark.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from semel.errors import missing_extra

if TYPE_CHECKING:
    from semel.spark.pipeline import ExactlyOnce, exactly_once
    from semel.spark.query import PipelineQuery
    from semel.spark.reader import read, read_batch, register
    from semel.spark.session import local_session

__all__ = ["ExactlyOnce", "PipelineQuery", "exactly_once", "local_session", "read", "read_batch", "register"]

DEFINED_IN: Final = {
    "ExactlyOnce": "semel.spark.pipeline",
    "PipelineQuery": "semel.spark.query",
    "exactly_once": "semel.spark.pipeline",
    "local_session": "semel.spark.session",
    "read": "semel.spark.reader",
    "read_batch": "semel.spark.reader",
    "register": "semel.spark.reader",
}


def __getattr__(name: str) -> object:
    if name not in DEFINED_IN:
        raise AttributeError(f"module 'semel.spark' has no attribute {name!r}")
    try:
        found: object = getattr(import_module(DEFINED_IN[name]), name)
    except ImportError as error:
        raise missing_extra(f"semel.spark.{name}", "spark", error) from error
    return found
