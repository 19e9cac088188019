"""Comparison of a running configuration with a new one: live changes and others.

A setting whose type is `Live` changes in a running gateway. `[lanes]` has the defaults of the lanes
of `[[models]]`; for the models of a repository, whose files decide about a new load, it needs a
restart.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from iskander.config.models import ModelConfig
from iskander.config.reference import TABLES
from iskander.config.schema import Config
from iskander.config.section import Section, is_live
from iskander.errors import ConfigError

_LANES, _MODELS = "lanes", "models"
_REPOSITORY_LANES: Final = "the models of a repository are loaded with it"


class Changes(NamedTuple):
    """Difference of two configurations.

    Attributes:
        live: Changed settings that a reload applies, as `section.key`; those of a model as
            `models[NAME/VERSION].key`.
        restart: Changed settings that it cannot apply, each with the reason.
    """

    live: tuple[str, ...]
    restart: Mapping[str, str]

    @property
    def text(self) -> str:
        """The live changes, for the log and the service manager."""
        return f"{', '.join(self.live)} changed" if self.live else "no setting changed"

    def require_live(self) -> None:
        """Require that a reload can apply all changes.

        Raises:
            ConfigError: Names the settings that need a restart, with the reasons.
        """
        if self.restart:
            names_by_reason: dict[str, list[str]] = {}
            for name, reason in self.restart.items():
                names_by_reason.setdefault(reason, []).append(name)
            named = "; ".join(
                f"{', '.join(names)} ({reason})" for reason, names in names_by_reason.items()
            )
            raise ConfigError(
                f"cannot change in a running server: {named}. No change of the file is applied; "
                "restart the server, or undo these"
            )


def compare(running: Config, wanted: Config) -> Changes:
    """Compare the running configuration with a new one."""
    live: list[str] = []
    restart: dict[str, str] = {}
    for field in msgspec.structs.fields(Config):
        name = field.name
        before, after = getattr(running, name), getattr(wanted, name)
        if name == _MODELS:
            _compare_models(before, after, live, restart)
        elif name in TABLES:
            if before != after:
                restart[name] = TABLES[name].restart_reason
        elif name == _LANES and running.repository.path:
            found: list[str] = []
            _compare(f"{name}.", before, after, found, restart)
            restart |= dict.fromkeys(found, _REPOSITORY_LANES)
        else:
            _compare(f"{name}.", before, after, live, restart)
    return Changes(tuple(live), restart)


def _compare(
    prefix: str, before: Section, after: Section, live: list[str], restart: dict[str, str]
) -> None:
    """Add the changed settings of a section."""
    for field in msgspec.structs.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new:
            continue
        if is_live(field) and isinstance(old, Section):
            _compare(f"{prefix}{field.name}.", old, new, live, restart)
        elif is_live(field):
            live.append(prefix + field.name)
        else:
            restart[prefix + field.name] = before.restart_reason


def _compare_models(
    before: tuple[ModelConfig, ...],
    after: tuple[ModelConfig, ...],
    live: list[str],
    restart: dict[str, str],
) -> None:
    """Compare the models by name and version; a model that was added or removed is one name."""
    wanted = {_title(model): model for model in after}
    running = {_title(model): model for model in before}
    for title in sorted(running.keys() ^ wanted.keys()):
        restart[f"models[{title}]"] = ModelConfig.restart_reason
    for title, model in running.items():
        _compare(f"models[{title}].", model, wanted.get(title, model), live, restart)


def _title(model: ModelConfig) -> str:
    return f"{model.name}/{model.version}"
