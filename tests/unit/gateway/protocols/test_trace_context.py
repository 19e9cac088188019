"""W3C trace context: parsing, and the contexts of calls and batches."""

from __future__ import annotations

import pytest

from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.trace_context import context_of_headers, parse_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
OTHER = f"00-{TRACE}-00f067aa0ba902b7-00"


def test_valid_context() -> None:
    context = parse_context(PARENT, "vendor=1,other=2")
    assert context is not None
    assert (context.trace_id.hex(), context.span_id.hex()) == (TRACE, SPAN)
    assert context.is_sampled
    assert context.state == "vendor=1,other=2"


@pytest.mark.parametrize(
    ("parent", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f" {PARENT} ", True),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"01-{TRACE}-{SPAN}-00-later-fields", False),
    ],
)
def test_flags_and_later_versions(parent: str, is_sampled: bool) -> None:
    context = parse_context(parent)
    assert context is not None
    assert context.is_sampled is is_sampled


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"{PARENT}-more",
        f"{PARENT}\n-x",
        f"00-{TRACE}-{SPAN}-0g",
        "é" * 55,
    ],
)
def test_invalid_context_is_ignored(parent: str) -> None:
    assert parse_context(parent) is None


@pytest.mark.parametrize("state", ["x" * 513, "a=\x00", "a=é"])
def test_invalid_state_is_dropped_alone(state: str) -> None:
    context = parse_context(PARENT, state)
    assert context is not None
    assert context.state == ""


def test_headers_of_a_call() -> None:
    several = [("tracestate", "a=1"), ("traceparent", PARENT), ("tracestate", "b=2")]
    context = context_of_headers(several)
    assert context is not None
    assert context.state == "a=1,b=2"
    assert context_of_headers([("x", "1")]) is None
    assert context_of_headers([("traceparent", PARENT), ("traceparent", OTHER)]) is None


def test_terms_have_the_context_of_the_batch_or_else_of_the_call() -> None:
    terms = StreamTerms([("traceparent", PARENT)], None, is_traced=True)
    of_call = parse_context(PARENT)
    assert terms.trace == terms.of(b"").trace == of_call
    assert terms.of(b'{"iskander": {"priority": 0}}').trace == of_call
    own = b'{"iskander": {"traceparent": "%s"}}' % OTHER.encode()
    assert terms.of(own).trace == parse_context(OTHER)
    assert terms.of(b'{"iskander": {"traceparent": "invalid"}}').trace == of_call


def test_contexts_are_not_read_without_tracing() -> None:
    terms = StreamTerms([("traceparent", PARENT)], None)
    own = b'{"iskander": {"traceparent": "%s"}}' % OTHER.encode()
    assert terms.trace is terms.of(b"").trace is terms.of(own).trace is None
