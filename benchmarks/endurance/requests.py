"""Requests whose answers identify the request, and the check of an answer.

Each thread of each client process has its own range of numbers, so an answer that belongs to
another request is wrong. Pure, apart from the folder of the model with changing versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

NUMERIC, STRINGS, PYTHON, VERSIONED, FRAGILE = "ids", "words", "python", "scaled", "fragile"
SUFFIX = "!"
SIZES = (1, 1, 1, 8, 8, 64, 128, 128, 512, 1024, 8192)
ROWS_MAX = max(SIZES)
CRASH = np.iinfo(np.int64).min
"""This value ends a worker by SIGFPE in the model `fragile`."""
VERSIONS_BACK = 3
"""A version may still be served while as many newer ones appear: loads take seconds."""
_RANGE_BITS = 32


class Request(NamedTuple):
    """A batch for a model; the strings of `words` are its numbers as text."""

    model: str
    values: Int64s

    @property
    def texts(self) -> list[str]:
        """The strings of `words`."""
        return [str(value) for value in self.values.tolist()]


class Numbers:
    """Numbers that no other client has; `owner` is unique, from 1."""

    def __init__(self, owner: int) -> None:
        self._first = owner << _RANGE_BITS
        self._used = 0

    def take(self, rows: int) -> Int64s:
        """The next numbers."""
        if self._used + rows > 1 << _RANGE_BITS:
            self._used = 0
        first = self._first + self._used
        self._used += rows
        return np.arange(first, first + rows, dtype=np.int64)


class Checker:
    """Checks answers; `versions` is the folder of the model with changing versions."""

    def __init__(self, versions: Path) -> None:
        self._versions = versions

    def newest(self) -> int:
        """The highest version in the folder."""
        return max(int(each.name) for each in self._versions.iterdir() if each.name.isdecimal())

    def find_fault(self, request: Request, answer: Any, newest: int) -> str:  # noqa: ANN401
        """Describe the first difference from the expected answer; empty if there is none.

        Args:
            request: The request.
            answer: An array, or a list of strings.
            newest: The highest version before the request was sent.
        """
        values = request.values
        if len(answer) != len(values):
            return f"{request.model}: {len(answer)} rows for {len(values)}"
        if request.model == STRINGS:
            expected: Any = [text + SUFFIX for text in request.texts]
            is_equal = list(answer) == expected
        else:
            factor = 3
            if request.model == VERSIONED:
                factor = int(answer[0]) // int(values[0])
                if not newest - VERSIONS_BACK <= factor <= self.newest():
                    return f"{request.model}: version {factor} answered, {newest} was the newest"
            expected = {VERSIONED: factor * values, FRAGILE: -values}.get(
                request.model, 3 * values + 1
            )
            is_equal = np.array_equal(answer, expected)
        if is_equal:
            return ""
        row = next(
            n for n, pair in enumerate(zip(answer, expected, strict=True)) if pair[0] != pair[1]
        )
        return f"{request.model}: row {row} is {answer[row]!r}, expected {expected[row]!r}"
