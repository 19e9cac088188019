"""`[[outputs]]` of a manifest as written: columns, what each is made of, and what is done with it.

Read together with the rest of the manifest (`manifest`); what it means for a graph is decided by
`finishing`.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, Literal

import msgspec

COUNT_MAX = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
ColumnOrder = Literal["passthrough_first", "outputs_first"] | tuple[str, ...]


class Quantization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers as int8: `round(x / scale) + zero_point`, what is beyond them at their ends."""

    scale: float
    zero_point: Annotated[int, msgspec.Meta(ge=-128, le=127)] = 0

    def __post_init__(self) -> None:
        """Refuse a scale that says nothing."""
        if not (isfinite(self.scale) and self.scale > 0):
            raise ValueError("scale has to be above 0 and finite")


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A step with a parameter; exactly one of its keys is there.

    Attributes:
        top_k: The largest of the last axis, as so many labels and scores.
        select: This one of the last axis.
        threshold: Whether a number is this or above.
        quantize: To int8.
        cast: To this type of numbers.
    """

    top_k: Count | None = None
    select: Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)] | None = None
    threshold: float | None = None
    quantize: Quantization | None = None
    cast: str | None = None

    def __post_init__(self) -> None:
        """Refuse none and several."""
        if len(msgspec.structs.asdict(self)) - list(self._values()).count(None) != 1:
            raise ValueError("a step has exactly one key, such as {top_k = 5}")
        if self.threshold is not None and not isfinite(self.threshold):
            raise ValueError("threshold has to be finite")

    def _values(self) -> tuple[Any, ...]:
        return msgspec.structs.astuple(self)

    def __str__(self) -> str:
        if self.quantize is not None:
            return f"quantize {self.quantize.scale:g} {self.quantize.zero_point}"
        ((key, value),) = (
            (key, value) for key, value in msgspec.structs.asdict(self).items() if value is not None
        )
        return f"{key} {value}"


Post = Literal["softmax", "sigmoid", "argmax", "l2"] | Step


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What values are made of, and how.

    Attributes:
        tensor: Output of the graph.
        post: What is done with it, one after the other.
        labels: File beside the model whose lines take the place of the numbers at the end.
        keys: Of a sequence of maps: whose values to take, in this order.
        sequence: Of a sequence of tensors: whether each of them is a row, or a column.
        shape: Of a row of a sequence of tensors, which a graph does not tell; with `list_max`, of
            an entry of it.
        list_max: The most entries of a list with a length of its own.
        lengths: Output of the graph that says how many entries of each row are meant.
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
        """Whether each row has a length of its own."""
        return self.list_max is not None or bool(self.lengths)


class Rank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A row's place among the rows of its group in a request, the first being 1.

    Attributes:
        of: Column of results that it is ranked by.
        within: Column of the request that says which rows are a group; empty for all of them.
        order: Which is first.
    """

    of: str
    within: str = ""
    order: Literal["descending", "ascending"] = "descending"


class OutputColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`[[outputs]]` of a manifest: a column of results.

    It has a `tensor` with the keys of `Source`, or `fields` with one for each field of a struct, or
    `rank`.

    Attributes:
        column: Its name.
        type: Its Arrow type, when all steps are done.
        tensor: Output of the graph that it is made of.
        post: Steps, one after the other.
        labels: File beside the model with a line for each class.
        keys: Of a sequence of maps: whose values to take, in this order.
        sequence: What each tensor of a sequence of tensors is one of.
        shape: Of a row of a sequence of tensors, where steps make something else of it than `type`.
        list_max: Entries that a list of a length of its own may have.
        lengths: Output of the graph that says how long each row's list is.
        fields: For each field of a struct a table with the keys from `tensor` on.
        rank: A row's place in its group: `of`, `within` and `order`.
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
    fields: dict[str, Source] = {}
    rank: Rank | None = None

    @property
    def source(self) -> Source:
        """What the whole column is made of, where that is one tensor."""
        return Source(
            self.tensor,
            self.post,
            self.labels,
            self.keys,
            self.sequence,
            self.shape,
            self.list_max,
            self.lengths,
        )

    @property
    def sources(self) -> list[Source]:
        """Every tensor of the graph that it is made of, and how."""
        return list(self.fields.values()) or ([self.source] if self.tensor else [])
