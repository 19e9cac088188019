"""`iskander completion`: prints the shell completion of this command.

`scripts/gen_completions.py` writes the files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from iskander.cli.command import add_command
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    from iskander.cli.command import Commands

FOLDER = Path(__file__).parent / "completions"
SHELLS = ("bash", "zsh", "fish")


def add_commands(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "completion", _completion, "print a shell completion")
    parser.add_argument("shell", choices=SHELLS, help="such as: iskander completion bash > FILE")


def _completion(arguments: argparse.Namespace) -> int:
    sys.stdout.write((FOLDER / f"iskander.{arguments.shell}").read_text())
    return ExitCode.DONE
