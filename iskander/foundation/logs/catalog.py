"""Catalog of all events, for the reference page and `iskander logs`."""

from __future__ import annotations

import logging
from typing import Any

from iskander.foundation.logs import (
    gateway,
    gpus,
    models,
    network,
    observation,
    requests,
    tracing,
    workers,
)
from iskander.foundation.logs.event import EVENTS, Event
from iskander.foundation.logs.formats import LIBRARY_MESSAGE

GROUPS = {
    "Gateway": gateway,
    "Workers": workers,
    "GPUs": gpus,
    "Models": models,
    "Requests": requests,
    "Connections, TLS and tokens": network,
    "Traces": tracing,
    "Observation": observation,
}
"""Module of the events of each subject, in the order of the reference page."""


def events_of(title: str) -> list[Event[Any]]:
    """Return the events of a group, in the order of their declarations."""
    return [each for each in vars(GROUPS[title]).values() if isinstance(each, Event)]


def level_name(event: Event[Any]) -> str:
    return logging.getLevelName(event.level).lower()


__all__ = ["EVENTS", "GROUPS", "LIBRARY_MESSAGE", "events_of", "level_name"]
