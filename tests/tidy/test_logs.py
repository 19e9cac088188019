"""Rules for logging: only declared events, each with advice, each logged somewhere."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from support.loops import for_each

from iskander.cli.main import build_parser
from iskander.config.reference import settings
from iskander.foundation.logs.catalog import EVENTS, GROUPS, events_of
from iskander.foundation.logs.formats import LIBRARY_MESSAGE, RESERVED

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [
    path
    for folder in ("iskander", "workers")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_generated" not in path.parts and path.parent.name != "logs"
]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
SET_UP = {
    "iskander/client/calls/retry.py",
    "iskander/gateway/event_stream/changes.py",
    "iskander/sampling/__main__.py",
    "iskander/gateway/repository/changes.py",
    "iskander/gateway/telemetry/status/events.py",
    "iskander/gateway/telemetry/logs.py",
    "iskander/gateway/telemetry/tracing/exporter.py",
}
"""Modules that set levels and handlers of loggers."""
WRITES = {
    "iskander/gateway/__main__.py",  # An error before the configuration is known.
    "workers/iskander_worker/foreign_interpreter.py",  # It may lack what the log needs.
}
FREE = ("cli", "lake")
"""Packages of commands, which print to the terminal."""
PRINTING = {
    "print", "sys.stderr.write", "sys.stderr.writelines", "traceback.print_exc",
    "traceback.print_exception", "warnings.warn",
}  # fmt: skip
LOGGING = re.compile(r"\blog(?:ger|ging)?\b|getLogger|foundation\.logs")
FIELD_TYPES = {int, float, str}
QUOTED = re.compile(r"`([^`]+)`")
SETTINGS = {setting.path for setting in settings()}
SECTIONS = {path.partition(".")[0] for path in SETTINGS}


@for_each(SOURCES)
def test_only_declared_events_are_logged(path: Path) -> None:
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    if not LOGGING.search(text):
        return
    tree = ast.parse(text)
    groups = _imported_groups(tree)
    for call in _calls(tree):
        assert call.attr != "getLogger" or name in SET_UP, call.lineno
        assert not (call.attr in LEVELS and _base(call) in {"log", "logger", "logging"}), (
            call.lineno
        )
        if _base(call) in groups:
            assert hasattr(groups[_base(call)], call.attr) and call.attr in EVENTS, call.lineno


@for_each(SOURCES)
def test_servers_write_to_stderr_only_by_the_log(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    if name in WRITES or path.relative_to(ROOT).parts[1] in FREE:
        return
    if not any(f"{each}(" in text for each in PRINTING):
        return
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert not PRINTING & {ast.unparse(function) for function in calls}


def test_every_event_is_logged_somewhere() -> None:
    called = set()
    for path in SOURCES:
        text = path.read_text()
        if "foundation.logs" not in text:
            continue
        tree = ast.parse(text)
        groups = _imported_groups(tree)
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        called |= {node.attr for node in attributes if _base(node) in groups}
    # By the package itself, for an uncaught exception.
    called |= {"worker_crashed", "auxiliary_process_crashed"}
    assert EVENTS.keys() - called == set()


def test_groups_have_every_event() -> None:
    assert [e.name for title in GROUPS for e in events_of(title)] == list(
        dict.fromkeys(e.name for title in GROUPS for e in events_of(title))
    )
    assert {e.name for title in GROUPS for e in events_of(title)} == EVENTS.keys()
    assert LIBRARY_MESSAGE not in EVENTS


@for_each(EVENTS)
def test_event_is_complete(name: str) -> None:
    event = EVENTS[name]
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
    assert event.meaning.endswith(".")
    assert event.advice.endswith(".") or (event.level == logging.INFO and not event.advice)
    assert set(event.fields.values()) <= FIELD_TYPES
    assert set(event.subject) <= event.fields.keys()
    assert not event.fields.keys() & set(RESERVED)


@for_each(EVENTS)
def test_event_names_existing_settings_events_and_commands(name: str) -> None:
    event = EVENTS[name]
    for quoted in QUOTED.findall(f"{event.meaning} {event.advice}"):
        if quoted.partition(".")[0] in SECTIONS and "." in quoted:
            assert quoted in SETTINGS
        elif re.fullmatch(r"[a-z]+_[a-z_]+", quoted):
            assert quoted in EVENTS
        elif quoted.startswith("iskander "):
            build_parser().parse_args(quoted.split()[1:])


def _imported_groups(tree: ast.Module) -> dict[str, object]:
    """Modules of events by their names in a module."""
    modules = {module.__name__.rpartition(".")[2]: module for module in GROUPS.values()}
    return {
        alias.asname or alias.name: modules[alias.name]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "iskander.foundation.logs"
        for alias in node.names
        if alias.name in modules
    }


def _calls(tree: ast.Module) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func


def _base(attribute: ast.Attribute) -> str:
    return attribute.value.id if isinstance(attribute.value, ast.Name) else ""
