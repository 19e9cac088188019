"""One test for many items: it runs its check for each, and names those that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
Item = TypeVar("Item")


def for_each(items: Iterable[Item]) -> Callable[[Callable[[Item], None]], Callable[[], None]]:
    """Decorate a check of one item; the test fails with the error of each item that fails."""
    chosen = list(items)

    def decorate(check: Callable[[Item], None]) -> Callable[[], None]:
        def test() -> None:
            errors = []
            for item in chosen:
                try:
                    check(item)
                except AssertionError as error:
                    name = item.relative_to(ROOT).as_posix() if isinstance(item, Path) else item
                    errors.append(f"{name}: {error}")
            assert chosen, "no items"
            assert not errors, "\n".join(errors)

        test.__doc__ = check.__doc__
        return test

    return decorate
