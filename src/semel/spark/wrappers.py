"""Small programs that stand before others, which Spark would start in a way that does not suit them."""

import os
import stat
import tempfile
from hashlib import sha256
from pathlib import Path


def wrapper_home(kind: str, script: str, cache: Path | None = None) -> Path:
    """A directory for this script, and no other: what runs is never changed."""
    return (cache or _cache()) / f"{kind}-{sha256(script.encode()).hexdigest()[:16]}"


def write_program(path: Path, script: str) -> None:
    """Written aside and renamed: two pipelines may start at once, and what runs cannot be written to."""
    if path.exists() and path.read_text() == script:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as aside:
        aside.write(script)
    written = Path(aside.name)
    written.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    written.replace(path)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "semel"
