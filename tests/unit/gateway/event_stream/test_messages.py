"""Form of the events: the JSON of each kind, and the lines of server-sent events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.errors import ProtocolError
from iskander.gateway.event_stream.messages import (
    Change,
    Completion,
    Event,
    Lost,
    SentEvent,
    encode,
    format_event,
    format_heartbeat,
    format_position,
    parse_event,
    parse_position,
)

STREAM = "0123456789abcdef"
COMPLETION = Completion(at_s=1.5, model="m\n\u2028é", version="1", protocol="grpc", method="M")
CHANGE = Change(at_s=2.5, process=1, event="e", level="info", text="a\nb", fields={"n": 1})
LOST = Lost(lost=None, reason="restarted")


@pytest.mark.parametrize(("event", "name"), [(COMPLETION, "completion"), (CHANGE, "worker")])
def test_event_survives_its_lines(event: Event, name: str) -> None:
    text = format_event(format_position(STREAM, 7), name, encode(event))
    assert text.endswith(b"\n\n") and text.count(b"\n") == 4
    sent = parse_event(text.decode())
    assert (sent.position, sent.name) == (f"{STREAM}-7", name)
    assert sent.decode() == event


def test_topics() -> None:
    sent = SentEvent("", "completion", encode(COMPLETION).decode())
    assert sent.topic == "completion/m\n\u2028é/1"
    assert SentEvent("", "worker", encode(CHANGE).decode()).topic == "worker"
    assert SentEvent("", "lost", encode(LOST).decode()).topic == "lost"


def test_heartbeat_has_no_event_but_a_position() -> None:
    text = format_heartbeat(format_position(STREAM, 3)).decode()
    assert text.startswith(":") and parse_event(text) == SentEvent(f"{STREAM}-3", "", "")


@pytest.mark.parametrize("data", ["", "{", '{"kind":"other"}', '{"kind":"lost"}'])
def test_invalid_data(data: str) -> None:
    with pytest.raises(ProtocolError, match="no event of an event stream"):
        SentEvent("", "worker", data).decode()
    if not data.startswith('{"'):
        with pytest.raises(ProtocolError, match="no event of an event stream"):
            assert SentEvent("", "completion", data).topic


@given(st.text())
def test_any_lines_are_parsed(lines: str) -> None:
    sent = parse_event(lines)
    assert "\n" not in sent.position + sent.name


@given(st.one_of(st.text(max_size=64), st.from_regex(r"[0-9a-f]{16}-[0-9]{1,20}")))
def test_position_is_accepted_in_its_own_form_only(text: str) -> None:
    found = parse_position(text)
    if found is not None:
        stream, number = text.split("-")
        assert found == (stream, int(number)) and len(number) <= 18
