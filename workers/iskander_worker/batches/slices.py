"""Rows of several requests as one batch: gathered in a body, and its results scattered.

Runs on: worker main.
"""

from __future__ import annotations

from iskander.contract.processing.rows import RowCopier, Rows
from iskander.interprocess.control.messages import Slice


def gather(
    copier: RowCopier, source: memoryview, slices: tuple[Slice, ...], body: memoryview, rows: int
) -> None:
    """Concatenate the rows of the slices to a body of `rows` rows.

    The last row is repeated as padding, because a model could reject zeros.
    """
    at = 0
    for part in slices:
        request = Rows(source[part.input_offset :], part.request_rows, part.first)
        copier.copy(part.rows, request, Rows(body, rows, at))
        at += part.rows
    copier.repeat_last(body, at, rows)


def scatter(
    copier: RowCopier, body: memoryview, rows: int, target: memoryview, slices: tuple[Slice, ...]
) -> None:
    """Copy the results of each slice to its output offset."""
    at = 0
    for part in slices:
        results = Rows(target[part.output_offset :], part.rows, 0)
        copier.copy(part.rows, Rows(body, rows, at), results)
        at += part.rows
