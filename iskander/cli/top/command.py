"""`iskander top`: models and workers of a server, live in a terminal.

It runs the action `stats` at an interval, in a thread of its own, so that the keys work while a
server does not answer. Rates and percentiles are differences of two responses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from iskander.cli import command
from iskander.cli.command import read_stats
from iskander.cli.tables import render_table
from iskander.cli.top.screen import (
    COLUMNS,
    HEADER_LINES,
    Screen,
    Style,
    View,
    read_keys,
    render_cell,
)
from iskander.cli.top.snapshot import Snapshot, compare
from iskander.errors import ConfigError, IskanderError
from iskander.foundation.clock import pause_s
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.text import Text

    from iskander.cli.command import Commands
    from iskander.client import Client

INTERVAL_MIN_S, INTERVAL_MAX_S = 0.2, 60.0
KEY_WAIT_S = 0.1
STOP_S = 0.5
READ_BYTES = 1024

_STYLES: dict[Style, str] = {
    "": "",
    "head": "bold reverse",
    "bad": "bold red",
    "faint": "dim",
}


def add_commands(commands: Commands) -> None:
    """Add the command."""
    sentence = "show models and workers of a server, live"
    top = command.add_command(commands, "top", run, sentence, command.add_address, command.add_json)
    top.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help=f"{INTERVAL_MIN_S:g} to {INTERVAL_MAX_S:g} (default: %(default)s)",
    )
    top.add_argument("--once", action="store_true", help="print one interval and end")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; without a terminal it prints one interval."""
    with command.connect(arguments) as client:
        if arguments.json or arguments.once or not sys.stdout.isatty():
            snapshot = _read_interval(client, arguments.interval)
            if arguments.json:
                command.print_json(msgspec.to_builtins(snapshot))
            else:
                command.print_lines(*_tables(snapshot))
            return ExitCode.DONE
        return _show(client, arguments.interval)


def _interval(text: str) -> float:
    value = float(text)
    if not INTERVAL_MIN_S <= value <= INTERVAL_MAX_S:
        raise argparse.ArgumentTypeError(f"{value:g} s, not in its limits")
    return value


def _read_interval(client: Client, interval_s: float) -> Snapshot:
    before = read_stats(client)
    pause_s(interval_s)
    return compare(before, read_stats(client))


def _tables(snapshot: Snapshot) -> list[str]:
    """All models by name, and all workers, as lines."""
    lines = []
    views: tuple[tuple[View, int | None], ...] = (("models", 2), ("workers", None))
    for view, numbers_from in views:
        columns = COLUMNS[view]
        rows = [
            tuple(render_cell(each.field, getattr(row, each.field)) for each in columns)
            for row in Screen(view=view, sort="name").rows(snapshot)
        ]
        head = tuple(each.head for each in columns)
        lines += [*render_table(head, rows, numbers_from=numbers_from), ""]
    return lines[:-1]


class _Poller:
    """Thread that reads a snapshot at an interval; `note` is the error of the last call."""

    def __init__(self, client: Client, interval_s: float) -> None:
        self.snapshot: Snapshot | None = None
        self.note = "waiting for the server"
        self._client, self._interval_s = client, interval_s
        self._is_stopped = threading.Event()
        # A daemon, because the call to a server that hangs ends with its timeout.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait briefly for a call."""
        self._is_stopped.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        before = None
        while not self._is_stopped.is_set():
            try:
                after = read_stats(self._client)
            except IskanderError as error:
                self.note = error.message
            else:
                self.snapshot, self.note = compare(before, after), ""
                before = after
            self._is_stopped.wait(self._interval_s)


def _show(client: Client, interval_s: float) -> int:
    """Show the screen until the key `q`."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        text = "`iskander top` needs the extra `score` (rich); --once and --json do not"
        raise ConfigError(text) from error
    console = Console()
    screen, shown, drawn = Screen(), None, None
    poller = _Poller(client, interval_s)
    try:
        with (
            _keyboard() as keys,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while not screen.is_over:
                if shown is None or not screen.is_paused:
                    shown = poller.snapshot
                width, height = console.size
                lines: list[tuple[str, Style]] = (
                    [(poller.note, "")]
                    if shown is None
                    else screen.draw(shown, width, height, poller.note)
                )
                if lines != drawn:
                    live.update(_text(lines), refresh=True)
                    drawn = lines
                for key in keys():
                    screen.press(key, max(height - HEADER_LINES - 2, 1))
    finally:
        poller.stop()
    return ExitCode.DONE


def _text(lines: Sequence[tuple[str, Style]]) -> Text:
    from rich.text import Text

    parts = [Text(text, _STYLES[style], no_wrap=True, overflow="crop") for text, style in lines]
    return Text("\n", no_wrap=True, overflow="crop").join(parts)


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[], list[str]]]:
    """Yield a function that waits for keys; without a terminal there are none.

    A signal to end the command restores the terminal. Suspending is disabled, because it would not.
    """
    signals = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number)),
        signal.SIGTSTP: signal.signal(signal.SIGTSTP, signal.SIG_IGN),
    }
    stdin = sys.stdin.fileno()
    mode = termios.tcgetattr(stdin) if os.isatty(stdin) else None
    inputs = [stdin] if mode is not None else []

    def read() -> list[str]:
        if not select.select(inputs, [], [], KEY_WAIT_S)[0]:
            return []
        data = os.read(stdin, READ_BYTES)
        if not data:
            inputs.clear()
        return read_keys(data)

    try:
        if mode is not None:
            tty.setcbreak(stdin)
        yield read
    finally:
        if mode is not None:
            termios.tcsetattr(stdin, termios.TCSADRAIN, mode)
        for number, handler in signals.items():
            signal.signal(number, handler)
