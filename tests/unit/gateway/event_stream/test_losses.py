"""Numbers of events: those of the queue, and the losses that a subscriber counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from iskander.gateway.event_stream import losses as counting
from iskander.gateway.event_stream import queue as queueing
from iskander.gateway.event_stream.losses import Losses
from iskander.gateway.event_stream.messages import (
    BATCH_EVENTS_MAX,
    Batch,
    Completion,
    Heartbeat,
    completion_topic,
    decode,
    encode,
)
from iskander.gateway.event_stream.queue import EventQueue


def completion(model: str = "m") -> Completion:
    return Completion(at_s=1.5, model=model, version="1", protocol="grpc", method="M", rows=3)


def batch(first: int, count: int = 1, stream: str = "s", dropped: int = 0) -> Batch:
    events = [completion() for _ in range(count)]
    return Batch(stream=stream, process=None, first=first, dropped=dropped, events=events)


def test_messages_survive_their_encoding() -> None:
    sent = batch(7, 2)
    assert decode(encode(sent)) == sent
    beat = Heartbeat(stream="s", process=1, dropped=2, next={"worker": 3})
    assert decode(encode(beat)) == beat


def test_first_message_is_no_loss() -> None:
    losses = Losses()
    assert losses.on_batch("worker", batch(100)) == 0
    assert losses.on_batch("worker", batch(101, 5)) == 0
    assert losses.on_batch("worker", batch(110)) == 4
    assert losses.lost == 4


def test_topics_and_streams_are_counted_apart() -> None:
    losses = Losses()
    for topic, stream, first in (("a", "s", 0), ("b", "s", 5), ("a", "t", 9), ("a", "s", 1)):
        assert losses.on_batch(topic, batch(first, stream=stream)) == 0


def test_heartbeat_shows_lost_last_events_of_the_own_topics() -> None:
    losses = Losses(("completion/m/", "worker"))
    losses.on_batch("worker", batch(0))
    beat = Heartbeat(
        stream="s", process=None, dropped=4, next={"worker": 3, "model": 9, "completion/m/1": 2}
    )

    assert losses.on_heartbeat(beat) == 2
    later = Heartbeat(stream="s", process=None, dropped=4, next=beat.next | {"model": 12})
    assert losses.on_heartbeat(later) == 0
    assert losses.on_batch("completion/m/1", batch(3, dropped=4)) == 1
    assert losses.dropped == {"s": 4}


def test_numbers_that_start_again_are_no_loss() -> None:
    losses = Losses()
    losses.on_batch("a", batch(100))
    assert losses.on_batch("a", batch(0)) == 0
    assert losses.on_batch("a", batch(1)) == 0


def test_table_of_topics_is_bounded() -> None:
    losses = Losses()
    for number in range(counting.TOPICS_MAX + 10):
        losses.on_batch(str(number), batch(0, stream=str(number)))
    assert len(losses._next) == len(losses.dropped) == counting.TOPICS_MAX


def test_queue_drops_and_counts_what_does_not_fit() -> None:
    queue = EventQueue(3)
    for _ in range(5):
        queue.add("a", completion())
    assert len(queue) == 3 and queue.dropped == 2


def test_queue_groups_by_topic_in_order() -> None:
    queue = EventQueue(100)
    models = ["m", "n", "m"]
    for model in models:
        queue.add(completion_topic(completion(model)), completion(model))

    taken = [(topic, first, len(events)) for topic, first, events in queue.take()]
    assert taken == [("completion/m/1", 0, 2), ("completion/n/1", 0, 1)]
    queue.add("completion/m/1", completion())
    assert [first for _, first, _ in queue.take()] == [2] and queue.take() == []


def test_batches_and_numbers_of_the_queue_are_bounded() -> None:
    queue = EventQueue(10**6)
    for number in range(queueing.TOPICS_MAX + 5):
        queue.add(str(number), completion())
    while queue:
        assert sum(len(events) for _, _, events in queue.take()) <= BATCH_EVENTS_MAX
    assert len(queue.next) == queueing.TOPICS_MAX


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=300))
def test_received_and_lost_events_are_all_events(steps: list[tuple[str, bool]]) -> None:
    queue, losses, received = EventQueue(10**6), Losses(), 0
    for number, (topic, arrives) in enumerate(steps):
        queue.add(topic, completion())
        for name, first, events in queue.take():
            if arrives or number < 2:
                sent = Batch(stream="s", process=None, first=first, dropped=0, events=events)
                losses.on_batch(name, sent)
                received += len(events)
    beat = Heartbeat(stream="s", process=None, dropped=0, next=dict(queue.next))
    unseen = sum(number for topic, number in queue.next.items() if ("s", topic) not in losses._next)
    firsts = sum(
        next(
            (n for n, (t, a) in enumerate(_of(steps, topic)) if a or _index(steps, topic, n) < 2), 0
        )
        for topic in queue.next
        if ("s", topic) in losses._next
    )
    losses.on_heartbeat(beat)
    assert received + losses.lost + unseen + firsts == len(steps)


def _of(steps: list[tuple[str, bool]], topic: str) -> list[tuple[str, bool]]:
    return [step for step in steps if step[0] == topic]


def _index(steps: list[tuple[str, bool]], topic: str, number: int) -> int:
    return [index for index, step in enumerate(steps) if step[0] == topic][number]
