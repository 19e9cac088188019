"""`iskander score`: arguments, private server, signals, and exit codes of batch scoring.

Exit codes: 0 done; 1 failed; 2 wrong usage; 3 done, with rows in the quarantine; 130 interrupted,
and resumable with the printed command.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from iskander.cli import command
from iskander.errors import (
    ConfigError,
    ContractError,
    Fault,
    FilterError,
    IskanderError,
    ModelMoved,
)
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    from iskander.client import Client, Retry
    from iskander.lake.dry_run import DryRun
    from iskander.lake.job import Job
    from iskander.lake.journal import Journal
    from iskander.lake.plan import Unit
    from iskander.lake.planning import PlannedJob
    from iskander.lake.run.report import Report
    from iskander.lake.run.runner import RunningUnit, StopRequest
    from iskander.lake.run.unit_run import UnitContext
    from iskander.lake.sources import JobSource

ENGINES: Final = ("here", "ray")
COLUMNS_SHOWN: Final = 10
"""Columns of the input in an error."""
ATTEMPTS: Final = 40
"""Attempts without a result between them: about a minute, enough for a server that restarts."""
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20,
                 "gi": 1 << 30}  # fmt: skip
_SIZE = re.compile(r"(\d+)\s*([kmg]i?)?b?", re.IGNORECASE)
_PAIR = re.compile(r"([^=]+)=(.+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command; `--help` fits on one screen."""
    parser.usage = "iskander score MODEL INPUT... -o OUTPUT [options]"
    add = parser.add_argument
    add("model", metavar="MODEL", help="model file or folder; with a server NAME[@VERSION]")
    add("inputs", nargs="+", metavar="INPUT", help="files, folders, URIs, tables, or - (Arrow)")
    add("-o", "--output", required=True, metavar="OUTPUT", help="folder, file, table, or -")

    group = parser.add_argument_group("server (default: a private one for this job)")
    add = group.add_argument
    add("--server", metavar="ADDRESS,...", help="HOST:PORT or unix:PATH")
    add("--config", metavar="FILE", help="configuration of a private server with the model")
    add("--model-version", metavar="VERSION", help="version or alias")
    add("--tls", action="store_true", help="connect with TLS")
    for name in ("roots", "certificate", "key"):
        add(f"--tls-{name}", type=Path, metavar="FILE", help=argparse.SUPPRESS)

    add("--engine", default="here", metavar="NAME", help="here, or ray: tasks and servers of Ray")
    add("--ray-address", default="auto", metavar="ADDRESS", help="auto, local or HOST:PORT")
    add(
        "--allow-unprotected-network",
        action="store_true",
        help="servers of Ray's nodes listen without TLS or tokens",
    )

    group = parser.add_argument_group("rows and columns")
    add = group.add_argument
    add("--map", action="append", default=[], metavar="INPUT=COLUMN", help="repeatable")
    add("--keep", metavar="COLUMN,...", help="input columns in the output (default: all)")
    add("--filter", metavar="TEXT", help="such as \"a > 3 and b in ['x', 'y']\"")
    add("--limit", type=int, metavar="ROWS", help="first rows after the filter")
    add("--plain-files", action="store_true", help="read files of a table as they are")
    add("--on-error", default="fail", metavar="WHAT", help="fail, null or quarantine=FOLDER")

    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--partition-by", default="", metavar="COLUMN,...", help="hive folders")
    add("--sort-by", default="", metavar="COLUMN,...", help="order of all rows")
    add("--file-size", metavar="BYTES", help="such as 256MB")
    add("--compression", metavar="NAME", help="zstd, snappy, gzip, lz4 or none")
    add("--overwrite", default="error", metavar="WHAT", help="error, append or replace")

    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--batch-rows", type=int, default=8192, metavar="N", help="default: %(default)s")
    add("--concurrency", type=int, metavar="N", help="streams; default: one for each core, 2 to 8")
    add("--unit-size", metavar="BYTES", help="input of one unit; default: 128MiB")
    add("--state", metavar="FOLDER", help="default: _iskander/NAME beside the output")
    add("--resume", action="store_true", help="continue, or fail without an earlier run")
    add("--restart", action="store_true", help="delete the state of an earlier run")
    add("--unattended", action="store_true", help="for timers: run only if there is new input")
    add("--dry-run", action="store_true", help="show the plan; score one batch")
    add("--progress", default="auto", metavar="KIND", help="auto, bar, plain, json or none")
    add("--report", metavar="FILE", help="report as JSON; - is stderr")
    command.add_json(group)


def run(arguments: argparse.Namespace, token: str | None) -> int:
    """Run the command; the token is for the server."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = _run(arguments, token)
    except (ConfigError, FilterError) as error:
        _say(error.message)
        code = ExitCode.USAGE
    except IskanderError as error:
        _say(error.message)
        code = ExitCode.FAILED
    except KeyboardInterrupt:
        _say("interrupted before the job began")
        code = ExitCode.INTERRUPTED
    _end_if_busy(code)
    return code


def _run(arguments: argparse.Namespace, token: str | None) -> int:
    from iskander.lake.job import CONCURRENCY_MAX
    from iskander.lake.run.progress import open_progress

    if arguments.engine not in ENGINES:
        raise ConfigError(f"--engine {arguments.engine}: expected {' or '.join(ENGINES)}")
    model, version = _model(arguments)
    if arguments.json and arguments.output == "-" and not arguments.dry_run:
        raise ConfigError("--json: the output is standard output; use --report")
    job = _job(arguments, model, version)
    # Wrong usage is reported before a server starts.
    if job.filter is not None:
        from iskander.lake.filters import parse_filter

        parse_filter(job.filter)
    open_progress(arguments.progress).close()
    code: int | None = None
    try:
        with _connected(arguments, token, job.concurrency) as server:
            if server.streams is not None and arguments.concurrency is None:
                job = dataclasses.replace(job, concurrency=min(server.streams, CONCURRENCY_MAX))
            code = _score(arguments, job, server)
    except KeyboardInterrupt:
        if code is None:
            raise
        _say("interrupted while the server stopped, after the end of the job")
    assert code is not None
    return code


def _model(arguments: argparse.Namespace) -> tuple[str, str | None]:
    """Name and version of the model."""
    from iskander.lake.run.server import model_name

    given: str = arguments.model
    if arguments.server and arguments.config:
        raise ConfigError("--server and --config exclude each other")
    if not arguments.server and not arguments.config:
        if arguments.model_version:
            raise ConfigError("--model-version needs --server or --config; a file has one version")
        if not Path(given).exists():
            raise ConfigError(
                f"{given}: no such model file or folder; for a model of a server, use --server"
            )
        return model_name(given), None
    name, mark, version = given.rpartition("@")
    if not mark:
        return given, arguments.model_version
    if arguments.model_version not in (None, version):
        raise ConfigError(f"{given} and --model-version {arguments.model_version} differ")
    return name, version


def _job(arguments: argparse.Namespace, model: str, version: str | None) -> Job:
    from iskander.lake.job import FILE_BYTES, UNIT_BYTES, Job, default_concurrency

    return Job(
        model=model,
        version=version,
        inputs=tuple(arguments.inputs),
        output=arguments.output,
        columns=_pairs(arguments.map),
        keep=None if arguments.keep is None else _names(arguments.keep),
        filter=arguments.filter,
        limit=arguments.limit,
        batch_rows=arguments.batch_rows,
        concurrency=(
            default_concurrency() if arguments.concurrency is None else arguments.concurrency
        ),
        on_error=arguments.on_error,
        partition_by=_names(arguments.partition_by),
        sort_by=_names(arguments.sort_by),
        unit_bytes=_bytes("unit-size", arguments.unit_size, UNIT_BYTES),
        file_bytes=_bytes("file-size", arguments.file_size, FILE_BYTES),
        compression=arguments.compression,
        overwrite=arguments.overwrite,
        resume=arguments.resume,
        restart=arguments.restart,
        unattended=arguments.unattended,
        state=arguments.state,
        plain_files=arguments.plain_files,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _pairs(texts: list[str]) -> Mapping[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        found = _PAIR.fullmatch(text)
        if found is None or found[1] in pairs:
            raise ConfigError(f"--map {text}: expected INPUT=COLUMN, each input once")
        pairs[found[1]] = found[2]
    return pairs


def _bytes(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--{option} {text}: expected a number with KB, MB, GB, KiB, MiB or GiB")
    return int(found[1]) * _UNITS[(found[2] or "").lower()]


class _Server(NamedTuple):
    """Client of the server, and what differs between servers and engines.

    Attributes:
        addresses: Addresses of all servers.
        options: Options of clients of them.
        lost: Returns an error if a private server has ended.
        open_unit: `JobSetup.open_unit` of an engine; None: here.
        streams: Default of `--concurrency`; None: that of a job here.
        stall_s: Time without progress after which the job fails; None: that of a job here.
    """

    client: Client
    addresses: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    lost: Callable[[], IskanderError | None] = lambda: None
    open_unit: Callable[[UnitContext, Unit], RunningUnit] | None = None
    streams: int | None = None
    stall_s: float | None = None


@contextlib.contextmanager
def _connected(arguments: argparse.Namespace, token: str | None, streams: int) -> Iterator[_Server]:
    """Connect to the given servers, to those of a Ray cluster, or to a private one."""
    from iskander.client import Client, Tls
    from iskander.lake.run.server import private_server

    tls = Tls(arguments.tls_roots, arguments.tls_certificate, arguments.tls_key)
    options: dict[str, Any] = {"token": token, "retry": _retry(streams)}
    if arguments.tls or any(tls):
        options["tls"] = tls
    model = None if arguments.config else arguments.model
    if arguments.engine == "ray":
        with _ray_servers(arguments, model, options) as server:
            yield server
    elif arguments.server:
        addresses = _names(arguments.server)
        with Client(addresses, **options) as client:
            yield _Server(client, addresses, options)
    else:
        with (
            private_server(model, config=arguments.config) as private,
            Client(private.address, **options) as client,
        ):
            yield _Server(client, lost=private.loss_error)


def _retry(streams: int) -> Retry:
    """Retries of the client of a job, with a budget for all attempts of all streams."""
    from iskander.client import Retry
    from iskander.client.calls.retry import BUDGET

    # Half of a budget may be used.
    return Retry(attempts=ATTEMPTS, budget=max(2 * ATTEMPTS * streams, BUDGET))


@contextlib.contextmanager
def _ray_servers(
    arguments: argparse.Namespace, model: str | None, options: Mapping[str, Any]
) -> Iterator[_Server]:
    """Connect to a Ray cluster, and start servers on its nodes unless some are given."""
    from iskander.client import Client
    from iskander.engines.addresses import Servers
    from iskander.ray import Fleet, cluster
    from iskander.ray.addresses import fixed_servers
    from iskander.ray.units import STALL_S, RayUnits

    cluster.connect(arguments.ray_address)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.disconnect)
        servers: Servers
        if arguments.server:
            servers = fixed_servers(_names(arguments.server))
        else:
            fleet = Fleet(
                model,
                config=arguments.config,
                token=options["token"],
                allow_unprotected_network=arguments.allow_unprotected_network,
            )
            servers = stack.enter_context(fleet).servers()
        client = stack.enter_context(Client(servers.addresses(), **options))
        yield _Server(
            client,
            servers.addresses(),
            options,
            open_unit=RayUnits(servers, options),
            streams=cluster.cpus(),
            stall_s=STALL_S,
        )


def _score(arguments: argparse.Namespace, job: Job, server: _Server) -> int:
    from iskander.engines.runtimes import common_runtimes
    from iskander.lake.journal import Journal
    from iskander.lake.planning import WORKERS_S, csv_types, describe, plan_job
    from iskander.lake.run.runner import StopRequest
    from iskander.lake.sources import open_source
    from iskander.lake.whole import whole_if_needed

    with contextlib.ExitStack() as signals, contextlib.ExitStack() as stack:
        journal: Journal | None = None
        # A dry run creates nothing.
        is_kept = not job.is_stream and (not arguments.dry_run or Path(job.state_folder).exists())
        if is_kept:
            journal = stack.enter_context(Journal(job.state_folder))
        version = job.version
        if journal is not None and job.resume and version is None:
            # The server's default version may have changed since.
            earlier = journal.plan()
            version = None if earlier is None else earlier.version
        description = describe(server.client, job.model, version, workers_s=WORKERS_S)
        common_runtimes(description, server.addresses, server.options)
        source = open_source(
            job.inputs,
            unit_bytes=job.unit_bytes,
            types=csv_types(job, description),
            plain_files=job.plain_files,
        )
        stack.callback(source.close)
        source = whole_if_needed(source, description)
        try:
            planned = plan_job(job, source, description)
        except ContractError as error:
            raise _with_map(error, source.schema.names) from None
        if job.unattended and journal is not None and journal.is_of_another(planned.plan):
            job = dataclasses.replace(job, unattended=False, restart=True)
        if arguments.dry_run:
            from iskander.lake.dry_run import dry_run

            _print_plan(
                arguments,
                dry_run(job, planned, source=source, client=server.client, journal=journal),
            )
            return ExitCode.DONE
        # A signal after the end of the job does not change its exit code.
        stop = StopRequest()
        signals.enter_context(_stopped_by_signals(stop))
        return _run_job(arguments, job, planned, source, server, journal, stop=stop)


def _run_job(
    arguments: argparse.Namespace,
    job: Job,
    planned: PlannedJob,
    source: JobSource,
    server: _Server,
    journal: Journal | None,
    *,
    stop: StopRequest,
) -> int:
    from iskander.lake.errors import JobConflict
    from iskander.lake.run.progress import open_progress
    from iskander.lake.run.runner import STALL_S, Interrupted, JobSetup, Runner
    from iskander.lake.run.unit_run import UnitRun
    from iskander.lake.sinks import open_sink
    from iskander.lake.sinks.errors import OutputExists

    runner = Runner(
        JobSetup(
            job=job,
            planned=planned,
            source=source,
            sink=open_sink(job),
            client=server.client,
            journal=journal,
            progress=open_progress(arguments.progress),
            stop=stop,
            lost=server.lost,
            open_unit=server.open_unit or UnitRun,
        ),
        stall_s=server.stall_s or STALL_S,
    )
    try:
        report = runner.run()
    except Interrupted:
        _write_report(arguments, runner.report("interrupted"))
        _say("interrupted")
        _print_resume(journal)
        return ExitCode.INTERRUPTED
    except IskanderError as error:
        _write_report(arguments, runner.report("failed"))
        _say(f"{error.message} [{error.code}]")
        # With the same options these would fail again.
        if not isinstance(error, ConfigError | JobConflict | ModelMoved | OutputExists):
            _print_resume(journal, _advice(error, job, journal))
        return ExitCode.USAGE if isinstance(error, ConfigError) else ExitCode.FAILED
    _write_report(arguments, report)
    return ExitCode.QUARANTINED if report.quarantined else ExitCode.DONE


@contextlib.contextmanager
def _stopped_by_signals(stop: StopRequest) -> Iterator[None]:
    """SIGINT and SIGTERM stop the job inside the block; a second one drops units in flight."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.request()

    numbers = (signal.SIGINT, signal.SIGTERM)
    earlier = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, earlier, strict=True):
            signal.signal(number, handler)


def _with_map(error: ContractError, names: Sequence[str]) -> ContractError:
    """Add the option for a missing column to an error, and the columns of the input."""
    column, nearest = error.column, error.fields.get("nearest")
    if column is None or column in names or "wanted" not in error.fields:
        return error
    shown = ", ".join(f"`{each}`" for each in names[:COLUMNS_SHOWN])
    more = f" and {len(names) - COLUMNS_SHOWN} more" if len(names) > COLUMNS_SHOWN else ""
    text = f"{error.message}. Use --map {column}={nearest or 'COLUMN'} to read another column"
    return ContractError(f"{text}; the input has {shown}{more}", **error.fields)


def _advice(error: IskanderError, job: Job, journal: Journal | None) -> str:
    """What to change, for an error that the same data and options give again; else empty."""
    from iskander.lake.rows import is_row_error

    is_of_rows = is_row_error(error)
    is_input = error.fault == Fault.CLIENT and error.status == "INVALID_ARGUMENT"
    if error.retryable or not (is_of_rows or is_input):
        return ""
    text = "The job would fail again: change the data or the options"
    if journal is not None and journal.has_plan:
        text += ", and start again with --restart"
    if is_of_rows and job.on_error == "fail":
        text += ". For rows that the model rejects, see --on-error null or quarantine=FOLDER"
    return text + "."


def _print_resume(journal: Journal | None, advice: str = "") -> None:
    """Print advice, or the command that continues the job if there is something to continue."""
    if advice:
        sys.stderr.write(f"{advice}\n")
        return
    if journal is None or not journal.has_plan:
        return
    words = [each for each in sys.argv[1:] if each not in ("--restart", "--resume")]
    resume = shlex.join(["iskander", *words, "--resume"])
    sys.stderr.write(f"{len(journal.finished())} units are finished. Resume with:\n  {resume}\n")


def _write_report(arguments: argparse.Namespace, report: Report) -> None:
    if arguments.report and arguments.report != "-":
        try:
            Path(arguments.report).write_text(json.dumps(report.to_json(), indent=1) + "\n")
        except OSError as error:
            _say(f"{arguments.report}: cannot be written: {error.strerror}")
    elif arguments.report:
        sys.stderr.write(json.dumps(report.to_json()) + "\n")
    if arguments.json:
        command.print_json(report.to_json())
    if arguments.progress != "none":
        sys.stderr.writelines(f"{line}\n" for line in report.lines())


def _print_plan(arguments: argparse.Namespace, plan: DryRun) -> None:
    """Print what the job would do; nothing else is written to standard output in a dry run."""
    if arguments.json:
        command.print_json(plan.to_json())
    else:
        command.print_lines(*plan.lines())


def _say(text: str) -> None:
    sys.stderr.write(f"iskander: {text}\n")


def _end_if_busy(code: int) -> None:
    """End the process at once if a thread waits for the network: it would crash a normal exit."""
    if any(each.name.startswith(("unit-", "part-")) for each in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
