"""Exit codes: one meaning in all commands, in their documentation, and of each error."""

from __future__ import annotations

import importlib
import re

import pytest
from support.models import ROOT

from iskander import errors
from iskander.foundation.exit_codes import MEANINGS, ExitCode, code_of, summary

MODULES = {
    "iskander": "iskander.cli.main",
    "iskander-gateway": "iskander.gateway.__main__",
    "iskander-worker": "iskander_worker.__main__",
}


@pytest.mark.parametrize("command", MODULES)
def test_module_documents_the_codes_of_its_command(command: str) -> None:
    """The man page has this paragraph too."""
    docstring = importlib.import_module(MODULES[command]).__doc__ or ""
    found = re.search(r"Exit codes: .+?\.(?=\n\n|\s*\Z)", docstring, re.DOTALL)
    assert found is not None
    assert " ".join(found[0].split()) == summary(command)


def test_page_has_all_codes() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    rows = [line.strip("| ") for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    table = {}
    for row in rows:
        code, *cells = (cell.strip() for cell in row.split("|"))
        table[int(code)] = cells + [""] * (len(MEANINGS) - len(cells))
    assert list(table) == list(ExitCode)
    for code, cells in table.items():
        meanings = [codes.get(ExitCode(code), "") for codes in MEANINGS.values()]
        assert cells == meanings, code


def test_every_code_is_used() -> None:
    used = {code for codes in MEANINGS.values() for code in codes}
    assert used == set(ExitCode)
    for codes in MEANINGS.values():
        assert list(codes) == sorted(codes)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError, 78),
        (errors.ManifestError, 78),
        (errors.NotReady, 69),
        (errors.ConnectionFailed, 69),
        (errors.Draining, 69),
        (errors.Unauthenticated, 77),
        (errors.PermissionDenied, 77),
        (errors.SegmentError, 71),
        (errors.ModelNotFound, 1),
        (errors.IskanderError, 1),
    ],
)
def test_code_of_an_error(error: type[errors.IskanderError], code: int) -> None:
    assert code_of(error("text")) == code
