"""What is compiled is there, and is none of what mypyc and msgspec do not agree about."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HOOK = (ROOT / "scripts" / "compile_hook.py").read_text("utf-8")
SOURCES = {"iskander": "iskander", "iskander_worker": "workers/iskander_worker"}
NEVER_READ = {
    "ParsedBatch",
    "Formed",
    "SlotPlan",
    "Tensor",
    "Terms",
}
"""Their fields are set by us, and by no decoder."""


def compiled() -> dict[str, Path]:
    listed = re.search(r"^COMPILED = (\(.*?^\))", HOOK, re.MULTILINE | re.DOTALL)
    assert listed is not None
    names: tuple[str, ...] = ast.literal_eval(listed[1])
    assert list(names) == sorted(set(names))
    return {name: ROOT / SOURCES[name.partition("/")[0]] / name.partition("/")[2] for name in names}


def test_what_is_compiled_is_there() -> None:
    assert [name for name, path in compiled().items() if not path.is_file()] == []


def test_messages_that_msgspec_reads_are_not_compiled() -> None:
    """Compiled, the types of their fields are not what msgspec goes by."""
    structs = re.compile(r"^class (\w+)\(.*\b(?:Struct|ClientTerms)\b", re.MULTILINE)
    sources = [path.read_text("utf-8") for path in compiled().values()]
    assert {name for source in sources for name in structs.findall(source)} == NEVER_READ


def test_fields_of_views_are_typed_where_mypyc_looks() -> None:
    """A NamedTuple's `memoryview` is looked up among the module's own names."""
    tuples = re.compile(
        r"^class \w+\(NamedTuple\):(?:\n(?:    .*)?)*?\n    \w+: .*memoryview", re.M
    )
    for name, path in compiled().items():
        source = path.read_text("utf-8")
        if tuples.search(source):
            assert "from builtins import memoryview" in source, name


def test_constants_are_final() -> None:
    """Any other is looked up by its name each time."""
    constant = re.compile(r"^(_?[A-Z][A-Z0-9_]*(?:, \w+| = \w+)* = .*)", re.MULTILINE)
    found = {
        f"{name}: {line}"
        for name, path in compiled().items()
        for line in constant.findall(path.read_text("utf-8"))
    }
    assert found == set()


def test_handlers_of_one_function_name_one_type_of_error() -> None:
    """A name has one type in compiled code: a second handler's error does not fit the first's."""
    found = []
    for name, path in compiled().items():
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            types: dict[str, str] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.ExceptHandler) and node.name and node.type is not None:
                    kind = ast.unparse(node.type)
                    if types.setdefault(node.name, kind) != kind:
                        found.append(f"{name}: {function.name}: {node.name}: {kind}")
    assert found == []
