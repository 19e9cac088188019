"""Renamed settings, accepted under their old name with a warning; removed ones are errors."""

from __future__ import annotations

from typing import Any, Final

from iskander.config.section import require

RENAMED: Final = {
    "loading.trial": "loading.sandbox",
    "loading.trial_s": "loading.sandbox_s",
    "loading.trial_bytes": "loading.sandbox_bytes",
}
"""New name of each old `section.key`; both are in the same section."""

_SERVED: Final = (
    "events are now served over HTTP at `/events` of admin.address: set events.enabled = true"
)
_BUFFERED: Final = "set events.buffer_bytes, the memory of the last events for all subscribers"
REMOVED: Final = {
    "events.address": _SERVED,
    "events.queue": _BUFFERED,
    "events.subscriber_messages": _BUFFERED,
}
"""What replaces each removed `section.key`."""


def new_name(path: str, warnings: list[str]) -> str:
    """Return the present name of a setting, and add a warning if `path` is an old name.

    Raises:
        ConfigError: The setting is removed.
    """
    require(path not in REMOVED, f"setting {path} is removed: {REMOVED.get(path)}")
    if path not in RENAMED:
        return path
    warnings.append(f"setting {path} is deprecated: use {RENAMED[path]}")
    return RENAMED[path]


def rename_keys(raw: Any, warnings: list[str]) -> None:  # noqa: ANN401
    """Rename old settings in a parsed file, in place.

    Raises:
        ConfigError: The file has a setting under both names, or a removed one.
    """
    for path in REMOVED:
        name, key = path.split(".")
        if isinstance(section := raw.get(name), dict) and key in section:
            new_name(path, warnings)
    for old, new in RENAMED.items():
        name, old_key = old.split(".")
        section, new_key = raw.get(name), new.split(".")[1]
        if isinstance(section, dict) and old_key in section:
            require(new_key not in section, f"{old} and {new} are the same setting: remove {old}")
            new_name(old, warnings)
            section[new_key] = section.pop(old_key)
