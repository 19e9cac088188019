"""Shadow versions in the status document: figures of pairs and of their outputs.

The counts behind the percentiles are part of the document, so that those of several processes are
added exactly. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from iskander.foundation.measurement.log_scale import percentile

SHADOWS_MAX = 32
"""Pairs of versions."""
OUTPUTS_MAX = 64
"""Outputs of all of them."""
PAIRS_MAX = 10
"""Differing pairs of labels of an output."""
STATES = ("not comparable", "suspended", "waiting", "comparing", "paused")
"""States of a pair, the worst first."""

PERCENTILES = (50, 95, 99)


class ShadowStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of versions of a model.

    Attributes:
        state: State of the comparison, one of `STATES`; `reason` explains a state that is not
            `comparing`.
        share: Share of the requests that is selected.
        rows: Compared rows.
        disagreeing: Rows of which any output differs; floats beyond the tolerance.
        dropped: Rows of selected requests that were not compared, by reason.
        run_rows: Rows of the batch to which the run times apply: the mean of the served version.
        served_run_ms: Run time of such a batch by the cost model.
    """

    name: str
    served: str
    candidate: str
    state: str
    reason: str = ""
    share: float = 0.0
    rows: int = 0
    disagreeing: int = 0
    disagreeing_percent: float | None = None
    dropped: dict[str, int] = {}
    run_rows: int = 0
    served_run_ms: float | None = None
    candidate_run_ms: float | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the pair."""
        return self.name, self.served, self.candidate


class DifferenceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Differences of floats: percentiles of the compared values, and the counts by bucket."""

    p50: float
    p95: float
    p99: float
    highest: float
    counts: dict[int, int]


class OutputStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An output of a pair of versions.

    Attributes:
        kind: `float`, `label` (one value of another type) or `list`.
        disagreeing: Rows that differ; floats beyond the tolerance.
        unmatched: Values that are a number for only one version, or different infinities.
        bias: Mean of candidate minus served, of `values` floats.
        relative_p99_percent: As in `relative`, for the page.
        pairs: Rows of the most frequent differing labels, as `served > candidate`.
    """

    name: str
    served: str
    candidate: str
    output: str
    kind: str
    rows: int = 0
    disagreeing: int = 0
    disagreeing_percent: float | None = None
    values: int = 0
    unmatched: int = 0
    bias: float | None = None
    absolute: DifferenceStatus | None = None
    relative: DifferenceStatus | None = None
    relative_p50_percent: float | None = None
    relative_p99_percent: float | None = None
    relative_max_percent: float | None = None
    pairs: dict[str, int] = {}

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the output."""
        return self.name, self.served, self.candidate, self.output


def percent_of(part: int, whole: int) -> float | None:
    """Return a part in percent; None of nothing."""
    return round(100 * part / whole, 4) if whole else None


def differences(counts: dict[int, int], highest: float) -> DifferenceStatus:
    """Return the percentiles of counts."""
    p50, p95, p99 = (rounded(percentile(counts, each, highest)) for each in PERCENTILES)
    return DifferenceStatus(p50=p50, p95=p95, p99=p99, highest=rounded(highest), counts=counts)


def rounded(value: float) -> float:
    """Return a value with four digits."""
    return float(f"{value:.4g}")


def with_percents(output: OutputStatus) -> OutputStatus:
    """Return an output with the values that follow from its counts."""
    relative = output.relative
    return replace(
        output,
        disagreeing_percent=percent_of(output.disagreeing, output.rows),
        relative_p50_percent=None if relative is None else 100 * relative.p50,
        relative_p99_percent=None if relative is None else 100 * relative.p99,
        relative_max_percent=None if relative is None else 100 * relative.highest,
    )


def merge_shadows(shadows: Iterable[ShadowStatus]) -> list[ShadowStatus]:
    """Merge the pairs of several processes: sums, the worst state, and the longest run times."""
    return [_merge_shadow(group) for group in _grouped(shadows, _shadow_key)]


def merge_outputs(outputs: Iterable[OutputStatus]) -> list[OutputStatus]:
    """Merge the outputs of several processes."""
    return [_merge_output(group) for group in _grouped(outputs, _output_key)]


def _merge_shadow(group: list[ShadowStatus]) -> ShadowStatus:
    worst = min(group, key=lambda each: STATES.index(each.state))
    rows = sum(each.rows for each in group)
    disagreeing = sum(each.disagreeing for each in group)
    return replace(
        worst,
        rows=rows,
        disagreeing=disagreeing,
        disagreeing_percent=percent_of(disagreeing, rows),
        dropped=_sum(each.dropped for each in group),
        run_rows=max(each.run_rows for each in group),
        served_run_ms=_highest(each.served_run_ms for each in group),
        candidate_run_ms=_highest(each.candidate_run_ms for each in group),
    )


def _merge_output(group: list[OutputStatus]) -> OutputStatus:
    values = sum(each.values for each in group)
    bias = sum(each.bias * each.values for each in group if each.bias is not None)
    pairs = Counter(_sum(each.pairs for each in group))
    return with_percents(
        replace(
            group[0],
            rows=sum(each.rows for each in group),
            disagreeing=sum(each.disagreeing for each in group),
            values=values,
            unmatched=sum(each.unmatched for each in group),
            bias=rounded(bias / values) if values else None,
            absolute=_merge_differences(each.absolute for each in group),
            relative=_merge_differences(each.relative for each in group),
            pairs=dict(pairs.most_common(PAIRS_MAX)),
        )
    )


def _merge_differences(group: Iterable[DifferenceStatus | None]) -> DifferenceStatus | None:
    known = [each for each in group if each is not None]
    if not known:
        return None
    return differences(_sum(each.counts for each in known), max(each.highest for each in known))


Entry = TypeVar("Entry")
Key = TypeVar("Key", int, str)


def _grouped(
    entries: Iterable[Entry], key: Callable[[Entry], tuple[str, ...]]
) -> list[list[Entry]]:
    return [list(group) for _, group in groupby(sorted(entries, key=key), key=key)]


def _shadow_key(shadow: ShadowStatus) -> tuple[str, ...]:
    return shadow.key


def _output_key(output: OutputStatus) -> tuple[str, ...]:
    return output.key


def _sum(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    total: Counter[Key] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
