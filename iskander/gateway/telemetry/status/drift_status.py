"""Drift in the status document: the columns with the most drift.

Pure but for `DriftReader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from iskander.foundation.logs import observation as log
from iskander.gateway.observation.drift_report import ColumnDrift, DriftReport, ModelDrift, describe

DRIFT_MAX: Final = 50
"""Listed columns of all models and processes."""
CONSUMER: Final = "drift"
"""Name of the report among those of the observer process."""


class DriftStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A column of a model version.

    Attributes:
        side: `input` or `output`.
        state: `drifting`, `steady`, or `unjudged` (no reference, or too few values).
        exceeded: Measures above their limits.
        severity: Greatest measure in units of its limit.
        recent: Mean of recent numbers, or their most frequent label with its share.
        reference: The same values of the reference.
        origin: Source of the reference, or `recording`; empty for none.
    """

    process: int
    name: str
    version: str
    side: str
    column: str
    state: str
    exceeded: str = ""
    severity: float = 0.0
    psi: float | None = None
    ks: float | None = None
    missing: float | None = None
    out_of_range: float | None = None
    new_labels: float | None = None
    recent: str = ""
    reference: str = ""
    recent_rows: int = 0
    reference_rows: int = 0
    origin: str = ""


class DriftReader:
    """Reads the last report of the observer process; `source` returns the reports of consumers."""

    def __init__(self, source: Callable[[], Mapping[str, Any]]) -> None:
        self._source = source
        self._raw: object = None
        self._report = DriftReport()

    def read(self) -> DriftReport:
        """Return the last report; an empty one before the first, and for an invalid one."""
        raw = self._source().get(CONSUMER)
        if raw is not self._raw:
            self._raw = raw
            try:
                self._report = DriftReport() if raw is None else msgspec.convert(raw, DriftReport)
            except msgspec.ValidationError as error:
                log.observer_message_invalid(reason=str(error))
                self._report = DriftReport()
        return self._report


def list_columns(report: DriftReport, process: int) -> list[DriftStatus]:
    """Return the columns of a report, the one with the most drift first."""
    found = [_status(model, column, process) for model in report.models for column in model.columns]
    return worst_first(found)


def worst_first(columns: Iterable[DriftStatus]) -> list[DriftStatus]:
    """Sort columns by their drift."""
    return sorted(columns, key=lambda column: -column.severity)


def _status(model: ModelDrift, column: ColumnDrift, process: int) -> DriftStatus:
    return DriftStatus(
        process=process,
        name=model.model,
        version=model.version,
        side=column.side,
        column=column.column,
        state=column.state,
        exceeded=", ".join(column.exceeded),
        severity=column.severity,
        **column.measures,
        recent=describe(column.recent),
        reference=describe(column.reference),
        recent_rows=model.rows,
        reference_rows=model.reference_rows,
        origin=model.reference,
    )
