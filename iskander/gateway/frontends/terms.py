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

import itertools
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from iskander.clock import NS_PER_MS, wall_ns
from iskander.errors import MalformedInput
from iskander.gateway.lanes.request import NEVER_NS, PRIORITY_DEFAULT, PRIORITY_MAX, Terms
from iskander.prepared import prepared

HEADER_PREFIX = "iskander-"
REMEMBERED_MAX = 64
_KEY = b"iskander"
_DAY_MS = 86_400_000

Milliseconds = Annotated[float, Meta(ge=0, le=_DAY_MS)]


class SaidTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


@prepared
class _Headers(SaidTerms, frozen=True, forbid_unknown_fields=True):
    """Beside the terms: what else a stream's headers may say.

    Attributes:
        errors: Whether a batch's error ends the stream, or comes in its result's place.
        region: Name of the memory in which the client's batches may be (`wire/sharing.py`).
    """

    errors: Literal["end", "in-band"] = "end"
    region: str = ""


_NOTHING = _Headers()


class _Envelope(msgspec.Struct, frozen=True):
    iskander: msgspec.Raw = msgspec.Raw()


_JSON = (msgspec.json.Decoder(_Envelope).decode, msgspec.json.Decoder(SaidTerms | None).decode)
_MSGPACK = (
    msgspec.msgpack.Decoder(_Envelope).decode,
    msgspec.msgpack.Decoder(SaidTerms | None).decode,
)
_numbers = itertools.count(1)


class StreamTerms:
    """The terms of one stream, and of each of its batches.

    Args:
        headers: Of the call, by name.
        deadline_ns: Of the call; None where it has none.
        name: Whose token the caller showed, which goes before what it calls itself: no caller can
            be called as one of another token. Empty where nobody needs a token.

    Attributes:
        is_in_band: An error of one batch takes the place of its result.
        region: Name of the memory that the client shares; empty for none.
        deadline_ns: Of the call.
        route_key: By which the call's version is chosen, where versions have shares.

    Raises:
        MalformedInput: A header of ours is not what it may be.
    """

    def __init__(
        self, headers: Iterable[tuple[str, Any]], deadline_ns: int | None, name: str = ""
    ) -> None:
        ours = {
            name.removeprefix(HEADER_PREFIX).replace("-", "_"): value
            for name, value in headers
            if name.startswith(HEADER_PREFIX)
        }
        try:
            said = msgspec.convert(ours, _Headers, strict=False) if ours else _NOTHING
        except msgspec.ValidationError as error:
            raise MalformedInput(f"the call's `{HEADER_PREFIX}` headers: {error}") from None
        if said.timestamp_ns is not None:
            raise MalformedInput(f"`{HEADER_PREFIX}timestamp-ns` is of one batch, not of a call")
        self.is_in_band = said.errors == "in-band"
        self.region = said.region
        self.deadline_ns = NEVER_NS if deadline_ns is None else deadline_ns
        self._said = said
        self._name = name
        self._client = self._called(said.client or f"stream {next(_numbers)}")
        self.route_key = said.route_key or said.client or self._client
        self._default = self.with_said(said)
        self._remembered: dict[bytes, Terms] = {}

    def of(self, app_metadata: bytes) -> Terms:
        """The terms of a batch.

        Raises:
            MalformedInput: The metadata is ours and not what it may be.
        """
        if _KEY not in app_metadata:
            return self._default
        terms = self._remembered.get(app_metadata)
        if terms is None:
            said = _read(app_metadata)
            if said is None:
                return self._default
            terms = self.with_said(said)
            if len(self._remembered) >= REMEMBERED_MAX:
                self._remembered.clear()
            if said.timestamp_ns is None:
                self._remembered[app_metadata] = terms
        return terms

    def route_key_of(self, said: SaidTerms | None) -> str:
        """The key by which a request's version is chosen, that says these terms itself."""
        return self.route_key if said is None else said.route_key or said.client or self.route_key

    def with_said(self, said: SaidTerms | None) -> Terms:
        """The terms of a request that says these, or nothing, itself."""
        if said is None:
            return self._default
        stream = self._said
        priority = _first(said.priority, stream.priority)
        stamp_ns = said.timestamp_ns
        return Terms(
            client=self._called(said.client) if said.client else self._client,
            is_named=bool(said.client or stream.client),
            priority=PRIORITY_DEFAULT if priority is None else priority,
            urgency=_first(said.urgency, stream.urgency) or 0.0,
            budget_ms=_first(said.deadline_ms, stream.deadline_ms),
            ttl_ms=_first(said.ttl_ms, stream.ttl_ms),
            steps_remaining=_first(said.steps_remaining, stream.steps_remaining),
            age_ms=0.0 if stamp_ns is None else max(wall_ns() - stamp_ns, 0) / NS_PER_MS,
            is_newest_wins=bool(_first(said.newest_wins, stream.newest_wins)),
        )

    def _called(self, said: str) -> str:
        """What a client is called that says it is called so."""
        return f"{self._name}/{said}" if self._name else said


def _first(said: Any, otherwise: Any) -> Any:  # noqa: ANN401
    return otherwise if said is None else said


def _read(app_metadata: bytes) -> SaidTerms | None:
    """What metadata says; None where it is neither JSON nor msgpack with our key."""
    read_envelope, read_terms = _JSON if app_metadata.lstrip()[:1] == b"{" else _MSGPACK
    try:
        ours = read_envelope(app_metadata).iskander
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not bytes(ours):
        return None
    try:
        said: SaidTerms | None = read_terms(ours)
        return said
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedInput(f"the batch's app_metadata, `iskander`: {error}") from None
