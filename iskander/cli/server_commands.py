"""Commands for a running server and its tokens: models, loads, statistics, drain, reload."""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iskander.cli import command
from iskander.cli.command import print_lines
from iskander.cli.startup import compare
from iskander.cli.tables import render_stats
from iskander.errors import ConfigError, ConnectionFailed, IskanderError
from iskander.foundation.clock import NS_PER_S, now_ns, pause_s
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    from iskander.cli.command import Commands

CHECK_S, PAUSE_S = 2.0, 0.1
"""Timeout of a check for the end of a server, and the pause after it."""


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    sentence = "list the models of a server, and load errors"
    models = command.add_command(
        commands, "models", _models, sentence, command.add_address, command.add_json
    )
    compare.add_command(models.add_subparsers(metavar="COMMAND"))

    sentence = "load a model of the repository, or its changed files"
    load = command.add_command(
        commands, "load", _load, sentence, command.add_name, command.add_address, command.add_json
    )
    load.add_argument(
        "--timeout-s", type=float, default=300.0, metavar="SECONDS", help="default: %(default)s"
    )

    sentence = "unload a model of the repository (control: explicit)"
    unload = command.add_command(commands, "unload", _unload, sentence, command.add_name)
    unload.add_argument("--version", metavar="VERSION", help="only this version (default: all)")
    command.add_address(unload)
    command.add_json(unload)

    sentence = "show the statistics of a server"
    command.add_command(commands, "stats", _stats, sentence, command.add_address, command.add_json)

    sentence = "stop a server after its accepted requests"
    drain = command.add_command(
        commands, "drain", _drain, sentence, command.add_address, command.add_json
    )
    sentence = "wait for its end (default: %(default)s; 0: do not wait)"
    drain.add_argument("--timeout-s", type=float, default=60.0, metavar="SECONDS", help=sentence)
    sentence = "apply the changed settings of a server's configuration file"
    command.add_command(
        commands, "reload", _reload, sentence, command.add_address, command.add_json
    )

    sentence = "create a token, print it once, and add its hash to the file of `access.tokens`"
    token = command.add_command(commands, "token", _token, sentence, command.add_json)
    token.add_argument("name", metavar="NAME", help="client of the token's requests")
    token.add_argument("--file", type=Path, required=True, metavar="FILE", help="tokens, TOML")
    sentence = "models that the token may use, such as `demo-*`; repeatable (default: all)"
    token.add_argument("--model", action="append", metavar="PATTERN", help=sentence)
    token.add_argument("--manage", action="store_true", help="also allow load and unload")
    sentence = "add a password, read from the terminal or from standard input, in place of a token"
    token.add_argument("--password", action="store_true", help=sentence)
    sentence = "sources that the token may read, if it may use their models; repeatable"
    token.add_argument("--source", action="append", metavar="PATTERN", help=sentence)


def _models(arguments: argparse.Namespace) -> int:
    with command.connect(arguments) as client:
        models = client.models()
    if arguments.json:
        command.print_json(models)
        return ExitCode.DONE
    head = ("model", "version", "state", "routes", "inputs", "outputs")
    command.print_table(head, [_model_row(model) for model in models])
    for model in models:
        if model["reason"]:
            print_lines(f"{model['name']}/{model['version']}: {model['reason']}")
        rows = model.get("rows")
        if rows and not rows["is_combinable"]:
            title = f"{model['name']}/{model['version']}"
            print_lines(f"{title}: requests are not combined: {rows['reason']}")
    return ExitCode.DONE


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
    def columns(side: str) -> str:
        return ", ".join(
            f"{entry.get('column') or ' + '.join(entry['columns'])} {entry['type']}"
            for entry in model.get(side, ())
        )

    routes = ", ".join(model.get("routes", ()))
    which = (model["name"], model["version"], model["state"], routes)
    return (*which, columns("inputs"), columns("outputs"))


def _load(arguments: argparse.Namespace) -> int:
    with command.connect(arguments, timeout_s=arguments.timeout_s) as client:
        versions = client.load(arguments.model)
    return _print_versions(arguments, versions, "served")


def _unload(arguments: argparse.Namespace) -> int:
    with command.connect(arguments) as client:
        versions = client.unload(arguments.model, version=arguments.version)
    return _print_versions(arguments, versions, "unloaded")


def _print_versions(arguments: argparse.Namespace, versions: list[str], state: str) -> int:
    if arguments.json:
        command.print_json({"model": arguments.model, "versions": versions, "state": state})
    else:
        print_lines(f"{arguments.model}: version {', '.join(versions)} {state}")
    return ExitCode.DONE


def _stats(arguments: argparse.Namespace) -> int:
    with command.connect(arguments) as client:
        if arguments.json:
            command.print_json(client.stats())
        else:
            print_lines(*render_stats(command.read_stats(client)))
    return ExitCode.DONE


def _drain(arguments: argparse.Namespace) -> int:
    with command.connect(arguments) as client:
        client.drain()
    is_stopped = bool(arguments.timeout_s) and _wait_for_end(arguments)
    state = "stopped" if is_stopped else "draining"
    if arguments.json:
        command.print_json({"address": arguments.address, "state": state})
    else:
        print_lines(f"{arguments.address}: {state}")
    return ExitCode.DONE if is_stopped or not arguments.timeout_s else ExitCode.FAILED


def _wait_for_end(arguments: argparse.Namespace) -> bool:
    """Wait until no server answers; return False after the timeout."""
    from iskander.client import OFF

    deadline_ns = now_ns() + int(arguments.timeout_s * NS_PER_S)
    while now_ns() < deadline_ns:
        try:
            with command.connect(arguments, timeout_s=CHECK_S, retry=OFF) as client:
                client.health()
        except ConnectionFailed:
            return True
        except IskanderError:
            pass  # It answers.
        pause_s(PAUSE_S)
    return False


def _reload(arguments: argparse.Namespace) -> int:
    with command.connect(arguments) as client:
        outcome = client.reload()
    if arguments.json:
        command.print_json(outcome)
        return ExitCode.DONE
    if "state" in outcome:
        print_lines("all processes reload the settings; the server's log has the outcome")
        return ExitCode.DONE
    print_lines(f"changed: {', '.join(outcome['changed']) or 'nothing'}")
    return ExitCode.DONE


def _token(arguments: argparse.Namespace) -> int:
    from iskander.gateway.auth.tokens import add_token

    models, sources = tuple(arguments.model or "*"), tuple(arguments.source or ())
    password = _read_password() if arguments.password else None
    added = add_token(
        arguments.file,
        arguments.name,
        models,
        manage=arguments.manage,
        sources=sources,
        password=password,
    )
    if password is not None:
        shown = {"name": arguments.name, "models": models}
        if arguments.json:
            command.print_json(shown)
        else:
            print_lines(f"added the password of {arguments.name}")
    elif arguments.json:
        command.print_json({"name": arguments.name, "token": added, "models": models})
    else:
        print_lines(added)
    return ExitCode.DONE


def _read_password() -> str:
    """Read a password from the terminal, or a line of the standard input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    password = getpass.getpass("Password: ")
    if getpass.getpass("Repeat the password: ") != password:
        raise ConfigError("the passwords differ")
    return password
