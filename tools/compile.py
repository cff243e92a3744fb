"""Compile the hot path of the broker with mypyc, into a tree of its own.

    script/compile                       make build/compiled
    PYTHONPATH=build/compiled semel serve ...

The tree has all of the package, and beside the modules below their compiled form, which Python prefers. The
checkout stays as it is: what is edited there is what runs, until somebody asks for the tree. For a wheel with
the compiled modules: SEMEL_COMPILE=1 pip install . (tools/hatch_build.py). Needs a C compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "src"
TARGET: Final = ROOT / "build" / "compiled"
STAMP: Final = "made-from"
"""In the tree: a checksum of what it was made from."""

MODULES: Final = (
    "wire.primitives",
    "wire.frames",
    "wire.batch",
    "wire.records",
    "wire.messages.produce",
    "wire.messages.add_partitions_to_txn",
    "wire.messages.end_txn",
    "log.partition",
    "log.producers",
    "log.settings",
    "broker.core",
    "broker.deadlines",
    "broker.decision",
    "broker.entries",
    "broker.produce",
    "broker.recompression",
    "broker.refusal",
    "broker.topics",
    "broker.transaction_messages",
    "broker.transactions.end_txn",
    "broker.transactions.ending",
    "broker.transactions.errors",
    "broker.transactions.hearing",
    "broker.transactions.joining",
    "broker.transactions.state",
    "broker.transactions.writing",
    "journal.format",
    "journal.writer",
    "storage.index",
    "storage.partition",
    "storage.segment",
    "storage.store",
    "server.clock",
    "server.connection",
    "server.intake",
    "server.life",
    "server.metrics",
    "server.node",
    "server.planted",
    "server.space",
    "subscriptions.window",
)
"""The way of a transaction, from the socket to the journal and back; and of clients' records, in and out of
batches and through a subscription's window. What inherits from a compiled class must be compiled, too;
`MessageStruct` alone may be inherited from by others."""

# The rest of the package is checked elsewhere. What mypy takes for unreachable would silently be left out.
MYPY_OPTIONS: Final = (
    "--config-file=",
    "--ignore-missing-imports",
    "--follow-imports=silent",
    "--warn-unreachable",
)
OPTIMISE: Final = "1"
"""Of gcc. More takes half as long again to compile, and the time goes to Python's own functions."""


def compile_package(target: Path) -> None:
    """Make `target` hold the package, with the modules compiled."""
    # Here and not above: a check of the stamp needs neither of them.
    from mypyc.build import mypycify
    from setuptools import setup

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(SOURCE / "semel", target / "semel", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    work = target / "work"
    before = Path.cwd()
    os.chdir(target)  # mypyc takes the names of modules from their paths.
    try:
        files = [f"semel/{module.replace('.', '/')}.py" for module in MODULES]
        extensions = mypycify(
            [*MYPY_OPTIONS, *files],
            opt_level=OPTIMISE,
            debug_level="0",
            multi_file=True,
            group_name="semel",
            target_dir=str(work),
        )
        workers = str(os.cpu_count() or 1)
        options = ["--quiet", "build_ext", "--inplace", "--parallel", workers]
        options += ["--build-temp", str(work), "--build-lib", str(work / "lib")]
        setup(name="semel", packages=[], ext_modules=extensions, script_args=options)
    finally:
        os.chdir(before)
    shutil.rmtree(work)
    (target / STAMP).write_text(_checksum())


def compiled_files(target: Path) -> list[Path]:
    """The compiled modules of a tree."""
    return sorted(target.rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"))


def is_fresh(target: Path) -> bool:
    """Whether the tree was made from what is there now."""
    stamp = target / STAMP
    return stamp.exists() and stamp.read_text() == _checksum()


def _checksum() -> str:
    digest = hashlib.sha256(f"{sys.version} {MODULES}".encode())
    for path in sorted((SOURCE / "semel").rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCE)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--into", type=Path, default=TARGET, help="where to make the tree (build/compiled)")
    target: Path = parser.parse_args().into.resolve()
    if is_fresh(target):
        print(f"{target} is fresh")
        return
    compile_package(target)
    print(f"{target} has {len(compiled_files(target))} compiled modules")


if __name__ == "__main__":
    main()
