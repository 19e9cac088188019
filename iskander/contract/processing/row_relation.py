"""Relation between the rows of a model: whether one row's result depends on the other rows.

A worker measures it when it loads a model version, and the manifest's `combine` overrides the
measurement. Everything that joins, cuts or pads rows obeys it.

Pure. Runs on: gateway and workers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["independent", "approximate", "undecided", "dependent"]
"""Verdicts in the order of what they permit; the first permits the most."""

_ORDER: tuple[Verdict, ...] = ("independent", "approximate", "undecided", "dependent")
EVIDENCE_CHARACTERS_MAX = 400


class RowRelation(msgspec.Struct, frozen=True, array_like=True):
    """Whether the rows of a batch affect each other's results.

    Attributes:
        verdict: `independent`: the result of a row is the same in every batch, within the tolerance
            of `contract.tolerance`. `approximate`: the result differs by little, as with dynamic
            quantization. `dependent`: the result depends on the other rows. `undecided`: the
            measurement could not find out.
        evidence: Text for people: which batches were run, and how their results differed.
        combine: The key `combine` of the manifest; None: the verdict decides.
    """

    verdict: Verdict = "undecided"
    evidence: str = "not measured"
    combine: bool | None = None

    @property
    def is_combinable(self) -> bool:
        """Whether rows of several requests may run as one batch."""
        return self.verdict == "independent" if self.combine is None else self.combine

    @property
    def is_whole(self) -> bool:
        """Whether each request must be one run with exactly its rows: not cut, joined or padded."""
        if self.combine is None:
            return self.verdict in ("undecided", "dependent")
        return not self.combine

    @property
    def reason(self) -> str:
        """Why requests are not combined; for a combinable model, what was measured."""
        if self.combine is not None:
            text = "true" if self.combine else "false"
            return f"the manifest has combine = {text}; measured: {self.verdict}, {self.evidence}"
        return f"its rows are {self.verdict}: {self.evidence}"

    @property
    def summary(self) -> str:
        """One line for people with the verdict and its effect."""
        if self.is_combinable:
            note = "" if self.combine is None else ", `combine = true` in the manifest"
        elif self.combine is None:
            note = ", requests are not combined"
        else:
            note = ", requests are not combined: `combine = false` in the manifest"
        has_evidence = self.verdict != "independent" and self.evidence
        return f"{self.verdict}{note}" + (f"; {self.evidence}" if has_evidence else "")

    def to_wire(self) -> dict[str, str | bool | None]:
        """Convert the relation to values for JSON: the verdict, and what the verdict permits."""
        return {
            "verdict": self.verdict,
            "evidence": self.evidence,
            "combine": self.combine,
            "is_combinable": self.is_combinable,
            "is_whole": self.is_whole,
            "reason": self.reason,
        }


INDEPENDENT = RowRelation("independent", "")


def weaker_relation(first: RowRelation, second: RowRelation) -> RowRelation:
    """Return the relation that permits less, from two measurements of one model version."""
    is_weaker = _ORDER.index(second.verdict) > _ORDER.index(first.verdict)
    return second if is_weaker else first
