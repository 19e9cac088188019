"""Builds the wheel once for each state of the sources; later calls return the same file.

    python scripts/build_wheel.py [--pure]

Compiled if there is a C compiler, unless `--pure` is given. The wheel check and the benchmarks
share the result in `build/wheels/DIGEST/`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "iskander",
    "workers",
    "configs",
    "pyproject.toml",
    "README.md",
    "scripts/compile_hook.py",
    "scripts/sboms",
)


def wheel(*, is_pure: bool = False) -> Path:
    """Path of this checkout's wheel, built unless the same sources were built before."""
    is_compiled = not is_pure and shutil.which("cc") is not None
    folder = ROOT / "build" / "wheels" / _digest(is_compiled)
    found = list(folder.glob("iskander-*.whl"))
    if found:
        return found[0]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        build(ROOT, Path(name) / "wheel", is_compiled=is_compiled)
        # Another process may have built the same wheel at the same time.
        if not folder.exists():
            (Path(name) / "wheel").rename(folder)
    return next(folder.glob("iskander-*.whl"))


def build(source: Path, folder: Path, *, is_compiled: bool = False) -> None:
    """Build the wheel of a source tree in a folder, with uv or pip."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    if shutil.which("uv"):
        command = ["uv", "build", "--quiet", "--wheel", "--python", sys.executable]
        command += ["--out-dir", folder]
    environment = os.environ | {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": str(int(is_compiled))}
    subprocess.run([*command, source], check=True, env=environment)


def _digest(is_compiled: bool) -> str:
    """Digest of the sources, the interpreter and the kind of wheel."""
    digest = hashlib.sha256(f"{sys.implementation.cache_tag} {is_compiled}".encode())
    for name in SOURCES:
        source = ROOT / name
        files = sorted(source.rglob("*")) if source.is_dir() else [source]
        for path in files:
            if path.is_file() and path.suffix != ".pyc" and not path.name.endswith(".onnx"):
                digest.update(f"{path.relative_to(ROOT)} {path.stat().st_mode}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.stdout.write(f"{wheel(is_pure='--pure' in sys.argv)}\n")
