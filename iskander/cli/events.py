"""`iskander events`: prints the event stream of a server, and counts the lost events."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from iskander.cli import command
from iskander.cli.command import UsageError, print_lines
from iskander.foundation.exit_codes import ExitCode
from iskander.gateway.event_stream.messages import Batch, Completion, Event
from iskander.gateway.event_stream.subscriber import Subscriber

if TYPE_CHECKING:
    from iskander.cli.command import Commands

WAIT_S = 0.5
NS_PER_MS = 1e6
SCHEMES = ("ipc://", "tcp://")


def add_commands(commands: Commands) -> None:
    """Add the command."""
    sentence = "print the events of a server, live: completed requests, changes of workers, models"
    parser = command.add_command(commands, "events", _events, sentence, command.add_address)
    parser.epilog = (
        "--address is that of a server, which is asked for its `events.address`, or that one "
        "itself: ipc://PATH or tcp://HOST:PORT. The number of lost events is printed on stderr."
    )
    sentence = "begin of topics, such as completion/churn/ or worker; repeatable (default: all)"
    parser.add_argument("--topic", action="append", default=[], metavar="TOPIC", help=sentence)
    sentence = "end after this number of events (default: 0, no end)"
    parser.add_argument("--count", type=int, default=0, metavar="N", help=sentence)
    parser.add_argument("--json", action="store_true", help="print a JSON value on each line")


def _events(arguments: argparse.Namespace) -> int:
    left = arguments.count or float("inf")
    with Subscriber(_address(arguments), arguments.topic) as subscriber:
        try:
            while left > 0:
                received = subscriber.receive(WAIT_S)
                if received is None:
                    continue
                topic, message, lost = received
                if lost:
                    sys.stderr.write(f"iskander: {lost} events lost before this line\n")
                if isinstance(message, Batch):
                    shown = message.events[: int(min(left, len(message.events)))]
                    left -= len(shown)
                    _print(topic, message, shown, as_json=arguments.json)
        finally:
            losses = subscriber.losses
            dropped = sum(losses.dropped.values())
            sys.stderr.write(
                f"iskander: {losses.lost} events lost, {dropped} dropped by the server\n"
            )
    return ExitCode.DONE


def _address(arguments: argparse.Namespace) -> str:
    """Return the address of the stream; ask the server for it."""
    address: str = arguments.address
    if address.startswith(SCHEMES):
        return address
    with command.connect(arguments) as client:
        found: str = client.stats().get("events", {}).get("address", "")
    if not found:
        raise UsageError(f"the server at {address} has no event stream (`events.address`)")
    return found


def _print(topic: str, batch: Batch, events: list[Event], *, as_json: bool) -> None:
    if as_json:
        known = {"topic": topic, "process": batch.process}
        lines = [json.dumps(known | msgspec.to_builtins(event)) for event in events]
    else:
        lines = [f"{_time(event.at_s)} {topic} {_describe(event)}" for event in events]
    print_lines(*lines)
    sys.stdout.flush()


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).strftime("%H:%M:%S")


def _describe(event: Event) -> str:
    if not isinstance(event, Completion):
        return f"{event.level}: {event.text}"
    times = f"queue {event.queue_ns / NS_PER_MS:.2f} ms, run {event.run_ns / NS_PER_MS:.2f} ms"
    trace = f", trace {event.trace_id}" if event.trace_id else ""
    return f"{event.outcome}: {event.rows} rows, {times}, {event.method}{trace}"
