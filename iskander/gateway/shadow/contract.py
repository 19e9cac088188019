"""Comparability of two versions: equal inputs, and outputs of one name and type.

Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from iskander.contract.tensors import Contract, TensorSpec
from iskander.contract.validation import quoted

WORK_MAX = 65_536
"""Work of the comparison of one row, see `work_of`; some milliseconds of the event loop."""
_STRING_WORK, _LABEL_WORK = 16, 4


class OutputMatch(NamedTuple):
    """An output of both versions, with its index in each contract's outputs."""

    name: str
    spec: TensorSpec
    served: int
    candidate: int

    @property
    def is_float(self) -> bool:
        """Whether its values are numbers to subtract; others are compared for equality."""
        return self.spec.type.dtype_name in ("float16", "float32", "float64", "bfloat16")

    @property
    def is_label(self) -> bool:
        """Whether each row has one value that is no float."""
        return not self.is_float and self.spec.elements == 1

    @property
    def kind(self) -> str:
        """Kind of the comparison."""
        return "float" if self.is_float else "label" if self.is_label else "list"

    @property
    def work(self) -> int:
        """Time to compare a row, in that of a float."""
        each = _STRING_WORK if self.spec.is_string else 1 if self.is_float else _LABEL_WORK
        return each * self.spec.elements


def match_outputs(served: Contract, candidate: Contract) -> tuple[OutputMatch, ...] | str:
    """Return the outputs to compare, or why the versions cannot be compared."""
    problem = _inputs_problem(served, candidate)
    if problem:
        return problem
    others = {spec.column: index for index, spec in enumerate(candidate.outputs)}
    missing = [spec.column for spec in served.outputs if spec.column not in others]
    if missing:
        return f"the candidate lacks the outputs {quoted(missing)}"
    matches = []
    for index, spec in enumerate(served.outputs):
        name = spec.column
        other = candidate.outputs[others[name]]
        if (spec.type.dtype_name, spec.shape) != (other.type.dtype_name, other.shape):
            return f"output `{name}` is {_type(spec)}, and {_type(other)} of the candidate"
        matches.append(OutputMatch(name, spec, index, others[name]))
    work = sum(match.work for match in matches)
    if work > WORK_MAX:
        return f"a row has {work:,} values to compare, limit {WORK_MAX:,}"
    return tuple(matches)


def _inputs_problem(served: Contract, candidate: Contract) -> str:
    ours, theirs = (
        [(spec.column, spec.type.dtype_name, spec.shape) for spec in contract.inputs]
        for contract in (served, candidate)
    )
    if ours != theirs:
        return f"the inputs differ: {_names(served)}, and {_names(candidate)} of the candidate"
    if served.sources != candidate.sources:
        return "the inputs are converted from columns in different ways (manifest: [[inputs]])"
    return ""


def _names(contract: Contract) -> str:
    return ", ".join(f"{spec.column} {_type(spec)}" for spec in contract.inputs)


def _type(spec: TensorSpec) -> str:
    name = spec.type.dtype_name
    return f"{name} of shape {list(spec.shape)}" if spec.shape else name
