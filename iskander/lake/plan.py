"""Plan of a scoring job: units, fingerprint, and their JSON form.

Pure. Runs in: the operator's tool.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from iskander import __version__
from iskander.lake.errors import JobConflict

FORMAT: Final = 3
"""Version of the plan's JSON form."""
PROGRAM: Final = f"iskander {__version__}, pyarrow {pa.__version__}"
"""Versions that determine the bytes of the output."""
ROWS_MAX: Final = "rows_max"
"""Key of a locator whose value is the number of rows to read of the unit, after the filter."""


@dataclass(frozen=True)
class Unit:
    """A part of the input that is read, scored and written as a whole.

    Attributes:
        index: Position in the plan, from 0.
        name: `part-INDEX-HASH`, derived from the index and the locator.
        locator: JSON values by which the source finds and checks the data of the unit.
        rows: Rows before the filter; None if they are unknown before reading.
        bytes: Approximate bytes of the unit in the input.
    """

    index: int
    name: str
    locator: dict[str, Any]
    rows: int | None
    bytes: int

    @property
    def rows_max(self) -> int | None:
        """Number of rows to read of this unit, after the filter; None for all rows."""
        return self.locator.get(ROWS_MAX)


@dataclass(frozen=True)
class JobPlan:
    """Units of a job, and the identity of everything that its results depend on.

    Attributes:
        units: Units in the order of the output.
        fingerprint: Result of `fingerprint`, 64 hexadecimal digits.
        model: Name of the model.
        version: Version of the model, pinned for the whole job.
        digest: Result of `model_digest`.
        snapshot: State of the input when it was planned.
        schema: Schema of the input.
        values: Options of the job and runtime of the model; the fingerprint includes them.
        program: Program that made the plan.
    """

    units: tuple[Unit, ...]
    fingerprint: str
    model: str
    version: str
    digest: str
    snapshot: dict[str, str]
    schema: pa.Schema
    values: dict[str, Any] = field(default_factory=dict)
    program: str = PROGRAM

    @property
    def rows(self) -> int | None:
        """Rows of all units before the filter; None if the rows of a unit are unknown."""
        return total_rows(self.units)

    @property
    def bytes(self) -> int:
        """Approximate bytes of the input."""
        return sum(unit.bytes for unit in self.units)


def make_unit(index: int, locator: dict[str, Any], *, rows: int | None, bytes: int) -> Unit:
    """Make a unit, whose name is derived from its index and locator."""
    digest = hashlib.sha256(canonical(locator)).hexdigest()
    return Unit(index, f"part-{index:05d}-{digest[:8]}", locator, rows, bytes)


def total_rows(units: Iterable[Unit]) -> int | None:
    """Return the sum of the rows of units; None if the rows of a unit are unknown."""
    total = 0
    for unit in units:
        if unit.rows is None:
            return None
        total += unit.rows
    return total


def limit_units(
    units: Sequence[Unit], limit: int | None, count: Callable[[Unit], int]
) -> list[Unit]:
    """Select the units with the first `limit` rows, and cut the last selected unit.

    Args:
        units: Units in order.
        limit: Rows to keep after the filter; None keeps all units.
        count: Counts the rows of a unit after the filter. It is called once for every selected
            unit, except the last one of `units`.
    """
    if limit is None:
        return list(units)
    kept: list[Unit] = []
    left = limit
    for unit in units:
        is_last = unit.index == units[-1].index
        rows = left if is_last else count(unit)
        if rows < left and not is_last:
            kept.append(unit)
            left -= rows
            continue
        cut = None if unit.rows is None else min(unit.rows, left)
        locator = {**unit.locator, ROWS_MAX: left}
        kept.append(make_unit(unit.index, locator, rows=cut, bytes=unit.bytes))
        break
    return kept


def fingerprint(
    *,
    model: str,
    version: str,
    digest: str,
    contract: Mapping[str, Any],
    output_columns: Sequence[str],
    options: Mapping[str, Any],
    snapshot: Mapping[str, str],
) -> str:
    """Return the fingerprint of a job: jobs with equal fingerprints have equal results.

    Args:
        model: Name of the model.
        version: Version of the model.
        digest: Result of `model_digest`.
        contract: The model's inputs and outputs as JSON values.
        output_columns: Names of the output's columns, in order.
        options: `Job.fingerprint_options()`, and `execution`.
        snapshot: `JobSource.snapshot`.

    Returns:
        64 hexadecimal digits.
    """
    parts = {
        "format": FORMAT,
        "program": PROGRAM,
        "model": model,
        "version": version,
        "digest": digest,
        "contract": dict(contract),
        "output_columns": list(output_columns),
        "options": dict(options),
        "snapshot": dict(snapshot),
    }
    return hashlib.sha256(canonical(parts)).hexdigest()


def model_digest(identity: Mapping[str, Any]) -> str:
    """Hash the identity of a model version: its contract, with the hash of its files."""
    return hashlib.sha256(canonical(identity)).hexdigest()


def canonical(values: Mapping[str, Any]) -> bytes:
    """Encode as JSON with sorted keys, without spaces, in ASCII."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def encode_plan(plan: JobPlan) -> bytes:
    """Convert a plan to JSON."""
    values = {
        "format": FORMAT,
        "program": plan.program,
        "fingerprint": plan.fingerprint,
        "model": plan.model,
        "version": plan.version,
        "digest": plan.digest,
        "snapshot": plan.snapshot,
        "values": plan.values,
        "schema": base64.b64encode(plan.schema.serialize()).decode(),
        "units": [[unit.index, unit.locator, unit.rows, unit.bytes] for unit in plan.units],
    }
    return canonical(values) + b"\n"


def decode_plan(text: bytes) -> JobPlan:
    """Convert a plan back from JSON.

    Raises:
        JobConflict: The text is not a plan of this version of the program.
    """
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise JobConflict(
                f"plan has format {values['format']!r}; this program reads format {FORMAT}; "
                "start again with --restart"
            )
        if not isinstance(values["values"], dict):
            raise TypeError("values are no object")
        return JobPlan(
            units=tuple(map(_unit_of, range(len(values["units"])), values["units"])),
            fingerprint=values["fingerprint"],
            model=values["model"],
            version=values["version"],
            digest=values["digest"],
            snapshot=values["snapshot"],
            values=values["values"],
            program=values["program"],
            schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(values["schema"]))),
        )
    except (ValueError, KeyError, TypeError, RecursionError, OSError, pa.ArrowException) as error:
        raise JobConflict(
            f"plan is not readable ({type(error).__name__}); start again with --restart"
        ) from error


def _unit_of(position: int, values: Any) -> Unit:  # noqa: ANN401
    index, locator, rows, count = values
    is_valid = index == position and isinstance(locator, dict) and type(count) is int
    if not is_valid or not (rows is None or type(rows) is int):
        raise ValueError(f"unit {position} is damaged")
    return make_unit(position, locator, rows=rows, bytes=count)
