"""`iskander check` and `iskander manifest`: commands for configurations and model files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from iskander.cli import command
from iskander.cli.command import UsageError, print_lines
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    from iskander.cli.command import Commands, Parser
    from iskander.cli.startup.sample import Line, Sample
    from iskander.contract.tensors import Contract


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    sentence = "check whether a configuration starts, and show its models and their placement"
    check = command.add_command(
        commands, "check", _check, sentence, command.add_file, command.add_set, command.add_json
    )
    _add_sample(check, "show for each column whether a model accepts this data")
    check.add_argument("--model", metavar="NAME", help="model for the sample, if there are several")

    sentence = "print the manifest of a model, or derive one"
    manifest = command.add_command(commands, "manifest", _manifest, sentence, command.add_json)
    source = manifest.add_mutually_exclusive_group(required=True)
    sentence = "ONNX file or folder; or MLflow's `MLmodel`, as YAML or JSON"
    source.add_argument("model", type=Path, nargs="?", metavar="MODEL", help=sentence)
    source.add_argument("--schema", action="store_true", help="print the JSON schema of manifests")
    sentence = "derive the manifest of MODEL, a NAME or NAME/VERSION, on this server (HOST:PORT)"
    manifest.add_argument("--remote", metavar="ADDRESS", help=sentence)
    _add_sample(manifest, "derive a manifest with which the model accepts this data unchanged")


def _add_sample(parser: Parser, sentence: str) -> None:
    sentence += "; Parquet or Arrow"
    parser.add_argument("--sample", type=Path, metavar="DATA.parquet", help=sentence)


def _check(arguments: argparse.Namespace) -> int:
    from iskander.cli.startup import check as checking

    config = command.read_config(arguments).config
    result = checking.check(config)
    contracts = {model.name: model.loaded.contract for model in result.models if model.loaded}
    if not arguments.json:
        print_lines(*checking.render(result, config))
    lines: list[Line] = []
    if arguments.sample is not None:
        candidates = {model.name for model in config.models} or set(contracts)
        name = arguments.model or (candidates.pop() if len(candidates) == 1 else "")
        sample, lines = _explain_sample(arguments, name, contracts)
        if not arguments.json:
            _print_sample(sample, name, lines)
    if arguments.json:
        more = {"sample": [line._asdict() for line in lines]}
        command.print_json(checking.to_json(result, config) | more)
    is_bad = any(model.error for model in result.models) or any(line.problem for line in lines)
    return ExitCode.FAILED if is_bad else ExitCode.DONE


def _explain_sample(
    arguments: argparse.Namespace, name: str, contracts: dict[str, Contract]
) -> tuple[Sample, list[Line]]:
    """Return for each column of a sample whether a model accepts it."""
    from iskander.cli.startup.sample import explain, read_sample

    if name not in contracts:
        raise UsageError(f"--model must name the model of the sample: {', '.join(contracts)}")
    sample = read_sample(arguments.sample)
    return sample, explain(sample, contracts[name])


def _print_sample(sample: Sample, name: str, lines: list[Line]) -> None:
    print_lines(f"\n{sample.name}, {sample.batch.num_rows} rows, for `{name}`")
    rows = [(line.column, line.expected, line.found, line.problem or "fits") for line in lines]
    command.print_table(("column", "expected", "found", "verdict"), rows)


def _manifest(arguments: argparse.Namespace) -> int:
    from iskander_worker.affinity import set_library_environment

    from iskander.contract.compile import compile_contract, derive_manifest
    from iskander.contract.formats.manifest_schema import manifest_schema
    from iskander.contract.formats.mlflow import manifest_of_signature
    from iskander.contract.formats.render import render_entries, render_manifest
    from iskander.contract.labels import read_labels
    from iskander.contract.manifest import model_file, read_manifest

    if arguments.schema:
        command.print_json(manifest_schema())
        return ExitCode.DONE
    file: Path = arguments.model
    if arguments.remote:
        from iskander_worker.backends.remote import derive_remote_manifest

        name, _, version = str(file).partition("/")
        text = render_entries(derive_remote_manifest(arguments.remote, name, version))
        command.print_toml(text, as_json=arguments.json)
        return ExitCode.DONE
    if file.name == "MLmodel" or file.suffix in (".json", ".yaml", ".yml"):
        from iskander.config.migration.import_inferential import read_inferential

        text = render_entries(manifest_of_signature(read_inferential(file)))
        command.print_toml(text, as_json=arguments.json)
        return ExitCode.DONE
    set_library_environment()
    from iskander_worker.backends.onnx import read_graph

    graph = read_graph(file)
    # The shell has emptied the file before, if the output goes to `> manifest.toml`.
    target = model_file(file).parent / "manifest.toml"
    is_emptied = target.is_file() and not target.stat().st_size
    manifest = None if is_emptied else read_manifest(file)
    if arguments.sample is not None:
        from iskander.cli.startup.sample import manifest_for, read_sample

        manifest = manifest_for(read_sample(arguments.sample), graph)
    manifest = manifest or derive_manifest(graph)
    contract = compile_contract(manifest, graph, labels=read_labels(file, manifest))
    command.print_toml(render_manifest(contract, manifest), as_json=arguments.json)
    return ExitCode.DONE
