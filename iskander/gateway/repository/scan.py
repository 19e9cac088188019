"""Scan of the repository folder: models, versions, and a stamp of each version's files.

Makes no decisions. An entry that exists but cannot be read is reported with the reason, not as
missing. File names are bytes in any encoding.

Runs on: any thread.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from iskander.config.loader import require_model
from iskander.config.repository import ModelFile, versions_error
from iskander.config.schema import Config
from iskander.contract.paths import existing_inside, read_plain
from iskander.errors import ConfigError, ManifestError

SETTINGS = "model.toml"
SETTINGS_BYTES_MAX = 1 << 16
MODELS_MAX = 1024
VERSIONS_MAX = 256
FILES_MAX = 10_000
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
VERSION = re.compile(r"0|[1-9][0-9]{0,17}")
FOLDER_KEYS = ("name", "path", "version")
"""Keys that the folder defines, and `model.toml` must not."""
NOT_FOUND = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""All other errors concern an entry that exists."""


class ScannedModel(NamedTuple):
    """Stamps of a model's `model.toml` and versions; or why the versions are unknown.

    Attributes:
        unloaded: Versions that calls have unloaded. They are not loaded; the routing may still
            name them without an error.
    """

    settings: str
    versions: dict[str, str]
    error: str = ""
    unloaded: Collection[str] = ()


ABSENT = ScannedModel("", {})


def list_models(root: Path, marker: str) -> dict[str, ScannedModel]:
    """Scan every model; skip invalid names, and versions without the marker file if one is set."""
    try:
        entries = [each for each in os.scandir(root) if NAME.fullmatch(each.name)]
        names = sorted(each.name for each in entries if _is_folder(each))
    except OSError as error:
        raise ConfigError(f"repository.path: {error.strerror}") from None
    if len(names) > MODELS_MAX:
        raise ConfigError(f"repository.path has {len(names)} models, limit {MODELS_MAX}")
    listed = {name: list_model(root, name, marker) for name in names}
    return {name: each for name, each in listed.items() if each.versions or each.error}


def list_model(root: Path, name: str, marker: str) -> ScannedModel:
    """Scan one model; return one without versions if it is missing."""
    folder = root / name
    if not NAME.fullmatch(name):
        return ABSENT
    try:
        found = [entry.name for entry in os.scandir(folder) if VERSION.fullmatch(entry.name)]
    except OSError as error:
        if error.errno in NOT_FOUND:
            return ABSENT
        return ScannedModel("", {}, f"its folder cannot be read: {error.strerror}")
    versions = {
        version: stamp
        for version in sorted(found, key=int)[-VERSIONS_MAX:]
        if (stamp := stamp_of(folder / version, marker))
    }
    return ScannedModel(_stat_of(folder / SETTINGS), versions)


def stamp_of(folder: Path, marker: str = "") -> str:
    """Hash a folder's file names, stats and read errors; empty without files or the marker."""
    if marker and not _stat_of(folder / marker):
        return ""
    states: list[str] = []
    for path in _files(folder, states):
        states.append(f"{path.relative_to(folder)} {_stat_of(path)}")
    if not states:
        return ""
    text = "\n".join(sorted(states)).encode(errors="surrogateescape")
    return blake2b(text, digest_size=16).hexdigest()


def read_settings(root: Path, name: str, config: Config) -> ModelFile:
    """Read a model's `model.toml`, with the configuration's lanes as defaults.

    Raises:
        ConfigError: It is invalid.
    """
    try:
        file = existing_inside(root / name, SETTINGS)
        raw = b"" if file is None else read_plain(file, SETTINGS_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{SETTINGS} cannot be read: {error.strerror}") from None
    except ManifestError as error:
        raise ConfigError(error.message) from None
    if len(raw) > SETTINGS_BYTES_MAX:
        raise ConfigError(f"{SETTINGS} is larger than {SETTINGS_BYTES_MAX} bytes")
    try:
        fields = msgspec.toml.decode(raw)
        if forbidden := [key for key in FOLDER_KEYS if key in fields]:
            raise ConfigError(f"{SETTINGS}: `{forbidden[0]}` is defined by the folder's name")
        if isinstance(fields.get("lane", {}), dict):
            fields["lane"] = msgspec.to_builtins(config.lanes) | fields.get("lane", {})
        settings = msgspec.convert(fields, ModelFile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{SETTINGS}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{SETTINGS} is nested too deeply") from None
    if settings.versions is not None and (wrong := versions_error(settings.versions)):
        raise ConfigError(f"{SETTINGS}: {wrong}")
    if settings.own_workers:
        own = "workers of its own (`workers`, `python`, a backend that needs them)"
        raise ConfigError(f"{SETTINGS}: {own} are only for models of [[models]]")
    if settings.shadow_share is not None:
        raise ConfigError(f"{SETTINGS}: `shadow_share` is only for [[models]]; use `shadows`")
    require_model(settings, SETTINGS, config)
    return settings


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno not in NOT_FOUND


def _files(folder: Path, errors: list[str]) -> Iterator[Path]:
    """Yield up to `FILES_MAX` files below a folder; append read errors to `errors`."""

    def on_error(error: OSError) -> None:
        if error.errno not in NOT_FOUND:
            errors.append(f"{error.filename}: {error.strerror}")

    walk = os.walk(folder, onerror=on_error)
    return islice((Path(parent, name) for parent, _, names in walk for name in names), FILES_MAX)


def _stat_of(path: Path) -> str:
    """Return size, time and inode, or the read error; empty if nothing exists there."""
    try:
        stat = path.stat()
    except OSError as error:
        return "" if error.errno in NOT_FOUND else f"{error.strerror}"
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
