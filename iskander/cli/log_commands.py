"""`iskander logs`: meaning of the lines of a server's log."""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING, Any

from iskander.cli import command
from iskander.cli.command import UsageError, print_lines
from iskander.exit_codes import ExitCode
from iskander.logs.catalog import EVENTS, GROUPS, events_of, level_name

if TYPE_CHECKING:
    from iskander.cli.command import Commands
    from iskander.logs.event import Event


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    logs = commands.add_parser("logs", help="explain the events of a server's log")
    kinds = logs.add_subparsers(required=True, metavar="KIND")
    sentence = "the meaning of an event, and what to do about it"
    explain = command.add_command(kinds, "explain", _explain, sentence, command.add_json)
    explain.add_argument("event", metavar="EVENT", help="`event` of a JSON line, or from the list")
    command.add_command(kinds, "list", _list, "every event of the log", command.add_json)


def _explain(arguments: argparse.Namespace) -> int:
    event = EVENTS.get(arguments.event)
    if event is None:
        near = difflib.get_close_matches(arguments.event, EVENTS, n=3)
        hint = f"; similar: {', '.join(near)}" if near else "; see `iskander logs list`"
        raise UsageError(f"no event `{arguments.event}`{hint}")
    if arguments.json:
        command.print_json(_json(event))
        return ExitCode.DONE
    fields = ", ".join(f"{name} ({kind.__name__})" for name, kind in event.fields.items())
    print_lines(
        f"{event.name}: {level_name(event)}, logger {event.logger_name}",
        f"meaning: {event.meaning}",
        f"to do: {event.advice or 'Nothing.'}",
        f"fields: {fields or 'none'}",
    )
    return ExitCode.DONE


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
