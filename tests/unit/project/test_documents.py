"""The documents say what is so: generated parts and locks are fresh, links lead somewhere, examples run."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from semel.embedded import Broker
from semel.spark import doctor

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import generate_docs  # noqa: E402

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")


def code_blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The names by which a document's headings are linked to."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_file_map_the_pages_and_the_settings_are_fresh() -> None:
    stale = [str(path.relative_to(ROOT)) for path in generate_docs.stale_files()]
    assert not stale, "run: python tools/generate_docs.py"


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in generate_docs.SOURCE.rglob("*.py")
        if path.parent.name != "messages" and not generate_docs.first_sentence(path)
    ]
    assert not silent


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(document.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name) if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_python_examples_of_the_readme_run(
    capsys: pytest.CaptureFixture[str], semel_broker: Broker, semel_topic: str
) -> None:
    names: dict[str, object] = {}
    for block in code_blocks(ROOT / "README.md", "python"):
        if not block.startswith(("import ", "from ")):
            continue  # an excerpt
        exec(compile(block, "README.md", "exec"), names)
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", capsys.readouterr().out)
    examples = [each for name, each in names.items() if name.startswith("test_")]
    assert len(examples) == 1
    assert inspect.isfunction(examples[0])
    examples[0](semel_broker, semel_topic)


def test_the_locks_have_a_checksum_for_everything_and_name_no_registry() -> None:
    for lock in (ROOT / "requirements").glob("*.txt"):
        text = lock.read_text()
        assert "://" not in text
        for requirement in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]:
            assert "--hash=sha256:" in requirement, requirement


def wanted(extra: str | None) -> list[Requirement]:
    """What the project asks for, with what the extras that it names itself ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    requirements = [Requirement(each) for each in found]
    nested = [name for each in requirements if each.name == project["name"] for name in each.extras]
    others = [each for each in requirements if each.name != project["name"]]
    return others + [each for name in nested for each in wanted(name)]


@pytest.mark.parametrize(("lock", "extra"), [("run.txt", None), ("dev.txt", None), ("dev.txt", "dev")])
def test_what_the_project_asks_for_is_locked(lock: str, extra: str | None) -> None:
    locked = dict(
        re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements" / lock).read_text(), re.MULTILINE)
    )
    for each in wanted(extra):
        assert each.name in locked, "run: script/lock"
        assert each.specifier.contains(locked[each.name]), "run: script/lock"


def test_the_doctor_asks_for_what_the_extra_installs() -> None:
    asked = {
        requirement.name: each.version.split(".")
        for requirement in [*wanted(None), *wanted("spark")]
        for each in requirement.specifier
        if each.operator == ">="
    }
    for name in ("pyspark", "pyarrow", "numpy", "pandas"):
        major, minor = [*asked[name], "0"][:2]
        assert getattr(doctor, f"MIN_{name.upper()}") == (int(major), int(minor)), name


def test_no_two_modules_of_the_tests_share_a_name() -> None:
    # All tests run in one session, where a module is known by its name alone.
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
