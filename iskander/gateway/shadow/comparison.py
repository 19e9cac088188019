"""Row-by-row comparison of the results of two versions, with statistics of bounded size.

    floats          histograms of absolute and relative differences, rows beyond the tolerance
    labels          rows that differ (integers, strings, booleans), and the most frequent pairs
    lists           rows that differ in any entry, such as top-k

Results are collected, and compared in groups: the calls of NumPy cost more than their work on few
rows. A group has about `GROUP_WORK` values, which takes a fifth of a millisecond: too little for a
thread.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from iskander.contract.dtypes import OFFSET_BYTES
from iskander.contract.processing.rows import RowCopier
from iskander.foundation.measurement.log_scale import BUCKETS, EXPONENT_MIN, STEPS
from iskander.gateway.shadow.contract import OutputMatch

GROUP_WORK: Final = 2048
"""Work (`OutputMatch.work`) of collected rows at which they are compared."""
PAIRS_MAX: Final = 1000
"""Counted pairs of labels of an output."""
BYTES_OF_WORK: Final = 512
"""Bytes of strings that take the time of one unit of work."""
LABEL_CHARACTERS_MAX: Final = 64
LABEL_BYTES_MAX: Final = 4 * LABEL_CHARACTERS_MAX
"""Counted labels are cut to as many bytes as the shown characters can have."""

Values = npt.NDArray[Any] | list[bytes]
Label = bytes | int | bool
Disagreeing = npt.NDArray[np.bool_]


class Tolerance(NamedTuple):
    """Largest difference of two floats that count as equal: absolute + relative * served."""

    absolute: float
    relative: float


class Body(NamedTuple):
    """Results of some rows: a body with the layout of `layout_rows`, from row `first`."""

    body: bytes | memoryview
    layout_rows: int
    first: int


class Differences:
    """Distribution of differences that are not negative.

    Attributes:
        counts: Number of differences in each bucket of `log_scale`.
        highest: Largest difference.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(BUCKETS + 1, np.int64)
        self.highest = 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Count finite values."""
        if values.size:
            self.highest = max(self.highest, float(values.max()))
            buckets = np.zeros(values.size, np.int64)
            positive = values > 0
            scaled = np.ceil((np.log2(values[positive]) - EXPONENT_MIN) * STEPS) + 1
            buckets[positive] = np.clip(scaled, 1, BUCKETS)
            self.counts += np.bincount(buckets, minlength=BUCKETS + 1)

    def sparse(self) -> dict[int, int]:
        """Return the counts of the buckets with any."""
        return {int(bucket): int(self.counts[bucket]) for bucket in self.counts.nonzero()[0]}


class OutputComparison(Protocol):
    """Statistics of one output.

    Attributes:
        match: The output.
        disagreeing: Rows that differ; of floats, beyond the tolerance.
    """

    match: OutputMatch
    disagreeing: int

    def add(self, served: Values, candidate: Values) -> Disagreeing:
        """Compare the values of some rows; return which rows differ."""


class FloatComparison:
    """Differences of floats, in any number a row.

    Attributes:
        unmatched: Values of which exactly one is a number, or that are different infinities.
        bias: Sum of candidate minus served.
        values: Number of values in it.
    """

    def __init__(self, match: OutputMatch, tolerance: Tolerance) -> None:
        self.match = match
        self.disagreeing = self.unmatched = self.values = 0
        self.bias = 0.0
        self.absolute, self.relative = Differences(), Differences()
        self._tolerance = tolerance

    def add(self, served: Values, candidate: Values) -> Disagreeing:
        """Compare the values of some rows; return which rows differ."""
        with np.errstate(all="ignore"):  # Any values are valid results.
            ours, theirs = _as_doubles(served), _as_doubles(candidate)
            is_finite = np.isfinite(ours) & np.isfinite(theirs)
            is_same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
            is_unmatched = ~is_finite & ~is_same
            signed = np.where(is_finite, theirs - ours, 0.0)
            absolute = np.abs(signed)
            largest = np.maximum(np.abs(ours), np.abs(theirs))
            limit = self._tolerance.absolute + self._tolerance.relative * np.abs(ours)
            beyond = is_unmatched | (is_finite & (absolute > limit))
            self.absolute.add(absolute[is_finite & np.isfinite(absolute)])
            is_relative = is_finite & (largest > 0) & np.isfinite(absolute)
            self.relative.add(absolute[is_relative] / largest[is_relative])
            self.relative.counts[0] += int((is_finite & (largest == 0)).sum())
            self.bias += float(signed[np.isfinite(signed)].sum())
        self.values += int(is_finite.sum())
        self.unmatched += int(is_unmatched.sum())
        rows: Disagreeing = beyond.reshape(-1, self.match.spec.elements).any(axis=1)
        self.disagreeing += int(rows.sum())
        return rows


class EqualityComparison:
    """Rows of labels or lists that differ.

    Attributes:
        pairs: For labels, the number of rows of each differing pair (served, candidate); at most
            `PAIRS_MAX` different ones, the first that occurred.
    """

    def __init__(self, match: OutputMatch) -> None:
        self.match = match
        self.disagreeing = 0
        self.pairs: Counter[tuple[Label, Label]] = Counter()

    def add(self, served: Values, candidate: Values) -> Disagreeing:
        """Compare the values of some rows; return which rows differ."""
        if isinstance(served, list):
            assert isinstance(candidate, list)
            differs = map(bytes.__ne__, served, candidate)
            differing = np.fromiter(differs, np.bool_, len(served))
        else:
            differing = np.not_equal(served, np.asarray(candidate))
        rows: Disagreeing = np.asarray(differing.reshape(-1, self.match.spec.elements).any(axis=1))
        self.disagreeing += int(rows.sum())
        if self.match.is_label:
            pairs = zip(_selected(served, rows), _selected(candidate, rows), strict=True)
            for pair, count in Counter(pairs).items():
                if pair in self.pairs or len(self.pairs) < PAIRS_MAX:
                    self.pairs[pair] += count
        return rows

    def top_pairs(self, count: int) -> list[tuple[str, str, int]]:
        """Return the most frequent pairs as text, with their rows."""
        return [(_text(a), _text(b), rows) for (a, b), rows in self.pairs.most_common(count)]


class Comparison:
    """Statistics of all outputs of two versions.

    Attributes:
        outputs: Differences of each output.
        rows: Compared rows.
        disagreeing: Rows of which any output differs.
        is_due: Enough rows are collected: `compare` is to be called.
    """

    def __init__(
        self,
        matches: Sequence[OutputMatch],
        served: RowCopier,
        candidate: RowCopier,
        tolerance: Tolerance,
    ) -> None:
        self.outputs: list[FloatComparison | EqualityComparison] = [
            FloatComparison(match, tolerance) if match.is_float else EqualityComparison(match)
            for match in matches
        ]
        self.row_work = max(sum(match.work for match in matches), 1)
        self.rows = self.disagreeing = 0
        self._copiers = served, candidate
        self._collected: list[tuple[int, Body, Body]] = []
        self._work = 0

    @property
    def is_due(self) -> bool:
        """Whether a group of rows is complete."""
        return self._work >= GROUP_WORK

    def collect(self, rows: int, served: Body, candidate: Body) -> None:
        """Keep the results of some rows for the next `compare`."""
        self._collected.append((rows, served, candidate))
        self._work += max(rows * self.row_work, len(candidate.body) // BYTES_OF_WORK)

    def compare(self) -> None:
        """Compare the collected rows.

        Raises:
            AssertionError: A body is not one of the layout; none of these rows is counted.
        """
        collected, self._collected, self._work = self._collected, [], 0
        rows = sum(count for count, _, _ in collected)
        differing = np.zeros(rows, np.bool_)
        served, candidate = self._copiers
        values: list[tuple[Values, Values]] = []
        for output in self.outputs:
            match = output.match
            ours = [_values(served, match.served, body, n) for n, body, _ in collected]
            theirs = [_values(candidate, match.candidate, body, n) for n, _, body in collected]
            values.append((_joined(ours), _joined(theirs)))
        for output, pair in zip(self.outputs, values, strict=True):
            differing |= output.add(*pair)
        self.rows += rows
        self.disagreeing += int(differing.sum())


def _values(copier: RowCopier, index: int, where: Body, rows: int) -> Values:
    """Values of an output of some rows: flat, or one entry for each string."""
    spec, dtype = copier.specs[index], copier.specs[index].type.dtype
    offset, skipped = copier.layout(where.layout_rows)[0][index], where.first * spec.elements
    count = rows * spec.elements
    if spec.is_string:
        return _strings(copier, index, where, offset + skipped * OFFSET_BYTES, count)
    if dtype.arrow_bits == 1:
        packed = np.frombuffer(where.body, np.uint8, (skipped + count + 7) // 8, offset)
        return np.unpackbits(packed, bitorder="little")[skipped : skipped + count].view(np.bool_)
    start = offset + skipped * dtype.arrow_bits // 8
    values: npt.NDArray[Any] = np.frombuffer(where.body, dtype.numpy, count, start)
    if dtype.arrow == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _strings(copier: RowCopier, index: int, where: Body, start: int, count: int) -> list[bytes]:
    body = memoryview(where.body)
    positions = np.frombuffer(body, np.int32, count + 1, start)
    # Overlapping strings would have any number of bytes.
    ascends = positions[0] >= 0 and bool((positions[1:] >= positions[:-1]).all())
    assert ascends, "offsets of strings descend"
    ends = positions.tolist()
    number = sum(spec.is_string for spec in copier.specs[:index])
    begin = copier.string_ranges(body, where.layout_rows)[0][number][0]
    texts = bytes(body[begin + ends[0] : begin + ends[-1]])
    low = ends[0]
    return [texts[ends[i] - low : ends[i + 1] - low] for i in range(count)]


def _joined(parts: list[Values]) -> Values:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], list):
        return [text for part in parts for text in part]
    return np.concatenate(parts)


def _as_doubles(values: Values) -> npt.NDArray[np.float64]:
    return np.asarray(values, np.float64)


def _selected(values: Values, rows: Disagreeing) -> list[Any]:
    if isinstance(values, list):
        return [values[row][:LABEL_BYTES_MAX] for row in rows.nonzero()[0].tolist()]
    selected: list[Any] = values[rows].tolist()
    return selected


def _text(label: Label) -> str:
    """A label for people; bytes that are no text are escaped."""
    if isinstance(label, bytes):
        return label.decode("utf-8", "backslashreplace")[:LABEL_CHARACTERS_MAX]
    return str(label).lower() if isinstance(label, bool) else str(label)
