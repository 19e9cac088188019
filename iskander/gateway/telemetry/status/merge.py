"""Status of a gateway of several processes, merged from the documents of the processes.

Rates, queues and counts are sums. A merged percentile is the highest of the processes, which is an
upper bound of the percentile of all requests. Workers are those that process 0 supervises.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter

from msgspec.structs import replace

from iskander.gateway.telemetry.status.document import (
    CODES_MAX,
    MEMORY_MAX,
    REASONS_MAX,
    STATES,
    ModelStatus,
    ProcessStatus,
    Status,
    listed,
    plotted,
)
from iskander.gateway.telemetry.status.drift_status import DRIFT_MAX, worst_first
from iskander.gateway.telemetry.status.events import EVENTS_MAX, Event
from iskander.gateway.telemetry.status.shadow_status import (
    OUTPUTS_MAX,
    SHADOWS_MAX,
    merge_outputs,
    merge_shadows,
)

SUMMED = ("requests_per_s", "rows_per_s")
"""Measures that are summed; of all others the highest value counts."""


def merge(
    own: Status, processes: Sequence[ProcessStatus], documents: Sequence[Status | None]
) -> Status:
    """Merge the documents of the processes into that of the parent.

    Args:
        own: Version, readiness and events of the parent.
        processes: What the parent knows about each process.
        documents: Document of each process; None: it did not answer.
    """
    answered = [each for each in documents if each is not None]
    reasons = list(dict.fromkeys(chain(own.reasons, *(document.reasons for document in answered))))
    models = _merge_models(answered)
    shown = listed(models)
    with_plots = plotted(shown)
    memory = [each for document in answered for each in document.memory]
    shadows = merge_shadows(each for document in answered for each in document.shadows)
    outputs = merge_outputs(each for document in answered for each in document.shadow_outputs)
    drift = worst_first(each for document in answered for each in document.drift)
    first = answered[0] if answered else own
    return replace(
        own,
        reasons=reasons[:REASONS_MAX],
        processes=[
            _process(known, document) for known, document in zip(processes, documents, strict=True)
        ],
        models=[
            model if (model.name, model.version) in with_plots else replace(model, series={})
            for model in shown
        ],
        workers=first.workers,
        gpus=first.gpus,
        memory=memory[:MEMORY_MAX],
        shadows=shadows[:SHADOWS_MAX],
        shadow_outputs=outputs[:OUTPUTS_MAX],
        drift=drift[:DRIFT_MAX],
        events=_merge_events(own.events, processes, documents),
        left_out={
            "reasons": max(len(reasons) - REASONS_MAX, 0),
            "models": len(models) - len(shown) + _left_out(answered, "models"),
            "workers": first.left_out.get("workers", 0),
            "memory": max(len(memory) - MEMORY_MAX, 0) + _left_out(answered, "memory"),
            "shadows": _left_out(answered, "shadows"),
            "shadow_outputs": _left_out(answered, "shadow_outputs"),
            "drift": max(len(drift) - DRIFT_MAX, 0) + _left_out(answered, "drift"),
        },
    )


def _process(known: ProcessStatus, document: Status | None) -> ProcessStatus:
    if document is None or not document.processes:
        return known
    return replace(
        document.processes[0], process=known.process, state=known.state, starts=known.starts
    )


def _left_out(documents: Iterable[Status], key: str) -> int:
    return max((document.left_out.get(key, 0) for document in documents), default=0)


def _merge_models(documents: Iterable[Status]) -> list[ModelStatus]:
    by_version: dict[tuple[str, str], list[ModelStatus]] = {}
    for document in documents:
        for model in document.models:
            by_version.setdefault((model.name, model.version), []).append(model)
    return [_merge_model(models) for models in by_version.values()]


def _merge_model(models: list[ModelStatus]) -> ModelStatus:
    """Merge one model version: the worst state, with its reason."""
    worst = min(models, key=lambda model: STATES.index(model.state))
    batches = sum(model.batches for model in models)
    rows = sum(model.batches * model.batch_rows for model in models)
    return replace(
        worst,
        isolated=any(model.isolated for model in models),
        row_relation=max((model.row_relation for model in models), key=len),
        workers=min(model.workers for model in models),
        **{name: _combine(name, [getattr(model, name) for model in models]) for name in _SAMPLED},
        queue_requests=sum(model.queue_requests for model in models),
        queue_rows=sum(model.queue_rows for model in models),
        queue_bytes=sum(model.queue_bytes for model in models),
        oldest_s=max(model.oldest_s for model in models),
        batches=batches,
        batch_rows=round(rows / batches, 1) if batches else 0.0,
        refusals=_sum_codes(model.refusals for model in models),
        failures=_sum_codes(model.failures for model in models),
        series=_merge_series([model.series for model in models if model.series]),
    )


_SAMPLED = (*SUMMED, "total_p50_ms", "total_p95_ms", "total_p99_ms")


def _merge_series(
    series: Sequence[Mapping[str, list[float | None]]],
) -> dict[str, list[float | None]]:
    """Merge series of equal length, which end at the same tick or at two adjacent ones."""
    names = series[0] if series else ()
    return {
        name: [
            _combine(name, values)
            for values in zip(*(each.get(name, []) for each in series), strict=False)
        ]
        for name in names
    }


def _combine(name: str, values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return round(sum(known), 3) if name in SUMMED else max(known)


def _sum_codes(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total.most_common(CODES_MAX))


def _merge_events(
    own: list[Event], processes: Sequence[ProcessStatus], documents: Sequence[Status | None]
) -> list[Event]:
    """All events, the latest first."""
    events = list(own)
    for known, document in zip(processes, documents, strict=True):
        if document is not None:
            events += [replace(event, process=known.process) for event in document.events]
    return sorted(events, key=attrgetter("at_s"), reverse=True)[:EVENTS_MAX]
