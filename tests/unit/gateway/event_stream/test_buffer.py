"""Buffer of the event stream: bounded memory, and losses that are always said."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from iskander.gateway.event_stream import buffer as module
from iskander.gateway.event_stream.buffer import EventBuffer, Reader
from iskander.gateway.event_stream.messages import SentEvent, parse_event

STREAM = "0123456789abcdef"
LARGE = 1 << 20
SMALL = 4096
"""Holds 14 of the events of these tests."""


def all_topics(topic: str) -> bool:
    del topic
    return True


def make(bytes_max: int = LARGE) -> EventBuffer:
    return EventBuffer(STREAM, bytes_max)


def add(buffer: EventBuffer, number: int, topic: str = "worker") -> None:
    buffer.add(topic, topic, b'{"number":%d}' % number)


def read(reader: Reader, bytes_max: int = LARGE) -> list[SentEvent]:
    return [parse_event(text) for text in reader.take(bytes_max).decode().split("\n\n") if text]


def numbers(events: list[SentEvent]) -> list[int]:
    return [json.loads(event.data)["number"] for event in events if event.name != "lost"]


def losses(events: list[SentEvent]) -> list[tuple[int | None, str]]:
    found = (json.loads(event.data) for event in events if event.name == "lost")
    return [(lost["lost"], lost["reason"]) for lost in found]


def test_reader_gets_what_follows_its_start() -> None:
    buffer = make()
    add(buffer, 0)
    reader = buffer.open(all_topics)
    assert not reader.is_behind and reader.take(LARGE) == b""
    add(buffer, 1)
    add(buffer, 2)
    events = read(reader)
    assert numbers(events) == [1, 2]
    assert [event.position for event in events] == [f"{STREAM}-2", f"{STREAM}-3"]
    assert reader.position == f"{STREAM}-3".encode()


def test_text_of_an_event_is_made_once() -> None:
    buffer = make()
    readers = [buffer.open(all_topics) for _ in range(2)]
    add(buffer, 0)
    number = readers[0].at
    assert buffer.event(number)[1] is buffer.event(number)[1]
    assert readers[0].take(LARGE) == readers[1].take(LARGE) == buffer.event(number)[1]


def test_take_has_at_most_one_event_above_its_bytes() -> None:
    buffer = make()
    reader = buffer.open(all_topics)
    for number in range(10):
        add(buffer, number)
    one = len(buffer.event(0)[1])
    assert numbers(read(reader, 1)) == [0]
    assert numbers(read(reader, one + 1)) == [1, 2]
    assert reader.is_behind


def test_take_looks_at_a_bounded_number_of_events() -> None:
    buffer = make(LARGE * 8)
    reader = buffer.open(lambda topic: topic == "model")
    for number in range(module.SCANNED_MAX + 1):
        add(buffer, number)
    add(buffer, 7, "model")
    assert reader.take(LARGE) == b"" and reader.is_behind
    assert numbers(read(reader)) == [7] and not reader.is_behind


def test_slow_reader_is_told_how_many_selected_events_it_lost() -> None:
    buffer = make(SMALL)
    every, models = buffer.open(all_topics), buffer.open(lambda topic: topic == "model")
    for number in range(100):
        add(buffer, number, "model" if number % 4 == 0 else "worker")
    events, selected = read(every), read(models)
    (lost, reason), *others = losses(events)
    assert not others and reason == "slow" and lost is not None
    assert numbers(events) == list(range(lost, 100)) and 0 < lost < 100
    assert losses(selected) == [(len(range(0, lost, 4)), "slow")]
    assert losses(read(every)) == []
    assert events[0].position == f"{STREAM}-{lost}"


def test_event_larger_than_the_buffer_is_a_loss() -> None:
    buffer = make(SMALL)
    reader = buffer.open(all_topics)
    buffer.add("worker", "worker", b'"%b"' % (b"x" * SMALL))
    assert losses(read(reader)) == [(1, "slow")] and not reader.is_behind
    add(buffer, 1)
    assert numbers(read(reader)) == [1]


def test_reader_goes_on_after_its_last_event() -> None:
    buffer = make()
    for number in range(5):
        add(buffer, number)
    events = read(buffer.open(all_topics, f"{STREAM}-3"))
    assert numbers(events) == [3, 4] and losses(events) == []
    assert read(buffer.open(all_topics, f"{STREAM}-5")) == []


def test_gap_after_a_reconnection_is_said() -> None:
    buffer = make(SMALL)
    for number in range(100):
        add(buffer, number)
    events = read(buffer.open(all_topics, f"{STREAM}-2"))
    ((lost, reason),) = losses(events)
    assert reason == "expired" and numbers(events) == list(range(2 + (lost or 0), 100))
    assert events[0].name == "lost"


def test_position_of_another_stream_is_a_gap_of_unknown_length() -> None:
    buffer = make()
    add(buffer, 0)
    for position in (f"{'f' * 16}-0", f"{STREAM}-99", "garbage", "-1", f"{STREAM}-" + "9" * 30):
        reader = buffer.open(all_topics, position)
        add(buffer, 1)
        events = read(reader)
        assert losses(events) == [(None, "restarted")] and numbers(events) == [1]


def test_closed_reader_is_forgotten() -> None:
    buffer = make(SMALL)
    reader = buffer.open(all_topics)
    buffer.close(reader)
    for number in range(100):
        add(buffer, number)
    assert reader.at == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 30)),
            st.tuples(st.just("take"), st.integers(0, 400)),
            st.tuples(st.just("reconnect"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_received_and_lost_events_are_all(steps: list[tuple[str, int]]) -> None:
    """Of any reader that selects all topics, reads in pieces, and connects again."""
    buffer = make(SMALL)
    reader = buffer.open(all_topics)
    received: list[int] = []
    missing = added = 0
    position = reader.position.decode()

    def note(events: list[SentEvent]) -> None:
        nonlocal missing, position
        for event in events:
            position = event.position
        received.extend(numbers(events))
        missing += sum(lost or 0 for lost, _ in losses(events))

    for step, count in steps:
        if step == "add":
            for _ in range(count):
                add(buffer, added)
                added += 1
        elif step == "take":
            note(read(reader, count))
        else:
            buffer.close(reader)
            reader = buffer.open(all_topics, position)
    note(read(reader))
    assert received == sorted(set(received)) and len(received) + missing == added
