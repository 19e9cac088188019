"""Client terms of a request (priority, deadline and others), as Flight clients send them.

The tensor protocols carry the same fields in their own messages (`oip/terms.py`,
`inferential/terms.py`). In Flight, call headers apply to a whole stream; `app_metadata` of one
batch is a JSON object or msgpack map with the key `iskander`:

    iskander-client: robot-7            {"iskander": {"deadline_ms": 20, "priority": 0}}
    iskander-deadline-ms: 30

Terms of a batch override those of its stream. Other `app_metadata` is ignored; all of it is echoed.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from iskander.errors import MalformedInput, RemoteLoop
from iskander.foundation.decoders import DECODE_ERRORS, thread_safe
from iskander.gateway.protocols.trace_context import STATE_CHARACTERS_MAX
from iskander.gateway.scheduling.request import PRIORITY_MAX

HEADER_PREFIX: Final = "iskander-"
KEY: Final = b"iskander"
"""Metadata without this key contains no terms."""
DAY_MS = 86_400_000
HOPS_MAX: Final = 4

Milliseconds = Annotated[float, Meta(ge=0, le=DAY_MS)]


class ClientTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms of a request; header names have `-` for `_` and the prefix `iskander-`.

    Attributes:
        client: Client name, stable across calls; for fairness, limits and rhythm.
        priority: 0 (highest) to 9; default 1.
        urgency: 0 to 1.
        deadline_ms: Milliseconds from the batch's arrival to its deadline.
        ttl_ms: Maximum milliseconds in the queue.
        steps_remaining: Actions that the client has left before it needs this result.
        timestamp_ns: Time of the observation, in nanoseconds of the wall clock.
        newest_wins: A newer batch of this client replaces a queued one.
        run_alone: Do not combine the rows with those of other requests in one batch: other
            requests then do not change the bits of the results.
        route_key: Selects a version by the versions' shares; equal keys select the same version.
            Default: the client's name. A Flight stream sends it in its headers.
        traceparent: Trace context of a batch, in place of the one of its call (W3C Trace Context).
            Without `tracing.enabled` it has no effect.
        tracestate: Belongs to `traceparent`.
    """

    client: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)] | None = None
    urgency: Annotated[float, Meta(ge=0, le=1)] | None = None
    deadline_ms: Milliseconds | None = None
    ttl_ms: Milliseconds | None = None
    steps_remaining: Annotated[int, Meta(ge=0)] | None = None
    timestamp_ns: Annotated[int, Meta(ge=0)] | None = None
    newest_wins: bool | None = None
    run_alone: bool | None = None
    route_key: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    traceparent: Annotated[str, Meta(max_length=128)] | None = None
    tracestate: Annotated[str, Meta(max_length=STATE_CHARACTERS_MAX)] | None = None


@thread_safe
class HeaderTerms(ClientTerms, frozen=True, forbid_unknown_fields=True):
    """Terms and options in the headers of a stream.

    Attributes:
        errors: `end`: the error of a batch ends the stream; `in-band`: it replaces the result.
        region: Name of the shared-memory region with the client's batches.
        read: Identity of the read of a source whose reader process sends the stream.
        hops: Gateways that the call passed before, each with a remote model.
        runtimes: Names of `runtimes` in the contract with ` | ` between them; a model that runs
            with another one rejects the call, because the last bits of its results may differ.
        cut: The batches are parts of a table that the client has cut. A model whose rows depend on
            each other rejects them.
    """

    errors: Literal["end", "in-band"] = "end"
    region: str = ""
    read: str = ""
    hops: Annotated[int, Meta(ge=0)] = 0
    runtimes: str = ""
    cut: bool = False


NO_HEADER_TERMS: Final = HeaderTerms()


class _Envelope(msgspec.Struct, frozen=True):
    iskander: msgspec.Raw = msgspec.Raw()


_JSON = (msgspec.json.Decoder(_Envelope).decode, msgspec.json.Decoder(ClientTerms | None).decode)
_MSGPACK = (
    msgspec.msgpack.Decoder(_Envelope).decode,
    msgspec.msgpack.Decoder(ClientTerms | None).decode,
)


def read_headers(headers: Iterable[tuple[str, Any]]) -> HeaderTerms:
    """Parse the `iskander-` headers of a call.

    Raises:
        MalformedInput: A header is invalid.
        RemoteLoop: The call passed more than `HOPS_MAX` gateways.
    """
    fields = {
        name.removeprefix(HEADER_PREFIX).replace("-", "_"): value
        for name, value in headers
        if name.startswith(HEADER_PREFIX)
    }
    if not fields:
        return NO_HEADER_TERMS
    try:
        terms = msgspec.convert(fields, HeaderTerms, strict=False)
    except msgspec.ValidationError as error:
        raise MalformedInput(f"the call's `{HEADER_PREFIX}` headers: {error}") from None
    if terms.timestamp_ns is not None:
        raise MalformedInput(f"`{HEADER_PREFIX}timestamp-ns` applies to one batch, not to a call")
    if terms.hops > HOPS_MAX:
        raise RemoteLoop(
            f"the call passed {terms.hops} gateways, limit {HOPS_MAX}: their remote models form a "
            "loop"
        )
    return terms


def read_metadata(app_metadata: bytes) -> ClientTerms | None:
    """Parse the terms of a batch; None if the metadata is neither JSON nor msgpack with our key.

    Raises MalformedInput if the value of the key is invalid.
    """
    read_envelope, read_terms = _JSON if app_metadata.lstrip()[:1] == b"{" else _MSGPACK
    try:
        raw = read_envelope(app_metadata).iskander
    except RecursionError:
        raise MalformedInput("the batch's app_metadata is nested too deeply") from None
    except ValueError:
        return None
    if not bytes(raw):
        return None
    try:
        terms: ClientTerms | None = read_terms(raw)
        return terms
    except DECODE_ERRORS as error:
        raise MalformedInput(f"the batch's app_metadata, `iskander`: {error}") from None
