"""What a client says about how urgent its requests are; here as Flight's calls say it.

The tensor protocols say the same terms in their own places (`oip_terms`, `inferential_terms`).

For a whole stream in the call's headers, for one batch in its `app_metadata`, as a JSON object or
msgpack map with the key `iskander`:

    iskander-client: robot-7            {"iskander": {"deadline_ms": 20, "priority": 0}}
    iskander-deadline-ms: 30

What a batch says goes before what its stream says. Any other `app_metadata` means nothing here, and
all of it is echoed.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from iskander.decoders import thread_safe
from iskander.errors import MalformedInput
from iskander.scheduling.request import PRIORITY_MAX

HEADER_PREFIX: Final = "iskander-"
KEY: Final = b"iskander"
"""Without it, metadata says nothing of ours."""
_DAY_MS = 86_400_000

Milliseconds = Annotated[float, Meta(ge=0, le=_DAY_MS)]


class ClientTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client may say; a header's name has `-` for `_`, and `iskander-` before it.

    Attributes:
        client: Who it is, the same from call to call; for fairness, limits and cadence.
        priority: 0 (highest) to 9; without, 1.
        urgency: 0 to 1.
        deadline_ms: Milliseconds from the batch's arrival within which its result is of use.
        ttl_ms: Milliseconds that it may wait for a worker.
        steps_remaining: Actions that the client has left before it needs this result.
        timestamp_ns: When it was observed, in nanoseconds of the wall clock.
        newest_wins: A newer batch of this client takes the place of one that still waits.
        route_key: Where versions of a model have shares, the same key gets the same version;
            without it the client's name is the key. A stream of Flight says it in its headers.
    """

    client: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)] | None = None
    urgency: Annotated[float, Meta(ge=0, le=1)] | None = None
    deadline_ms: Milliseconds | None = None
    ttl_ms: Milliseconds | None = None
    steps_remaining: Annotated[int, Meta(ge=0)] | None = None
    timestamp_ns: Annotated[int, Meta(ge=0)] | None = None
    newest_wins: bool | None = None
    route_key: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


@thread_safe
class HeaderTerms(ClientTerms, frozen=True, forbid_unknown_fields=True):
    """Beside the terms: what else a stream's headers may say.

    Attributes:
        errors: Whether a batch's error ends the stream, or comes in its result's place.
        region: Name of the memory in which the client's batches may be (`wire/sharing.py`).
    """

    errors: Literal["end", "in-band"] = "end"
    region: str = ""


NOTHING: Final = HeaderTerms()


class _Envelope(msgspec.Struct, frozen=True):
    iskander: msgspec.Raw = msgspec.Raw()


_JSON = (msgspec.json.Decoder(_Envelope).decode, msgspec.json.Decoder(ClientTerms | None).decode)
_MSGPACK = (
    msgspec.msgpack.Decoder(_Envelope).decode,
    msgspec.msgpack.Decoder(ClientTerms | None).decode,
)


def read_headers(headers: Iterable[tuple[str, Any]]) -> HeaderTerms:
    """What a call's headers say.

    Args:
        headers: By name; those of others are passed over.

    Raises:
        MalformedInput: One of ours is not what it may be.
    """
    ours = {
        name.removeprefix(HEADER_PREFIX).replace("-", "_"): value
        for name, value in headers
        if name.startswith(HEADER_PREFIX)
    }
    if not ours:
        return NOTHING
    try:
        said = msgspec.convert(ours, HeaderTerms, strict=False)
    except msgspec.ValidationError as error:
        raise MalformedInput(f"the call's `{HEADER_PREFIX}` headers: {error}") from None
    if said.timestamp_ns is not None:
        raise MalformedInput(f"`{HEADER_PREFIX}timestamp-ns` is of one batch, not of a call")
    return said


def read_metadata(app_metadata: bytes) -> ClientTerms | None:
    """What a batch's metadata says; None where it is neither JSON nor msgpack with our key.

    Raises:
        MalformedInput: It is ours and not what it may be.
    """
    read_envelope, read_terms = _JSON if app_metadata.lstrip()[:1] == b"{" else _MSGPACK
    try:
        ours = read_envelope(app_metadata).iskander
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not bytes(ours):
        return None
    try:
        said: ClientTerms | None = read_terms(ours)
        return said
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedInput(f"the batch's app_metadata, `iskander`: {error}") from None
