"""The settings of a repository of models, and of a model in it (`model.toml`)."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from iskander.config.models import ModelConfig
from iskander.config.section import Section
from iskander.decoders import thread_safe

ALIAS = r"^(?![0-9]+\Z)[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z"
"""A name that is no version."""
ALIASES_MAX = 64

Version = Annotated[int, Meta(ge=0, le=10**18)]
Versions = str | tuple[Version, ...]
"""Held against `complaint_about_versions`, and not against a pattern of its type.

msgspec 0.22 takes the pattern of a text that may also be a list for the type of the list's
entries, and ends the process as it lets go of it. Source: TypeNode_get_traverse_ranges of its
`_core.c`, which does not count the pattern.
"""

_POLICY = re.compile(r"all|latest:[1-9][0-9]{0,2}")


def complaint_about_versions(versions: Versions) -> str:
    """What is wrong with a policy; empty where nothing is."""
    if not isinstance(versions, str) or _POLICY.fullmatch(versions):
        return ""
    said = msgspec.json.encode(versions).decode()
    return f"versions = {said}: wanted `latest:N` with N from 1 to 999, `all`, or a list"


class RepositoryConfig(Section, frozen=True, kw_only=True):
    """A folder of models, `NAME/VERSION/model.onnx`; see `docs/repository.md`."""

    path: Annotated[
        str, Meta(description="The folder, relative to this file. Empty: only `[[models]]`.")
    ] = ""
    control: Annotated[
        Literal["watched", "explicit"],
        Meta(
            description="`watched`: what is in the folder is served, and its changes are followed. "
            "`explicit`: models are loaded and unloaded by calls."
        ),
    ] = "watched"
    load: Annotated[
        tuple[str, ...],
        Meta(
            description="With `explicit` control: models to load at start; `*` is each that is "
            "there."
        ),
    ] = ()
    versions: Annotated[
        Versions,
        Meta(
            description="Which versions of a model are served, where its `model.toml` does not "
            "say: `latest:N`, `all`, or a list."
        ),
    ] = "latest:1"
    marker: Annotated[
        str,
        Meta(
            pattern=r"^[^/]{0,100}\Z",
            description="File that says that a version's folder is whole, such as `.complete`; "
            "without it the folder is not looked at. Empty: folders come whole, by a rename.",
        ),
    ] = ""
    settle_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=3_600_000,
            description="Milliseconds for which nothing in a version's folder may have changed, "
            "before the change is followed.",
        ),
    ] = 200
    rescan_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86_400,
            description="Seconds after which the folder is looked at where nothing was told of it.",
        ),
    ] = 30.0


@thread_safe
class ModelFile(ModelConfig, frozen=True, kw_only=True):
    """`model.toml` beside the versions of a model: settings of `[[models]]`, and which versions."""

    name: str = ""
    path: str = ""
    versions: Annotated[
        Versions | None, Meta(description="Which are served; else as `repository.versions`.")
    ] = None
    default: Annotated[
        str | int, Meta(description="Version or alias of calls that name none; else the highest.")
    ] = ""
    aliases: Annotated[
        dict[Annotated[str, Meta(pattern=ALIAS)], Version],
        Meta(max_length=ALIASES_MAX, description="Versions by another name."),
    ] = field(default_factory=dict)
    split: Annotated[
        dict[str, Annotated[float, Meta(ge=0, le=1_000_000)]],
        Meta(
            max_length=ALIASES_MAX,
            description="Weights by version or alias: where calls go that name none.",
        ),
    ] = field(default_factory=dict)
