"""Terms of a stream or call and of each of its batches, with defaults.

Runs on: gateway loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

from iskander.foundation.clock import NS_PER_MS, wall_ns
from iskander.gateway.auth.source import UNKNOWN_SOURCE, Source
from iskander.gateway.protocols.terms import (
    HEADER_PREFIX,
    KEY,
    NO_HEADER_TERMS,
    ClientTerms,
    HeaderTerms,
    read_headers,
    read_metadata,
)
from iskander.gateway.protocols.trace_context import context_of_headers, parse_context
from iskander.gateway.scheduling.request import NEVER_NS, PRIORITY_DEFAULT, Terms
from iskander.gateway.scheduling.tracing import TraceContext

CACHE_MAX: Final = 64
CACHED_BYTES_MAX: Final = 512
"""Longer metadata is parsed for each batch, so that a stream keeps at most 32 KiB of it."""


class StreamTerms:
    """Terms of one stream; raises MalformedInput if an `iskander-` header is invalid.

    The tenant of the source prefixes client names, so that no caller can use a name of another
    token. The trace context is read only if the call `is_traced`.
    """

    def __init__(
        self,
        headers: Sequence[tuple[str, Any]],
        deadline_ns: int | None,
        source: Source = UNKNOWN_SOURCE,
        *,
        is_traced: bool = False,
    ) -> None:
        self.deadline_ns = NEVER_NS if deadline_ns is None else deadline_ns  # Of the call.
        self._source = source
        self._header_terms = terms = _header_terms(headers)
        self._cache: dict[bytes, Terms] | None = None
        self.is_in_band = terms.errors == "in-band"  # The error of a batch replaces its result.
        self.runtimes = terms.runtimes  # Names of the permitted runtimes; empty for all.
        self.is_cut = terms.cut  # The batches are parts of a table.
        self.region = terms.region  # Name of the shared-memory region; empty for none.
        # No other caller can guess the name.
        self._client = self._qualified(terms.client or f"stream {secrets.token_hex(8)}")
        # Selects the call's version among version shares.
        self.route_key = terms.route_key or terms.client or self._client
        self._is_traced = is_traced
        self.trace = context_of_headers(headers) if is_traced else None  # Caller's span.
        is_default = terms is NO_HEADER_TERMS
        self._default = (
            Terms(self._client, source=source, trace=self.trace)
            if is_default
            else self._merge(terms)
        )

    def of(self, app_metadata: bytes) -> Terms:
        """Return the terms of a batch; raises MalformedInput if they are invalid."""
        if KEY not in app_metadata:
            return self._default
        if self._cache is None:
            self._cache = {}
        terms = self._cache.get(app_metadata)
        if terms is None:
            own = read_metadata(app_metadata)
            if own is None:
                return self._default
            terms = self._merge(own)
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            is_short = len(app_metadata) <= CACHED_BYTES_MAX
            if is_short and own.timestamp_ns is None and own.traceparent is None:
                self._cache[app_metadata] = terms
        return terms

    def route_key_of(self, terms: ClientTerms | None) -> str:
        """Return the route key of a request; `terms` are its own terms, if any."""
        if terms is None:
            return self.route_key
        return terms.route_key or terms.client or self.route_key

    def merged(self, terms: ClientTerms | None) -> Terms:
        """Merge the own terms of a request, if any, with those of the call."""
        return self._default if terms is None else self._merge(terms)

    def _merge(self, own: ClientTerms) -> Terms:
        stream = self._header_terms
        priority = _first(own.priority, stream.priority)
        stamp_ns = own.timestamp_ns
        return Terms(
            client=self._qualified(own.client) if own.client else self._client,
            is_named=bool(own.client or stream.client),
            priority=PRIORITY_DEFAULT if priority is None else priority,
            urgency=_first(own.urgency, stream.urgency) or 0.0,
            budget_ms=_first(own.deadline_ms, stream.deadline_ms),
            ttl_ms=_first(own.ttl_ms, stream.ttl_ms),
            steps_remaining=_first(own.steps_remaining, stream.steps_remaining),
            age_ms=0.0 if stamp_ns is None else max(wall_ns() - stamp_ns, 0) / NS_PER_MS,
            is_newest_wins=bool(_first(own.newest_wins, stream.newest_wins)),
            is_alone=bool(_first(own.run_alone, stream.run_alone)),
            source=self._source,
            hops=stream.hops,
            trace=self._trace_of(own),
        )

    def _trace_of(self, own: ClientTerms) -> TraceContext | None:
        """The trace context of a batch: its own if it has a valid one, else that of the call."""
        if not self._is_traced or own.traceparent is None:
            return self.trace
        return parse_context(own.traceparent, own.tracestate or "") or self.trace

    def _qualified(self, client: str) -> str:
        tenant = self._source.tenant
        return f"{tenant}/{client}" if tenant else client


def _header_terms(headers: Sequence[tuple[str, Any]]) -> HeaderTerms:
    for name, _ in headers:
        if name.startswith(HEADER_PREFIX):
            return read_headers(headers)
    return NO_HEADER_TERMS


def _first(value: Any, default: Any) -> Any:  # noqa: ANN401
    return default if value is None else value
