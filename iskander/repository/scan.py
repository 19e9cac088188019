"""What lies in a repository's folder: models, their versions, and in what state each is.

Decides nothing. What is there and may not be read is not taken for gone: it is told of with the
reason. Names are the bytes that the system has, whatever they mean.

Runs on: any thread.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from iskander.config.loader import require_model
from iskander.config.repository import ModelFile, complaint_about_versions
from iskander.config.schema import Config
from iskander.contract.paths import read_plain
from iskander.errors import ConfigError

SETTINGS = "model.toml"
SETTINGS_BYTES_MAX = 1 << 16
MODELS_MAX = 1024
VERSIONS_MAX = 256
FILES_MAX = 10_000
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
VERSION = re.compile(r"0|[1-9][0-9]{0,17}")
NOT_OURS = ("name", "path", "version")
NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Of errors: the others are of things that are there."""


class ScannedModel(NamedTuple):
    """A model in the folder.

    Attributes:
        settings: What tells one state of its `model.toml` from another; empty without one.
        versions: What tells one state of a version's folder from another, by version.
        error: Why nobody can say which versions there are; empty where they are known.
    """

    settings: str
    versions: dict[str, str]
    error: str = ""

    def without(self, versions: Collection[str]) -> ScannedModel:
        """The same as if some versions were not there."""
        kept = {each: state for each, state in self.versions.items() if each not in versions}
        return self._replace(versions=kept)


def list_models(root: Path, marker: str) -> dict[str, ScannedModel]:
    """Every model, by name; what has not the name of one is passed over.

    Args:
        root: The repository.
        marker: File without which a version is not there; empty for none.

    Raises:
        ConfigError: The folder cannot be read, or has too much in it.
    """
    try:
        names = sorted(
            entry.name
            for entry in os.scandir(root)
            if NAME.fullmatch(entry.name) and _is_folder(entry)
        )
    except OSError as error:
        raise ConfigError(f"repository.path: {error.strerror}") from None
    if len(names) > MODELS_MAX:
        raise ConfigError(f"repository.path has more than {MODELS_MAX} models")
    listed = {name: list_model(root, name, marker) for name in names}
    return {name: each for name, each in listed.items() if each.versions or each.error}


def list_model(root: Path, name: str, marker: str) -> ScannedModel:
    """One model; without versions where it is not there."""
    folder = root / name
    if not NAME.fullmatch(name):
        return ScannedModel("", {})
    try:
        found = [entry.name for entry in os.scandir(folder) if VERSION.fullmatch(entry.name)]
    except OSError as error:
        if error.errno in NOTHING_THERE:
            return ScannedModel("", {})
        return ScannedModel("", {}, f"its folder cannot be read: {error.strerror}")
    versions = {
        version: stamp
        for version in sorted(found, key=int)[-VERSIONS_MAX:]
        if (stamp := stamp_of(folder / version, marker))
    }
    return ScannedModel(_state_of(folder / SETTINGS), versions)


def stamp_of(folder: Path, marker: str = "") -> str:
    """What tells one state of a folder from another: names, sizes, times and inodes of its files.

    Empty where the folder has no files, or not the marker. What cannot be read is part of it.
    """
    if marker and not _state_of(folder / marker):
        return ""
    states: list[str] = []
    for path in _files(folder, states):
        states.append(f"{path.relative_to(folder)} {_state_of(path)}")
    if not states:
        return ""
    text = "\n".join(sorted(states)).encode(errors="surrogateescape")
    return blake2b(text, digest_size=16).hexdigest()


def read_settings(root: Path, name: str, config: Config) -> ModelFile:
    """A model's `model.toml`, over what the configuration says; that alone without one.

    Raises:
        ConfigError: It cannot be read, or says what it may not.
    """
    lanes = msgspec.to_builtins(config.lanes)
    try:
        raw = read_plain(root / name / SETTINGS, SETTINGS_BYTES_MAX + 1)
    except FileNotFoundError:
        raw = b""
    except OSError as error:
        raise ConfigError(f"{SETTINGS} cannot be read: {error.strerror}") from None
    if len(raw) > SETTINGS_BYTES_MAX:
        raise ConfigError(f"{SETTINGS} is larger than {SETTINGS_BYTES_MAX} bytes")
    try:
        said = msgspec.toml.decode(raw)
        ours = [key for key in NOT_OURS if key in said]
        if ours:
            raise ConfigError(f"{SETTINGS}: `{ours[0]}` is said by the folder's name")
        if isinstance(said.get("lane", {}), dict):
            said["lane"] = lanes | said.get("lane", {})
        settings = msgspec.convert(said, ModelFile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{SETTINGS}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{SETTINGS} is nested too deeply") from None
    if settings.versions is not None and (wrong := complaint_about_versions(settings.versions)):
        raise ConfigError(f"{SETTINGS}: {wrong}")
    if settings.own_workers:
        raise ConfigError(
            f"{SETTINGS}: workers of its own are planned at the start, for models of [[models]]"
        )
    require_model(settings, SETTINGS, config)
    return settings


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno not in NOTHING_THERE


def _files(folder: Path, unread: list[str]) -> Iterator[Path]:
    """The files of a folder; what of it cannot be read is noted."""

    def note(error: OSError) -> None:
        if error.errno not in NOTHING_THERE:
            unread.append(f"{error.filename}: {error.strerror}")

    count = 0
    for parent, _, names in os.walk(folder, onerror=note):
        for name in names:
            count += 1
            if count > FILES_MAX:
                return
            yield Path(parent, name)


def _state_of(path: Path) -> str:
    """Empty where there is nothing."""
    try:
        stat = path.stat()
    except OSError as error:
        return "" if error.errno in NOTHING_THERE else f"{error.strerror}"
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
