"""Queue of events until the next message, and their numbers.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from iskander.gateway.event_stream.messages import BATCH_EVENTS_MAX, Event

TOPICS_MAX = 4096
"""Topics with numbers; the one that is unused for the longest time starts again at 0."""


class EventQueue:
    """Events in the order of their arrival.

    Attributes:
        dropped: Events that did not fit.
        next: Number of the next event of each topic.
    """

    def __init__(self, events_max: int) -> None:
        self.dropped = 0
        self.next: OrderedDict[str, int] = OrderedDict()
        self._events: deque[tuple[str, Event]] = deque()
        self._events_max = events_max

    def __len__(self) -> int:
        return len(self._events)

    def add(self, topic: str, event: Event) -> None:
        """Add an event, or drop it if the queue is full."""
        if len(self._events) >= self._events_max:
            self.dropped += 1
        else:
            self._events.append((topic, event))

    def take(self) -> list[tuple[str, int, list[Event]]]:
        """Remove the next events, at most `BATCH_EVENTS_MAX`; return (topic, first, events)."""
        by_topic: dict[str, list[Event]] = {}
        for _ in range(min(len(self._events), BATCH_EVENTS_MAX)):
            topic, event = self._events.popleft()
            by_topic.setdefault(topic, []).append(event)
        return [
            (topic, self._number(topic, len(events)), events) for topic, events in by_topic.items()
        ]

    def _number(self, topic: str, count: int) -> int:
        first = self.next.pop(topic, 0)
        self.next[topic] = first + count
        if len(self.next) > TOPICS_MAX:
            self.next.popitem(last=False)
        return first
