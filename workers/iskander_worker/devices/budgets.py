"""Limit of the allocator that the programs of one process share: the sum of their budgets.

Pure. Runs on: worker main, and its loading thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Budgets:
    """Sets the limit to the sum of the budgets; no limit if a program has declared no budget.

    Args:
        total_bytes: Memory of the device.
        set_fraction: Function that sets the limit, as a share of that memory.
    """

    def __init__(self, total_bytes: int, set_fraction: Callable[[float], None]) -> None:
        self._total_bytes = total_bytes
        self._set_fraction = set_fraction
        self._budgets: list[int] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def held(self, budget_bytes: int) -> Iterator[None]:
        """Add the budget of a program while the block runs; 0 for a budget that is not declared."""
        with self._lock:
            self._budgets.append(budget_bytes)
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._budgets.remove(budget_bytes)
                self._apply()

    def _apply(self) -> None:
        is_limited = self._budgets and all(self._budgets)
        share = sum(self._budgets) / self._total_bytes if is_limited else 1.0
        self._set_fraction(min(share, 1.0))
