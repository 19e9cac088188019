"""`[[outputs]]` of a manifest: result columns, their tensors and post-processing steps.

`postprocess` compiles them for a graph.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, Literal

import msgspec

COUNT_MAX = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
ColumnOrder = Literal["passthrough_first", "outputs_first"] | tuple[str, ...]


class Quantization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quantization to int8: `round(x / scale) + zero_point`, saturated."""

    scale: float
    zero_point: Annotated[int, msgspec.Meta(ge=-128, le=127)] = 0

    def __post_init__(self) -> None:
        """Reject a scale that is not positive and finite."""
        if not (isfinite(self.scale) and self.scale > 0):
            raise ValueError("scale has to be above 0 and finite")


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A post-processing step with a parameter; exactly one key is set.

    Attributes:
        top_k: Number of the largest values of the last axis to return, with labels and scores.
        select: Index in the last axis to return.
        threshold: Compare each number with this one: true if it is equal or larger.
        quantize: Quantize to int8.
        cast: Numeric type to cast to.
    """

    top_k: Count | None = None
    select: Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)] | None = None
    threshold: float | None = None
    quantize: Quantization | None = None
    cast: str | None = None

    def __post_init__(self) -> None:
        """Require exactly one key."""
        if len(self._keys()) != 1:
            raise ValueError("a step has exactly one key, such as {top_k = 5}")
        if self.threshold is not None and not isfinite(self.threshold):
            raise ValueError("threshold has to be finite")

    def _keys(self) -> list[tuple[str, Any]]:
        keys = msgspec.structs.asdict(self).items()
        return [(key, value) for key, value in keys if value is not None]

    def __str__(self) -> str:
        if self.quantize is not None:
            return f"quantize {self.quantize.scale:g} {self.quantize.zero_point}"
        ((key, value),) = self._keys()
        return f"{key} {value}"


Post = Literal["softmax", "sigmoid", "argmax", "l2"] | Step


class OutputSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor of the graph and its post-processing; `OutputColumn` explains the keys.

    With `list_max`, `shape` is the shape of a list entry.
    """

    tensor: str
    post: tuple[Post, ...] = ()
    labels: str = ""
    keys: tuple[int | str, ...] = ()
    sequence: Literal["", "rows", "columns"] = ""
    shape: tuple[Count, ...] | None = None
    list_max: Count | None = None
    lengths: str = ""

    @property
    def is_ragged(self) -> bool:
        """Whether rows are lists of variable length."""
        return self.list_max is not None or bool(self.lengths)


class Rank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rank of a row in its group within a request, starting at 1.

    Attributes:
        of: Result column to rank by.
        within: Request column whose equal values form a group; empty: all rows are one group.
        order: Sort order.
    """

    of: str
    within: str = ""
    order: Literal["descending", "ascending"] = "descending"


class OutputColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`[[outputs]]` of a manifest: a result column.

    It has one of: `tensor` with the keys of `OutputSource`; `fields` with an `OutputSource` for
    each field of a struct; `rank`.

    Attributes:
        column: Name of the column.
        type: Arrow type after all steps.
        tensor: Output of the graph.
        post: Post-processing steps, in order.
        labels: File beside the model with one label a line; the labels replace the numbers after
            the last step.
        keys: For a sequence of maps: keys of the values to return, in order.
        sequence: For a sequence of tensors: whether each tensor is a row or a column.
        shape: For a sequence of tensors: shape of a row, if steps change it to that of `type`.
        list_max: Maximum entries of a list of variable length.
        lengths: Output of the graph with the length of each row's list.
        fields: Table for each field of a struct, with the keys `tensor` to `lengths`.
        rank: Rank of a row in its group: `of`, `within` and `order`.
    """

    column: str
    type: str
    tensor: str = ""
    post: tuple[Post, ...] = ()
    labels: str = ""
    keys: tuple[int | str, ...] = ()
    sequence: Literal["", "rows", "columns"] = ""
    shape: tuple[Count, ...] | None = None
    list_max: Count | None = None
    lengths: str = ""
    fields: dict[str, OutputSource] = {}
    rank: Rank | None = None

    @property
    def source(self) -> OutputSource:
        """The tensor and post-processing steps of the whole column."""
        return OutputSource(*(getattr(self, key) for key in OutputSource.__struct_fields__))

    @property
    def sources(self) -> list[OutputSource]:
        """Every tensor of the column, with its post-processing steps."""
        return list(self.fields.values()) or ([self.source] if self.tensor else [])
