"""`iskander completion`: prints the shell completion of this command, made from its parser."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from iskander.cli.command import add_command
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iskander.cli.command import Commands, Parser

SHELLS = ("bash", "zsh", "fish")


def add_commands(commands: Commands, main: Parser) -> None:
    """Add the command; `main` is the parser of all commands."""

    def run(arguments: argparse.Namespace) -> int:
        return _completion(main, arguments.shell)

    parser = add_command(commands, "completion", run, "print a shell completion")
    parser.add_argument("shell", choices=SHELLS, help="such as: iskander completion bash > FILE")


def _completion(parser: Parser, shell: str) -> int:
    import shtab

    for action in _actions(parser):
        if action.type is Path or action.metavar in ("FILE", "FOLDER"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(f"{shtab.complete(parser, shell).rstrip()}\n")
    return ExitCode.DONE


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
