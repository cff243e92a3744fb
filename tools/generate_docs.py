"""Write the parts of the documents that follow from the rest: the file map, the list of pages, the settings.

python tools/generate_docs.py            write what has changed
python tools/generate_docs.py --check    fail if anything would change

The file map in ARCHITECTURE.md is the first sentence of every module, and its list of pages the title of
every page; docs/settings.md is the table of the broker's settings. So none of them is out of date for long.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

from semel.broker.configs import (
    ACCEPTED_WITHOUT_EFFECT,
    INT_MAX,
    LONG_MAX,
    TOPIC_CONFIGS,
    ConfigDefinition,
    ConfigType,
)
from semel.server.settings import SETTINGS

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "src" / "semel"
BEGINS: Final = "<!-- {name}: written by tools/generate_docs.py -->\n"
ENDS: Final = "<!-- end of the {name} -->\n"

# Packages of generated modules, which the map names as a whole.
GENERATED_PACKAGES: Final = frozenset({"wire/messages"})

SETTINGS_OPENING: Final = """\
# Settings

<!-- written by tools/generate_docs.py from semel/server/settings.py; edit that file instead -->

Names are Kafka's where Kafka has the setting. A value comes from the first of these that names it:

1. a flag: `semel serve --set num.partitions=4` (`--data`, `--listen` and `--durability` are short for
   `log.dirs`, `listeners` and `durability`);
2. the environment: `SEMEL_NUM_PARTITIONS=4`;
3. a file of `name=value` lines: `--config FILE`, or the variable `SEMEL_CONFIG`;
4. the default.

`semel config show` prints every setting, its value and where that came from. A name that does not exist or a
value that does not fit is refused at the start.
"""

TOPIC_OPENING: Final = """\
A topic has what its owner set (`semel topic create NAME --config retention.ms=60000`, `semel topic alter`),
else what the broker says under the second name, else the default. The broker's names are settings like those
above.
"""

FOREIGN_OPENING: Final = """\
Kafka knows these, too. They may be set on a topic, and are kept and shown, but have no effect here:
"""


# The file map.


def file_map() -> str:
    lines = []
    for package, modules in _packages():
        heading = f"semel/{package}" if package else "semel"
        lines.append(f"### `{heading}`\n")
        if package and (summary := first_sentence(SOURCE / package / "__init__.py")):
            lines.append(f"{summary}\n")
        if package not in GENERATED_PACKAGES:
            rows = [(f"`{path.name}`", first_sentence(path)) for path in modules]
            lines += [*_table(("module", "what it is for"), rows), ""]
    return "\n".join(lines)


def _packages() -> Iterator[tuple[str, list[Path]]]:
    directories = sorted({path.parent for path in SOURCE.rglob("*.py")})
    for directory in directories:
        modules = sorted(path for path in directory.glob("*.py") if path.name != "__init__.py")
        package = "" if directory == SOURCE else directory.relative_to(SOURCE).as_posix()
        yield package, modules


@cache
def first_sentence(path: Path) -> str:
    """What a module says it is for."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n", 1)[0].split())
    return re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]


# The list of pages.


def page_list() -> str:
    lines = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.relative_to(ROOT).as_posix()})")
    return "\n".join([*lines, "", ""])


def architecture() -> str:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    text = _with_section(text, "list of pages", page_list())
    return _with_section(text, "file map", file_map())


def _with_section(text: str, name: str, section: str) -> str:
    """The text with what stands between the section's two marks replaced."""
    begins, ends = BEGINS.format(name=name), ENDS.format(name=name)
    before, found, rest = text.partition(begins)
    _, found_end, after = rest.partition(ends)
    if not found or not found_end:
        raise SystemExit(f"ARCHITECTURE.md has no lines {begins.strip()} and {ends.strip()}; put them back")
    return f"{before}{begins}\n{section}{ends}{after}"


# The settings.


def settings_page() -> str:
    topic_names = {item.server_name for item in TOPIC_CONFIGS.values()}
    own = [
        (f"`{item.name}`", _kind(item), _default(item), item.summary)
        for name, item in SETTINGS.items()
        if name not in topic_names
    ]
    of_topics = [
        (f"`{item.name}`", f"`{item.server_name}`", _kind(item), _default(item), item.summary)
        for item in TOPIC_CONFIGS.values()
    ]
    return "\n".join(
        [
            SETTINGS_OPENING,
            "## The broker\n",
            *_table(("setting", "type", "default", "meaning"), own),
            "",
            "## Topics\n",
            TOPIC_OPENING,
            *_table(("topic config", "broker setting", "type", "default", "meaning"), of_topics),
            "",
            FOREIGN_OPENING,
            ", ".join(f"`{name}`" for name in sorted(ACCEPTED_WITHOUT_EFFECT)) + ".",
            "",
        ]
    )


def _kind(item: ConfigDefinition) -> str:
    if item.kind == ConfigType.BOOLEAN:
        return "true or false"
    if item.choices:
        joint = " and/or " if item.kind == ConfigType.LIST else " or "
        return joint.join(f"`{choice}`" for choice in item.choices)
    bounds = []
    if item.minimum is not None:
        bounds.append(f"from {_number(item.minimum)}")
    if item.maximum is not None:
        bounds.append(f"to {_number(item.maximum)}")
    return " ".join([item.kind.name.lower(), *bounds])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _default(item: ConfigDefinition) -> str:
    if not item.default:
        return "(empty)"
    if item.kind in (ConfigType.INT, ConfigType.LONG) and int(item.default) in (INT_MAX, LONG_MAX):
        return "no limit"
    return f"`{item.default}`{_readable(item)}"


def _readable(item: ConfigDefinition) -> str:
    """Bytes and milliseconds in units that a person can read."""
    if item.kind not in (ConfigType.INT, ConfigType.LONG):
        return ""
    number = int(item.default)
    units: tuple[tuple[int, str], ...] = ()
    if item.name.endswith("bytes"):
        units = ((1024**3, "GiB"), (1024**2, "MiB"))
    elif item.name.endswith(".ms"):
        units = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))
    for size, unit in units:
        if number >= size and number % size == 0:
            return f" ({number // size} {unit})"
    return ""


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [" | ".join(headings), " | ".join("---" for _ in headings)]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {line} |" for line in lines]


# Both.


def wanted_files() -> dict[Path, str]:
    return {ROOT / "ARCHITECTURE.md": architecture(), ROOT / "docs" / "settings.md": settings_page()}


def stale_files() -> dict[Path, str]:
    return {
        path: text
        for path, text in wanted_files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if files are stale"
    )
    check: bool = arguments.parse_args().check
    stale = stale_files()
    for path, text in stale.items():
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and stale:
        print("run: python tools/generate_docs.py", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
