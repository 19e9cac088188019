"""Count of the events that a subscriber lost.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from iskander.gateway.event_stream.messages import Batch, Heartbeat

TOPICS_MAX = 16_384


class Losses:
    """Numbers of the next events of each stream and topic.

    Attributes:
        lost: Events that did not arrive, of the subscribed topics, since their first message.
        dropped: Events that each stream's publisher dropped, since its start.
    """

    def __init__(self, topics: Sequence[str] = ("",)) -> None:
        self.lost = 0
        self.dropped: OrderedDict[str, int] = OrderedDict()
        self._topics = tuple(topics)
        self._next: OrderedDict[tuple[str, str], int] = OrderedDict()

    def on_batch(self, topic: str, batch: Batch) -> int:
        """Count a batch; return how many events were lost before it."""
        self._note_dropped(batch.stream, batch.dropped)
        return self._advance(batch.stream, topic, batch.first, len(batch.events))

    def on_heartbeat(self, heartbeat: Heartbeat) -> int:
        """Count a heartbeat; return how many events were lost before it."""
        self._note_dropped(heartbeat.stream, heartbeat.dropped)
        return sum(
            self._advance(heartbeat.stream, topic, number, 0)
            for topic, number in heartbeat.next.items()
            if topic.startswith(self._topics)
        )

    def _advance(self, stream: str, topic: str, first: int, count: int) -> int:
        key = (stream, topic)
        lost = max(first - self._next.pop(key, first), 0)
        self._next[key] = first + count
        if len(self._next) > TOPICS_MAX:
            self._next.popitem(last=False)
        self.lost += lost
        return lost

    def _note_dropped(self, stream: str, dropped: int) -> None:
        self.dropped[stream] = dropped
        if len(self.dropped) > TOPICS_MAX:
            self.dropped.popitem(last=False)
