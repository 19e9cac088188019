"""Who listens to what is measured, point by point: functions of a program that embeds the gateway.

Without any the path of a batch knows nothing of this.

Runs on: gateway loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping

Labels = Mapping[str, str]
Point = tuple[int, float, Labels]
"""When, in nanoseconds; the value; what it is of."""
Listener = Callable[[str, float, Labels], None]
LISTENERS: list[Listener] = []
"""Told of every point as (name, value, labels): those that are here when a server is made."""

log = logging.getLogger("iskander.metrics")


class SubscribedRing(deque[Point]):
    """The last points of a measure, to which somebody listens.

    Args:
        name: Of the measure.
        points_max: That it keeps.
        listeners: Whom it tells.
    """

    def __init__(self, name: str, points_max: int, listeners: tuple[Listener, ...]) -> None:
        super().__init__(maxlen=points_max)
        self._name = name
        self._listeners = dict.fromkeys(listeners, False)

    def append(self, point: Point) -> None:
        """Keep a point, and tell of it."""
        super().append(point)
        for listener, has_failed in self._listeners.items():
            try:
                listener(self._name, point[1], point[2])
            except Exception:
                # It is not ours, and must cost neither the point nor the others; it tells once.
                self._listeners[listener] = True
                if not has_failed:
                    log.exception("a listener failed at `%s`", self._name)
