"""Client distribution: its modules, their imports, and an import where the server cannot run."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from support import client_copy

CLIENT = client_copy.build_client()
THIRD_PARTY = {"pyarrow", "numpy"}
OPTIONAL = {"opentelemetry"}
"""Imported only if the caller has imported it."""
SERVER_ONLY = {"iskander.client.calls.shared_memory"}
"""Late imports of modules that the distribution lacks: shared memory needs msgspec and memfd."""
LOADED = """
loaded = [name for name, module in sys.modules.items() if module is not None]
print(json.dumps(sorted(name for name in loaded if name.startswith("iskander"))))
"""


def test_third_party_imports_are_the_dependencies_and_numpy() -> None:
    used = {
        module.partition(".")[0]
        for name in CLIENT.modules().values()
        for module in CLIENT.imports(name, includes_late=True)
    }

    assert used - sys.stdlib_module_names - {"iskander"} <= THIRD_PARTY | OPTIONAL


def test_imports_of_the_server_are_only_those_of_shared_memory() -> None:
    modules = CLIENT.modules()
    late = {
        module
        for name in modules.values()
        for module in CLIENT.imports(name, includes_late=True)
        if CLIENT._file_of(module) is not None
    }

    assert late - modules.keys() == SERVER_ONLY


def test_every_client_module_but_shared_memory_is_in_the_distribution() -> None:
    folder = CLIENT.ROOT / "iskander" / "client"
    files = {path.relative_to(CLIENT.ROOT).as_posix() for path in folder.rglob("*.py")}

    assert files - set(CLIENT.modules().values()) == {"iskander/client/calls/shared_memory.py"}


def test_imports_in_functions_and_for_type_checkers_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
import json
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import zmq
else:
    import stat
try:
    from a import b
except ImportError:
    pass
class Late:
    import html
    def read(self):
        import csv
"""
    monkeypatch.setattr(CLIENT, "ROOT", tmp_path)
    (tmp_path / "source.py").write_text(source)
    at_import = {"json", "typing", "typing.TYPE_CHECKING", "stat", "a", "a.b", "html"}

    assert CLIENT.imports("source.py") == at_import
    assert CLIENT.imports("source.py", includes_late=True) == {*at_import, "csv"}


@pytest.mark.long
@pytest.mark.parametrize("platform", client_copy.PLATFORMS)
def test_copy_of_the_files_is_imported_without_server_libraries(
    tmp_path: Path, platform: str
) -> None:
    CLIENT.copy_sources(tmp_path)

    loaded = client_copy.run(tmp_path, platform, LOADED)

    assert loaded == sorted(CLIENT.modules())


def test_project_file_has_the_bounds_of_the_main_project() -> None:
    main = tomllib.loads((CLIENT.ROOT / "pyproject.toml").read_text())["project"]

    project = tomllib.loads(CLIENT._pyproject())["project"]

    assert project["requires-python"] == main["requires-python"]
    assert len(project["dependencies"]) == len(CLIENT.DEPENDENCIES)
    assert set(project["dependencies"]) < set(main["dependencies"])
