"""Buckets of a model whose rows are lists: for each, the contract with its tensors that long.

A row belongs to the smallest bucket that holds it, so that one long row does not cost the others
their padding. Requests of one bucket only are put together; `Execute` names it by its number.

Pure; known to the gateway and to workers.
"""

from __future__ import annotations

import msgspec

from iskander.contract.manifest import InputColumn
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ManifestError


def require_one_set(entries: tuple[InputColumn, ...]) -> None:
    """Refuse inputs with different buckets: a row is in one bucket with all its lists.

    Raises:
        ManifestError: Names two that differ.
    """
    bucketed = [entry for entry in entries if entry.buckets]
    for entry in bucketed[1:]:
        if entry.buckets != bucketed[0].buckets:
            raise ManifestError(
                f"inputs `{bucketed[0].tensor}` and `{entry.tensor}` have different buckets, and a "
                "row is in one with all its lists"
            )


def buckets_of(contract: Contract) -> tuple[int, ...]:
    """Elements of a row in each bucket, ascending; empty where there are none."""
    return next((entry.buckets for entry in contract.sources if entry.buckets), ())


def variants(contract: Contract) -> tuple[Contract, ...]:
    """The contract of each bucket; itself where there are none."""
    buckets = buckets_of(contract)
    if not buckets:
        return (contract,)
    long = bucketed_tensors(contract)
    return tuple(
        msgspec.structs.replace(
            contract,
            inputs=tuple(
                _of_length(spec, length) if spec.tensor in long else spec
                for spec in contract.inputs
            ),
        )
        for length in buckets
    )


def bucketed_tensors(contract: Contract) -> set[str]:
    """The tensors whose second axis is as long as the bucket."""
    bucketed = [entry for entry in contract.sources if entry.buckets]
    return {name for entry in bucketed for name in (entry.tensor, entry.mask) if name}


def _of_length(spec: TensorSpec, length: int) -> TensorSpec:
    shape = (length, *spec.shape[1:])
    column_type = msgspec.structs.replace(spec.type, shape=(length, *spec.type.shape[1:]))
    return msgspec.structs.replace(spec, type=column_type, shape=shape)
