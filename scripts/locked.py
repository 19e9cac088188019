"""Runtime dependencies in their locked versions, from `uv.lock`.

Markers are evaluated for Linux on x86-64 and the oldest supported Python.
"""

from __future__ import annotations

import functools
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from packaging.markers import Marker

ROOT: Final = Path(__file__).resolve().parent.parent
PROJECT: Final = "iskander"
DEVELOPMENT: Final = {
    "test", "browser", "engines", "fuzz", "bench", "lint", "deb", "proto", "train",
}  # fmt: skip
"""Extras that no user installs."""
BASE: Final = ""
"""The extra of dependencies that are always installed."""
_ENVIRONMENT: Final = {
    "extra": "", "implementation_name": "cpython", "os_name": "posix",
    "platform_machine": "x86_64", "platform_python_implementation": "CPython",
    "platform_system": "Linux", "python_full_version": "3.11.0", "python_version": "3.11",
    "sys_platform": "linux",
}  # fmt: skip


Package: TypeAlias = dict[str, Any]
"""A table of `uv.lock`: a package, or a dependency on one."""


class Locked(NamedTuple):
    """A package.

    Attributes:
        extras: Extras of this project that need it; `BASE` if it is always installed.
        requires: Names of the packages that it needs itself.
    """

    name: str
    version: str
    extras: tuple[str, ...]
    requires: tuple[str, ...]


def project() -> dict[str, Any]:
    """`[project]` of the project file."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        read: dict[str, Any] = tomllib.load(file)["project"]
    return read


def runtime_extras() -> list[str]:
    """Extras for users, in the order of the project file."""
    return [each for each in project()["optional-dependencies"] if each not in DEVELOPMENT]


@functools.cache
def runtime_packages() -> list[Locked]:
    """All packages that the project or one of its extras needs, by name."""
    with (ROOT / "uv.lock").open("rb") as file:
        packages = tomllib.load(file)["package"]
    by_name: dict[str, list[Any]] = defaultdict(list)
    for each in packages:
        by_name[each["name"]].append(each)
    (root,) = by_name[PROJECT]
    extras: dict[str, set[str]] = defaultdict(set)
    found: dict[str, Any] = {}
    for extra in (BASE, *runtime_extras()):
        optional = root.get("optional-dependencies", {}).get(extra, ())
        for package in _closure(optional if extra else root["dependencies"], by_name):
            found[package["name"]] = package
            extras[package["name"]].add(extra)
    found.pop(PROJECT, None)
    return [
        Locked(
            name,
            found[name]["version"],
            tuple(sorted(extras[name])),
            tuple(sorted({each["name"] for each in _direct(found[name])} & found.keys())),
        )
        for name in sorted(found)
    ]


def _closure(
    dependencies: Iterable[Package], by_name: dict[str, list[Package]]
) -> Iterator[Package]:
    """The packages of dependencies, and of their dependencies."""
    waiting, seen = list(dependencies), set()
    while waiting:
        dependency = waiting.pop()
        key = dependency["name"], *dependency.get("extra", ())
        if key in seen or not _applies(dependency.get("marker")):
            continue
        seen.add(key)
        package = _selected(dependency, by_name[dependency["name"]])
        yield package
        waiting += package.get("dependencies", ())
        for extra in dependency.get("extra", ()):
            waiting += package.get("optional-dependencies", {}).get(extra, ())


def _direct(package: Package) -> Iterator[Package]:
    return (each for each in package.get("dependencies", ()) if _applies(each.get("marker")))


def _selected(dependency: Package, candidates: list[Package]) -> Package:
    """The package of a dependency; there are several if its version depends on the Python."""
    if len(candidates) == 1:
        return candidates[0]
    version = dependency.get("version")
    return next(
        each
        for each in candidates
        if (version is None or each["version"] == version)
        and any(map(_applies, each.get("resolution-markers", [None])))
    )


def _applies(marker: str | None) -> bool:
    return marker is None or Marker(marker).evaluate(_ENVIRONMENT)
