"""Metric callbacks of a program that embeds the gateway; without any they cost nothing.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from iskander.foundation.logs import requests as log

Labels = Mapping[str, str]
Point = tuple[int, float, Labels]
"""Time in nanoseconds, value, labels."""
Subscriber = Callable[[str, float, Labels], None]
SUBSCRIBERS: list[Subscriber] = []
"""Callbacks for every point as (name, value, labels); register them before the server starts."""


class SubscribedRing(deque[Point]):
    """The last points of a measure, with callbacks for each new one."""

    def __init__(self, name: str, points_max: int, listeners: tuple[Subscriber, ...]) -> None:
        super().__init__(maxlen=points_max)
        self._name = name
        self._listeners = dict.fromkeys(listeners, False)

    def append(self, point: Point) -> None:
        """Add a point and call the callbacks."""
        super().append(point)
        for listener, has_failed in self._listeners.items():
            try:
                listener(self._name, point[1], point[2])
            except Exception as error:
                # Foreign code: log its first failure, keep the point and call the others.
                self._listeners[listener] = True
                if not has_failed:
                    log.metric_callback_failed(metric=self._name, error=error)
