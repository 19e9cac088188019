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
from typing import TYPE_CHECKING, Any

from iskander import __version__
from iskander.cli.tables import Row, render_stats, render_table
from iskander.config.loader import Loaded, load_config
from iskander.config.reference import render_reference, render_value, settings
from iskander.errors import ConfigError, IskanderError

if TYPE_CHECKING:
    from iskander.client import Client
    from iskander.contract.tensors import Contract

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_NO = 1
TOKEN_VARIABLE = "ISKANDER_TOKEN"


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
        prog="iskander",
        description="Check, inspect and ask an Iskander model server.",
        epilog=f"Environment: {TOKEN_VARIABLE} is shown to servers that want a token.",
    )
    parser.add_argument("--version", action="version", version=f"iskander {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_model_commands(commands)
    _add_server_commands(commands)
    _add_config_commands(commands)
    return parser


def _add_model_commands(commands: Commands) -> None:
    """What looks at files."""
    check = commands.add_parser(
        "check", help="say whether a configuration would start, and what it would run where"
    )
    check.add_argument("file", type=Path, metavar="FILE", help="configuration, TOML")
    _add_set(check)
    check.add_argument(
        "--sample",
        type=Path,
        metavar="DATA.parquet",
        help="say column by column whether a model takes this data; Parquet or Arrow",
    )
    check.add_argument("--model", metavar="NAME", help="which one, where there are several")
    check.set_defaults(run=_check)

    manifest = commands.add_parser(
        "manifest",
        help="print the manifest of a model",
        description="Print the manifest that a model has, or would have by its graph; or the one "
        "that an MLflow signature stands for.",
    )
    what = manifest.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "model",
        type=Path,
        nargs="?",
        metavar="MODEL",
        help="ONNX file or folder; or MLflow's `MLmodel`, as YAML or JSON",
    )
    what.add_argument(
        "--schema", action="store_true", help="print the JSON schema of manifests instead"
    )
    manifest.add_argument(
        "--sample",
        type=Path,
        metavar="DATA.parquet",
        help="make one by which the model takes this data as it is; Parquet or Arrow",
    )
    manifest.set_defaults(run=_manifest)


def _add_server_commands(commands: Commands) -> None:
    """What asks a running server."""
    models = commands.add_parser(
        "models", help="list what a running server serves or loads, and what does not load and why"
    )
    _add_address(models)
    models.set_defaults(run=_models)

    load = commands.add_parser("load", help="load what is there of a model, or of a changed one")
    load.add_argument("model", metavar="NAME", help="of the model")
    _add_address(load)
    load.add_argument(
        "--timeout-s", type=float, default=300.0, metavar="SECONDS", help="default: %(default)s"
    )
    load.set_defaults(run=_load_model)

    unload = commands.add_parser(
        "unload", help="serve a model of the repository no longer (control: explicit)"
    )
    unload.add_argument("model", metavar="NAME", help="of the model")
    unload.add_argument("--version", metavar="VERSION", help="only this one (default: all)")
    _add_address(unload)
    unload.set_defaults(run=_unload_model)

    stats = commands.add_parser("stats", help="show what a running server counts")
    _add_address(stats)
    stats.add_argument("--json", action="store_true", help="all of it, as one JSON object")
    stats.set_defaults(run=_stats)

    token = commands.add_parser(
        "token",
        help="make a token, print it, and enter its hash in the file of `access.tokens`",
        description="Make a token and print it, this once; the file has its hash. A running server "
        "reads the file when it changes.",
    )
    token.add_argument("name", metavar="NAME", help="whose it is: the client of its requests")
    token.add_argument("--file", type=Path, required=True, metavar="FILE", help="tokens, TOML")
    token.add_argument(
        "--model",
        action="append",
        metavar="PATTERN",
        help="that it may ask, such as `demo-*`; may be given again (default: all)",
    )
    token.add_argument("--manage", action="store_true", help="it may load and unload them too")
    token.set_defaults(run=_token)


def _add_config_commands(commands: Commands) -> None:
    """What shows or makes configurations."""
    config = commands.add_parser("config", help="show a configuration, or every setting")
    kinds = config.add_subparsers(required=True, metavar="KIND")
    show = kinds.add_parser("show", help="every value of a file and where it comes from")
    show.add_argument("file", type=Path, metavar="FILE", help="configuration, TOML")
    _add_set(show)
    show.set_defaults(run=_config_show)
    reference = kinds.add_parser("reference", help="every setting at its default, commented")
    reference.set_defaults(run=_config_reference)
    imported = kinds.add_parser(
        "import-inferential", help="a configuration of Inferential's server, as one of this"
    )
    imported.add_argument("file", type=Path, metavar="FILE", help="YAML, or JSON")
    imported.set_defaults(run=_config_import)


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="127.0.0.1:50051", help="default: %(default)s")
    parser.add_argument("--tls", action="store_true", help="the server speaks TLS")
    for name, sentence in (
        ("roots", "of whom to believe that it is who it says (default: the system's)"),
        ("certificate", "to show, where it wants one"),
        ("key", "of that certificate"),
    ):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE.pem", help=sentence)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )


def _load(arguments: argparse.Namespace) -> Loaded:
    return load_config(arguments.file, overrides=tuple(arguments.set))


def _check(arguments: argparse.Namespace) -> int:
    from iskander.cli import check as checking

    config = _load(arguments).config
    found = checking.check(config)
    for line in checking.render(found, config):
        _print(line)
    contracts = {each.name: each.loaded.contract for each in found.models if each.loaded}
    code = EXIT_NO if any(each.error for each in found.models) else 0
    if arguments.sample is None:
        return code
    candidates = {model.name for model in config.models} or set(contracts)
    name = arguments.model or (candidates.pop() if len(candidates) == 1 else "")
    return _check_sample(arguments, name, contracts) or code


def _check_sample(arguments: argparse.Namespace, name: str, contracts: dict[str, Contract]) -> int:
    """Hold a caller's data against a model, and say what is wrong with each column."""
    from iskander.cli.sample import explain, read_sample

    if name not in contracts:
        known = ", ".join(contracts)
        raise ConfigError(f"--model says which model is to take the sample: one of {known}")
    sample = read_sample(arguments.sample)
    lines = explain(sample, contracts[name])
    _print(f"\n{sample.name}, {sample.batch.num_rows} rows, for `{name}`")
    _print_table(
        ("column", "wanted", "found", "verdict"),
        [(line.column, line.wanted, line.found, line.problem or "fits") for line in lines],
    )
    return EXIT_NO if any(line.problem for line in lines) else 0


def _manifest(arguments: argparse.Namespace) -> int:
    import json

    from iskander_worker.affinity import set_library_environment

    from iskander.contract.compile import compile_contract, derive_manifest
    from iskander.contract.labels import read_labels
    from iskander.contract.manifest import read_manifest
    from iskander.contract.manifest_schema import manifest_schema
    from iskander.contract.mlflow import manifest_of_signature
    from iskander.contract.render import render_entries, render_manifest

    if arguments.schema:
        _print(json.dumps(manifest_schema(), indent=1))
        return 0
    file: Path = arguments.model
    if file.name == "MLmodel" or file.suffix in (".json", ".yaml", ".yml"):
        from iskander.config.import_inferential import read_inferential

        sys.stdout.write(render_entries(manifest_of_signature(read_inferential(file))))
        return 0
    set_library_environment()
    from iskander_worker.backends.onnx import read_graph

    graph, written = read_graph(file), read_manifest(file)
    if arguments.sample is not None:
        from iskander.cli.sample import manifest_for, read_sample

        written = manifest_for(read_sample(arguments.sample), graph)
    manifest = written or derive_manifest(graph)
    contract = compile_contract(manifest, graph, labels=read_labels(file, manifest))
    sys.stdout.write(render_manifest(contract, manifest))
    return 0


def _client(arguments: argparse.Namespace, timeout_s: float | None = None) -> Client:
    """Of the server that a command is about; secrets come by the environment, which `ps` hides."""
    from iskander.client import CALL_TIMEOUT_S, Client, Tls

    tls = Tls(arguments.tls_roots, arguments.tls_certificate, arguments.tls_key)
    return Client(
        arguments.address,
        token=os.environ.get(TOKEN_VARIABLE, "").strip() or None,
        tls=tls if arguments.tls or any(tls) else None,
        timeout_s=CALL_TIMEOUT_S if timeout_s is None else timeout_s,
    )


def _models(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        models = client.models()
    head = ("model", "version", "state", "routes", "inputs", "outputs")
    _print_table(head, [_model_row(model) for model in models])
    for model in models:
        if model["reason"]:
            _print(f"{model['name']}/{model['version']}: {model['reason']}")
    return 0


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
    def columns(side: str) -> str:
        return ", ".join(
            f"{entry.get('column') or ' + '.join(entry['columns'])} {entry['type']}"
            for entry in model.get(side, ())
        )

    routes = ", ".join(model.get("routes", ()))
    which = (model["name"], model["version"], model["state"], routes)
    return (*which, columns("inputs"), columns("outputs"))


def _load_model(arguments: argparse.Namespace) -> int:
    with _client(arguments, timeout_s=arguments.timeout_s) as client:
        versions = client.load(arguments.model)
    _print(f"{arguments.model}: version {', '.join(versions)} served")
    return 0


def _unload_model(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        versions = client.unload(arguments.model, version=arguments.version)
    _print(f"{arguments.model}: version {', '.join(versions)} let go")
    return 0


def _stats(arguments: argparse.Namespace) -> int:
    import json

    with _client(arguments) as client:
        stats = client.stats()
    for line in [json.dumps(stats, indent=1)] if arguments.json else render_stats(stats):
        _print(line)
    return 0


def _token(arguments: argparse.Namespace) -> int:
    from iskander.auth.tokens import add_token

    models = tuple(arguments.model or "*")
    _print(add_token(arguments.file, arguments.name, models, manage=arguments.manage))
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


def _config_import(arguments: argparse.Namespace) -> int:
    from iskander.config.import_inferential import (
        import_inferential,
        read_inferential,
        render_import,
    )
    from iskander.transport.addresses import zmq_address

    theirs = read_inferential(arguments.file)
    ours = import_inferential(theirs, lambda bind: zmq_address(bind) is not None)
    sys.stdout.write(render_import(ours))
    return 0


def _print_table(head: Row, rows: Sequence[Row]) -> None:
    for line in render_table(head, rows):
        _print(line)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
