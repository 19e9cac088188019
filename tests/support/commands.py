"""Parsers of all commands of `iskander`, by their words."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from iskander.cli.main import build_parser

Words = tuple[str, ...]


def parsers() -> dict[Words, argparse.ArgumentParser]:
    """Return the parser of each command and group, such as that of `("config", "show")`."""
    return dict(_below(build_parser(), ()))


def commands() -> dict[Words, argparse.ArgumentParser]:
    """Return the parsers of the commands that run, without groups such as `config`."""
    return {words: each for words, each in parsers().items() if each.get_default("run")}


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the names of all options, such as `--json` and `-o`."""
    return {name for action in parser._actions for name in action.option_strings}


def _below(
    parser: argparse.ArgumentParser, words: Words
) -> Iterator[tuple[Words, argparse.ArgumentParser]]:
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, each in action.choices.items():
                yield from _below(each, (*words, word))
