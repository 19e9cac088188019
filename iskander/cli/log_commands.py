"""`iskander logs`: meaning of the events of a server's log."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from typing import TYPE_CHECKING, Any

from iskander.cli import command
from iskander.cli.command import UsageError, print_lines
from iskander.foundation.exit_codes import ExitCode
from iskander.foundation.logs.catalog import EVENTS, GROUPS, events_of, level_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from iskander.cli.command import Commands
    from iskander.foundation.logs.event import Event


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    logs = commands.add_parser("logs", help="explain the events of a server's log")
    kinds = logs.add_subparsers(required=True, metavar="KIND")
    sentence = "the meaning of an event or a line, and what to do about it"
    explain = command.add_command(kinds, "explain", _explain, sentence, command.add_json)
    explain.add_argument(
        "event",
        metavar="EVENT",
        help="name of an event, or a JSON line of the log in quotes; `-`: the JSON lines of stdin",
    )
    command.add_command(kinds, "list", _list, "every event of the log", command.add_json)


def _explain(arguments: argparse.Namespace) -> int:
    text: str = arguments.event
    events = _events_of_lines(_stdin_lines() if text == "-" else [text])
    if text in EVENTS:
        events = [EVENTS[text]]
    if not events:
        near = difflib.get_close_matches(text, EVENTS, n=3)
        hint = f"similar: {', '.join(near)}" if near else "see `iskander logs list`"
        lines = "lines have the name of their event with admin.log_format = `json`"
        raise UsageError(f"no name of an event in `{text}`; {hint}; {lines}")
    if arguments.json:
        command.print_json(_json(events[0]) if text in EVENTS else [_json(each) for each in events])
        return ExitCode.DONE
    for index, event in enumerate(events):
        print_lines(*[""] * bool(index), *_describe(event))
    return ExitCode.DONE


def _stdin_lines() -> Iterator[str]:
    """Yield the lines of standard input; a log may have bytes that are no UTF-8."""
    return (line.decode(errors="replace").rstrip("\r\n") for line in sys.stdin.buffer)


def _events_of_lines(lines: Iterable[str]) -> list[Event[Any]]:
    """Return the events of lines, each once, in the order of their first lines."""
    found = (_event_of_line(line) for line in lines)
    return list(dict.fromkeys(event for event in found if event is not None))


def _event_of_line(line: str) -> Event[Any] | None:
    """Return the event of a JSON line, before which another program may have printed a prefix."""
    start = line.find("{")
    try:
        fields = json.loads(line[start:]) if start >= 0 else None
    except (ValueError, RecursionError):
        return None
    name = fields.get("event") if isinstance(fields, dict) else None
    return EVENTS.get(name) if isinstance(name, str) else None


def _describe(event: Event[Any]) -> list[str]:
    fields = ", ".join(f"{name} ({kind.__name__})" for name, kind in event.fields.items())
    return [
        f"{event.name}: {level_name(event)}, logger {event.logger_name}",
        f"meaning: {event.meaning}",
        f"to do: {event.advice or 'Nothing.'}",
        f"fields: {fields or 'none'}",
    ]


def _list(arguments: argparse.Namespace) -> int:
    events = [event for title in GROUPS for event in events_of(title)]
    if arguments.json:
        command.print_json([_json(event) for event in events])
    else:
        rows = [(event.name, level_name(event), _sentence(event)) for event in events]
        command.print_table(("event", "level", "meaning"), rows)
    return ExitCode.DONE


def _sentence(event: Event[Any]) -> str:
    return event.meaning.partition(". ")[0].removesuffix(".")


def _json(event: Event[Any]) -> dict[str, Any]:
    return {
        "event": event.name,
        "level": level_name(event),
        "logger": event.logger_name,
        "topic": event.topic,
        "fields": {name: kind.__name__ for name, kind in event.fields.items()},
        "traceback": event.has_traceback,
        "meaning": event.meaning,
        "advice": event.advice,
    }
