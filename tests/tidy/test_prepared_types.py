"""Every type that is decoded was made ready for threads where it is defined."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = [*(ROOT / "iskander").rglob("*.py"), *(ROOT / "workers").rglob("*.py")]


def decoded(tree: ast.AST) -> Iterator[str]:
    """Names of the types that a file has msgspec decode by a function, not by a decoder."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        function = ast.unparse(call.func)
        if function == "msgspec.convert":
            yield ast.unparse(call.args[1])
        elif function.startswith("msgspec.") and function.endswith(".decode"):
            yield from (ast.unparse(each.value) for each in call.keywords if each.arg == "type")


def known(tree: ast.AST) -> Iterator[str]:
    """Names of the types that a file prepares, and what its decoders of the module are of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if any(ast.unparse(each) == "thread_safe" for each in node.decorator_list):
                yield node.name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".Decoder"):
            yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def test_every_type_that_is_decoded_is_prepared() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    ready = {name for tree in trees.values() for name in known(tree)}
    # By another name: of ModelSpec there is a decoder by the messages, the others are parameters.
    ready |= {"ModelSpec", "ModelConfig", "kind", "kinds[section]", "dict[str, msgspec.Raw]"}
    found = {name: path.name for path, tree in trees.items() for name in decoded(tree)}
    assert len(found) > 10
    assert {name: file for name, file in found.items() if name not in ready} == {}
