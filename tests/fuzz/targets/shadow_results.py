"""Results of a candidate version in a worker's memory, with slices of the bytes as the reference.

Layout of an input: outputs (1 byte), then the candidate's body of `ROWS` rows. It is compared with
valid results twice: alone, and in a group with valid ones. Bodies that are no results are rejected
with an AssertionError, and change no statistics.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from fuzz import mutation
from iskander.contract.column_types import ColumnType
from iskander.contract.dtypes import BY_ARROW
from iskander.contract.processing.rows import RowCopier
from iskander.contract.processing.strings import string_ranges
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.gateway.shadow.comparison import (
    PAIRS_MAX,
    Body,
    Comparison,
    EqualityComparison,
    FloatComparison,
    Tolerance,
)
from iskander.gateway.shadow.contract import match_outputs

ITERATIONS = 800
ROWS = 5
TOLERANCE = Tolerance(1e-6, 1e-3)
FLOATS = ("float16", "float32", "float64", "bfloat16")
KINDS: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...] = (
    (("float32", ()), ("utf8", ())),
    (("utf8", (2,)), ("binary", ()), ("bool", ())),
    (("float64", (3,)), ("int8", ()), ("float16", ())),
    (("bool", (3,)), ("bfloat16", ()), ("int64", (2,)), ("utf8", ())),
)


def specs_of(kind: int) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(f"y{at}", f"y{at}", ColumnType(name, shape), shape,
                   string_bytes=0 if BY_ARROW[name].arrow_bits else 16)
        for at, (name, shape) in enumerate(KINDS[kind])
    )  # fmt: skip


def body_of(specs: tuple[TensorSpec, ...], first: int) -> bytes:
    """Valid results, whose values depend on `first`."""
    layout, _ = body_layout(specs, ROWS)
    texts = [
        [b"text%d" % (first + at) * (at % 3) for at in range(ROWS * spec.elements)]
        for spec in specs
        if spec.is_string
    ]
    lengths = [sum(map(len, column)) for column in texts]
    ranges, end = string_ranges(specs, ROWS, lengths, layout)
    body, column = bytearray(end), 0
    for spec, offset in zip(specs, layout, strict=True):
        count = ROWS * spec.elements
        if spec.is_string:
            begin, text = ranges[column][0], texts[column]
            body[begin : begin + lengths[column]] = b"".join(text)
            ends = np.cumsum([0, *map(len, text)]).astype(np.int32)
            column += 1
        elif spec.type.dtype.arrow_bits == 1:
            ends = np.packbits(np.arange(first, first + count) % 3 == 0, bitorder="little")
        else:
            ends = np.arange(first, first + count).astype(spec.type.dtype.numpy)
        raw = ends.tobytes()
        body[offset : offset + len(raw)] = raw
    return bytes(body)


SPECS = tuple(specs_of(kind) for kind in range(len(KINDS)))
SERVED = tuple(body_of(specs, 0) for specs in SPECS)
COPIERS = tuple(RowCopier(specs) for specs in SPECS)


def seeds() -> list[bytes]:
    return [
        bytes((kind,)) + body_of(specs, first)
        for kind, specs in enumerate(SPECS)
        for first in (0, 1, 200)
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    body = raw[1:]
    if not random.randrange(4):
        return raw[:1] + mutation.flip(body, other[1:], random)
    if not random.randrange(8):
        body = body.ljust(4, b"\0")
        special = random.choice((np.nan, np.inf, -np.inf, 3e38, 1e-45))
        values = np.frombuffer(body[: len(body) & ~3], np.float32).copy()
        values[random.randrange(len(values)) :: random.choice((1, 2, 7))] = special
        return raw[:1] + values.tobytes() + body[len(body) & ~3 :]
    return raw[:1] + mutation.patch(body, random, ("<i", "<i", "<h", "<q"))


def run(raw: bytes) -> None:
    kind, body = (raw[0] if raw else 0) % len(KINDS), raw[1:]
    specs, served, copier = SPECS[kind], SERVED[kind], COPIERS[kind]
    if len(body) < body_layout(specs, ROWS)[0][-1] + specs[-1].buffer_bytes(ROWS):
        return  # The arena holds the layout of each batch.
    try:
        if copier.has_strings:
            body = body[: copier.string_ranges(memoryview(body), ROWS)[1]]
    except AssertionError:
        return
    columns = [columns_of(specs, each) for each in (served, body)]
    alone, group = comparison_of(specs), comparison_of(specs)
    accepts = compare(alone, served, body)
    assert accepts == (columns[1] is not None), f"accepted: {accepts}"
    compare(group, served, served)
    assert compare(group, served, served, body) == accepts
    if columns[0] is None or columns[1] is None:
        assert not alone.rows and group.rows == ROWS
        return
    check(alone, specs, columns[0], columns[1], ROWS)
    check(group, specs, columns[0], columns[1], 3 * ROWS)


def comparison_of(specs: tuple[TensorSpec, ...]) -> Comparison:
    matches = match_outputs(Contract((), specs), Contract((), specs))
    assert isinstance(matches, tuple)
    return Comparison(matches, RowCopier(specs), RowCopier(specs), TOLERANCE)


def compare(comparison: Comparison, served: bytes, *bodies: bytes) -> bool:
    """Compare bodies as one group; False if they are rejected, which changes nothing."""
    before = state_of(comparison)
    for body in bodies:
        comparison.collect(ROWS, Body(served, ROWS, 0), Body(body, ROWS, 0))
    try:
        comparison.compare()
    except AssertionError:
        assert state_of(comparison) == before, "rejected results are counted"
        return False
    return True


def state_of(comparison: Comparison) -> list[Any]:
    """All statistics, as values that can be compared."""
    state: list[Any] = [comparison.rows, comparison.disagreeing]
    for output in comparison.outputs:
        if isinstance(output, FloatComparison):
            state += [output.disagreeing, output.unmatched, output.values, output.bias]
            state += [output.absolute.sparse(), output.relative.sparse()]
        else:
            state += [output.disagreeing, dict(output.pairs)]
    return state


def check(
    comparison: Comparison,
    specs: tuple[TensorSpec, ...],
    served: list[list[Any]],
    candidate: list[list[Any]],
    rows: int,
) -> None:
    """Check the statistics of one comparison of `candidate`, and of none but equal rows."""
    assert comparison.rows == rows
    any_differs = [False] * ROWS
    for output, spec, ours, theirs in zip(
        comparison.outputs, specs, served, candidate, strict=True
    ):
        is_float = spec.type.dtype_name in FLOATS
        differs = [
            any(
                beyond(a, b) if is_float else a != b
                for a, b in zip(
                    ours[row * spec.elements :][: spec.elements],
                    theirs[row * spec.elements :][: spec.elements],
                    strict=True,
                )
            )
            for row in range(ROWS)
        ]
        assert output.disagreeing == sum(differs), f"{spec.type.dtype_name}: {output.disagreeing}"
        any_differs = [a or b for a, b in zip(any_differs, differs, strict=True)]
        if isinstance(output, EqualityComparison):
            assert len(output.pairs) <= PAIRS_MAX and len(output.top_pairs(3)) <= 3
        else:
            assert output.absolute.highest >= 0 and int(output.absolute.counts.min()) >= 0
            assert output.unmatched + output.values <= rows * spec.elements
    assert comparison.disagreeing == sum(any_differs)


def beyond(served: float, candidate: float) -> bool:
    if np.isnan(served) or np.isnan(candidate):
        return bool(np.isnan(served) != np.isnan(candidate))
    if np.isinf(served) or np.isinf(candidate):
        return served != candidate
    with np.errstate(over="ignore"):
        limit = TOLERANCE.absolute + TOLERANCE.relative * abs(served)
        return bool(abs(np.float64(candidate) - np.float64(served)) > limit)


def columns_of(specs: tuple[TensorSpec, ...], body: bytes) -> list[list[Any]] | None:
    """The values of each output; None if strings are not within their column, in order."""
    layout, _ = body_layout(specs, ROWS)
    found: list[list[Any]] = []
    at = (layout[-1] + specs[-1].buffer_bytes(ROWS) + 63) & -64
    for spec, offset in zip(specs, layout, strict=True):
        count, dtype = ROWS * spec.elements, spec.type.dtype
        if spec.is_string:
            ends = np.frombuffer(body, "<i4", count + 1, offset).tolist()
            if ends != sorted(ends) or ends[0] < 0:
                return None
            found.append([body[at + a : at + b] for a, b in pairwise(ends)])
            at = (at + ends[-1] + 63) & -64
        elif dtype.arrow_bits == 1:
            found.append([body[offset + i // 8] >> i % 8 & 1 for i in range(count)])
        else:
            raw = body[offset : offset + count * dtype.arrow_bits // 8]
            if dtype.arrow == "bfloat16":
                raw = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
                found.append(np.frombuffer(raw, "<f4").tolist())
            else:
                found.append(np.frombuffer(raw, dtype.numpy).tolist())
    return found
