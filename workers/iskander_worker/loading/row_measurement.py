"""Measurement of a model's rows: whether a result depends on the other rows of its batch.

Rows run alone, which gives the reference results, and then in batches. A graph with a fixed number
of rows has one full batch as its reference. A difference from the reference shows that the result
depends on what the second column names:

    all rows, and reversed            the position, or the other rows
    in parts                          the split of a request
    the last row repeated             padding
    among many other rows             the rows of other requests
    behind 1,000 and 65,000 rows      a window over rows, or a limit of positions
    among rows 1000 times as large,   a scale of the whole batch, as in dynamic quantization
      and 1000 times as small
    among NaN, infinities, 10^9       the treatment of such values in the whole batch
    with constants of the graph       the replacement of such a value by one of the whole batch
    among constants and their doubles a threshold for the whole batch

The rows are the warm-up samples, if there are any, and generated ones of several kinds. The
reference results of different rows must differ, because equal results do not show their row.

Runs on: the process of a sandboxed load; worker main for a model that has no sandboxed load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from iskander.contract.processing.row_relation import EVIDENCE_CHARACTERS_MAX, Verdict
from iskander.contract.processing.tolerance import difference, mismatches, scale_of
from iskander.contract.tensors import Contract
from iskander.errors import ContractError, ExecutionFailed, shorten
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander_worker.backends import Run
from iskander_worker.loading.generated_rows import DIGITS, RowGenerator, Values
from iskander_worker.loading.graph_constants import GraphConstants, constants_of

MAGNITUDE = 1000.0
RARE = (((float("nan"),), "NaN"), ((float("inf"), float("-inf")), "infinities"))
MARKERS = (0.0, -1.0, 1.0, -9.0, 9.0, -99.0, 99.0, -999.0, 999.0, -9999.0, 9999.0, 255.0)
"""Floats that often stand for a missing value, which a model may replace by a mean of the batch."""
ZEROS = (Values(low=0, high=1), Values(low=-2))
"""Kinds of integers for which a graph that divides by its input ends the process."""
INTEGER_MARKERS = (0, -1, -2, -9, 99, -99, 999, -999, 127, 255, 9999, -9999, 32767)
"""Integers that often stand for a missing value; 0 and -1 are left out if a graph may divide."""
LARGE_INTEGERS = (10**5, 10**6, 10**9, 10**13)
"""Integers beyond usual thresholds, such as those of times in milliseconds."""
LARGE_CONSTANT = 1e4
"""Larger constants are tried doubled too, because generated floats do not exceed them."""
FAR_ROWS = 1024
FAR_ROWS_MAX = 65_536
"""Rows of the largest batch: the default of `models.max_batch_rows`."""
FAR_BYTES_MAX = 32 << 20
"""Limit of the inputs and results of a batch of more than `FAR_ROWS` rows."""
FAR_STEP = 4
FAR_S = 0.5
"""Limit of the time of a batch of more than `FAR_ROWS` rows. The time is predicted from the
previous batch, as if it grew with the square of the rows."""
SMALL_SHARE = 0.05
"""Largest difference of `approximate` results, as a share of the results of all rows."""
SEARCHED_ROWS = 512
"""Rows of a batch in which rows with different results are searched."""
MEASURE_S = 20.0
WHAT_TO_DO = "add warm-up samples with different results, or `combine` to the manifest"

Arrays = Mapping[str, np.ndarray]


class Extent(NamedTuple):
    """Sizes and number of the batches that a measurement runs.

    Attributes:
        rows: Number of rows that are compared for a kind of values.
        padded: Number of rows of a batch whose last row is repeated.
        many: Number of rows of a batch with many other rows.
        kinds: Number of kinds of values.
        total: Approximate number of the rows of all batches.
    """

    rows: int
    padded: int
    many: int
    kinds: int
    total: int


EXTENTS = (
    Extent(rows=8, padded=13, many=64, kinds=10, total=2500),
    Extent(rows=4, padded=6, many=16, kinds=2, total=130),
    Extent(rows=3, padded=4, many=6, kinds=1, total=40),
)
"""The first extent whose predicted time fits is used; a row of a large model can take a second."""
TIME_SHARE = 0.4
"""Share of the time limit within which the predicted time must be."""


class MeasuredModel(Protocol):
    """The part of a `Session` that a measurement uses."""

    contract: Contract

    def results(self, rows: int, arrays: Arrays, run: Run) -> dict[str, np.ndarray]:
        """Return the results of a batch by name; raise `ExecutionFailed` or `ContractError`."""


class RowVerdict(NamedTuple):
    """Whether rows of a batch affect each other's results, and what was run and found.

    `has_other_rows`: the number of results of a batch differed from its number of rows.
    """

    verdict: Verdict
    evidence: str
    has_other_rows: bool = False


class _Difference(NamedTuple):
    """A result that differs from the reference.

    `share` is the difference as a share of the results of all rows; 1 if the batch fails.
    """

    share: float
    text: str


class _Undecided(Exception):
    """The measurement cannot continue; the message is the reason."""


class _Dependent(Exception):
    """A batch has another number of results than rows; the message is the evidence."""


def measure_rows(
    model: MeasuredModel,
    samples: Arrays,
    accepted_texts: Mapping[str, Sequence[str]],
    graph_file: Path,
    *,
    is_confined: bool,
    seconds: float = MEASURE_S,
    on_risk: Callable[[RowVerdict], None] | None = None,
) -> RowVerdict:
    """Measure a loaded model.

    Args:
        model: The model.
        samples: Recorded inputs of a few rows by tensor; empty for none.
        accepted_texts: The only texts that an input accepts, by tensor; other inputs accept any.
        graph_file: File whose words are used as texts.
        is_confined: A crash ends only the process of this load. If false, values that crash a
            known operator are not run.
        seconds: Time limit.
        on_risk: Called with the verdict so far before batches that may end a confined process.
    """
    fixed = model.contract.rows_fixed
    if fixed == 1:
        return RowVerdict("independent", "the graph runs one row at a time")
    measurement = _Measurement(model, accepted_texts, fixed, seconds)
    try:
        verdict = measurement.verdict(samples, graph_file, is_confined=is_confined)
        if verdict.verdict == "independent" and on_risk is not None and measurement.has_risk:
            # Counts only if the next batches end the process.
            on_risk(verdict._replace(evidence=f"{verdict.evidence}; integers below 1 crash it"))
            return measurement.verdict_with_zeros()
        return verdict
    except _Dependent as evidence:
        return RowVerdict("dependent", _shortened(str(evidence)), has_other_rows=True)
    except _Undecided as reason:
        return RowVerdict("undecided", _shortened(str(reason)))
    finally:
        measurement.close()


class _Measurement:
    """State of one measurement; `close` stops its timer.

    `_worst_similar` is the largest difference in batches whose rows have one magnitude,
    `_worst_unlike` that in batches which also have rows of another magnitude.
    """

    def __init__(
        self,
        model: MeasuredModel,
        accepted_texts: Mapping[str, Sequence[str]],
        fixed: int | None,
        seconds: float,
    ) -> None:
        self._model = model
        self._fixed = fixed
        self._generator = RowGenerator(model.contract.inputs, accepted_texts)
        self._dtypes = {spec.tensor: spec.type.dtype_name for spec in model.contract.outputs}
        self._names = list(self._dtypes)
        self._seconds = seconds
        self._run = Run()
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()
        self._is_late = False
        self._extent = EXTENTS[0]
        self._far_rows = 0
        self._largest_rows = 0
        self._may_be_zero = self._is_confined = False
        self._constants = GraphConstants()
        self._varied_outputs: set[str] = set()
        self._kinds_examined = 0
        self._first_error = ""
        self._worst_similar: _Difference | None = None
        self._worst_unlike: _Difference | None = None

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def verdict(self, samples: Arrays, graph_file: Path, *, is_confined: bool) -> RowVerdict:
        """Compare the rows of each kind of values with their references; judge the differences."""
        self._is_confined = is_confined
        self._extent = self._choose_extent()
        self._constants = constants_of(graph_file)
        kinds = self._kinds(is_confined=is_confined)
        if samples:
            self._examine(kinds[0], samples)
        count = self._fixed or self._extent.rows
        for number, values in enumerate(kinds):
            if self._kinds_examined < self._extent.kinds and not self._is_dependent:
                self._examine(values, self._generator.rows(count, values, seed=number))
        if not self._has_difference and self._kinds_examined:
            for rare, text in RARE:
                for found in self._compare_rare_rows(rare, text):
                    self._worst_similar = _larger_of(self._worst_similar, found)
            for marker in self._float_markers():
                for found in self._compare_rare_rows((marker,), f"{marker:g}"):
                    self._worst_similar = _larger_of(self._worst_similar, found)
            self._compare_integer_markers(is_confined=is_confined)
        if not self._has_difference and self._fixed is None:
            self._search_other_results(kinds)
        return self._judge()

    @property
    def has_risk(self) -> bool:
        """Whether integers below 1 were left out, because they may end the process."""
        return self._leaves_out_integers and self._kinds_examined > 0

    def verdict_with_zeros(self) -> RowVerdict:
        """Compare rows with zeros and negative integers too, and judge again."""
        self._may_be_zero = True
        count = self._fixed or self._extent.rows
        for number, values in enumerate(ZEROS, len(EXTENTS) * 10):
            if not self._has_difference:
                self._examine(values, self._generator.rows(count, values, seed=number))
        if not self._has_difference:
            self._compare_integer_markers(is_confined=True)
        return self._judge()

    def _compare_integer_markers(self, *, is_confined: bool) -> None:
        """Compare rows with integers that often stand for a missing value."""
        for number in self._integer_markers(is_confined=is_confined):
            for found in self._compare_rare_rows((), f"{number}", number):
                self._worst_similar = _larger_of(self._worst_similar, found)

    def _examine(self, values: Values, rows: Arrays) -> None:
        """Compare the results of rows in all batches with the reference, unless its runs fail."""
        found = self._reference(rows)
        if isinstance(found, str):
            self._first_error = self._first_error or found
            return
        self._kinds_examined += 1
        self._require_repeatable(rows, found)
        self._note_varied(found)
        for each in self._compare_same_magnitude(rows, found, values):
            self._worst_similar = _larger_of(self._worst_similar, each)
        for each in self._compare_other_magnitudes(rows, found, values):
            self._worst_unlike = _larger_of(self._worst_unlike, each)
        comparisons = [self._compare_among_rare]
        if self._kinds_examined == 1 and self._extent is EXTENTS[0]:
            comparisons.append(self._compare_among_constants)
        for differences in comparisons:
            if not self._has_difference:
                for worse in differences(rows, found, values):
                    self._worst_unlike = _larger_of(self._worst_unlike, worse)

    @property
    def _has_difference(self) -> bool:
        return self._worst_similar is not None or self._worst_unlike is not None

    @property
    def _is_dependent(self) -> bool:
        return self._worst_similar is not None and self._worst_similar.share > SMALL_SHARE

    def _search_other_results(self, kinds: Sequence[Values]) -> None:
        """Search and examine rows with different results, for outputs that have not varied yet.

        Labels are such outputs: few rows may all have the same one.
        """
        for values in kinds:
            if not self._kinds_examined or self._varied_outputs == set(self._names):
                return
            many = self._generator.rows(SEARCHED_ROWS, values, seed=96)
            results = self._results(many)
            if isinstance(results, str):
                continue
            wanted = {0, 1}
            for name in set(self._names) - self._varied_outputs:
                first, *others = results[name]
                different = (n for n, row in enumerate(others, 1) if not _is_same(first, row))
                wanted.update(islice(different, 2))
            if len(wanted) > 2:
                self._examine(values, _rows_at(many, sorted(wanted)))

    def _judge(self) -> RowVerdict:
        """Return the verdict for the largest differences."""
        similar, unlike = self._worst_similar, self._worst_unlike
        if similar is not None:
            if similar.share > SMALL_SHARE:
                return RowVerdict("dependent", _shortened(similar.text))
            return RowVerdict("approximate", _shortened((unlike or similar).text))
        if unlike is not None:
            is_small = unlike.share <= SMALL_SHARE
            return RowVerdict("approximate" if is_small else "dependent", _shortened(unlike.text))
        if not self._kinds_examined:
            raise _Undecided(f"no batch of generated rows runs: {self._first_error}; {WHAT_TO_DO}")
        same = [name for name in self._names if name not in self._varied_outputs]
        if same:
            raise _Undecided(
                f"output `{same[0]}` has the same result for all rows that were tried; {WHAT_TO_DO}"
            )
        count = self._fixed or self._extent.rows
        sizes = f"{count}" if self._fixed else f"1 to {self._largest_rows or self._extent.many}"
        kinds = f"{self._kinds_examined} kind{'s' if self._kinds_examined > 1 else ''}"
        untried = "; integers below 1 were not tried" if self._leaves_out_integers else ""
        return RowVerdict(
            "independent",
            f"{count} rows of {kinds} of values, in batches of {sizes} rows{untried}",
        )

    @property
    def _leaves_out_integers(self) -> bool:
        """Whether integers below 1 were not tried, because they could end the process."""
        return self._generator.has_integers and not self._may_be_zero

    def _choose_extent(self) -> Extent:
        """Return the extent of the measurement, by the time of one row.

        Also sets `_far_rows`: a fast model runs a batch of `FAR_ROWS`.
        """
        arrays = self._generator.rows(self._fixed or 1, Values(), seed=97)
        times = []
        for _ in range(2):
            begun_ns = now_ns()
            if isinstance(self._results(arrays), str):
                return EXTENTS[0]
            times.append((now_ns() - begun_ns) / NS_PER_S)
        row_s = min(times) / (self._fixed or 1)
        is_fast = FAR_ROWS * row_s <= TIME_SHARE * self._seconds / 2
        if is_fast and self._fixed is None and FAR_ROWS * self._row_bytes <= FAR_BYTES_MAX:
            self._far_rows = FAR_ROWS
        for extent in EXTENTS:
            if extent.total * row_s <= TIME_SHARE * self._seconds:
                return extent
        raise _Undecided(f"one row takes {row_s:.2g} s, which is too long to measure more of them")

    @property
    def _row_bytes(self) -> int:
        """Bytes of one row in all inputs and results."""
        specs = (*self._model.contract.inputs, *self._model.contract.outputs)
        return max(sum(spec.buffer_bytes(FAR_ROWS) for spec in specs) // FAR_ROWS, 1)

    def _kinds(self, *, is_confined: bool) -> list[Values]:
        """Return the kinds of values to try, and set whether integers may be zero."""
        generator = self._generator
        kinds = [Values()]
        if is_confined and generator.has_integers:
            kinds.append(Values(high=9))
            if not self._constants.has_divisions:
                self._may_be_zero = True
                kinds[1:1] = ZEROS
        if generator.has_floats:
            kinds += [Values(scale=100.0), Values(scale=10.0, are_positive=True)]
        if generator.has_texts:
            kinds += [Values(words_of_text=4), Values(words=("", *DIGITS))]
        if generator.has_texts and (words := tuple(self._constants.words)):
            kinds += [Values(words=words), Values(words=words, words_of_text=4)]
        return kinds

    def _reference(self, rows: Arrays) -> dict[str, np.ndarray] | str:
        """Return results of the rows alone, or in a batch of the fixed size.

        A text if a run fails.
        """
        if self._fixed is not None:
            return self._results(rows)
        first = self._results(_rows_at(rows, [0]))
        if isinstance(first, str):
            whole = self._results(rows)
            if isinstance(whole, str):
                return first
            raise _Undecided(f"a batch of one row fails, and one of several rows runs: {first}")
        parts = [first]
        for index in range(1, _row_count(rows)):
            part = self._results(_rows_at(rows, [index]))
            if isinstance(part, str):
                return part
            parts.append(part)
        return {name: np.concatenate([part[name] for part in parts]) for name in self._names}

    def _require_repeatable(self, rows: Arrays, found: dict[str, np.ndarray]) -> None:
        """Raise `_Undecided` if two runs of the same rows have different results."""
        first = rows if self._fixed is not None else _rows_at(rows, [0])
        again = self._results(first)
        expected = found if self._fixed is not None else _rows_at(found, [0])
        if isinstance(again, str):
            raise _Undecided(f"a batch that ran before fails: {again}")
        for name in self._names:
            if self._mismatches(name, again[name], expected[name], scale_of(found[name])).any():
                raise _Undecided(f"output `{name}` differs between two runs of the same rows")

    def _note_varied(self, found: Mapping[str, np.ndarray]) -> None:
        """Remember the outputs that have different results for different rows."""
        for name in self._names:
            result = found[name]
            if any(not _is_same(result[0], row) for row in result[1:]):
                self._varied_outputs.add(name)

    def _compare_same_magnitude(
        self, rows: Arrays, found: dict[str, np.ndarray], values: Values
    ) -> Iterator[_Difference]:
        """Yield differences in batches whose rows have the same magnitude."""
        count = _row_count(rows)
        indices = list(range(count))
        backwards = indices[::-1]
        if self._fixed is not None:
            yield from self._compare(_rows_at(rows, backwards), found, backwards, "in reverse")
            for index in sorted({0, count // 2, count - 1}):
                repeated = _rows_at(rows, [index] * count)
                yield from self._compare(repeated, found, [index] * count, "in a batch of copies")
                other = self._generator.rows(count, values, seed=100 + index)
                yield from self._compare_one(rows, found, index, other, "with other rows")
            return
        yield from self._compare(rows, found, indices, f"in a batch of {count} rows")
        yield from self._compare(_rows_at(rows, backwards), found, backwards, "in reverse")
        for part in (indices[: count // 3 + 1], indices[count // 3 + 1 :]):
            yield from self._compare(_rows_at(rows, part), found, part, f"in a part of {len(part)}")
        padded = indices + [count - 1] * max(self._extent.padded - count, 1)
        yield from self._compare(
            _rows_at(rows, padded), found, padded, "with the last row repeated"
        )
        total = max(self._extent.many, 2 * count)
        many = self._generator.rows(total - count, values, seed=99)
        if not isinstance(self._results(many), str):
            joined = {name: np.concatenate([rows[name], many[name]]) for name in rows}
            yield from self._compare(joined, found, indices, f"in a batch of {total} rows")
        yield from self._compare_behind_many(rows, found, values)

    def _compare_behind_many(
        self, rows: Arrays, found: dict[str, np.ndarray], values: Values
    ) -> Iterator[_Difference]:
        """Yield differences at the end of large batches, which a measurement runs only once."""
        total, self._far_rows = self._far_rows, 0
        taken_s = 0.0
        while 0 < total * self._row_bytes <= FAR_BYTES_MAX and taken_s * FAR_STEP**2 < FAR_S:
            if total > FAR_ROWS_MAX or self._has_difference:
                return
            begun_ns = now_ns()
            yield from self._compare_behind(total, rows, found, values)
            taken_s = (now_ns() - begun_ns) / NS_PER_S
            total *= FAR_STEP

    def _compare_behind(
        self, total: int, rows: Arrays, found: dict[str, np.ndarray], values: Values
    ) -> Iterator[_Difference]:
        """Yield differences at the end of a batch of `total` rows, unless its other rows fail."""
        count = _row_count(rows)
        if total <= count:
            return
        before = total - count
        others = self._generator.rows(before, values, seed=95)
        if isinstance(self._results(others), str):
            return
        self._largest_rows = total
        joined = {name: np.concatenate([others[name], rows[name]]) for name in rows}
        own = list(range(before, total))
        yield from self._compare(joined, found, list(range(count)), f"behind {before} rows", own)

    def _compare_among_rare(
        self, rows: Arrays, found: dict[str, np.ndarray], values: Values
    ) -> Iterator[_Difference]:
        """Yield differences among rows with NaN, infinities, large values, zeros, negatives."""
        kinds: list[tuple[Values, str]] = []
        if self._generator.has_floats:
            pairs = (*RARE, ((1e9, -1e9), "values of 1e9"), ((1e13, -1e13), "values of 1e13"))
            kinds += [(values._replace(rare=rare), text) for rare, text in pairs]
        if self._may_be_zero:
            kinds.append((values._replace(low=0, high=0), "zeros"))
            kinds.append((values._replace(low=-2, high=-1), "negative values"))
        for kind, text in kinds:
            others = self._generator.rows(_row_count(rows), kind, seed=94)
            yield from self._compare_among(rows, found, others, f"among rows with {text}")

    def _compare_among_constants(
        self, rows: Arrays, found: dict[str, np.ndarray], values: Values
    ) -> Iterator[_Difference]:
        """Yield differences among rows with the graph's constants, doubles, large integers."""
        own = [value for number in self._constants.numbers for value in (number, 2 * number)]
        kinds: list[tuple[Values, str]] = []
        if self._generator.has_floats:
            kinds += [(values._replace(rare=(number,)), f"{number:g}") for number in own]
        if self._generator.has_integers and self._is_confined:
            integers = [int(number) for number in own if number == int(number) and abs(number) > 9]
            kinds += [
                (values._replace(rare_integer=number), f"{number}")
                for number in dict.fromkeys((*LARGE_INTEGERS, *integers))
            ]
        for kind, text in kinds:
            others = self._generator.rows(_row_count(rows), kind, seed=90)
            yield from self._compare_among(rows, found, others, f"among rows with {text}")

    def _float_markers(self) -> list[float]:
        """Return the floats to try as markers: usual ones, and constants of the graph."""
        if self._extent is not EXTENTS[0]:
            return []
        own = list(self._constants.numbers)
        own += [2 * number for number in own if abs(number) > LARGE_CONSTANT]
        return list(dict.fromkeys((*MARKERS, *own)))

    def _integer_markers(self, *, is_confined: bool) -> list[int]:
        """Return the integers to try as markers.

        No integers if a marker could end the process of a worker.
        """
        if not is_confined or self._extent is not EXTENTS[0] or self._worst_similar is not None:
            return []
        own = [int(number) for number in self._constants.numbers if number == int(number)]
        markers = dict.fromkeys((*INTEGER_MARKERS, *own))
        return [marker for marker in markers if self._may_be_zero or marker not in (0, -1)]

    def _compare_rare_rows(
        self, rare: tuple[float, ...], text: str, rare_integer: int | None = None
    ) -> Iterator[_Difference]:
        """Yield differences of rows with rare values, such as NaN, between two sets of other rows.

        The other rows of the first batch have none of these values, and those of the second batch
        have some. In the first batch, large values alone would decide a mean over the rows.
        The rows have the same positions in both batches, because the runtime may compute a maximum
        with NaN differently at another position.
        """
        generator = self._generator
        if not (generator.has_floats if rare else generator.has_integers):
            return
        count = self._fixed or 2 * self._extent.rows
        own = list(range(1, count - 1, 2))  # The first and the last row are other rows.
        first = self._generator.rows(count, Values(), seed=92)
        high = 2 if rare else 9
        kind = Values(rare=rare, rare_integer=rare_integer)
        second = self._generator.rows(count, kind._replace(scale=100.0, high=high), seed=91)
        rows = self._generator.rows(count, kind, seed=93)
        for batch in (first, second):
            for name in batch:
                batch[name][own] = rows[name][own]
        found = self._results(first)
        if not isinstance(found, str) and not isinstance(self._results(second), str):
            expected = _rows_at(found, own)
            indices = list(range(len(own)))
            yield from self._compare(
                second, expected, indices, f"with {text} among other rows", own
            )

    def _compare_other_magnitudes(
        self, rows: Arrays, found: dict[str, np.ndarray], values: Values
    ) -> Iterator[_Difference]:
        """Yield differences among rows whose values are much larger or much smaller."""
        if not self._generator.has_floats:
            return
        count = _row_count(rows)
        for factor in (MAGNITUDE, 1 / MAGNITUDE):
            scaled = values._replace(scale=values.scale * factor)
            others = self._generator.rows(count, scaled, seed=98)
            yield from self._compare_among(
                rows, found, others, f"among rows {factor:g} times as large"
            )

    def _compare_among(
        self, rows: Arrays, found: dict[str, np.ndarray], others: Arrays, text: str
    ) -> Iterator[_Difference]:
        """Yield differences of rows among other rows, unless the other rows fail alone."""
        count = _row_count(rows)
        if self._fixed is not None:
            for index in sorted({0, count - 1}):
                yield from self._compare_one(rows, found, index, others, text)
        elif not isinstance(self._results(others), str):
            pairs = {name: np.stack([others[name], rows[name]], axis=1) for name in rows}
            mixed = {  # The first and the last row are other rows.
                name: np.concatenate([pair.reshape(2 * count, *pair.shape[2:]), others[name][-1:]])
                for name, pair in pairs.items()
            }
            own = list(range(1, 2 * count, 2))
            yield from self._compare(mixed, found, list(range(count)), text, own)

    def _compare_one(
        self, rows: Arrays, found: dict[str, np.ndarray], index: int, others: Arrays, text: str
    ) -> Iterator[_Difference]:
        """Yield differences of one row in a batch of other rows, unless the other rows fail."""
        if isinstance(self._results(others), str):
            return
        mixed = {name: others[name].copy() for name in rows}
        for name in rows:
            mixed[name][index] = rows[name][index]
        yield from self._compare(mixed, found, [index], text, [index])

    def _compare(
        self,
        batch: Arrays,
        found: dict[str, np.ndarray],
        indices: Sequence[int],
        text: str,
        at: Sequence[int] | None = None,
    ) -> Iterator[_Difference]:
        """Yield differences of a batch from the reference.

        Args:
            batch: The inputs.
            found: Results of the reference.
            indices: Rows of the reference that are in the batch.
            text: How the rows run, for the evidence.
            at: Positions of these rows in the batch; by default the first positions.
        """
        results = self._results(batch)
        if isinstance(results, str):
            yield _Difference(1.0, f"rows that run alone fail {text}: {results}")
            return
        places = list(range(len(indices))) if at is None else list(at)
        for name in self._names:
            one, expected = results[name][places], found[name][list(indices)]
            scale = scale_of(found[name])
            is_wrong = self._mismatches(name, one, expected, scale)
            if not is_wrong.any():
                continue
            where = np.argwhere(is_wrong)[0]
            value, wanted = one[tuple(where)], expected[tuple(where)]
            share = difference(one, expected, scale)
            size = f"the largest difference is {share:.2g} times the largest result"
            if expected.dtype.kind != "f":
                size = f"{share:.2g} of the results differ"
            yield _Difference(
                share,
                f"output `{name}` of row {indices[int(where[0])]} is {value!s:.40} {text}, and "
                f"{wanted!s:.40} {'in its own batch' if self._fixed else 'alone'}; {size}",
            )

    def _mismatches(
        self, name: str, one: np.ndarray, expected: np.ndarray, scale: float
    ) -> np.ndarray:
        return mismatches(one, expected, self._dtypes[name], scale)

    def _results(self, rows: Arrays) -> dict[str, np.ndarray] | str:
        """Return the results of a batch, or the text of its error."""
        if self._is_late:
            self._raise_late()
        self._run = Run(is_trial=True)
        try:
            return self._model.results(_row_count(rows), rows, self._run)
        except (ContractError, ExecutionFailed) as error:
            if self._is_late:
                self._raise_late()
            if isinstance(error, ExecutionFailed) and error.is_shape:
                raise _Dependent(error.message) from None
            return error.message

    def _raise_late(self) -> None:
        raise _Undecided(f"the measurement took more than {self._seconds:g} s")

    def _expire(self) -> None:
        """End the measurement; runs on the timer's thread."""
        self._is_late = True
        self._run.abort()


def _rows_at(arrays: Arrays, indices: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the rows with these indices."""
    return {name: array[list(indices)] for name, array in arrays.items()}


def _row_count(arrays: Arrays) -> int:
    """Number of rows."""
    return len(next(iter(arrays.values())))


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    is_float = np.asarray(one).dtype.kind == "f"
    return bool(np.array_equal(one, other, equal_nan=is_float))


def _larger_of(one: _Difference | None, other: _Difference) -> _Difference:
    return other if one is None or other.share > one.share else one


def _shortened(text: str) -> str:
    return shorten(text, EVIDENCE_CHARACTERS_MAX)
