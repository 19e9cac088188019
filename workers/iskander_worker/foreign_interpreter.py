"""A worker in an interpreter that has not this distribution installed: its code is lent to it.

    python -P .../iskander_worker/foreign_interpreter.py FOLDERS MODULE its-arguments...

Only the two packages, and what they were compiled to, are found in the folders; everything else is
the interpreter's own, which needs NumPy and msgspec, and what the model's backend needs.

Runs on: worker main, as the first thing. Imports nothing of ours before it is found.

Exit codes: 78 the interpreter lacks something; else those of `__main__`.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

EXIT_LACKS = 78
PYTHON_MIN = (3, 11)
LENT = "ISKANDER_LENT"
"""In the environment of such a process: the folders, for those that it starts."""
NEEDED = ("msgspec", "numpy")


class PackageFinder:
    """Finds our packages in the folders, and nothing else there."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As the import system asks for it."""
        if name in ("iskander", "iskander_worker") or name.endswith("__mypyc"):
            return PathFinder.find_spec(name, self._folders)
        return None


def own_command(module: str) -> list[str]:
    """What runs another module of ours in this interpreter, lent to it or not."""
    folders = os.environ.get(LENT)
    start = ["-m"] if folders is None else [__file__, folders]
    return [sys.executable, "-P", *start, module]


def main() -> None:
    """Lend the code, see that the interpreter has what it needs, and be what was asked for."""
    os.environ[LENT] = sys.argv.pop(1)
    module = sys.argv.pop(1)
    complaint = _complaint()
    if complaint:
        sys.stderr.write(f"iskander-worker[{os.getpid()}]: {sys.executable} {complaint}\n")
        sys.exit(EXIT_LACKS)
    sys.meta_path.insert(0, PackageFinder(os.environ[LENT].split(os.pathsep)))
    importlib.import_module(module).main()


def _complaint() -> str:
    """What the interpreter lacks; empty where it has all."""
    if sys.version_info < PYTHON_MIN:
        found = ".".join(map(str, sys.version_info[:2]))
        return f"is Python {found}, and a worker needs 3.11 or newer"
    missing = [name for name in NEEDED if PathFinder.find_spec(name) is None]
    if missing:
        return f"lacks {' and '.join(missing)}, which a worker needs: install them there"
    return ""


if __name__ == "__main__":
    main()
