"""`iskander events`: prints the event stream of a server, and counts the lost events."""

from __future__ import annotations

import argparse
import json
import ssl
import sys
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from iskander.cli import command
from iskander.cli.command import UsageError, print_lines, token_of_environment
from iskander.foundation.exit_codes import ExitCode
from iskander.gateway.event_stream.messages import Change, Completion, Lost, SentEvent
from iskander.gateway.event_stream.subscriber import Subscriber

if TYPE_CHECKING:
    from iskander.cli.command import Commands

NS_PER_MS = 1e6
WILDCARDS = ("0.0.0.0", "::")
REASONS = {
    "slow": "they were not read in time",
    "expired": "the server no longer had them after the reconnection",
    "restarted": "the server was restarted",
}


def add_commands(commands: Commands) -> None:
    """Add the command."""
    sentence = "print the events of a server, live: completed requests, changes of workers, models"
    parser = command.add_command(commands, "events", _events, sentence, command.add_address)
    parser.epilog = (
        "--address is that of a server, which is asked for its `admin.address`, or that one "
        "itself: http://HOST:PORT. The number of lost events is printed on stderr."
    )
    sentence = "begin of topics, such as completion/churn/ or worker; repeatable (default: all)"
    parser.add_argument("--topic", action="append", default=[], metavar="TOPIC", help=sentence)
    sentence = "end after this number of events (default: 0, no end)"
    parser.add_argument("--count", type=int, default=0, metavar="N", help=sentence)
    parser.add_argument("--json", action="store_true", help="print a JSON value on each line")


def _events(arguments: argparse.Namespace) -> int:
    left = arguments.count or float("inf")
    counted = unknown = 0
    url, token = _address(arguments), token_of_environment()
    subscriber = Subscriber(url, arguments.topic, token=token, tls=_tls(arguments))
    try:
        for sent in subscriber.events():
            event = sent.decode()
            if isinstance(event, Lost):
                counted += event.lost or 0
                unknown += event.lost is None
                count = "an unknown number of" if event.lost is None else event.lost
                text = f"{count} events lost before this line: {REASONS[event.reason]}"
                sys.stderr.write(f"iskander: {text}\n")
                continue
            _print(sent, event, as_json=arguments.json)
            left -= 1
            if left <= 0:
                break
    finally:
        subscriber.close()
        places = f", an unknown number at {unknown} places" if unknown else ""
        sys.stderr.write(f"iskander: {counted} events lost{places}\n")
    return ExitCode.DONE


def _address(arguments: argparse.Namespace) -> str:
    """Return the URL of the stream; ask the server for it."""
    address: str = arguments.address
    if address.startswith(("http://", "https://")):
        return address
    if address.startswith(("ipc://", "tcp://")):
        text = "events are served over HTTP: use the address of the server, or http://HOST:PORT"
        raise UsageError(f"--address {address}: {text} of its `admin.address`")
    with command.connect(arguments) as client:
        found: str = client.stats().get("events", {}).get("address", "")
    if not found:
        raise UsageError(f"the server at {address} has no event stream (`events.enabled`)")
    parts = urlsplit(found)
    if parts.hostname in WILDCARDS:  # It listens on all addresses, also on the one in use.
        host = address.rpartition(":")[0]
        return parts._replace(netloc=f"{host}:{parts.port}").geturl()
    return found


def _tls(arguments: argparse.Namespace) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=arguments.tls_roots)
    if arguments.tls_certificate:
        tls.load_cert_chain(arguments.tls_certificate, arguments.tls_key)
    return tls


def _print(sent: SentEvent, event: Completion | Change, *, as_json: bool) -> None:
    if as_json:
        print_lines(json.dumps({"topic": sent.topic} | json.loads(sent.data)))
    else:
        print_lines(f"{_time(event.at_s)} {sent.topic} {_describe(event)}")
    sys.stdout.flush()


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).strftime("%H:%M:%S")


def _describe(event: Completion | Change) -> str:
    if isinstance(event, Change):
        return f"{event.level}: {event.text}"
    times = f"queue {event.queue_ns / NS_PER_MS:.2f} ms, run {event.run_ns / NS_PER_MS:.2f} ms"
    trace = f", trace {event.trace_id}" if event.trace_id else ""
    return f"{event.outcome}: {event.rows} rows, {times}, {event.method}{trace}"
