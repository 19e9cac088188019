"""`iskander-gateway`: flags, configuration, signals, exit codes.

Exit codes: 0 drained; 2 wrong usage; 69 workers not ready; 71 the system refused memory; 78 invalid
configuration, model or manifest; 130 immediate stop by a second signal.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

from iskander.config.loader import Loaded, load_config
from iskander.config.memory import Division, divide
from iskander.config.schema import Config
from iskander.errors import ConfigError, IskanderError, ManifestError, SegmentError
from iskander.foundation.build_info import describe
from iskander.foundation.exit_codes import ExitCode, summary
from iskander.foundation.logs import gateway as log
from iskander.foundation.machine_memory import memory_bytes
from iskander.gateway.child_settings import RELOAD_SIGNAL, read_settings
from iskander.gateway.supervision.placement.machine import plan_machine
from iskander.gateway.supervision.placement.plan import PlacementPlan
from iskander.gateway.supervision.placement.topology import render_cpu_list
from iskander.gateway.supervision.worker import SlotPlan
from iskander.gateway.systemd import keep_alive
from iskander.gateway.telemetry.logs import are_logs_set_up, set_up_logs
from iskander.gateway.transport.limits.allocator import keep_large_blocks

_PR_SET_PDEATHSIG = 1
PARENT_PID = "ISKANDER_PARENT_PID"


def main(words: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(
        prog="iskander-gateway",
        description="Serve models over Arrow Flight: record batches in, predictions out. Starts "
        "the workers, listens, and drains on SIGTERM or SIGINT; a second signal ends it at once.",
        epilog="Environment: ISKANDER_SECTION__KEY=VALUE overrides the file, --set overrides both. "
        f"See also: iskander check FILE, iskander config reference. {summary('iskander-gateway')}",
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="TOML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; repeatable",
    )
    parser.add_argument("--process", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=describe("iskander-gateway"))
    arguments = parser.parse_args(words)
    if arguments.process is not None:
        _end_with_parent()
    try:
        loaded = _read(arguments)
        set_up_logs(loaded.config.admin, arguments.process)
        for warning in loaded.warnings:
            log.setting_questionable(warning=warning)
        placed = plan_machine(loaded.config)
        workers = len(placed.slots)
        division = _divide(loaded, workers, arguments)
        config = division.loaded.config
        if division.total_bytes:
            log.memory_divided(
                total_bytes=division.total_bytes,
                shares=division.shares,
                left_bytes=division.left_bytes,
            )

        def read_again() -> Config:
            return _divide(_read(arguments), workers, arguments).loaded.config

        # Before the loop's handlers exist, SIGINT ends the process; asyncio's own handler would
        # cancel the startup half way.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if config.server.processes > 1 and arguments.process is None:
                sys.exit(runner.run(_supervise(config, read_again)))
            keep_large_blocks()
            _pin(placed)
            runner.run(_serve(config, placed.slots, arguments.process, read_again))
    except (ConfigError, ManifestError) as error:
        _end(error, ExitCode.CONFIG)
    except SegmentError as error:
        _end(error, ExitCode.MEMORY)
    except IskanderError as error:
        _end(error, ExitCode.UNAVAILABLE)


def _read(arguments: argparse.Namespace) -> Loaded:
    """Load the configuration file, or in a child process the settings from the parent."""
    if arguments.process is not None:
        return Loaded(read_settings(arguments.config), {})
    return load_config(arguments.config, overrides=tuple(arguments.set))


def _divide(loaded: Loaded, workers: int, arguments: argparse.Namespace) -> Division:
    """Apply `server.memory`; a child process receives settings that its parent has divided."""
    if arguments.process is not None:
        return Division(loaded, 0, {}, 0)
    return divide(loaded, workers, memory_bytes())


def _pin(placed: PlacementPlan) -> None:
    """Pin this process, before it has threads or much memory; a worker replaces its own mask."""
    for note in placed.notes:
        log.placement_restricted(note=note)
    if not placed.gateway:
        return
    cpus = render_cpu_list(placed.gateway)
    try:
        os.sched_setaffinity(0, placed.gateway)
    except OSError as error:
        log.gateway_not_pinned(cpus=cpus, reason=str(error.strerror))
    else:
        log.gateway_pinned(cpus=cpus)


async def _supervise(config: Config, read_again: Callable[[], Config]) -> int:
    """Run several processes, each of which runs `_serve`; return the exit code."""
    from iskander.gateway.parent import Parent

    command = [sys.executable, "-P", "-m", "iskander.gateway"]
    Path("/proc/self/comm").write_text("isk-gateway")
    parent = Parent(config, command, read_again)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, parent.on_signal)
    loop.add_signal_handler(signal.SIGHUP, parent.reload)
    keep_alive()
    code = await parent.serve()
    return ExitCode.INTERRUPTED if parent.is_forced else code


async def _serve(
    config: Config, slots: list[SlotPlan], process: int | None, read_again: Callable[[], Config]
) -> None:
    """Run one gateway process until a signal; `process` is its number, None for a single one."""
    name = "isk-gateway" if process is None else f"isk-gateway-{process}"
    Path("/proc/self/comm").write_text(name)
    stop = asyncio.Event()
    received: set[signal.Signals] = set()

    def end_now() -> None:
        server.kill_workers()
        os._exit(ExitCode.INTERRUPTED)

    def on_signal(number: signal.Signals) -> None:
        # A child may receive several from the parent, a service manager, and prctl; only SIGQUIT
        # stops it immediately. The action `drain` is no signal: the first one after it is often
        # that of a service manager.
        if received and process is None:
            end_now()
        received.add(number)
        stop.set()

    def on_reload() -> None:
        operation.on_signal()

    def keeps_workers() -> bool:
        # Workers of a service manager continue: it stops them itself, and the next gateway uses
        # their models. Other workers stop with the last process (after SIGINT from the parent, or
        # its death), and continue when only this process is replaced.
        is_replaced = process is not None and signal.SIGINT not in received and _has_parent()
        return is_replaced or not config.workers.spawn

    # Handlers run at the first await of the startup.
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if process is not None:
        loop.add_signal_handler(signal.SIGHUP, on_signal, signal.SIGHUP)
        loop.add_signal_handler(RELOAD_SIGNAL, on_reload)
        loop.add_signal_handler(signal.SIGQUIT, end_now)
    else:
        loop.add_signal_handler(signal.SIGHUP, on_reload)
    # Must precede the import of NumPy, which starts one BLAS thread per core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Memory of pyarrow is returned to the system with the heap (`transport/allocator.py`).
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from iskander.arrow.without_pandas import keep_pandas_out

    keep_pandas_out()
    from iskander.gateway.operation import Operation, ask_parent
    from iskander.gateway.server import Server

    server = Server(config, slots, process or 0)
    operation = Operation(server, config, read_again, stop.set)
    server.set_operation(operation.operate if process is None else ask_parent)
    starting = asyncio.create_task(server.start())
    keep_alive()
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if starting.done() and starting.exception() is not None:
        stopping.cancel()
        await server.abandon()
        starting.result()
    starting.cancel()
    await stopping
    await server.drain(keeps_workers)


def _end_with_parent() -> None:
    """Receive SIGTERM at the death of the parent. Source: prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not _has_parent():
        os._exit(ExitCode.INTERRUPTED)  # It died before the prctl call.


def _has_parent() -> bool:
    return os.getppid() == int(os.environ.get(PARENT_PID, os.getppid()))


def _end(error: IskanderError, code: ExitCode) -> None:
    if are_logs_set_up():
        log.gateway_failed(reason=error.message)
    else:
        sys.stderr.write(f"iskander-gateway: {error.message}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
