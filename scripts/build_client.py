"""Builds the wheel of `iskander-client`: the Python client without the server.

    python scripts/build_client.py [FOLDER]

The wheel is pure and contains the modules that `import iskander.client` loads, under the same
import name. Their list is computed from the imports of the sources; imports inside functions and
for type checkers only do not count. `docs/releasing.md` has the reason for this layout.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build_wheel

ROOT = Path(__file__).resolve().parent.parent
ENTRY = "iskander.client"
TYPED = "iskander/py.typed"
DEPENDENCIES = ("pyarrow",)
SBOM = "iskander-client.cdx.json"
README = """\
# iskander-client

Python client of Iskander, a model server for Arrow data. It needs pyarrow only, and runs on Linux,
macOS and Windows.

```python
from iskander.client import Client

with Client("models.example:50051") as client:
    result = client.score("movielens-two-tower", table)
```

The distribution `iskander` contains this client, the server and shared memory for clients on the
server's machine. Both use the import name `iskander`: install one of them in an environment.
"""


def wheel(folder: Path) -> Path:
    """Build the client wheel in a folder; return its path."""
    with tempfile.TemporaryDirectory(prefix="iskander-client-") as name:
        tree = Path(name)
        copy_sources(tree)
        # The main project's license files, if it has any.
        for path in ROOT.glob("LICENSE*"):
            shutil.copy(path, tree)
        shutil.copy(ROOT / "scripts" / "sboms" / SBOM, tree)
        (tree / "README.md").write_text(README)
        (tree / "pyproject.toml").write_text(_pyproject())
        build_wheel.build(tree, tree / "wheel")
        built = next((tree / "wheel").glob("*.whl"))
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(built, folder))


def copy_sources(target: Path) -> None:
    """Copy the client's modules and the marker for type checkers to an empty folder."""
    for name in (*sorted(modules().values()), TYPED):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, path)


def modules() -> dict[str, str]:
    """Modules of this repository that `import iskander.client` loads, with their files."""
    found: dict[str, str] = {}
    waiting = [ENTRY]
    while waiting:
        module = waiting.pop()
        name = _file_of(module)
        if module in found or name is None:
            continue
        found[module] = name
        waiting += imports(name)
        package = module.rpartition(".")[0]
        if package:
            waiting.append(package)
    return found


def imports(name: str, *, includes_late: bool = False) -> set[str]:
    """Modules that a file imports when it is loaded, or also later; `from a import b` adds a.b."""
    tree = ast.parse((ROOT / name).read_text())
    found: set[str] = set()
    for node in _statements(tree, includes_late=includes_late):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _statements(tree: ast.AST, *, includes_late: bool) -> Iterator[ast.AST]:
    """Yield the nodes that run at import, or also those in functions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not includes_late:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _file_of(module: str) -> str | None:
    """Return the file of a module; None if it is not in this repository."""
    if module.partition(".")[0] != "iskander":
        return None
    path = module.replace(".", "/")
    names = (f"{path}.py", f"{path}/__init__.py")
    return next((name for name in names if (ROOT / name).is_file()), None)


def _pyproject() -> str:
    """Project file of the client, with the main project's Python versions and bounds."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        main = tomllib.load(file)["project"]
    shared = [each for each in main["classifiers"] if not each.startswith("Operating System")]
    project: dict[str, Any] = {
        "name": "iskander-client",
        "description": "Python client of Iskander, a model server for Arrow data.",
        "readme": "README.md",
        "requires-python": main["requires-python"],
        "dynamic": ["version"],
        "keywords": main["keywords"],
        "classifiers": [*shared, "Operating System :: OS Independent", "Typing :: Typed"],
        "dependencies": [
            each for each in main["dependencies"] if each.partition(">=")[0] in DEPENDENCIES
        ],
    }
    lines = ["[build-system]", 'requires = ["hatchling>=1.28"]']
    lines += ['build-backend = "hatchling.build"']
    lines += ["[project]", *(f"{key} = {json.dumps(value)}" for key, value in project.items())]
    lines += ["[tool.hatch.version]", 'path = "iskander/__init__.py"']
    lines += ["[tool.hatch.build.targets.wheel]", 'packages = ["iskander"]']
    lines += [f'sbom-files = ["{SBOM}"]']
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(f"{wheel(Path(sys.argv[1]) if sys.argv[1:] else ROOT / 'dist')}\n")
