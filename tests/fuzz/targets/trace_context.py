"""Trace contexts in headers, with OpenTelemetry's propagator as the reference.

An input is lines `NAME: VALUE`. Deliberate differences: the reference accepts several `traceparent`
headers by their first one, rejects long ones, and drops members of `tracestate`; here an invalid
list is dropped.
"""

from __future__ import annotations

from random import Random

from opentelemetry.trace import SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fuzz import mutation
from iskander.gateway.protocols.trace_context import PARENT, STATE, context_of_headers

ITERATIONS = 2000
CHARACTERS_MAX = 512
"""Of a `traceparent` in the reference."""
PROPAGATOR = TraceContextTextMapPropagator()
VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WORDS = [
    "00", "01", "ff", "-", "0" * 32, "0" * 16, "af", "AF", "g", " ", "\t", "\n", "=", ",", "@",
    "k=v", "٣", "\x7f", "traceparent: ", "tracestate: ", "x" * 300,
]  # fmt: skip


def seeds() -> list[bytes]:
    return [
        each.encode()
        for each in (
            f"{PARENT}: {VALID}",
            f"{PARENT}: {VALID}\n{STATE}: a=1,b@c=2",
            f"{PARENT}: {VALID[:-2]}00\n{STATE}: a=1\n{STATE}: b=2",
            f"{PARENT}: cc{VALID[2:]}-what-follows",
            f"{PARENT}: {VALID}\n{PARENT}: {VALID}",
        )
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    if not random.randrange(4):
        return mutation.flip(raw, other, random)
    text = raw.decode(errors="replace")
    at = random.randrange(len(text) + 1)
    end = min(at + random.choice((0, 0, 1, 2, 16)), len(text))
    return (text[:at] + random.choice(WORDS) + text[end:]).encode(errors="replace")


def run(raw: bytes) -> None:
    lines = [line.partition(": ") for line in raw.decode(errors="replace").split("\n")]
    headers = [(name, value) for name, _, value in lines]
    parents = [value for name, value in headers if name == PARENT]
    states = [value for name, value in headers if name == STATE]
    actual = context_of_headers(headers)
    if len(parents) != 1 or len(parents[0]) > CHARACTERS_MAX:
        assert actual is None or len(parents) == 1
        return
    carrier = {PARENT: parents[0].strip(), STATE: ",".join(states)}
    expected: SpanContext = get_current_span(PROPAGATOR.extract(carrier)).get_span_context()
    assert (actual is not None) == expected.is_valid, f"{actual}, expected {expected}"
    if actual is None:
        return
    assert int.from_bytes(actual.trace_id) == expected.trace_id
    assert int.from_bytes(actual.span_id) == expected.span_id
    assert actual.is_sampled == expected.trace_flags.sampled
    assert len(actual.state) <= 512 and actual.state in ("", ",".join(states))
