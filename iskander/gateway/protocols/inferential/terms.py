"""Terms of an observation, from fields of its envelope and strings of its metadata.

Metadata example: `observe(..., deadline_ms="30")`. The keys `traceparent` and `tracestate` are the
caller's span. Other metadata keys are ignored.

Pure. Source: the protocol of the package `inferential` 1.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from iskander.errors import MalformedInput
from iskander.foundation.clock import NS_PER_MS
from iskander.foundation.decoders import thread_safe
from iskander.gateway.auth.source import UNKNOWN_SOURCE, Source
from iskander.gateway.protocols.terms import DAY_MS, Milliseconds
from iskander.gateway.protocols.trace_context import PARENT, STATE, parse_context
from iskander.gateway.scheduling.request import PRIORITY_MAX, Terms


@thread_safe
class InferentialTerms(msgspec.Struct, frozen=True):
    """Terms in the metadata of an observation."""

    deadline_ms: Milliseconds | None = None  # From its arrival to its deadline.
    ttl_ms: Milliseconds | None = None  # Maximum time in the queue.
    newest_wins: bool | None = None  # A newer observation of the client replaces a queued one.


NO_TERMS = InferentialTerms()
NAMES = frozenset(InferentialTerms.__struct_fields__)


def read_terms(
    envelope: Any,  # noqa: ANN401
    client: str,
    *,
    newest_wins: bool,
    wall_ns: int,
    source: Source = UNKNOWN_SOURCE,
    is_traced: bool = False,
) -> Terms:
    """Return the terms of an observation; raises MalformedInput for an invalid one in its metadata.

    Args:
        envelope: An `Observation`; its priority and urgency are clamped to the valid range.
        client: Name of the client.
        newest_wins: Default for metadata without that key.
        wall_ns: Current wall-clock time.
        source: Source of the request.
        is_traced: Whether the caller's span is read.
    """
    metadata = envelope.metadata
    terms = _read_metadata(metadata)
    is_traced = is_traced and PARENT in metadata
    urgency, stamp_ns = envelope.urgency, envelope.timestamp_ns
    steps = envelope.steps_remaining if envelope.HasField("steps_remaining") else None
    return Terms(
        client=client,
        is_named=True,
        priority=min(envelope.priority, PRIORITY_MAX),
        urgency=min(urgency, 1.0) if urgency > 0 else 0.0,  # NaN gives 0.
        budget_ms=terms.deadline_ms,
        ttl_ms=terms.ttl_ms,
        steps_remaining=steps,
        age_ms=max(wall_ns - stamp_ns, 0) / NS_PER_MS if stamp_ns else 0.0,
        is_newest_wins=newest_wins if terms.newest_wins is None else terms.newest_wins,
        source=source,
        trace=parse_context(metadata[PARENT], metadata.get(STATE, "")) if is_traced else None,
    )


def _read_metadata(metadata: Mapping[str, str]) -> InferentialTerms:
    fields = {name: metadata[name] for name in NAMES if name in metadata}
    if not fields:
        return NO_TERMS
    try:
        return msgspec.convert(fields, InferentialTerms, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        kind = "true or false" if name == "newest_wins" else f"milliseconds from 0 to {DAY_MS}"
        got = f"`{name}` is {fields.get(name, '')[:100]!r}, wanted {kind}"
        raise MalformedInput(f"the observation's metadata: {got}") from None
