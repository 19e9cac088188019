"""Buckets of a model with list inputs: one contract for each padded list length.

A row belongs to the smallest bucket that holds it, so that one long row adds no padding to the
others. A batch contains requests of one bucket only; the message `Execute` carries the number of
the bucket.

Pure. Runs on: gateway and workers.
"""

from __future__ import annotations

import msgspec

from iskander.contract.manifest import InputColumn
from iskander.contract.tensors import Contract, TensorSpec
from iskander.contract.validation import require


def require_same_buckets(entries: tuple[InputColumn, ...]) -> None:
    """Reject inputs with different buckets: all lists of a row are in the same bucket."""
    bucketed = [entry for entry in entries if entry.buckets]
    for entry in bucketed[1:]:
        first, is_same = bucketed[0].tensor, entry.buckets == bucketed[0].buckets
        problem = "have different buckets; all lists of a row must share one bucket"
        require(is_same, f"inputs `{first}` and `{entry.tensor}` {problem}")


def buckets_of(contract: Contract) -> tuple[int, ...]:
    """Return the list length of each bucket, ascending; empty for a contract without buckets."""
    return next((entry.buckets for entry in contract.sources if entry.buckets), ())


def contracts_of_buckets(contract: Contract) -> tuple[Contract, ...]:
    """Return the contract of each bucket; only the contract itself if it has no buckets."""
    buckets = buckets_of(contract)
    if not buckets:
        return (contract,)
    padded, contracts = bucketed_tensors(contract), []
    for length in buckets:
        specs = (_with_length(s, length) if s.tensor in padded else s for s in contract.inputs)
        contracts.append(msgspec.structs.replace(contract, inputs=tuple(specs)))
    return tuple(contracts)


def bucketed_tensors(contract: Contract) -> set[str]:
    """Return the tensors whose second axis has the length of the bucket."""
    bucketed = [entry for entry in contract.sources if entry.buckets]
    return {name for entry in bucketed for name in (entry.tensor, entry.mask) if name}


def _with_length(spec: TensorSpec, length: int) -> TensorSpec:
    column_type = msgspec.structs.replace(spec.type, shape=(length, *spec.type.shape[1:]))
    return msgspec.structs.replace(spec, type=column_type, shape=(length, *spec.shape[1:]))
