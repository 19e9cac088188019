"""Vocabulary lookup: replaces text inputs by numbers from a file, before the model runs.

Requests carry the text; the graph receives its line number, counted from 0, or a one-hot row of it.

Runs on: worker main.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from iskander.contract.dtypes import BY_ONNX
from iskander.contract.graph import Graph
from iskander.contract.labels import Labels
from iskander.contract.manifest import InputColumn
from iskander.contract.tensors import Contract
from iskander.errors import ContractError, ManifestError
from iskander_worker.backends import Arrays, Run
from iskander_worker.batches.arrays import Compute

UNKNOWN = -1


class Vocabularies:
    """The lookups of a model; `files` has the lines of each file that the manifest names."""

    def __init__(self, contract: Contract, graph: Graph, files: Labels) -> None:
        tensors = {tensor.name: tensor for tensor in graph.inputs}
        self._lookups = []
        for entry in contract.sources:
            if entry.vocabulary:
                tensor = tensors[entry.tensor]
                dtype = np.dtype(BY_ONNX[tensor.element].numpy)
                lines = files[entry.vocabulary]
                self._lookups.append(_Lookup(entry, lines, dtype, tensor.shape[-1]))

    def __len__(self) -> int:
        return len(self._lookups)

    def around(self, compute: Compute) -> Compute:
        """Return a `compute` that accepts text, from one that expects numbers."""

        def with_lookups(arrays: Arrays, names: Sequence[str], run: Run) -> Arrays:
            numbers = {
                lookup.tensor: lookup.look_up(arrays[lookup.tensor]) for lookup in self._lookups
            }
            return compute({**arrays, **numbers}, names, run)

        return with_lookups


class _Lookup:
    """Lookup of one input; raises a `ManifestError` if its vocabulary does not match the graph."""

    def __init__(
        self, entry: InputColumn, lines: tuple[str, ...], dtype: np.dtype, axis: int | str | None
    ) -> None:
        prefix = f"input `{entry.tensor}`: the vocabulary `{entry.vocabulary}`"
        self.tensor = entry.tensor
        self._entry, self._dtype = entry, dtype
        self._numbers = {line: number for number, line in enumerate(lines)}
        if len(self._numbers) < len(lines):
            raise ManifestError(f"{prefix} has a line twice")
        self._unknown = entry.unknown if isinstance(entry.unknown, int) else UNKNOWN
        count = max(len(lines), self._unknown + 1)
        self._depth = axis if entry.one_hot and isinstance(axis, int) else count
        if self._depth < count:
            raise ManifestError(
                f"{prefix} has {count} numbers, and the graph accepts {self._depth}"
            )
        if self._unknown == UNKNOWN:
            self._require_known(entry)

    def look_up(self, text: np.ndarray) -> np.ndarray:
        """Return the numbers of texts, in the same shape, or as one-hot rows with one more axis."""
        flat = text.reshape(-1)
        find, unknown = self._numbers.get, self._unknown
        found = np.array([find(value, unknown) for value in flat], np.int64)
        if unknown == UNKNOWN and (found == UNKNOWN).any():
            at = int(np.flatnonzero(found == UNKNOWN)[0])
            raise ContractError(
                f"column `{self._entry.column or self.tensor}` has `{flat[at][:100]}`, which is "
                f"not in the vocabulary `{self._entry.vocabulary}` "
                f"({int((found == UNKNOWN).sum())} of {len(flat)} values)"
            )
        if not self._entry.one_hot:
            return found.astype(self._dtype).reshape(text.shape)
        rows = np.zeros((len(flat), self._depth), self._dtype)
        rows[np.arange(len(flat)), found] = 1
        return rows.reshape(*text.shape, self._depth)

    def _require_known(self, entry: InputColumn) -> None:
        """Reject a vocabulary without the texts that the gateway itself inserts."""
        for key, value, is_inserted in (
            ("padding", entry.padding, entry.max_length is not None),
            ("fill", entry.fill, entry.nulls in ("fill", "mask")),
        ):
            if is_inserted and (text := str(value or "")) not in self._numbers:
                raise ManifestError(
                    f"input `{entry.tensor}` has the {key} `{text}`, which is not in the "
                    f"vocabulary `{entry.vocabulary}`, and has no `unknown`"
                )
