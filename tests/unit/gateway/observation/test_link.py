"""Gateway's end of the connection to an observer process: invalid messages end it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from iskander.gateway.observation.link import Link
from iskander.gateway.observation.messages import Copied, Report, decode_to_gateway, encode
from iskander.interprocess.control.channel import FRAME_BYTES_MAX

COPIED = Copied([1], [2])
REPORT = Report({"drift": {"counts": {"rows": 1}, "failure": "", "more": [1]}, "observer": {}})


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * FRAME_BYTES_MAX)
    with ours, theirs:
        theirs.settimeout(10)
        yield Link(ours), theirs


@pytest.mark.parametrize(
    "invalid",
    [
        b"text",
        b"\x81\xa4type\xa6Copied",
        b"\x82\xa4type\xa6Report\xa6values" + b"\x81\xa1a" * 3000,
        bytes(FRAME_BYTES_MAX + 1),
        *(
            msgspec.msgpack.encode({"type": "Report", "values": {"drift": values}})
            for values in ({"counts": {"rows": "1"}}, {"counts": [1]}, {"failure": 1}, 1)
        ),
    ],
)
def test_invalid_message_ends_the_connection(
    ends: tuple[Link, socket.socket], invalid: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    link, theirs = ends
    theirs.send(encode(COPIED))
    theirs.send(invalid)
    assert list(link.receive()) == [COPIED]
    assert caplog.records[-1].__dict__["log_event"].name == "observer_message_invalid"
    assert theirs.recv(100) == b"", "the process reads the end"
    assert list(link.receive()) == [] and link.has_ended


def test_valid_messages_are_received(ends: tuple[Link, socket.socket]) -> None:
    link, theirs = ends
    sent: list[Any] = [REPORT, COPIED, COPIED]
    for message in sent:
        theirs.send(encode(message))
    assert list(link.receive()) == sent and not link.has_ended
    assert decode_to_gateway(encode(REPORT)) == REPORT
