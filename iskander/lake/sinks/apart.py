"""Check that the places of a job are apart: inputs, output, and quarantine.

A place that lies in another one would be read as input by the next run, or be deleted by it.

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
from iskander.lake.sources.places import MAGIC, locate

INPUT: Final = "input"
_TABLE: Final = re.compile(r"(?:delta|iceberg)://")
_PINNED: Final = re.compile(r"(delta://.*)@v\d+|(iceberg://.*)@\d+", re.DOTALL)


def check_apart(role: str, uri: str, others: Sequence[tuple[str, str]]) -> None:
    """Check that a place that is written neither is, nor contains, nor lies in another one.

    Links and `..` of local paths are resolved. A glob is the files and folders that it can match.

    Args:
        role: Name of the place in errors, for example `quarantine`.
        uri: Path or URI of files or of a table; `-` is apart from all.
        others: Roles and URIs of the other places; inputs may be globs.

    Raises:
        ConfigError: They are not apart.
    """
    if uri == STREAM:
        return
    place = _Place.of(uri)
    for other_role, other in others:
        if other == STREAM:
            continue
        relation = place.relation(_Place.of(other))
        if relation is not None:
            hint = ""
            if other_role == INPUT and _TABLE.match(uri):
                hint = ", or read the table at a fixed version (delta://PATH@vN, iceberg://...@N)"
            raise ConfigError(
                f"{uri}: the {role} {relation} the {other_role} {other}; choose another "
                f"{role}{hint}"
            )


def check_inputs(job: Job) -> None:
    """Check that the output of a job is apart from its inputs.

    A table at a fixed version may be changed: the version keeps its files.

    Raises:
        ConfigError: It is not.
    """
    others = [
        (INPUT, each)
        for each in job.inputs
        if not (_pinned(each) and _Place.of(each) == _Place.of(job.output))
    ]
    check_apart("output", job.output, others)


def check_quarantine(job: Job) -> None:
    """Check that the quarantine of a job is apart from its inputs and its output.

    Raises:
        ConfigError: It is not.
    """
    if job.quarantine is not None:
        others = [(INPUT, each) for each in job.inputs]
        check_apart("quarantine", job.quarantine, [*others, ("output", job.output)])


class _Place(NamedTuple):
    """A path as its parts: scheme, folders, and the segments of a glob."""

    scheme: str
    parts: tuple[str, ...]
    glob: tuple[str, ...] = ()

    @classmethod
    def of(cls, uri: str) -> _Place:
        """Find the place of a path or URI."""
        plain = (_pinned(uri) or uri).removeprefix("delta://")
        try:
            place = locate(plain)
        except SourceError:
            # Tables of catalogs, and schemes that only the library of a table has.
            scheme, _, path = plain.partition("://")
            return cls(f"{scheme}://", _parts(path.partition("?")[0]))
        segments = place.path.split("/")
        fixed = next((i for i, each in enumerate(segments) if MAGIC.search(each)), len(segments))
        if place.is_local:
            if os.path.lexists(place.path):
                # A path that exists is not a glob, whatever letters it has.
                fixed = len(segments)
            root = os.path.realpath("/".join(segments[:fixed]) or "/").replace(os.sep, "/")
        else:
            root = "/".join(segments[:fixed])
        return cls(place.prefix, _parts(root), tuple(segments[fixed:]))

    def relation(self, other: _Place) -> str | None:
        """Return how this place, which is no glob, and the other one touch; None if apart."""
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


def _pinned(uri: str) -> str | None:
    """URI of a table without its fixed version; None if it has none."""
    match = _PINNED.fullmatch(uri)
    return (match[1] or match[2]) if match else None


def _parts(path: str) -> tuple[str, ...]:
    return tuple(each for each in path.split("/") if each)


def _may_match(parts: Sequence[str], segments: Sequence[str]) -> bool:
    """Whether a glob can match a path, a folder above it, or files below it."""
    if not parts or not segments or segments[0] == "**":
        return True
    is_match = parts[0] == segments[0] or fnmatch.fnmatchcase(parts[0], segments[0])
    return is_match and _may_match(parts[1:], segments[1:])
