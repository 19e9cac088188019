"""Findings about a model from running it at its load, cached with its sandboxed load.

Runs on: worker main, the process of a sandboxed load, and the operator's tool.
"""

from __future__ import annotations

import msgspec

from iskander.contract.processing.row_relation import EVIDENCE_CHARACTERS_MAX, Verdict
from iskander.errors import shorten
from iskander.foundation.decoders import thread_safe


@thread_safe
class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a load found out about one model version by running it.

    Attributes:
        unbound: Indices of the contract's outputs that the runtime does not write to bound memory;
            they are copied from the runtime's own memory after each run. They are no names, because
            the report of a load has a size limit and names have none.
        verdict: Whether rows of a batch affect each other's results (`contract.row_relation`).
        evidence: What was run and found, for people.
        has_other_rows: The results of a batch had another number of rows than the batch.
    """

    unbound: tuple[int, ...] = ()
    verdict: Verdict = "undecided"
    evidence: str = "not measured"
    has_other_rows: bool = False


def undecided(evidence: str, unbound: tuple[int, ...] = ()) -> Measurement:
    """Return the findings about a model whose rows could not be measured, with the reason."""
    return Measurement(unbound, "undecided", shorten(evidence, EVIDENCE_CHARACTERS_MAX))
