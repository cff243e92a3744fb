"""Which Python Spark's workers run on: this one, and on this machine with PySpark as it is installed.

Spark puts a PySpark of its own first on the path of its workers: a zip of sources, which Python compiles anew
in every process, for a third of a second. Where the same package is installed, and was compiled once, this
Python is put behind a program of ours that leaves the zip out (docs/decisions/0015).
"""

import importlib.util
import os
import sys
import sysconfig
from collections.abc import MutableMapping
from pathlib import Path
from shlex import quote
from typing import Final

from semel.spark.wrappers import wrapper_home, write_program

WORKER_PYTHON: Final = "PYSPARK_PYTHON"
SPARK_HOME: Final = "SPARK_HOME"
WRAPPER: Final = """\
#!/bin/sh
# Without Spark's zip of PySpark's sources: the package that is installed is compiled already.
export PYTHONPATH="${{PYTHONPATH#*pyspark.zip:}}"
exec {python} "$@"
"""


def choose_worker_python(
    environment: MutableMapping[str, str], *, is_local: bool, cache: Path | None = None
) -> None:
    """Says to Spark which Python it is, unless the user does: it would take any `python3` of the PATH."""
    script = WRAPPER.format(python=quote(sys.executable))
    wrapper = wrapper_home("python", script, cache) / "python"
    # On a cluster no other machine has it; a session of this process may have been a local one before.
    if environment.get(WORKER_PYTHON, sys.executable) not in (sys.executable, str(wrapper)):
        return
    environment[WORKER_PYTHON] = sys.executable
    if is_local and os.name == "posix" and _is_installed(environment):
        write_program(wrapper, script)
        environment[WORKER_PYTHON] = str(wrapper)


def _is_installed(environment: MutableMapping[str, str]) -> bool:
    """Whether a worker finds by itself the PySpark that Spark's zip was made of."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        return False
    package = Path(found.origin).parent
    home = environment.get(SPARK_HOME)
    is_sparks_own = home is None or Path(home).resolve() == package.resolve()
    places = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return is_sparks_own and package.resolve().parent in places
