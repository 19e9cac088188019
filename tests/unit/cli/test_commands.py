"""Rules for all commands: JSON output, and the page that lists them."""

from __future__ import annotations

import re

import pytest
from support.commands import commands, options
from support.models import ROOT

PAGE = (ROOT / "docs" / "commands.md").read_text("utf-8")
REASONS = {"completion": "prints a shell script"}
"""Commands without `--json`, and the reason on the page."""


def test_every_command_prints_json_or_has_a_reason() -> None:
    without = {
        " ".join(words) for words, each in commands().items() if "--json" not in options(each)
    }
    assert without == set(REASONS)
    text = " ".join(PAGE.split())
    for command, reason in REASONS.items():
        assert f"`{command}` {reason}" in text


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_page_lists_every_command(words: tuple[str, ...]) -> None:
    rows = re.findall(r"^\| (`[a-z][^|]*) \|", PAGE, re.MULTILINE)
    listed = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    assert listed & {" ".join(words), words[0]}
