"""`iskander doctor`: checks the machine for a configuration, or for the default settings.

A first column of each finding is its state. A finding that is not `ok` has the reason, a command
that corrects it, and how to revert that.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iskander.cli import command
from iskander.cli.command import UsageError
from iskander.cli.doctor.finding import Finding, State
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    from iskander.cli.command import Commands

COLUMNS = 100
INDENT = 10


def add_commands(commands: Commands) -> None:
    """Add the command."""
    sentence = "check this machine for a configuration"
    parser = command.add_command(commands, "doctor", _doctor, sentence)
    parser.add_argument(
        "file", type=Path, nargs="?", metavar="FILE", help="configuration (default: no settings)"
    )
    command.add_set(parser)
    sentence = "read limits, control group and environment of the process PID, such as a gateway"
    parser.add_argument("--pid", type=int, metavar="PID", help=sentence)
    command.add_json(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    from iskander_worker.loading.engines import preload_libraries

    from iskander.cli.doctor.checks.subject import Subject
    from iskander.cli.doctor.demand import default_demand, demand_of
    from iskander.cli.doctor.diagnosis import diagnose
    from iskander.cli.doctor.facts import read_facts
    from iskander.cli.doctor.probes import probe
    from iskander.gateway.repository.specs import loading_spec
    from iskander.gateway.supervision.gpus.placement import wants_gpus
    from iskander.gateway.supervision.gpus.query import Devices, read_devices
    from iskander.interprocess.control.runtime_directory import runtime_path

    process = "self" if arguments.pid is None else str(arguments.pid)
    if not Path(f"/proc/{process}").is_dir():
        raise UsageError(f"--pid {process}: no such process")
    facts = read_facts(process=process)
    topology = facts.cpus.topology
    if arguments.file is None:
        demand = default_demand(topology)
    else:
        config = command.read_config(arguments).config
        devices = read_devices() if wants_gpus(config) else Devices()
        demand = demand_of(config, topology, devices.gpus)
    environment = dict(facts.environment)
    runtime = runtime_path(demand.config, environment, facts.uid)
    cache = loading_spec(demand.config, environment).cache
    probes = probe(runtime, cache, demand.providers, facts.mounts, preload_libraries)
    findings = diagnose(Subject(facts, probes, demand))
    if arguments.json:
        command.print_json(_to_json(findings))
    else:
        command.print_lines(*render(findings))
    has_problem = any(finding.state == State.PROBLEM for finding in findings)
    return ExitCode.FAILED if has_problem else ExitCode.DONE


def render(findings: Sequence[Finding]) -> Iterator[str]:
    """Return the findings as lines of text."""
    for finding in findings:
        yield from _wrap(finding.state, f"{finding.check}: {finding.found}")
        if finding.state != State.OK:
            for name, text in (("", finding.why), ("fix", finding.fix), ("undo", finding.undo)):
                if text:
                    yield from _wrap("", f"{name}: {text}" if name else text)
    yield ""
    counts = Counter(finding.state for finding in findings)
    yield ", ".join(f"{count} {state}" for state in reversed(State) if (count := counts[state]))


def _wrap(head: str, text: str) -> list[str]:
    # Lines break only at spaces, so that a command can be copied.
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=head.ljust(INDENT),
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    counts = Counter(str(finding.state) for finding in findings)
    return {"findings": [finding._asdict() for finding in findings], "counts": dict(counts)}
