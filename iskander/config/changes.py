"""Comparison of a running configuration with a new one: live changes and others.

A setting whose type is `Live` changes in a running gateway. `[lanes]` has the defaults of the lanes
of `[[models]]`; for the models of a repository, whose files decide about a new load, it needs a
restart.

Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from iskander.config.models import ModelConfig
from iskander.config.reference import TABLES
from iskander.config.schema import Config
from iskander.config.section import Section, is_live

_LANES, _MODELS, _LANE = "lanes", "models", "lane"


class Changes(NamedTuple):
    """Difference of two configurations.

    Attributes:
        live: Changed settings that a reload applies, as `section.key`; those of a model as
            `models[NAME/VERSION].key`.
        restart: Changed settings that it does not apply.
        config: The running configuration with the live changes.
    """

    live: tuple[str, ...]
    restart: tuple[str, ...]
    config: Config


def compare(running: Config, wanted: Config) -> Changes:
    """Compare the running configuration with a new one."""
    live: list[str] = []
    restart: list[str] = []
    merged: dict[str, object] = {}
    for field in msgspec.structs.fields(Config):
        name = field.name
        if name in TABLES:
            continue
        can_apply = name != _LANES or not running.repository.path
        before, after = getattr(running, name), getattr(wanted, name)
        merged[name] = _merge(f"{name}.", before, after, live, restart, can_apply=can_apply)
    merged[_MODELS] = _merge_models(running.models, wanted.models, live, restart)
    for name in sorted(TABLES.keys() - {_MODELS}):
        if getattr(running, name) != getattr(wanted, name):
            restart.append(name)
    return Changes(tuple(live), tuple(restart), replace(running, **merged))


def _merge(
    prefix: str,
    before: Section,
    after: Section,
    live: list[str],
    restart: list[str],
    *,
    can_apply: bool = True,
) -> Section:
    """Return a section with its live changes; add the names of its changes to the lists."""
    changed = {}
    for field in msgspec.structs.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new:
            continue
        if is_live(field) and isinstance(old, Section):
            changed[field.name] = _merge(f"{prefix}{field.name}.", old, new, live, restart)
        elif is_live(field) and can_apply:
            live.append(prefix + field.name)
            changed[field.name] = new
        else:
            restart.append(prefix + field.name)
    return replace(before, **changed)


def _merge_models(
    before: tuple[ModelConfig, ...],
    after: tuple[ModelConfig, ...],
    live: list[str],
    restart: list[str],
) -> tuple[ModelConfig, ...]:
    """Compare the models by name and version; a model that was added or removed is one name."""
    wanted = {_title(model): model for model in after}
    running = {_title(model): model for model in before}
    restart += sorted(f"models[{title}]" for title in running.keys() ^ wanted.keys())
    merged = []
    for title, model in running.items():
        new = _merge(f"models[{title}].", model, wanted.get(title, model), live, restart)
        assert isinstance(new, ModelConfig)
        merged.append(new)
    return tuple(merged)


def _title(model: ModelConfig) -> str:
    return f"{model.name}/{model.version}"
