"""Conformance of the HTTP/2 transport to RFC 9113 and RFC 7541, case by case, over a socket.

The cases are `support/http2_cases.py`; `test_h2spec.py` runs the tool whose names they have.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.grpc_listener import listening
from support.http2 import GOAWAY, RST_STREAM, Wire, ping
from support.http2_cases import (
    CASES,
    Answered,
    Case,
    Closed,
    Open,
    Reset,
    Served,
    is_acknowledged,
)

from iskander.gateway.transport.http2.call import Call

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
OPEN_S = 0.02
"""Keeps a call open for the frames after its headers."""
LAST_PING = b"the end."


async def respond(call: Call) -> None:
    await asyncio.sleep(OPEN_S)
    await call.answer(b"message")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with listening(respond) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def other(address: str) -> Iterator[Wire]:
    """Another connection, which is not affected."""
    with Wire(address) as wire:
        yield wire


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_case(address: str, other: Wire, case: Case) -> None:
    with Wire(address, case.first) as wire:
        for is_bytes, parts in itertools.groupby(case.parts, lambda part: isinstance(part, bytes)):
            if is_bytes:
                # At once, so that the call does not end in between.
                wire.feed(*parts)
            else:
                for wait in parts:
                    wait(wire)
        check(wire, case)
    require_open(other)


def check(wire: Wire, case: Case) -> None:
    """Checks the outcome of a case."""
    match case.outcome:
        case Closed(code):
            wire.until_over()
            assert [each.code for each in wire.frames_of(GOAWAY)] == [code]
        case Reset(code, stream_id):
            wire.until(lambda: wire.frames_of(RST_STREAM))
            resets = [(each.stream_id, each.number) for each in wire.frames_of(RST_STREAM)]
            assert resets == [(stream_id, code)]
            require_open(wire)
        case Served(stream_id):
            answer = wire.answer(stream_id)
            assert (answer.messages, answer.status, answer.reset) == ([b"message"], 0, None)
            require_open(wire)
        case Answered(stream_id):
            answer = wire.answer(stream_id)
            assert answer.blocks[0][":status"] != "200" and not answer.messages
            require_open(wire)
        case Open():
            require_open(wire)


def require_open(wire: Wire) -> None:
    """Checks that the connection is open."""
    wire.frames.clear()
    wire.feed(ping(LAST_PING))
    wire.until(lambda: is_acknowledged(wire, LAST_PING))


def test_the_page_names_the_number_of_cases() -> None:
    (number,) = re.findall(r"test_http2_conformance\.py` \| all (\d+) \|", PAGE.read_text())
    assert int(number) == len(CASES)
