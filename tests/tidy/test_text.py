"""Rules for text: function length, request steps, generated pages, links."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from support.loops import for_each

import iskander

ROOT = Path(__file__).resolve().parent.parent.parent
FUNCTION_LINES_MAX = 75
SOURCES = [
    path
    for folder in ("iskander", "workers", "scripts", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_generated" not in path.parts
]


@for_each(SOURCES)
def test_functions_have_a_maximum_length(path: Path) -> None:
    def check(statements: list[ast.stmt]) -> None:
        for node in statements:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < FUNCTION_LINES_MAX, node.name
            elif isinstance(node, ast.ClassDef | ast.If):
                check(node.body)

    check(ast.parse(path.read_text()).body)


def test_architecture_page_lists_the_steps_of_the_source() -> None:
    """Each `# Step N` is in the function that docs/architecture.md names for it, in order."""
    steps: dict[int, list[str]] = {}
    for path in SOURCES:
        for number in re.findall(r"# Step (\d+)$", path.read_text(), re.MULTILINE):
            steps.setdefault(int(number), []).append(path.name)
    page = (ROOT / "docs" / "architecture.md").read_text()
    documented = {
        int(number): re.findall(r"`([\w/]+\.py)`", line)
        for number, line in re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE)
    }
    assert sorted(steps) == sorted(documented) == list(range(1, len(documented) + 1))
    for number, files in steps.items():
        assert files == [Path(documented[number][0]).name], f"step {number}"


def test_generated_pages_are_fresh() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "gen_reference.py"), "--check"]
    assert subprocess.run(check, capture_output=True, text=True, check=False).stderr == ""


def test_changelog_begins_with_this_version() -> None:
    entries = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == iskander.__version__


def test_markdown_links_have_existing_targets() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_commands_exist() -> None:
    """Every `make` target in the README exists, and no placeholder remains."""
    readme = (ROOT / "README.md").read_text()
    assert not re.search(r"@[A-Z]+@|TODO", readme)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", readme))
    assert {"quickstart", "test"} <= named <= targets
