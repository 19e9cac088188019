"""Report of drift from the observer process to the gateway: metrics, page, `stats`.

Pure, and without the sketch library, because gateways import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from iskander.foundation.decoders import thread_safe

MODELS_MAX: Final = 64
"""Model versions in a report, those with the most drift first."""
COLUMNS_MAX: Final = 160
"""Columns in a report, those with the most drift."""
COLUMNS_BYTES_MAX: Final = 120_000
"""Bytes of these columns. A report is one message, which the buffer of a socket (208 KiB) limits; a
model version without its columns has up to 1,200 bytes."""
NAME_CHARACTERS: Final = 80
"""Longer names of columns are shortened in a report."""
PROBLEM_CHARACTERS: Final = 200
QUANTILES: Final = (0.1, 0.5, 0.9)
STATES: Final = ("drifting", "steady", "unjudged")
"""States of a column; `unjudged` is without a reference, or with too few values."""
MEASURES: Final = ("psi", "ks", "missing", "out_of_range", "new_labels")
_encode = msgspec.msgpack.Encoder().encode


class SideSummary(msgspec.Struct, frozen=True):
    """Summary of a column's values; without numbers, mean and quantiles are null.

    Attributes:
        missing: Share of values that are null, NaN or infinite.
        quantiles: At `QUANTILES`.
        labels: Shares of the most frequent labels.
    """

    count: int = 0
    missing: float = 0.0
    mean: float | None = None
    deviation: float | None = None
    quantiles: tuple[float, ...] = ()
    labels: dict[str, float] = {}


class ColumnDrift(msgspec.Struct, frozen=True, kw_only=True):
    """A column of a model version.

    Attributes:
        side: `input` or `output`.
        exceeded: Measures above their limits, the greatest first.
        severity: Greatest measure in units of its limit.
        measures: Values of the measures that apply.
    """

    side: str
    column: str
    state: str
    exceeded: tuple[str, ...] = ()
    severity: float = 0.0
    measures: dict[str, float] = {}
    recent: SideSummary = SideSummary()
    reference: SideSummary | None = None


class ModelDrift(msgspec.Struct, frozen=True, kw_only=True):
    """A model version.

    Attributes:
        reference: Origin of the reference, `recording`, or empty for none.
        problem: Why a reference is not used; empty for none.
        reference_rows: Rows of the reference, or recorded so far.
        rows: Rows of the recent samples.
        states: Number of columns by state, for inputs and outputs.
        left_out: Columns that are not summarized.
        columns: The columns with the most drift.
    """

    model: str
    version: str
    reference: str = ""
    problem: str = ""
    reference_rows: int = 0
    rows: int = 0
    states: dict[str, dict[str, int]] = {}
    left_out: int = 0
    columns: tuple[ColumnDrift, ...] = ()


@thread_safe
class DriftReport(msgspec.Struct, frozen=True):
    """Drift of all model versions.

    Attributes:
        left_out: Model versions above `MODELS_MAX`, or above the limit of all columns.
        counts: Summarized `samples` and `rows` since the start of the process.
        failure: A reason why a reference is not used or not stored; empty for none.
    """

    models: tuple[ModelDrift, ...] = ()
    left_out: int = 0
    counts: dict[str, int] = {}
    failure: str = ""


def limited(models: Sequence[ModelDrift]) -> tuple[ModelDrift, ...]:
    """Return the models with only those columns that have the most drift, the worst model first."""
    positions = [
        (-column.severity, index, at)
        for index, model in enumerate(models)
        for at, column in enumerate(model.columns)
    ]
    kept: set[tuple[int, int]] = set()
    size_bytes = 0
    for _, index, at in sorted(positions)[:COLUMNS_MAX]:
        size_bytes += len(_encode(models[index].columns[at]))
        if size_bytes > COLUMNS_BYTES_MAX:
            break
        kept.add((index, at))
    listed = [
        msgspec.structs.replace(
            model,
            columns=tuple(column for at, column in enumerate(model.columns) if (index, at) in kept),
        )
        for index, model in enumerate(models)
    ]
    return tuple(sorted(listed, key=lambda model: -max_severity(model)))


def max_severity(model: ModelDrift) -> float:
    """Return the severity of the column with the most drift."""
    return max((column.severity for column in model.columns), default=0.0)


def shorten(name: str) -> str:
    """Return a name with a hash for its middle, if it is too long; its end has the element."""
    if len(name) <= NAME_CHARACTERS:
        return name
    middle = f"..{blake2b(name.encode(), digest_size=4).hexdigest()}.."
    half = (NAME_CHARACTERS - len(middle)) // 2
    return f"{name[:half]}{middle}{name[-half:]}"


def describe(side: SideSummary | None) -> str:
    """Return the mean of numbers, or the most frequent label with its share; or an empty text."""
    if side is None:
        return ""
    if side.labels:
        label, share = next(iter(side.labels.items()))
        return f"{label} {share:.0%}"
    return "" if side.mean is None else f"{side.mean:.4g}"
