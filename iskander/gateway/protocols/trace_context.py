"""Parser of the W3C trace context of a call or batch.

An invalid `traceparent` is ignored, as the specification requires: the request then has no caller
in its trace. An invalid `tracestate` is dropped without the `traceparent`.

Pure. Source: W3C Trace Context, sections 3.2 and 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from iskander.gateway.scheduling.tracing import TraceContext

PARENT = "traceparent"
STATE = "tracestate"
STATE_CHARACTERS_MAX = 512
"""A longer `tracestate` may be dropped."""

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]+")
_SAMPLED = 1


def parse_context(parent: str, state: str = "") -> TraceContext | None:
    """Parse the values of `traceparent` and `tracestate`; None if the former is invalid."""
    match = _PARENT.fullmatch(parent.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Later versions may append fields to those of version 00.
    if version == "ff" or (version == "00" and rest is not None):
        return None
    trace, span = bytes.fromhex(trace_id), bytes.fromhex(span_id)
    if not any(trace) or not any(span):
        return None
    if len(state) > STATE_CHARACTERS_MAX or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(trace, span, bool(int(flags, 16) & _SAMPLED), state)


def context_of_headers(headers: Iterable[tuple[str, Any]]) -> TraceContext | None:
    """Parse the context in the headers of a call; None if there is no valid one."""
    parents, states = [], []
    for name, value in headers:
        if name == PARENT:
            parents.append(value)
        elif name == STATE:
            states.append(value)
    # Several `traceparent` headers are invalid; several `tracestate` headers are one list.
    return parse_context(parents[0], ",".join(states)) if len(parents) == 1 else None
