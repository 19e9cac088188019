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
"""Key of a locator: rows to read of the unit, after the filter."""


@dataclass(frozen=True)
class Unit:
    """A part of the input that is read, scored and written as a whole.

    Attributes:
        index: Position in the plan, from 0.
        name: `part-INDEX-HASH`, derived from the index and the locator.
        locator: JSON values with which the source finds and checks the data.
        rows: Rows before the filter; None if only reading tells.
        bytes: Approximate bytes in the input.
    """

    index: int
    name: str
    locator: dict[str, Any]
    rows: int | None
    bytes: int

    @property
    def rows_max(self) -> int | None:
        """Rows to read of this unit, after the filter; None for all."""
        return self.locator.get(ROWS_MAX)


@dataclass(frozen=True)
class Plan:
    """Units of a job, and the identity of all that its results depend on.

    Attributes:
        units: Units in the order of the output.
        fingerprint: Result of `fingerprint`, 64 hexadecimal digits.
        model: Name of the model.
        version: Version of the model, pinned for the whole job.
        digest: Result of `model_digest`.
        snapshot: State of the input when it was planned.
        schema: Schema of the input.
        values: Options and execution of the job, which are in the fingerprint.
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
        """Rows of all units before the filter; None if one unit does not know."""
        return total_rows(self.units)

    @property
    def bytes(self) -> int:
        """Approximate bytes of the input."""
        return sum(unit.bytes for unit in self.units)


def unit(index: int, locator: dict[str, Any], *, rows: int | None, bytes: int) -> Unit:
    """Make a unit with the name that belongs to its index and locator."""
    digest = hashlib.sha256(canonical(locator)).hexdigest()
    return Unit(index, f"part-{index:05d}-{digest[:8]}", locator, rows, bytes)


def total_rows(units: Iterable[Unit]) -> int | None:
    """Sum of the rows of units; None if one of them is unknown."""
    total = 0
    for each in units:
        if each.rows is None:
            return None
        total += each.rows
    return total


def limited(units: Sequence[Unit], limit: int | None, count: Callable[[Unit], int]) -> list[Unit]:
    """Select the units that hold the first `limit` rows, and cut the last one of them.

    Args:
        units: Units in order.
        limit: Rows to keep after the filter; None keeps all units.
        count: Rows of a unit after the filter. It is called once for each unit that is kept, except
            the last unit of all.
    """
    if limit is None:
        return list(units)
    kept: list[Unit] = []
    left = limit
    for each in units:
        is_last = each.index == units[-1].index
        rows = left if is_last else count(each)
        if rows < left and not is_last:
            kept.append(each)
            left -= rows
            continue
        cut = None if each.rows is None else min(each.rows, left)
        kept.append(unit(each.index, {**each.locator, ROWS_MAX: left}, rows=cut, bytes=each.bytes))
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
    """Identify the results of a job: equal fingerprints give equal results.

    Args:
        model: Name of the model.
        version: Version of the model.
        digest: Result of `model_digest`.
        contract: The model's inputs and outputs as JSON values.
        output_columns: Names of the output's columns, in order.
        options: `Job.fingerprinted()`, and `execution`.
        snapshot: `Source.snapshot`.

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
    """Hash what identifies a model version: its contract, with the hash of its files."""
    return hashlib.sha256(canonical(identity)).hexdigest()


def canonical(values: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys, no spaces and ASCII letters only."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def encode_plan(plan: Plan) -> bytes:
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
        "units": [[each.index, each.locator, each.rows, each.bytes] for each in plan.units],
    }
    return canonical(values) + b"\n"


def decode_plan(text: bytes) -> Plan:
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
        return Plan(
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
    return unit(position, locator, rows=rows, bytes=count)
