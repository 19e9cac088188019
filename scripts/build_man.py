"""Builds the man pages of the commands from their `argparse` parsers and exit codes.

    python scripts/build_man.py FOLDER

Needs the package `argparse-manpage`, which is in the extra `deb`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from unittest import mock

from argparse_manpage.manpage import Manpage

from iskander import __version__
from iskander.foundation.exit_codes import MEANINGS, summary

COMMANDS = {
    "iskander": ("iskander.cli.main", "operator's tool of the Iskander model server"),
    "iskander-gateway": ("iskander.gateway.__main__", "Iskander model server"),
    "iskander-worker": ("iskander_worker.__main__", "process that runs models for a gateway"),
}


WIDTH = 80


def build(folder: Path) -> list[Path]:
    """Write the page of each command to a folder; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["COLUMNS"] = str(WIDTH)  # Of the usage lines.
    pages = []
    for name in COMMANDS:
        page = folder / f"{name}.1"
        page.write_text(render(name))
        pages.append(page)
    return pages


def render(name: str) -> str:
    """Return the page of a command."""
    module, sentence = COMMANDS[name]
    parser = _parser_of(importlib.import_module(module).main)
    parser.epilog = (parser.epilog or "").replace(summary(name), "").strip()
    now = int(os.environ.get("SOURCE_DATE_EPOCH", datetime.datetime.now(datetime.UTC).timestamp()))
    date = datetime.datetime.fromtimestamp(now, datetime.UTC).date().isoformat()
    data = {
        "description": sentence,
        "manual_title": "Iskander",
        "project_name": "iskander",
        "version": __version__,
        "date": date,
    }
    text = str(Manpage(parser, data))
    # A hyphen in the date of `.TH` must not be escaped.
    text = text.replace(date.replace("-", r"\-"), date, 1)
    text = text.replace(".SH COMMENTS", ".SH NOTES")
    codes = "".join(f".TP\n.B {code}\n{meaning}\n" for code, meaning in MEANINGS[name].items())
    return f"{text.rstrip()}\n.SH EXIT STATUS\n{codes}"


class _Captured(Exception):
    """Carries the parser of a command out of its `main`."""


def _parser_of(main: Callable[[], None]) -> argparse.ArgumentParser:
    """Return the parser with which a command parses its arguments."""

    def capture(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise _Captured(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", capture):
        try:
            main()
        except _Captured as captured:
            parser: argparse.ArgumentParser = captured.args[0]
            return parser
    raise AssertionError("the command parses no arguments")


if __name__ == "__main__":
    for written in build(Path(sys.argv[1])):
        print(written)
