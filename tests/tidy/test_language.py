"""Language that a machine can check: banned words, and the first line of each module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = [
    path
    for folder in ("iskander", "workers", "scripts", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_generated" not in path.parts
]
TEXTS = [
    *MODULES,
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "configs").rglob("*.toml")),
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "Makefile",
]
FIRST_LINE_MAX = 90
OPENINGS = re.compile(r"(?:Who|Whom|Whose|What|Where|When|Whether|How|Which|Why|That|Those)\b")
BANNED = (
    "at the door",
    "come home",
    "doorstep",
    "forsaken",
    "found and made",
    "gives way",
    "is let go",
    "is told of",
    "newborn",
    "newcomer",
    "nobody waits",
    "one that is installed",
    "survivor",
    "taken on",
    "that are lent",
    "told of",
    "what becomes of",
    "what came of it",
    "what it came to be",
)
STYLE = ROOT / "docs" / "style.md"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_banned_words(path: Path) -> None:
    text = path.read_text("utf-8")
    if path == STYLE:
        # The page quotes them in a table.
        text = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    text = re.sub(r"\s+(?:#\s+)?", " ", text).lower()
    assert [word for word in BANNED if re.search(rf"\b{re.escape(word)}\b", text)] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_modules_begin_with_a_noun_or_verb_phrase(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring is not None
    first = docstring.splitlines()[0]
    assert len(first) <= FIRST_LINE_MAX
    assert not OPENINGS.match(first)


def test_style_page_has_ten_pairs() -> None:
    section = STYLE.read_text("utf-8").partition("## Language")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)) >= 10 + 1
