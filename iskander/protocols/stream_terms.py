"""The terms of a stream or a call, and of each of its batches: said, or by default.

Runs on: gateway loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from iskander.auth.source import UNKNOWN_SOURCE, Source
from iskander.clock import NS_PER_MS, wall_ns
from iskander.protocols.terms import (
    HEADER_PREFIX,
    KEY,
    NOTHING,
    ClientTerms,
    HeaderTerms,
    read_headers,
    read_metadata,
)
from iskander.scheduling.request import NEVER_NS, PRIORITY_DEFAULT, Terms

REMEMBERED_MAX: Final = 64

_numbers = itertools.count(1)


class StreamTerms:
    """The terms of one stream, and of each of its batches.

    Args:
        headers: Of the call, by name.
        deadline_ns: Of the call; None where it has none.
        source: Whose share of a queue its requests take. The tenant goes before what the caller
            calls itself: no caller can be called as one of another token.

    Attributes:
        is_in_band: An error of one batch takes the place of its result.
        region: Name of the memory that the client shares; empty for none.
        deadline_ns: Of the call.
        route_key: By which the call's version is chosen, where versions have shares.

    Raises:
        MalformedInput: A header of ours is not what it may be.
    """

    def __init__(
        self,
        headers: Sequence[tuple[str, Any]],
        deadline_ns: int | None,
        source: Source = UNKNOWN_SOURCE,
    ) -> None:
        self.deadline_ns = NEVER_NS if deadline_ns is None else deadline_ns
        self._source = source
        self._said = said = _said_in(headers)
        self._remembered: dict[bytes, Terms] | None = None
        if said is NOTHING:
            self.is_in_band, self.region = False, ""
            self._client = self.route_key = self._called(f"stream {next(_numbers)}")
            self._default = Terms(self._client, source=source)
            return
        self.is_in_band, self.region = said.errors == "in-band", said.region
        self._client = self._called(said.client or f"stream {next(_numbers)}")
        self.route_key = said.route_key or said.client or self._client
        self._default = self._with(said)

    def of(self, app_metadata: bytes) -> Terms:
        """The terms of a batch.

        Raises:
            MalformedInput: The metadata is ours and not what it may be.
        """
        if KEY not in app_metadata:
            return self._default
        if self._remembered is None:
            self._remembered = {}
        terms = self._remembered.get(app_metadata)
        if terms is None:
            said = read_metadata(app_metadata)
            if said is None:
                return self._default
            terms = self.with_said(said)
            if len(self._remembered) >= REMEMBERED_MAX:
                self._remembered.clear()
            if said.timestamp_ns is None:
                self._remembered[app_metadata] = terms
        return terms

    def route_key_of(self, said: ClientTerms | None) -> str:
        """The key by which a request's version is chosen, that says these terms itself."""
        return self.route_key if said is None else said.route_key or said.client or self.route_key

    def with_said(self, said: ClientTerms | None) -> Terms:
        """The terms of a request that says these, or nothing, itself."""
        return self._default if said is None else self._with(said)

    def _with(self, said: ClientTerms) -> Terms:
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
            source=self._source,
        )

    def _called(self, said: str) -> str:
        """What a client is called that says it is called so."""
        tenant = self._source.tenant
        return f"{tenant}/{said}" if tenant else said


def _said_in(headers: Sequence[tuple[str, Any]]) -> HeaderTerms:
    for name, _ in headers:
        if name.startswith(HEADER_PREFIX):
            return read_headers(headers)
    return NOTHING


def _first(said: Any, otherwise: Any) -> Any:  # noqa: ANN401
    return otherwise if said is None else said
