"""Figures of one point: rates, errors by code, latencies, delay of the generator.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from iskander.cli.load_generator.schedule import Load
from iskander.foundation.clock import NS_PER_MS, NS_PER_S

LATE_SHARE = 0.1
"""A generator is late if the 99th percentile of its delay is this share of that of the latency."""
LATE_NS = NS_PER_MS
"""A delay below this never counts as late: it is the precision of a sleeping thread."""
SATURATED_SHARE = 0.9
"""A generator may be the limit if it used this share of a core, because Python runs on one."""
UNSTABLE_SHARE = 0.1
PARTS = 3
"""A run is unstable if the rates of its thirds differ by more than 10 %, as in perf_analyzer."""


class Answer(NamedTuple):
    """One finished request, in nanoseconds since the start of the measurement.

    Attributes:
        due_ns: Intended send time of an open loop, else the send time.
        code: Code of the error; empty for results.
        was_busy: No client of an open loop was idle when the request was due.
    """

    due_ns: int
    sent_ns: int
    end_ns: int
    code: str = ""
    was_busy: bool = False


class Figures(NamedTuple):
    """Figures of one point; times in milliseconds.

    Attributes:
        seconds: Time of the measurement.
        offered: Requests a second that were due.
        completed: Requests a second with results, before the end.
        requests: Number of requests.
        errors: Failed requests by code.
        unanswered: Requests without an answer when the run ended.
        busy: Share of an open loop's requests that waited for an idle client.
        lag_p99: 99th percentile of the delay of the others between intended and actual send time.
        is_late: The delay of the generator is a part of the latencies.
        cpu: CPU time of the generator as a share of one core.
        is_saturated: The share of the generator's time permits hardly more requests.
        is_stable: The rates of the thirds of the run agree.
    """

    title: str
    rate: float
    clients: int
    rows: int
    seconds: float
    requests: int
    offered: float
    completed: float
    rows_per_s: float
    errors: dict[str, int]
    unanswered: int
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    busy: float
    lag_p99: float
    is_late: bool
    cpu: float
    is_saturated: bool
    is_stable: bool


def figures_of(
    load: Load,
    rows: int,
    answers: Sequence[Answer],
    duration_s: float,
    *,
    unanswered: int = 0,
    cpu: float = 0.0,
) -> Figures:
    """Return the figures of the answers whose requests were due during the measurement."""
    good = np.array([(a.due_ns, a.sent_ns, a.end_ns) for a in answers if not a.code], np.int64)
    good = good.reshape(-1, 3)
    latencies = np.sort(good[:, 2] - good[:, 0])
    lags = np.sort([each.sent_ns - each.due_ns for each in answers if not each.was_busy])
    busy = sum(each.was_busy for each in answers) if load.rate else 0
    completed = int((good[:, 2] < duration_s * NS_PER_S).sum()) / duration_s
    p50, p90, p95, p99, longest = (_ms(latencies, share) for share in (50, 90, 95, 99, 100))
    lag_p99 = _ms(lags, 99)
    is_late = bool(load.rate) and lag_p99 > LATE_NS / NS_PER_MS and lag_p99 > LATE_SHARE * p99
    return Figures(
        title=load.title,
        rate=load.rate,
        clients=load.clients,
        rows=rows,
        seconds=duration_s,
        requests=len(answers) + unanswered,
        offered=(len(answers) + unanswered) / duration_s,
        completed=completed,
        rows_per_s=completed * rows,
        errors=dict(Counter(each.code for each in answers if each.code)),
        unanswered=unanswered,
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=longest,
        busy=busy / max(len(answers), 1),
        lag_p99=lag_p99,
        is_late=is_late,
        cpu=cpu,
        is_saturated=cpu > SATURATED_SHARE,
        is_stable=_is_stable(good[:, 2], duration_s),
    )


def _ms(ordered: npt.NDArray[np.int64], percent: int) -> float:
    """A percentile by nearest rank; 0 without values."""
    if not len(ordered):
        return 0.0
    return float(np.percentile(ordered, percent, method="inverted_cdf")) / NS_PER_MS


def _is_stable(ends_ns: npt.NDArray[np.int64], duration_s: float) -> bool:
    limits = np.linspace(0, duration_s * NS_PER_S, PARTS + 1)
    counts, _ = np.histogram(ends_ns, limits)
    return bool(counts.min() >= (1 - UNSTABLE_SHARE) * counts.max())
