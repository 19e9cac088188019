"""Check that inputs, output and quarantine of a job do not overlap.

The next run could read an output that lies in an input, or delete an input that lies in the output.

Runs in: the operator's tool, one thread.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from iskander.errors import ConfigError, SourceError
from iskander.lake.job import STREAM, Job
from iskander.lake.sources.places import GLOB_CHARACTERS, locate

INPUT: Final = "input"
_TABLE: Final = re.compile(r"(?:delta|iceberg)://")
_PINNED: Final = re.compile(r"(delta://.*)@v\d+|(iceberg://.*)@\d+", re.DOTALL)


def check_apart(role: str, uri: str, others: Sequence[tuple[str, str]]) -> None:
    """Check that a written place neither equals, nor contains, nor lies in another place.

    Links and `..` of local paths are resolved. A glob stands for the files and folders that it can
    match.

    Args:
        role: Name of the place in errors, for example `quarantine`.
        uri: Path or URI of files or of a table; `-` overlaps nothing.
        others: Roles and URIs of the other places; inputs may be globs.

    Raises:
        ConfigError: The place overlaps another one.
    """
    if uri == STREAM:
        return
    place = _Place.of_uri(uri)
    for other_role, other in others:
        if other == STREAM:
            continue
        relation = place.relation(_Place.of_uri(other))
        if relation is not None:
            hint = ""
            if other_role == INPUT and _TABLE.match(uri):
                hint = ", or read the table at a fixed version (delta://PATH@vN, iceberg://...@N)"
            raise ConfigError(
                f"{uri}: the {role} {relation} the {other_role} {other}; choose another "
                f"{role}{hint}"
            )


def check_inputs(job: Job) -> None:
    """Check that the output of a job overlaps none of its inputs.

    The output may be a table of which an input is a fixed version, because that version keeps its
    files.

    Raises:
        ConfigError: The output overlaps an input.
    """
    others = [
        (INPUT, uri)
        for uri in job.inputs
        if not (_without_version(uri) and _Place.of_uri(uri) == _Place.of_uri(job.output))
    ]
    check_apart("output", job.output, others)


def check_quarantine(job: Job) -> None:
    """Check that the quarantine of a job overlaps neither its inputs nor its output.

    Raises:
        ConfigError: The quarantine overlaps another place.
    """
    if job.quarantine is not None:
        others = [(INPUT, uri) for uri in job.inputs]
        check_apart("quarantine", job.quarantine, [*others, ("output", job.output)])


class _Place(NamedTuple):
    """A path, split into its scheme, its folders, and the segments of a glob."""

    scheme: str
    parts: tuple[str, ...]
    glob: tuple[str, ...] = ()

    @classmethod
    def of_uri(cls, uri: str) -> _Place:
        """Return the place of a path or URI."""
        plain = (_without_version(uri) or uri).removeprefix("delta://")
        try:
            place = locate(plain)
        except SourceError:
            # A table of a catalog, or a scheme that only a table's library supports.
            scheme, _, path = plain.partition("://")
            return cls(f"{scheme}://", _path_parts(path.partition("?")[0]))
        segments = place.path.split("/")
        fixed = next(
            (i for i, each in enumerate(segments) if GLOB_CHARACTERS.search(each)), len(segments)
        )
        if place.is_local:
            if os.path.lexists(place.path):
                # A path that exists is not a glob, whatever letters it has.
                fixed = len(segments)
            root = os.path.realpath("/".join(segments[:fixed]) or "/").replace(os.sep, "/")
        else:
            root = "/".join(segments[:fixed])
        return cls(place.prefix, _path_parts(root), tuple(segments[fixed:]))

    def relation(self, other: _Place) -> str | None:
        """Return how this place, which is no glob, overlaps the other one; None if it does not."""
        if self.scheme != other.scheme:
            return None
        mine, its = self.parts + self.glob, other.parts
        if len(mine) <= len(its):
            if mine != its[: len(mine)]:
                return None
            return "contains" if len(mine) < len(its) or other.glob else "is"
        if its != mine[: len(its)] or not _may_match(mine[len(its) :], other.glob):
            return None
        return "lies in"


def _without_version(uri: str) -> str | None:
    """Return the URI of a table without its fixed version; None if it has no fixed version."""
    match = _PINNED.fullmatch(uri)
    return (match[1] or match[2]) if match else None


def _path_parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part)


def _may_match(parts: Sequence[str], segments: Sequence[str]) -> bool:
    """Whether a glob can match a path, a folder above it, or files below it."""
    if not parts or not segments or segments[0] == "**":
        return True
    is_match = parts[0] == segments[0] or fnmatch.fnmatchcase(parts[0], segments[0])
    return is_match and _may_match(parts[1:], segments[1:])
