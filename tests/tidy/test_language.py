"""Rules for the first line of each module, and for the functions that need a docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from support.loops import for_each

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = [
    path
    for folder in ("iskander", "workers", "scripts", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_generated" not in path.parts
]
FIRST_LINE_MAX = 90
OPENINGS = re.compile(r"(?:Who|Whom|Whose|What|Where|When|Whether|How|Which|Why|That|Those)\b")


@for_each(MODULES)
def test_modules_begin_with_a_noun_or_verb_phrase(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring is not None
    first = docstring.splitlines()[0]
    assert len(first) <= FIRST_LINE_MAX
    assert not OPENINGS.match(first)


@for_each(MODULES)
def test_public_functions_of_several_statements_have_a_docstring(path: Path) -> None:
    """A name says what one statement does; ruff requires the docstrings of modules and classes."""
    waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                waiting.append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_simple = len(node.body) == 1 and not hasattr(node.body[0], "body")
                is_exempt = is_simple or node.name.startswith("_")
                assert is_exempt or ast.get_docstring(node), f"{node.lineno}: {node.name}"
