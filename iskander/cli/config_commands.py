"""`iskander config`: values of a configuration, every setting, import from another server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from iskander.cli import command
from iskander.config.reference import TABLES, render_reference, render_value, settings
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    from iskander.cli.command import Commands


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    config = commands.add_parser("config", help="show a configuration, or every setting")
    kinds = config.add_subparsers(required=True, metavar="KIND")
    sentence = "every value of a file, and its origin"
    command.add_command(
        kinds, "show", _show, sentence, command.add_file, command.add_set, command.add_json
    )
    sentence = "every setting at its default, commented"
    command.add_command(kinds, "reference", _reference, sentence, command.add_json)
    sentence = "convert a configuration of Inferential's server"
    imported = command.add_command(kinds, "import-inferential", _import, sentence, command.add_json)
    command.add_file(imported, "YAML, or JSON")


def _show(arguments: argparse.Namespace) -> int:
    config, origins, _ = command.read_config(arguments)
    if arguments.json:
        command.print_json({"settings": msgspec.to_builtins(config), "origins": origins})
        return ExitCode.DONE
    rows = []
    for section, key in (setting.path.split(".") for setting in settings()):
        if section not in TABLES:
            value = render_value(getattr(getattr(config, section), key))
            rows.append((f"{section}.{key}", origins.get(f"{section}.{key}", "default"), value))
    rows += [
        (f"{name}[{index}].{key}", "", render_value(getattr(table, key)))
        for name in TABLES
        for index, table in enumerate(getattr(config, name))
        for key in table.__struct_fields__
    ]
    # The value is last: it may be long.
    command.print_table(("setting", "from", "value"), rows)
    return ExitCode.DONE


def _reference(arguments: argparse.Namespace) -> int:
    command.print_toml(render_reference(), as_json=arguments.json)
    return ExitCode.DONE


def _import(arguments: argparse.Namespace) -> int:
    from iskander.config.migration import import_inferential as inferential
    from iskander.gateway.transport.addresses import zmq_address

    raw = inferential.read_inferential(arguments.file)
    imported = inferential.import_inferential(raw, lambda bind: zmq_address(bind) is not None)
    command.print_toml(inferential.render_import(imported), as_json=arguments.json)
    return ExitCode.DONE
