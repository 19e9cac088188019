"""`iskander drift`: the drift of a server's models, and references from training data."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from iskander.cli import command
from iskander.cli.command import UsageError, print_lines
from iskander.foundation.exit_codes import ExitCode
from iskander.gateway.observation.drift_report import (
    MEASURES,
    ColumnDrift,
    DriftReport,
    ModelDrift,
    describe,
)

if TYPE_CHECKING:
    from iskander.cli.command import Commands

HEAD: Final = ("side", "column", "state", *MEASURES, "mean", "reference")


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    drift = commands.add_parser("drift", help="show drift, or record a reference")
    kinds = drift.add_subparsers(required=True, metavar="KIND")
    sentence = "show the drift of a server's models; exit code 1 if a column drifts"
    show = command.add_command(
        kinds, "show", _show, sentence, command.add_address, command.add_json
    )
    show.add_argument("model", nargs="?", metavar="NAME", help="only this model")

    sentence = "record the reference of a model from its training data"
    record = command.add_command(kinds, "record", _record, sentence, command.add_json)
    record.add_argument("model", metavar="MODEL", help="file or folder; with --config its name")
    record.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, URIs, a table")
    sentence = "default: drift-reference.msgpack beside the model"
    record.add_argument("-o", "--output", type=Path, metavar="FILE", help=sentence)
    sentence = "configuration with the model, and a share in its [models.drift]"
    record.add_argument("--config", metavar="FILE", help=sentence)
    record.add_argument(
        "--map", action="append", default=[], metavar="INPUT=COLUMN", help="repeatable"
    )
    sentence = "read files of a table as they are"
    record.add_argument("--plain-files", action="store_true", help=sentence)


def _show(arguments: argparse.Namespace) -> int:
    with command.connect(arguments) as client:
        report = client.stats().get("observation", {}).get("report", {}).get("drift")
    if report is None:
        raise UsageError(f"{arguments.address} detects no drift; set drift.enabled")
    found = msgspec.convert(report, DriftReport)
    models = [each for each in found.models if arguments.model in (None, each.model)]
    if arguments.json:
        command.print_json([msgspec.to_builtins(each) for each in models])
    elif not models:
        print_lines("no samples yet")
    for model in () if arguments.json else models:
        print_lines(*_title(model))
        if model.columns:
            command.print_table(HEAD, [_row(column) for column in model.columns])
    is_drifting = any(states["drifting"] for model in models for states in model.states.values())
    return ExitCode.FAILED if is_drifting else ExitCode.DONE


def _title(model: ModelDrift) -> Iterator[str]:
    source = f"{model.reference}, {model.reference_rows:,} rows" if model.reference else "none"
    yield f"{model.model}/{model.version}: {model.rows:,} recent rows; reference: {source}"
    for side, states in model.states.items():
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        yield f"{side}s: {counts}"
    if model.left_out:
        yield f"{model.left_out} columns are not summarized (drift.columns)"
    if model.problem:
        yield model.problem


def _row(column: ColumnDrift) -> tuple[str, ...]:
    def measure(name: str) -> str:
        value = column.measures.get(name)
        mark = "!" if name in column.exceeded else ""
        return "-" if value is None else f"{value:.3f}{mark}"

    means = (describe(column.recent) or "-", describe(column.reference) or "-")
    return (column.side, column.column, column.state, *map(measure, MEASURES), *means)


def _record(arguments: argparse.Namespace) -> int:
    from iskander.cli.drift_recording import record

    columns: dict[str, str] = {}
    for text in arguments.map:
        name, mark, column = text.partition("=")
        if not (name and mark and column) or name in columns:
            raise UsageError(f"--map {text}: expected INPUT=COLUMN, each input once")
        columns[name] = column
    recorded = record(
        arguments.model,
        arguments.inputs,
        config=arguments.config,
        output=arguments.output,
        columns=columns,
        plain_files=arguments.plain_files,
    )
    if arguments.json:
        command.print_json(recorded._asdict() | {"file": str(recorded.file)})
    else:
        print_lines(
            f"{recorded.file}: {recorded.rows:,} of {recorded.sent:,} rows, "
            f"{recorded.columns} columns"
        )
    return ExitCode.DONE
