"""Preparation of decoded msgspec types for use in threads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = [*(ROOT / "iskander").rglob("*.py"), *(ROOT / "workers").rglob("*.py")]
NAMES = re.compile(r"\bmsgspec\b|\bthread_safe\b|\.Decoder\b")


def decoded_types(tree: ast.AST) -> Iterator[str]:
    """Names of the types that a file decodes by a msgspec function, without a decoder."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        function = ast.unparse(call.func)
        if function == "msgspec.convert":
            yield ast.unparse(call.args[1])
        elif function.startswith("msgspec.") and function.endswith(".decode"):
            yield from (ast.unparse(each.value) for each in call.keywords if each.arg == "type")


def prepared_types(tree: ast.AST) -> Iterator[str]:
    """Names of the types that a file prepares, or that its decoders use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if any(ast.unparse(each) == "thread_safe" for each in node.decorator_list):
                yield node.name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".Decoder"):
            yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def test_every_decoded_type_is_prepared() -> None:
    texts = {path: path.read_text() for path in FILES}
    trees = {path: ast.parse(text) for path, text in texts.items() if NAMES.search(text)}
    prepared = {name for tree in trees.values() for name in prepared_types(tree)}
    # ModelSpec is part of decoded messages; the others are names of parameters.
    prepared |= {"ModelSpec", "ModelConfig", "kind", "kinds[section]", "dict[str, msgspec.Raw]"}
    decoded = {name: path.name for path, tree in trees.items() for name in decoded_types(tree)}
    assert len(decoded) > 10
    assert {name: file for name, file in decoded.items() if name not in prepared} == {}
