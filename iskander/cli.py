"""`iskander`: the operator's tool. Thin: every command prints what another module decides.

Late imports keep each command to what it needs; `--help` and `config` load no runtime.

Exit codes: 0 fine; 1 the server or the file says no; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from iskander import __version__
from iskander.config import Config
from iskander.config_file import Loaded, load_config
from iskander.config_reference import render_reference, render_value, settings
from iskander.errors import IskanderError
from iskander.tables import Row, render_stats, render_table

EXIT_NO = 1


def main() -> None:
    """Entry point of the command."""
    arguments = _parser().parse_args()
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        sys.exit(run(arguments))
    except IskanderError as error:
        sys.stderr.write(f"iskander: {error.message}\n")
        sys.exit(EXIT_NO)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_NO)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="iskander", description="Check, inspect and ask an Iskander model server."
    )
    parser.add_argument("--version", action="version", version=f"iskander {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser(
        "check", help="say whether a configuration would start, and what it would run where"
    )
    check.add_argument("file", type=Path, metavar="FILE", help="configuration, TOML")
    _add_set(check)
    check.set_defaults(run=_check)

    manifest = commands.add_parser("manifest", help="print the manifest of a model")
    manifest.add_argument("model", type=Path, metavar="MODEL.onnx", help="model file or folder")
    manifest.set_defaults(run=_manifest)

    models = commands.add_parser("models", help="list what a running server serves")
    models.add_argument("--address", default="127.0.0.1:50051", help="default: %(default)s")
    models.set_defaults(run=_models)

    stats = commands.add_parser("stats", help="show what a running server counts")
    stats.add_argument("--address", default="127.0.0.1:50051", help="default: %(default)s")
    stats.add_argument("--json", action="store_true", help="all of it, as one JSON object")
    stats.set_defaults(run=_stats)

    config = commands.add_parser("config", help="show a configuration, or every setting")
    kinds = config.add_subparsers(required=True, metavar="KIND")
    show = kinds.add_parser("show", help="every value of a file and where it comes from")
    show.add_argument("file", type=Path, metavar="FILE", help="configuration, TOML")
    _add_set(show)
    show.set_defaults(run=_config_show)
    reference = kinds.add_parser("reference", help="every setting at its default, commented")
    reference.set_defaults(run=_config_reference)
    return parser


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )


def _load(arguments: argparse.Namespace) -> Loaded:
    return load_config(arguments.file, overrides=tuple(arguments.set))


def _check(arguments: argparse.Namespace) -> int:
    """The checks of a start, in its order, without starting; the models are loaded here."""
    from iskander_worker.placement import set_library_environment

    from iskander.contract.tensors import require_room
    from iskander.gateway.addresses import require_addresses
    from iskander.gateway.lanes.policies import make_policy
    from iskander.gateway.models import model_spec
    from iskander.gateway.supervision.placement import plan, read_topology
    from iskander.memory.arena import usable_bytes

    config = _load(arguments).config
    require_addresses(config)
    topology = read_topology()
    places = plan(config, topology)
    for model in config.models:
        make_policy(model.lane)
    specs = [model_spec(key, model) for key, model in enumerate(config.models)]
    set_library_environment()
    from iskander_worker.session import Session

    rows = []
    for spec in specs:
        try:
            session = Session(spec, min(len(place.cpus) for place in places))
            require_room(session.contract, spec.rows_max, usable_bytes(config.arena.output_bytes))
        except IskanderError as error:
            raise type(error)(f"model `{spec.name}/{spec.version}`: {error.message}") from None
        columns = ", ".join(f"{tensor.column} {tensor.type}" for tensor in session.contract.inputs)
        results = ", ".join(f"{tensor.column} {tensor.type}" for tensor in session.contract.outputs)
        rows.append(
            (f"{spec.name}/{spec.version}", session.providers[0], str(session.threads), columns)
        )
        rows.append(("", "", "", f"-> {results}"))
    _print_table(("model", "runs on", "threads", "columns"), rows)
    _print("")
    _print_table(
        ("worker", "group", "cores", "node"),
        [
            (
                str(place.index),
                str(place.group),
                ",".join(map(str, place.cpus)),
                "-" if place.node is None else str(place.node),
            )
            for place in places
        ],
    )
    _print(f"\nlistens on {', '.join(config.addresses)}; {_memory(config, len(places))}")
    return 0


def _memory(config: Config, workers: int) -> str:
    mib = 1 << 20
    arena = config.arena
    total = (arena.input_bytes + workers * arena.output_bytes) / mib
    return f"shared memory {total:.0f} MiB, taken at start"


def _manifest(arguments: argparse.Namespace) -> int:
    from iskander_worker.placement import set_library_environment

    from iskander.contract.manifest import read_manifest, render_manifest
    from iskander.contract.tensors import compile_contract

    set_library_environment()
    from iskander_worker.session import read_graph

    contract = compile_contract(read_manifest(arguments.model), read_graph(arguments.model))
    sys.stdout.write(render_manifest(contract))
    return 0


def _models(arguments: argparse.Namespace) -> int:
    from iskander.client import Client

    with Client(arguments.address) as client:
        rows = [_model_row(model) for model in client.models()]
    _print_table(("model", "version", "ready", "inputs", "outputs"), rows)
    return 0


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
    def columns(side: str) -> str:
        return ", ".join(f"{entry['column']} {entry['type']}" for entry in model.get(side, ()))

    ready = "yes" if model["ready"] else "no"
    return model["name"], model["version"], ready, columns("inputs"), columns("outputs")


def _stats(arguments: argparse.Namespace) -> int:
    import json

    from iskander.client import Client

    with Client(arguments.address) as client:
        stats = client.stats()
    for line in [json.dumps(stats, indent=1)] if arguments.json else render_stats(stats):
        _print(line)
    return 0


def _config_show(arguments: argparse.Namespace) -> int:
    config, origins = _load(arguments)
    rows = []
    for setting in settings():
        section, key = setting.path.split(".")
        if section != "models":
            value = render_value(getattr(getattr(config, section), key))
            rows.append((setting.path, value, origins.get(setting.path, "default")))
    for index, model in enumerate(config.models):
        for key in model.__struct_fields__:
            rows.append((f"models[{index}].{key}", render_value(getattr(model, key)), ""))
    _print_table(("setting", "value", "from"), rows)
    return 0


def _config_reference(arguments: argparse.Namespace) -> int:
    sys.stdout.write(render_reference())
    return 0


def _print_table(head: Row, rows: Sequence[Row]) -> None:
    for line in render_table(head, rows):
        _print(line)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
