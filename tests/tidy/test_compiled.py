"""Rules for modules that mypyc compiles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HOOK = (ROOT / "scripts" / "compile_hook.py").read_text("utf-8")
SOURCES = {"iskander": "iskander", "iskander_worker": "workers/iskander_worker"}
NOT_DECODED = {
    "ParsedBatch",
    "Formed",
    "SlotPlan",
    "Tensor",
    "Terms",
}
"""Structs that the gateway creates itself, without a decoder."""


def compiled_files() -> dict[str, Path]:
    match = re.search(r"^COMPILED = (\(.*?^\))", HOOK, re.MULTILINE | re.DOTALL)
    assert match is not None
    names: tuple[str, ...] = ast.literal_eval(match[1])
    assert list(names) == sorted(set(names))
    return {name: ROOT / SOURCES[name.partition("/")[0]] / name.partition("/")[2] for name in names}


def test_compiled_modules_exist() -> None:
    assert [name for name, path in compiled_files().items() if not path.is_file()] == []


def test_decoded_structs_are_not_compiled() -> None:
    """Compiled structs lose the field types that msgspec needs."""
    structs = re.compile(r"^class (\w+)\(.*\b(?:Struct|ClientTerms)\b", re.MULTILINE)
    sources = [path.read_text("utf-8") for path in compiled_files().values()]
    assert {name for source in sources for name in structs.findall(source)} == NOT_DECODED


def test_memoryview_fields_import_their_type() -> None:
    """mypyc resolves the `memoryview` of a NamedTuple in the module's own namespace."""
    tuples = re.compile(
        r"^class \w+\(NamedTuple\):(?:\n(?:    .*)?)*?\n    \w+: .*memoryview", re.M
    )
    for name, path in compiled_files().items():
        source = path.read_text("utf-8")
        if tuples.search(source):
            assert "from builtins import memoryview" in source, name


def test_constants_are_final() -> None:
    """Without `Final`, each access is a dictionary lookup."""
    constant = re.compile(r"^(_?[A-Z][A-Z0-9_]*(?:, \w+| = \w+)* = .*)", re.MULTILINE)
    findings = {
        f"{name}: {line}"
        for name, path in compiled_files().items()
        for line in constant.findall(path.read_text("utf-8"))
    }
    assert findings == set()


def test_exception_names_have_one_type_per_function() -> None:
    """A name has one type in compiled code, so a second handler with another type fails."""
    findings = []
    for name, path in compiled_files().items():
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            types: dict[str, str] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.ExceptHandler) and node.name and node.type is not None:
                    kind = ast.unparse(node.type)
                    if types.setdefault(node.name, kind) != kind:
                        findings.append(f"{name}: {function.name}: {node.name}: {kind}")
    assert findings == []


def test_compiled_coroutines_do_not_wait_while_an_error_is_handled() -> None:
    """After an `await` in `finally` or `except`, mypyc raises that error in a later coroutine."""
    found = []
    for name, path in compiled_files().items():
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.AsyncFunctionDef) and _waits_in_handler(function):
                found.append(f"{name}: {function.name}")
    assert found == []


def _waits_in_handler(function: ast.AsyncFunctionDef) -> bool:
    handlers: list[ast.stmt] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Try):
            handlers += node.finalbody
            for handler in node.handlers:
                handlers += handler.body
    waits = (ast.Await, ast.AsyncWith, ast.AsyncFor)
    return any(isinstance(node, waits) for each in handlers for node in ast.walk(each))
