"""Base class and field types of the configuration sections."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from iskander.errors import ConfigError

MIB = 1 << 20

SettingT = TypeVar("SettingT")
Live = Annotated[SettingT, Meta(extra={"live": True})]
"""Type of a setting that a reload changes in a running gateway; any other needs a restart."""

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
UpTo1024 = Annotated[int, Meta(ge=0, le=1024)]
PollMicroseconds = Annotated[int, Meta(ge=0, le=10_000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
NotNegativeSeconds = Annotated[float, Meta(ge=0, le=86_400)]
ShortSeconds = Annotated[float, Meta(gt=0, le=3600)]
Milliseconds = Annotated[float, Meta(ge=0, le=86_400_000)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of settings; an undeclared key is an error.

    The `Attributes:` of a section's docstring are the descriptions on the reference pages.
    `restart_reason` is why its settings that are not `Live` need a restart.
    """

    restart_reason: ClassVar[str] = ""


def is_live(field: msgspec.structs.FieldInfo) -> bool:
    """Whether a reload changes a setting in a running gateway."""
    notes = getattr(field.type, "__metadata__", ())
    return any(isinstance(note, Meta) and bool(note.extra) for note in notes)


def require(is_met: bool, rule: str) -> None:
    """Raise a `ConfigError` unless a condition is met."""
    if not is_met:
        raise ConfigError(rule)
