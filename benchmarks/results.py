"""Results as JSON Lines: one line for the run, then one for each measurement.

{"kind": "run", "machine": ..., "versions": ..., "effort": ...}
{"kind": "measurement", "case": ..., "system": ..., "round": 1, "p50_us": ..., ...}
{"kind": "probe", "name": ..., ...}        without load: startup, idle streams
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import Goal

Measurement = dict[str, Any]


@dataclass
class Results:
    """Contents of one or more results files.

    Attributes:
        run: Machine, versions and effort.
        measurements: In the order of measurement.
        probes: In the order of measurement.
    """

    run: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cases(self) -> list[str]:
        """Case names in the order of the first measurements."""
        return list(dict.fromkeys(each["case"] for each in self.measurements))

    def systems(self, case: str) -> list[str]:
        """Systems of a case, in the order of the first round."""
        return list(
            dict.fromkeys(each["system"] for each in self.measurements if each["case"] == case)
        )

    def select(self, case: str, system: str) -> list[Measurement]:
        """Measurements by round."""
        return [
            each for each in self.measurements if each["case"] == case and each["system"] == system
        ]

    @property
    def rounds(self) -> str:
        """Number of rounds of a system; a range if systems differ."""
        counts = {
            len(self.select(case, system)) for case in self.cases for system in self.systems(case)
        }
        return " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "no"

    def median(self, case: str, system: str, metric: str) -> float | None:
        """Median over the rounds; None if a round has no such figure."""
        values = [each[metric] for each in self.select(case, system)]
        return None if not values or None in values else float(median(values))

    def ratios(self, goal: Goal) -> list[float | None]:
        """A goal's figure in each round in which both systems were measured."""
        ours = {each["round"]: each[goal.metric] for each in self.select(goal.case, goal.system)}
        if not goal.baseline:
            return list(ours.values())
        theirs = {
            each["round"]: each[goal.metric] for each in self.select(goal.case, goal.baseline)
        }
        return [
            ours[number] / theirs[number] if ours[number] and theirs[number] else None
            for number in ours
            if number in theirs
        ]


@dataclass(frozen=True)
class Verdict:
    """A goal and its result; `value` is None without a measurement."""

    goal: Goal
    rounds: list[float | None]
    value: float | None

    @property
    def word(self) -> str:
        """Met, missed, or not measured."""
        if self.value is None:
            return "not measured"
        bound = self.goal.bound
        is_met = self.value >= bound if self.goal.sense == "least" else self.value <= bound
        return "met" if is_met else "missed"


def check_goals(results: Results, goals: Iterable[Goal]) -> list[Verdict]:
    """Judge every goal whose case is in the results."""
    verdicts = []
    for goal in goals:
        if goal.case in results.cases:
            rounds = results.ratios(goal)
            known = [value for value in rounds if value is not None]
            value = median(known) if known and len(known) == len(rounds) else None
            verdicts.append(Verdict(goal, rounds, value))
    return verdicts


def write(path: Path, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Write each record to a new file as it arrives, and pass it on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            file.flush()
            yield record


def read(paths: Iterable[Path]) -> Results:
    """Read the results of one run, or of several on the same machine with the same versions.

    Measurements of the same case in several files are further rounds.

    Raises:
        ValueError: A file is no results file, or machines or versions differ.
    """
    results = Results()
    for path in paths:
        before = max((each["round"] for each in results.measurements), default=0)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                kind = record["kind"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path}: line {number} is not a record") from None
            if kind == "run":
                _join(results, record, path)
            elif kind == "measurement":
                results.measurements.append(record | {"round": before + record["round"]})
            else:
                results.probes.append(record)
    if not results.run:
        raise ValueError("the files contain no run")
    return results


def _join(results: Results, run: dict[str, Any], path: Path) -> None:
    if not results.run:
        results.run = run
        return
    for key in ("machine", "versions"):
        ours, theirs = dict(results.run[key]), dict(run[key])
        commits = [each.pop("commit", None) for each in (ours, theirs)]
        if ours != theirs:
            raise ValueError(f"{path}: {key} differ from the preceding files; measure them again")
        if key == "versions" and commits[1] not in str(commits[0]).split(", "):
            results.run[key]["commit"] = f"{commits[0]}, {commits[1]}"
