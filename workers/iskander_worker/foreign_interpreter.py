"""Runs a worker in a Python interpreter without this distribution installed.

    python -P .../iskander_worker/foreign_interpreter.py FOLDERS MODULE its-arguments...

Only the two packages and their compiled modules are imported from the folders. Everything else
comes from the interpreter, which needs NumPy, msgspec, and the libraries of the model's backend.

Runs on: worker main, as the first thing. Imports nothing of ours before the finder is installed.

Exit codes: 78 the interpreter lacks something; else those of `__main__`.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

EXIT_INTERPRETER = 78
PYTHON_MIN = (3, 11)
FOLDERS = "ISKANDER_PACKAGES"
"""Environment variable with the folders, for child processes."""
PACKAGES_NEEDED = ("msgspec", "numpy")


class PackageFinder:
    """Finds our two packages in the folders, and nothing else."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Implement the interface of the import system."""
        if name in ("iskander", "iskander_worker") or name.endswith("__mypyc"):
            return PathFinder.find_spec(name, self._folders)
        return None


def own_command(module: str) -> list[str]:
    """Return the command that runs another module of ours in this interpreter."""
    folders = os.environ.get(FOLDERS)
    start = ["-m"] if folders is None else [__file__, folders]
    return [sys.executable, "-P", *start, module]


def main() -> None:
    """Check the interpreter, install the finder, and run the module."""
    os.environ[FOLDERS] = folders = sys.argv.pop(1)
    module = sys.argv.pop(1)
    if problem := _missing_requirement():
        sys.stderr.write(f"iskander-worker[{os.getpid()}]: {sys.executable} {problem}\n")
        sys.exit(EXIT_INTERPRETER)
    sys.meta_path.insert(0, PackageFinder(folders.split(os.pathsep)))
    importlib.import_module(module).main()


def _missing_requirement() -> str:
    """Describe what the interpreter lacks; empty if it lacks nothing."""
    if sys.version_info < PYTHON_MIN:
        found = ".".join(map(str, sys.version_info[:2]))
        return f"is Python {found}, and a worker needs 3.11 or newer"
    missing = [name for name in PACKAGES_NEEDED if PathFinder.find_spec(name) is None]
    if missing:
        return f"lacks {' and '.join(missing)}, which a worker needs: install them there"
    return ""


if __name__ == "__main__":
    main()
