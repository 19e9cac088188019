"""Rules for the first line of each module."""

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
