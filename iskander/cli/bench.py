"""`iskander bench`: load on a running server, in an open or a closed loop.

Each point lasts a fixed time after a warm-up. In an open loop, latencies count from the intended
send times. A point is marked if the generator itself was late, if requests had no answer, or if the
rates of the thirds of its time differ by more than 10 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from iskander.cli import command
from iskander.cli.command import UsageError, print_lines
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    import pyarrow as pa

    from iskander.cli.command import Commands
    from iskander.cli.load_generator.figures import Figures
    from iskander.cli.load_generator.schedule import Load
    from iskander.client import Client, Model

CLIENTS_MAX = 1024
RATE_MAX = 1_000_000.0


def add_commands(commands: Commands) -> None:
    """Add the command."""
    sentence = "measure a model of a server under load"
    parser = command.add_command(commands, "bench", _bench, sentence, command.add_name)
    parser.add_argument("--version", metavar="VERSION", help="version or alias")
    command.add_address(parser)
    group = parser.add_argument_group("load")
    loops = group.add_mutually_exclusive_group()
    sentence = "closed loops with these numbers of clients (default: 1)"
    loops.add_argument("--concurrency", metavar="N,...", help=sentence)
    loops.add_argument("--rate", metavar="R,...", help="open loops with these requests a second")
    add = group.add_argument
    add("--arrivals", choices=("poisson", "constant"), default="poisson", help="of --rate")
    add("--clients", type=int, default=64, metavar="N", help="of --rate (default: %(default)s)")
    add("--rows", type=int, default=1, metavar="N", help="rows of a request (default: %(default)s)")
    add(
        "--duration-s", type=float, default=10.0, metavar="S", help="of each (default: %(default)s)"
    )
    add(
        "--warm-up-s", type=float, default=1.0, metavar="S", help="before it (default: %(default)s)"
    )
    group = parser.add_argument_group("data (default: generated)")
    add = group.add_argument
    add("--data", type=Path, metavar="FILE", help="rows of a Parquet or Arrow file")
    sentence = "generated texts (default: %(default)s)"
    add("--string-bytes", type=int, default=16, metavar="N", help=sentence)
    add(
        "--list-length",
        type=int,
        default=8,
        metavar="N",
        help="longest list (default: %(default)s)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--csv", type=Path, metavar="FILE", help="write the figures")
    sentence = "latency by load: .svg or .png, by matplotlib, or - for a text plot"
    group.add_argument("--plot", metavar="FILE", help=sentence)
    command.add_json(group)


def _bench(arguments: argparse.Namespace) -> int:
    from iskander.cli import bench_output as output

    loads = _loads(arguments)
    output.require_plot(arguments.plot)
    with command.connect(arguments) as client:
        model = client.model(arguments.model, version=arguments.version)
        batches = _batches(arguments, model)
    found: list[Figures] = []
    is_interrupted = False
    for load in loads:
        try:
            found.append(_measure(arguments, load, batches, found))
        except KeyboardInterrupt:
            is_interrupted = True
            break
    if arguments.json:
        command.print_json(output.to_json(arguments.model, found))
    else:
        print_lines(*output.render(found))
    if arguments.csv is not None:
        output.write_csv(arguments.csv, found)
    if arguments.plot and found:
        print_lines(*output.plot(arguments.plot, arguments.model, found))
    if is_interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if any(each.errors or each.unanswered for each in found) else 0


def _measure(
    arguments: argparse.Namespace,
    load: Load,
    batches: Sequence[pa.RecordBatch],
    found: list[Figures],
) -> Figures:
    """Measure one point; an interruption adds the figures until then to `found`."""
    from iskander.cli.load_generator.run import Run
    from iskander.client import OFF

    def connect() -> Client:
        return command.connect(arguments, retry=OFF, is_matched=arguments.data is not None)

    run = Run(connect, arguments.model, arguments.version, batches, load)
    try:
        return run.measure(arguments.warm_up_s, arguments.duration_s)
    except KeyboardInterrupt:
        if (partial := run.figures()).requests:
            found.append(partial)
        raise


def _loads(arguments: argparse.Namespace) -> list[Load]:
    """Return the points; raise UsageError if an option is out of range."""
    from iskander.cli.load_generator.schedule import Load

    _require("duration-s", arguments.duration_s, 0.1, 86_400)
    _require("warm-up-s", arguments.warm_up_s, 0, 3600)
    _require("rows", arguments.rows, 1, 1 << 31)
    _require("clients", arguments.clients, 1, CLIENTS_MAX)
    _require("string-bytes", arguments.string_bytes, 0, 1 << 20)
    _require("list-length", arguments.list_length, 1, 1 << 20)
    if arguments.rate is None:
        counts = _numbers("concurrency", arguments.concurrency or "1")
        for count in counts:
            _require("concurrency", count, 1, CLIENTS_MAX)
        return [Load(int(count)) for count in counts]
    rates = _numbers("rate", arguments.rate)
    for rate in rates:
        _require("rate", rate, 0.001, RATE_MAX)
    return [Load(arguments.clients, rate, arguments.arrivals) for rate in rates]


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise UsageError(f"--{option} {text}: expected numbers such as 1,2,4")
    return numbers


def _require(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UsageError(f"--{option} {value:g}: expected a value from {least:g} to {most:g}")


def _batches(arguments: argparse.Namespace, model: Model) -> list[pa.RecordBatch]:
    """Generate the batches, or cut them out of a file."""
    from iskander.cli.load_generator.batches import cut, generate
    from iskander.cli.load_generator.run import SEED

    if arguments.data is None:
        return generate(
            model.input_schema,
            arguments.rows,
            string_bytes=arguments.string_bytes,
            list_length=arguments.list_length,
            seed=SEED,
        )
    from iskander.cli.startup.sample import read_sample

    rows = read_sample(arguments.data).batch
    return cut(rows, arguments.rows, model.input_schema.names)
