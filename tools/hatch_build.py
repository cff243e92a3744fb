"""Compiled modules in the wheel, for whoever asks: SEMEL_COMPILE=1 pip install .

Without the variable the wheel is pure Python, and needs no compiler to be made.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledModules(BuildHookInterface[Any]):
    """Compiles the package aside, and adds what came out to the wheel."""

    @property
    def _is_wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get("SEMEL_COMPILE") == "1"

    def dependencies(self) -> list[str]:
        return ["mypy[mypyc]>=2.0"] if self._is_wanted else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # An editable install runs the checkout, where a compiled module would hide what is edited.
        if not self._is_wanted or version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "tools"))
        from compile import TARGET, compile_package, compiled_files, is_fresh

        if not is_fresh(TARGET):
            compile_package(TARGET)
        for path in compiled_files(TARGET):
            build_data["force_include"][str(path)] = str(path.relative_to(TARGET))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
