"""Common parts of the commands: arguments, the client of a server, and printed results.

Every command with results has `--json`: one JSON value on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iskander import __version__
from iskander.cli.tables import Row, render_table
from iskander.config.loader import Loaded, load_config
from iskander.config.memory import divide
from iskander.errors import Fault, IskanderError, Unsupported

if TYPE_CHECKING:
    from iskander.client import Client
    from iskander.gateway.telemetry.status.stats import Stats

    Parser = argparse.ArgumentParser
    Commands = argparse._SubParsersAction[Parser]
    Command = Callable[[argparse.Namespace], int]


class UsageError(IskanderError, code="usage", fault=Fault.CLIENT, status="INVALID_ARGUMENT"):
    """An option of a command is out of range, or contradicts another one."""


TOKEN_VARIABLE = "ISKANDER_TOKEN"


def add_command(
    commands: Commands, name: str, run: Command, sentence: str, *added: Callable[[Parser], None]
) -> Parser:
    """Add a command, with the arguments that the functions `added` add."""
    description = f"{sentence[0].upper()}{sentence[1:]}."
    parser = commands.add_parser(name, help=sentence, description=description)
    parser.set_defaults(run=run)
    for add in added:
        add(parser)
    return parser


def add_name(parser: Parser) -> None:
    parser.add_argument("model", metavar="NAME", help="model name")


def add_address(parser: Parser) -> None:
    """Add the address of a server, and TLS."""
    parser.add_argument("--address", default="127.0.0.1:50051", help="default: %(default)s")
    parser.add_argument("--tls", action="store_true", help="connect with TLS")
    for name, sentence in (
        ("roots", "trusted CA certificates (default: the system's)"),
        ("certificate", "client certificate, if the server requires one"),
        ("key", "private key of the client certificate"),
    ):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE.pem", help=sentence)


def add_file(parser: Parser, sentence: str = "configuration, TOML") -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help=sentence)


def add_set(parser: Parser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON value")


def read_config(arguments: argparse.Namespace) -> Loaded:
    """Load the configuration of a command, as the gateway does; print its warnings."""
    loaded = load_config(arguments.file, overrides=tuple(arguments.set))
    for warning in loaded.warnings:
        sys.stderr.write(f"iskander: {warning}\n")
    if not loaded.config.server.memory:
        return loaded
    from iskander.foundation.machine_memory import memory_bytes
    from iskander.gateway.supervision.placement.machine import plan_machine

    workers = len(plan_machine(loaded.config).slots)
    return divide(loaded, workers, memory_bytes()).loaded


def connect(
    arguments: argparse.Namespace,
    timeout_s: float | None = None,
    **options: Any,  # noqa: ANN401
) -> Client:
    """Return the client of a command; `options` are those of the client."""
    from iskander.client import CALL_TIMEOUT_S, Client, Tls

    tls = Tls(arguments.tls_roots, arguments.tls_certificate, arguments.tls_key)
    return Client(
        arguments.address,
        token=token_of_environment(),
        tls=tls if arguments.tls or any(tls) else None,
        timeout_s=CALL_TIMEOUT_S if timeout_s is None else timeout_s,
        **options,
    )


def read_stats(client: Client) -> Stats:
    """Return the state of a server. Raises Unsupported for a server of another version."""
    import msgspec

    from iskander.gateway.telemetry.status.stats import Stats

    try:
        return msgspec.convert(client.stats(), Stats)
    except msgspec.ValidationError as error:
        text = f"the response to `stats` is of another version ({__version__} here): {error}"
        raise Unsupported(text) from None


def token_of_environment() -> str | None:
    """Return the token; it is in the environment because `ps` shows arguments."""
    return os.environ.get(TOKEN_VARIABLE, "").strip() or None


def print_lines(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


def print_table(head: Row, rows: Sequence[Row]) -> None:
    print_lines(*render_table(head, rows))


def print_json(value: Any) -> None:  # noqa: ANN401
    print_lines(json.dumps(value, indent=1))


def print_toml(text: str, *, as_json: bool) -> None:
    """Print a TOML document, or its values as JSON."""
    if as_json:
        print_json(tomllib.loads(text))
    else:
        sys.stdout.write(text)
