"""Generates the shell completions of `iskander` from its parser; `--check` lists stale ones.

    python scripts/gen_completions.py

The files are part of the package, so that `iskander completion` needs no library. Needs the package
`shtab`, which is in the extra `lint`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import shtab

from iskander.cli.completion import FOLDER, SHELLS
from iskander.cli.main import build_parser


def completions() -> dict[Path, str]:
    """Text of each file, by its path."""
    parser = build_parser()
    for action in _actions(parser):
        if action.type is Path or action.metavar in ("FILE", "FOLDER"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return {
        FOLDER / f"iskander.{shell}": f"{shtab.complete(parser, shell).rstrip()}\n"
        for shell in SHELLS
    }


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)


def main() -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare with the existing files")
    is_check = parser.parse_args().check
    stale = []
    for path, text in completions().items():
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if not is_check:
                path.write_text(text)
    if is_check and stale:
        sys.exit(f"stale, run scripts/gen_completions.py: {', '.join(stale)}")


if __name__ == "__main__":
    main()
