"""`iskander`: the operator's command-line tool.

Commands import their modules late; `--help` and `config` load no runtime.

Exit codes: 0 success; 1 error in the server or the file; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iskander.build_info import describe
from iskander.cli.tables import Row, render_stats, render_table
from iskander.config.loader import Loaded, load_config
from iskander.config.reference import render_reference, render_value, settings
from iskander.config.renamed import fix_file
from iskander.errors import ConfigError, IskanderError

if TYPE_CHECKING:
    from iskander.client import Client
    from iskander.contract.tensors import Contract

    Parser = argparse.ArgumentParser
    Commands = argparse._SubParsersAction[Parser]
    Command = Callable[[argparse.Namespace], int]

EXIT_ERROR = 1
TOKEN_VARIABLE = "ISKANDER_TOKEN"


def main() -> None:
    """Run the command."""
    arguments = _parser().parse_args()
    run: Command = arguments.run
    try:
        sys.exit(run(arguments))
    except IskanderError as error:
        sys.stderr.write(f"iskander: {error.message}\n")
        sys.exit(EXIT_ERROR)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)


def _parser() -> Parser:
    parser = argparse.ArgumentParser(
        prog="iskander",
        description="Check, inspect and query an Iskander model server.",
        epilog=f"Environment: {TOKEN_VARIABLE} contains the token to send to a server.",
    )
    parser.add_argument("--version", action="version", version=describe("iskander"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_model_commands(commands)
    _add_server_commands(commands)
    _add_score_command(commands)
    _add_config_commands(commands)
    return parser


def _add_model_commands(commands: Commands) -> None:
    """Commands for files."""
    sentence = "check whether a configuration starts, and show its models and their placement"
    check = _command(commands, "check", _check, sentence, _add_file, _add_set)
    sentence = "first rewrite settings with deprecated names in the file"
    check.add_argument("--fix", action="store_true", help=sentence)
    _add_sample(check, "show for each column whether a model accepts this data")
    check.add_argument("--model", metavar="NAME", help="model for the sample, if there are several")

    sentence = "print the manifest of a model, or derive one"
    manifest = _command(commands, "manifest", _manifest, sentence)
    source = manifest.add_mutually_exclusive_group(required=True)
    sentence = "ONNX file or folder; or MLflow's `MLmodel`, as YAML or JSON"
    source.add_argument("model", type=Path, nargs="?", metavar="MODEL", help=sentence)
    source.add_argument("--schema", action="store_true", help="print the JSON schema of manifests")
    _add_sample(manifest, "derive a manifest with which the model accepts this data unchanged")


def _add_server_commands(commands: Commands) -> None:
    """Commands for a running server."""
    sentence = "list the models of a server, and load errors"
    _command(commands, "models", _models, sentence, _add_address)

    sentence = "load a model of the repository, or its changed files"
    load = _command(commands, "load", _load_model, sentence, _add_name, _add_address)
    load.add_argument(
        "--timeout-s", type=float, default=300.0, metavar="SECONDS", help="default: %(default)s"
    )

    sentence = "unload a model of the repository (control: explicit)"
    unload = _command(commands, "unload", _unload_model, sentence, _add_name)
    unload.add_argument("--version", metavar="VERSION", help="only this version (default: all)")
    _add_address(unload)

    stats = _command(commands, "stats", _stats, "show the statistics of a server", _add_address)
    stats.add_argument("--json", action="store_true", help="all statistics, as one JSON object")

    sentence = "create a token, print it once, and add its hash to the file of `access.tokens`"
    token = _command(commands, "token", _token, sentence)
    token.add_argument("name", metavar="NAME", help="client of the token's requests")
    token.add_argument("--file", type=Path, required=True, metavar="FILE", help="tokens, TOML")
    sentence = "models that the token may use, such as `demo-*`; repeatable (default: all)"
    token.add_argument("--model", action="append", metavar="PATTERN", help=sentence)
    token.add_argument("--manage", action="store_true", help="also allow load and unload")


def _add_score_command(commands: Commands) -> None:
    """The command for files and tables."""
    from iskander.cli import score

    def run(arguments: argparse.Namespace) -> int:
        return score.run(arguments, _token_of_environment())

    _command(commands, "score", run, "score files or a table", score.add_arguments)


def _add_config_commands(commands: Commands) -> None:
    """Commands for configurations."""
    config = commands.add_parser("config", help="show a configuration, or every setting")
    kinds = config.add_subparsers(required=True, metavar="KIND")
    sentence = "every value of a file, and its origin"
    _command(kinds, "show", _config_show, sentence, _add_file, _add_set)
    _command(kinds, "reference", _config_reference, "every setting at its default, commented")
    sentence = "convert a configuration of Inferential's server"
    imported = _command(kinds, "import-inferential", _config_import, sentence)
    _add_file(imported, "YAML, or JSON")


def _command(
    commands: Commands, name: str, run: Command, sentence: str, *added: Callable[[Parser], None]
) -> Parser:
    """Add a command, with the arguments that the functions `added` add."""
    description = f"{sentence[0].upper()}{sentence[1:]}."
    parser = commands.add_parser(name, help=sentence, description=description)
    parser.set_defaults(run=run)
    for add in added:
        add(parser)
    return parser


def _add_name(parser: Parser) -> None:
    parser.add_argument("model", metavar="NAME", help="model name")


def _add_address(parser: Parser) -> None:
    parser.add_argument("--address", default="127.0.0.1:50051", help="default: %(default)s")
    parser.add_argument("--tls", action="store_true", help="connect with TLS")
    for name, sentence in (
        ("roots", "trusted CA certificates (default: the system's)"),
        ("certificate", "client certificate, if the server requires one"),
        ("key", "private key of the client certificate"),
    ):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE.pem", help=sentence)


def _add_file(parser: Parser, sentence: str = "configuration, TOML") -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help=sentence)


def _add_sample(parser: Parser, sentence: str) -> None:
    sentence += "; Parquet or Arrow"
    parser.add_argument("--sample", type=Path, metavar="DATA.parquet", help=sentence)


def _add_set(parser: Parser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )


def _load(arguments: argparse.Namespace) -> Loaded:
    loaded = load_config(arguments.file, overrides=tuple(arguments.set))
    for warning in loaded.warnings:
        sys.stderr.write(f"iskander: {warning}\n")
    return loaded


def _check(arguments: argparse.Namespace) -> int:
    from iskander.cli import check as checking

    if arguments.fix:
        for renamed in fix_file(arguments.file):
            _print(f"rewritten: {renamed}")
    config = _load(arguments).config
    result = checking.check(config)
    _print(*checking.render(result, config))
    contracts = {model.name: model.loaded.contract for model in result.models if model.loaded}
    code = EXIT_ERROR if any(model.error for model in result.models) else 0
    if arguments.sample is None:
        return code
    candidates = {model.name for model in config.models} or set(contracts)
    name = arguments.model or (candidates.pop() if len(candidates) == 1 else "")
    return _check_sample(arguments, name, contracts) or code


def _check_sample(arguments: argparse.Namespace, name: str, contracts: dict[str, Contract]) -> int:
    """Print for each column of a sample whether a model accepts it."""
    from iskander.cli.sample import explain, read_sample

    if name not in contracts:
        raise ConfigError(f"--model must name the model of the sample: {', '.join(contracts)}")
    sample = read_sample(arguments.sample)
    lines = explain(sample, contracts[name])
    _print(f"\n{sample.name}, {sample.batch.num_rows} rows, for `{name}`")
    rows = [(line.column, line.expected, line.found, line.problem or "fits") for line in lines]
    _print_table(("column", "expected", "found", "verdict"), rows)
    return EXIT_ERROR if any(line.problem for line in lines) else 0


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
    """The client of a command."""
    from iskander.client import CALL_TIMEOUT_S, Client, Tls

    tls = Tls(arguments.tls_roots, arguments.tls_certificate, arguments.tls_key)
    return Client(
        arguments.address,
        token=_token_of_environment(),
        tls=tls if arguments.tls or any(tls) else None,
        timeout_s=CALL_TIMEOUT_S if timeout_s is None else timeout_s,
    )


def _token_of_environment() -> str | None:
    """The token; it is in the environment because `ps` shows arguments."""
    return os.environ.get(TOKEN_VARIABLE, "").strip() or None


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
    _print(f"{arguments.model}: version {', '.join(versions)} unloaded")
    return 0


def _stats(arguments: argparse.Namespace) -> int:
    import json

    with _client(arguments) as client:
        stats = client.stats()
    _print(*([json.dumps(stats, indent=1)] if arguments.json else render_stats(stats)))
    return 0


def _token(arguments: argparse.Namespace) -> int:
    from iskander.auth.tokens import add_token

    models = tuple(arguments.model or "*")
    _print(add_token(arguments.file, arguments.name, models, manage=arguments.manage))
    return 0


def _config_show(arguments: argparse.Namespace) -> int:
    config, origins, _ = _load(arguments)
    rows = []
    for section, key in (setting.path.split(".") for setting in settings()):
        if section != "models":
            value = render_value(getattr(getattr(config, section), key))
            rows.append((f"{section}.{key}", value, origins.get(f"{section}.{key}", "default")))
    rows += [
        (f"models[{index}].{key}", render_value(getattr(model, key)), "")
        for index, model in enumerate(config.models)
        for key in model.__struct_fields__
    ]
    _print_table(("setting", "value", "from"), rows)
    return 0


def _config_reference(arguments: argparse.Namespace) -> int:
    sys.stdout.write(render_reference())
    return 0


def _config_import(arguments: argparse.Namespace) -> int:
    from iskander.config import import_inferential as inferential
    from iskander.transport.addresses import zmq_address

    raw = inferential.read_inferential(arguments.file)
    imported = inferential.import_inferential(raw, lambda bind: zmq_address(bind) is not None)
    sys.stdout.write(inferential.render_import(imported))
    return 0


def _print_table(head: Row, rows: Sequence[Row]) -> None:
    _print(*render_table(head, rows))


def _print(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
