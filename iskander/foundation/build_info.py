"""Version and kind of the installed build: compiled or interpreted."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from typing import Final

from iskander import __version__


def _is_compiled() -> bool:
    """Return whether mypyc compiled the modules on the path of a batch."""
    spec = find_spec("iskander.interprocess.memory.arena")
    return spec is not None and spec.origin is not None and not spec.origin.endswith(".py")


BUILD: Final = "compiled" if _is_compiled() else "interpreted"


def describe(program: str) -> str:
    """Return a line for `--version`, such as `iskander 0.2.0 (compiled, CPython 3.11.7)`."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{program} {__version__} ({BUILD}, {python})"
