"""Renamed settings, accepted under their old name or rewritten; removed ones are errors."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final

from iskander.config.section import require
from iskander.errors import ConfigError

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


def fix_file(file: Path) -> list[str]:
    """Rewrite the old settings of a file, and keep its comments, order, mode and symbolic link.

    Returns:
        One line for each renamed setting.

    Raises:
        ConfigError: The file cannot be read or written, or has a setting under both names.
    """
    target = file.resolve()
    warnings: list[str] = []
    try:
        text = target.read_text("utf-8")
        expected = tomllib.loads(text)
        rename_keys(expected, warnings)
        for old, new in RENAMED.items():
            text = _rename(text, old, new)
        if tomllib.loads(text) != expected:
            raise ConfigError(f"{file.name} cannot be rewritten by this command: {warnings[0]}")
        if warnings:
            _replace(target, text)
    except OSError as error:
        raise ConfigError(f"{file.name} cannot be rewritten: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file.name} is not TOML: {error}") from None
    return warnings


def _rename(text: str, old: str, new: str) -> str:
    """Rename a key of a TOML text.

    The name may also occur elsewhere: each occurrence is tried until the parsed text is correct.
    """
    section, old_key = old.split(".")
    new_key = new.split(".")[1]
    expected = tomllib.loads(text)
    if not (isinstance(expected.get(section), dict) and old_key in expected[section]):
        return text
    expected[section][new_key] = expected[section].pop(old_key)
    for match in re.finditer(rf"\b{old_key}\b", text):
        renamed = text[: match.start()] + new_key + text[match.end() :]
        try:
            if tomllib.loads(renamed) == expected:
                return renamed
        except tomllib.TOMLDecodeError:
            continue
    return text


def _replace(file: Path, text: str) -> None:
    """Replace a file atomically."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text, "utf-8")
    new.chmod(file.stat().st_mode & 0o7777)
    os.replace(new, file)
