"""Command line of the benchmarks: install peers, measure, report, compare."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import compare, page, probes, ramp, reload, results
from benchmarks.cases import GOALS, SUITES, Case, with_processes
from benchmarks.machine import describe_machine, describe_versions
from benchmarks.peers import GPU_REQUIREMENTS, install
from benchmarks.runner import Effort, log_progress, run
from benchmarks.systems import REQUIREMENTS, SYSTEMS
from benchmarks.tables import render_case, render_verdicts

OPEN_PROCESSES = 4
INSTALLABLE = (*REQUIREMENTS, *GPU_REQUIREMENTS)
"""Without names, the first ones only: the others need a GPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, or 1 if an installation failed.
    """
    options = _parser().parse_args(arguments)
    command = options.command
    if command == "install":
        failures = install(tuple(options.peers or REQUIREMENTS))
        for failure in failures:
            log_progress(f"not installed: {failure}")
        return bool(failures)
    if command == "report":
        images = page.IMAGES if options.images else None
        page.write_page(results.read(options.files), options.output, images=images)
        return 0
    if command == "compare":
        print(compare.render(compare.compare(*(results.read([each]) for each in options.files))))
        return 0
    effort = _effort(options)
    if command == "probe":
        records: Iterable[dict[str, Any]] = (
            *probes.probe_start(effort.rounds),
            *probes.probe_idle(effort),
        )
    elif command == "ramp":
        records = ramp.ramp(tuple(options.systems or ramp.RAMPED), effort)
    elif command == "reload":
        records = reload.reload(effort)
    else:
        records = run(_cases(options), effort)
    _record(records, effort, options.out)
    return 0


def _record(records: Iterable[dict[str, Any]], effort: Effort, out: Path) -> None:
    first = {
        "kind": "run",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "effort": asdict(effort),
    }
    for _ in results.write(out, (each for part in ([first], records) for each in part)):
        pass
    found = results.read([out])
    parts = [render_case(found, case) for case in found.cases]
    verdicts = results.check_goals(found, GOALS)
    parts += [render_verdicts(verdicts)] if verdicts else []
    parts += [
        each for each in (probes.render(found), ramp.render(found), reload.render(found)) if each
    ]
    print("\n\n".join(parts))


def _cases(options: argparse.Namespace) -> list[Case]:
    chosen = []
    for case in SUITES[options.suite]:
        systems = tuple(
            name for name in case.systems if not options.systems or name in options.systems
        )
        if systems and re.search(options.case, case.name):
            is_open = case.load.arrivals_per_s > 0
            processes = options.processes or (OPEN_PROCESSES if is_open else case.load.clients)
            seconds = options.seconds if options.quick and is_open else case.seconds
            chosen.append(
                with_processes(replace(case, systems=systems, seconds=seconds), processes)
            )
    if not chosen:
        raise SystemExit("no case of the suite matches --case and --systems")
    return chosen


def _effort(options: argparse.Namespace) -> Effort:
    if options.quick:
        options.seconds = 0.5
        return Effort(rounds=1, seconds=0.5, warm_up_seconds=0.25)
    return Effort(rounds=options.rounds, seconds=options.seconds)


def _peer(name: str) -> str:
    if name not in INSTALLABLE:
        raise argparse.ArgumentTypeError(f"unknown peer; choose from {', '.join(INSTALLABLE)}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    add = commands.add_parser("install", help="create environments for the other servers")
    # argparse checks an empty list against `choices` too.
    add.add_argument("peers", nargs="*", type=_peer, metavar="PEER", help=", ".join(INSTALLABLE))

    for name, help_text in (
        ("run", "measure the cases of a suite"),
        ("ramp", "find the greatest sustained load of each system"),
        ("probe", "measure the startup time, and the cost of idle streams"),
        ("reload", "measure the cost of reloads for active streams"),
    ):
        add = commands.add_parser(name, help=help_text)
        if name == "run":
            add.add_argument("suite", choices=[*SUITES])
            add.add_argument("--case", default="", metavar="REGEX", help="of case names")
            add.add_argument(
                "--processes", type=int, help="client processes; default: one a client"
            )
        if name in ("run", "ramp"):
            add.add_argument("--systems", nargs="*", choices=[*SYSTEMS], metavar="SYSTEM")
        add.add_argument("--rounds", type=int, default=3, help="rounds; medians are reported")
        add.add_argument("--seconds", type=float, default=5.0, help="of each system in a round")
        add.add_argument("--quick", action="store_true", help="run each only for a moment")
        add.add_argument("--out", type=Path, default=Path(f"build/{name}.jsonl"), metavar="PATH")

    add = commands.add_parser("report", help="write benchmarks/README.md")
    add.add_argument("files", type=Path, nargs="+")
    add.add_argument("--output", type=Path, default=page.README, metavar="PATH")
    add.add_argument("--images", action=argparse.BooleanOptionalAction, default=True)

    add = commands.add_parser("compare", help="print the changes beyond noise")
    add.add_argument("files", type=Path, nargs=2, metavar="FILE")
    return parser


if __name__ == "__main__":
    # SIGTERM stops the started servers too, as ^C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
