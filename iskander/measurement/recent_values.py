"""The last points of each measure: rings of a fixed length, read by name, labels and age.

What `histogram` cannot say: how it is now, and for which labels.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Annotated

import msgspec

from iskander.clock import NS_PER_S, now_ns
from iskander.decoders import thread_safe
from iskander.errors import MalformedInput
from iskander.measurement.subscribers import LISTENERS, Labels, Point, SubscribedRing

POINTS_MAX = 1024
NAMES_MAX = 64
WINDOW_S_MAX = 86_400 * 366


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What the points that match a question come to; values are None where there are none."""

    count: int = 0
    avg: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    latest: float | None = None


@thread_safe
class ValuesQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of the action `metrics`.

    Attributes:
        name: Of a measure; every one without.
        labels: That a point must have; it may have others beside them.
        window_s: How old a point may be; any age without.
    """

    name: str | None = None
    labels: dict[str, str] = {}
    window_s: Annotated[float, msgspec.Meta(ge=0, le=WINDOW_S_MAX)] | None = None


class RecentValues:
    """The last points of each measure.

    Args:
        points_max: Of one measure; then each new point takes the place of the oldest.
        names_max: Measures; points of more are dropped, and counted.

    Attributes:
        dropped: Points of measures that there was no room for.
    """

    def __init__(self, points_max: int = POINTS_MAX, names_max: int = NAMES_MAX) -> None:
        self._points_max = points_max
        self._names_max = names_max
        self._rings: dict[str, deque[Point]] = {}
        self._listeners = tuple(LISTENERS)
        self.dropped = 0

    def __repr__(self) -> str:
        points = sum(map(len, self._rings.values()))
        return f"<Recent {points} points of {len(self._rings)} measures, {self.dropped} dropped>"

    def record(self, name: str, value: float, labels: Labels) -> None:
        """Keep a point; in the path of every batch.

        Args:
            name: Of the measure, with its unit last.
            value: In that unit.
            labels: Kept as it is and never changed: callers share one for all of their points.
        """
        ring = self._rings.get(name)
        if ring is None and len(self._rings) >= self._names_max:
            self.dropped += 1
            return
        self.ring(name).append((now_ns(), value, labels))

    def ring(self, name: str) -> deque[Point]:
        """The points of a measure, for who has many and knows their times: (ns, value, labels)."""
        ring = self._rings.get(name)
        if ring is None:
            ring = deque(maxlen=self._points_max)
            if self._listeners:
                ring = SubscribedRing(name, self._points_max, self._listeners)
            self._rings[name] = ring
        return ring

    def names(self) -> list[str]:
        """The measures that there are points of."""
        return sorted(self._rings)

    def query(
        self, name: str, labels: Labels | None = None, window_s: float | None = None
    ) -> Summary:
        """What the points of a measure come to.

        Args:
            name: Of the measure; one that nobody has recorded has no points.
            labels: That a point must have; it may have others beside them.
            window_s: How old a point may be; any age without.
        """
        ring = self._rings.get(name, deque())
        since_ns = 0 if window_s is None else now_ns() - int(window_s * NS_PER_S)
        wanted = (labels or {}).items()
        values = []
        for at_ns, value, has in reversed(ring):
            if at_ns < since_ns:
                break
            if wanted <= has.items():
                values.append(value)
        return _summarise(values) if values else Summary()

    async def answer(self, body: bytes) -> dict[str, Summary]:
        """Answer the action `metrics`: a summary for each measure asked for.

        A full ring takes 0.15 to 0.25 ms, so that others have their turn between two.

        Raises:
            MalformedInput: The body is not a question; says what was wanted.
        """
        try:
            question = msgspec.json.decode(body, type=ValuesQuery) if body else ValuesQuery()
        except msgspec.MsgspecError as error:
            raise MalformedInput(
                f'action `metrics`: wanted {{"name"?, "labels"?, "window_s"?}}: {error}'
            ) from None
        answers: dict[str, Summary] = {}
        for name in self.names() if question.name is None else [question.name]:
            answers[name] = self.query(name, question.labels, question.window_s)
            await asyncio.sleep(0)
        return answers


def _summarise(newest_first: list[float]) -> Summary:
    ordered = sorted(newest_first)
    return Summary(
        count=len(ordered),
        avg=sum(ordered) / len(ordered),
        min=ordered[0],
        max=ordered[-1],
        p50=_percentile(ordered, 50),
        p95=_percentile(ordered, 95),
        p99=_percentile(ordered, 99),
        latest=newest_first[0],
    )


def _percentile(ordered: list[float], percent: int) -> float:
    """Between the two nearest of the sorted values, in proportion."""
    place = (len(ordered) - 1) * percent / 100
    index = int(place)
    low, high = ordered[index], ordered[min(index + 1, len(ordered) - 1)]
    return low + (high - low) * (place - index)
