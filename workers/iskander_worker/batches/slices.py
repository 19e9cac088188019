"""Rows of several requests as one batch: gathered in a body, and its results scattered.

Runs on: worker main.
"""

from __future__ import annotations

from iskander.contract.processing.rows import RowCopier, Rows
from iskander.interprocess.control.messages import Slice


def gather(
    copier: RowCopier, source: memoryview, slices: tuple[Slice, ...], body: memoryview, rows: int
) -> None:
    """Concatenate the rows of the slices, padded with the last one: zeros could be rejected."""
    at = 0
    for each in slices:
        request = Rows(source[each.input_offset :], each.request_rows, each.first)
        copier.copy(each.rows, request, Rows(body, rows, at))
        at += each.rows
    copier.repeat_last(body, at, rows)


def scatter(
    copier: RowCopier, body: memoryview, rows: int, target: memoryview, slices: tuple[Slice, ...]
) -> None:
    """Copy the results of each slice to its output offset."""
    at = 0
    for each in slices:
        results = Rows(target[each.output_offset :], each.rows, 0)
        copier.copy(each.rows, Rows(body, rows, at), results)
        at += each.rows
