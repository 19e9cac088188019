"""Completed requests as events.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable

from iskander.errors import IskanderError
from iskander.foundation.clock import NS_PER_S, now_ns, wall_ns
from iskander.gateway.event_stream.messages import Completion
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.tracing import Method, TraceContext


class CompletionRecorder:
    """Tracer that records each request at its end; `add` receives it, and does not block."""

    def __init__(self, add: Callable[[Completion], None], process: int | None = None) -> None:
        self._add, self._process = add, process

    def on_end(self, request: Request, method: Method, error: IskanderError | None) -> None:
        """Record a request whose response is written, or that failed or was withdrawn."""
        now = now_ns()
        model = request.lane.model
        self._add(
            Completion(
                at_s=wall_ns() / NS_PER_S,
                process=self._process,
                model=model.name,
                version=model.version,
                protocol=method.system,
                method=method.name,
                rows=request.rows,
                outcome="ok" if error is None else error.code,
                queue_ns=(request.sent_ns or now) - request.arrived_ns,
                run_ns=request.run_ns,
                total_ns=now - request.arrived_ns,
                trace_id=_hex(request.terms.trace),
            )
        )

    def on_refused(
        self,
        method: Method,
        context: TraceContext | None,
        arrived_ns: int,
        error: IskanderError,
    ) -> None:
        """Record a call that failed before it had a request."""
        waited_ns = now_ns() - arrived_ns
        self._add(
            Completion(
                at_s=wall_ns() / NS_PER_S,
                process=self._process,
                protocol=method.system,
                method=method.name,
                outcome=error.code,
                queue_ns=waited_ns,
                total_ns=waited_ns,
                trace_id=_hex(context),
            )
        )


def _hex(context: TraceContext | None) -> str:
    return "" if context is None else context.trace_id.hex()
