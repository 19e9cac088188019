"""`iskander`: the operator's command-line tool.

Commands import their modules late; `--help` and `config` load no runtime.

Exit codes: 0 success; 1 failed, or a check found a problem; 2 wrong usage; 3 `score`: all rows are
scored, some are in quarantine; 69 no server answers, or it is not ready; 77 the token is missing,
invalid or not sufficient; 78 invalid configuration, model or manifest; 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import TYPE_CHECKING

from iskander.cli import (
    bench,
    completion,
    config_commands,
    drift_commands,
    events,
    log_commands,
    model_commands,
    server_commands,
)
from iskander.cli import doctor_command as doctor
from iskander.cli.command import TOKEN_VARIABLE, UsageError, add_command, token_of_environment
from iskander.cli.startup import install_systemd
from iskander.cli.top import command as top
from iskander.errors import IskanderError, utf8_problem
from iskander.foundation.build_info import describe
from iskander.foundation.exit_codes import ExitCode, code_of, summary

if TYPE_CHECKING:
    from iskander.cli.command import Command, Commands, Parser


def main() -> None:
    """Run the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Names of files in any encoding.
    arguments = build_parser().parse_args()
    run: Command = arguments.run
    try:
        _require_utf8(arguments)
        sys.exit(run(arguments))
    except IskanderError as error:
        sys.stderr.write(f"iskander: {error.message}\n")
        sys.exit(ExitCode.USAGE if isinstance(error, UsageError) else code_of(error))
    except UnicodeError as error:
        # Names and texts in files of any encoding; those of the arguments are checked before.
        sys.stderr.write(f"iskander: a name or text is not UTF-8: {error}\n")
        sys.exit(ExitCode.FAILED)
    except KeyboardInterrupt:
        sys.stderr.write("iskander: interrupted\n")
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILED)


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="iskander",
        description="Check, inspect and query an Iskander model server.",
        epilog=f"Environment: {TOKEN_VARIABLE} contains the token to send to a server. "
        f"{summary('iskander')}",
    )
    parser.add_argument("--version", action="version", version=describe("iskander"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    model_commands.add_commands(commands)
    doctor.add_commands(commands)
    server_commands.add_commands(commands)
    top.add_commands(commands)
    drift_commands.add_commands(commands)
    events.add_commands(commands)
    log_commands.add_commands(commands)
    bench.add_commands(commands)
    _add_score(commands)
    install_systemd.add_commands(commands)
    config_commands.add_commands(commands)
    completion.add_commands(commands, parser)
    return parser


def _require_utf8(arguments: argparse.Namespace) -> None:
    """Reject texts that no message or file can have; paths of files may have any bytes."""
    for name, given in vars(arguments).items():
        for each in given if isinstance(given, list | tuple) else (given,):
            if isinstance(each, str) and (problem := utf8_problem(each)):
                raise UsageError(f"argument `{name}`: {problem}")


def _add_score(commands: Commands) -> None:
    """Add the command for files and tables."""
    from iskander.cli import score

    def run(arguments: argparse.Namespace) -> int:
        return score.run(arguments, token_of_environment())

    add_command(commands, "score", run, "score files or a table", score.add_arguments)


if __name__ == "__main__":
    main()
