"""Helpers of the manifest checks: requirements, and names and shapes in error texts.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from iskander.errors import ManifestError

Found = TypeVar("Found")


def require(is_met: bool, message: str) -> None:
    """Raise a `ManifestError` unless a condition is met."""
    if not is_met:
        raise ManifestError(message)


def required(value: Found | None, message: str) -> Found:
    """Return a value, or raise a `ManifestError` if the value is None."""
    if value is None:
        raise ManifestError(message)
    return value


def require_distinct(kind: str, names: Iterable[str], where: str) -> None:
    """Reject a list in which a name of this kind occurs twice."""
    twice = repeated(names)
    require(not twice, f"{where} names the {kind} {quoted(twice)} twice")


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def quoted(names: Iterable[str]) -> str:
    """Return the names in backticks, for an error text."""
    return ", ".join(f"`{name}`" for name in names) or "none"


def shape_text(shape: Iterable[int | str | None]) -> str:
    """Return a shape as text for an error, with `?` for each unknown size."""
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
