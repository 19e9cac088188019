"""Entry of requests: the way of every protocol into the queue of a lane.

    lane's check  ->  quota of the grant  ->  memory of the input arena  ->  queue

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from iskander.config.schema import LimitsConfig
from iskander.errors import ArenaFull, IskanderError, LimitExceeded
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.auth.quota import Quota
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.lanes.admission import expired_error
from iskander.gateway.scheduling.request import Request

Entering = TypeVar("Entering", bound=Request)


def do_nothing(_: Request) -> None:
    """Do nothing with a request that enters."""


class Entry:
    """Checks requests, places them in the input arena, and queues them.

    Attributes:
        quotas: Limits of grants, by the name of the grant; empty for none.
    """

    def __init__(
        self,
        arena: InputArena,
        queue: Callable[[Request, list[Request]], None],
        limits: LimitsConfig,
    ) -> None:
        """`queue` queues a request, and evicts the queued requests in the list."""
        self._arena = arena
        self._queue = queue
        self.quotas: Mapping[str, Quota] = {}
        self.configure(limits)

    def configure(self, limits: LimitsConfig) -> None:
        """Apply the limits to later requests."""
        self._wait_ms = limits.arena_wait_ms
        self._result_bytes = limits.result_bytes

    def enter(self, request: Entering, entered: Callable[[Entering], None] = do_nothing) -> bool:
        """Check, place and queue a request, if that is possible at once.

        Args:
            request: A new request.
            entered: Called before the request is queued, because results may follow at once. If it
                raises, the request gives back its memory, and is not queued.

        Returns:
            False if it is large or there is no memory: continue with `enter_later`, and read no
            more from the stream meanwhile (backpressure).

        Raises:
            IskanderError: As `Lane.check`, or a limit of sizes or of the grant is exceeded.
        """
        # Step 2
        lane = request.lane
        request.input_bytes = request.layout.input_bytes
        lane.observe_arrival(request)
        victims = lane.check(request, now_ns())
        result_bytes = request.layout.output_bytes
        if result_bytes > self._result_bytes:
            raise LimitExceeded(
                f"{request.rows} rows make {result_bytes} bytes of results, "
                f"limit {self._result_bytes} (`limits.result_bytes`); send fewer rows",
                wanted=self._result_bytes,
            )
        self._arena.arena.require_fits(request.input_bytes)
        if self.quotas:
            self._take_quota(request)
        if not self._arena.place(request):
            return False
        if self.quotas:
            self._enter_quota(request)
        self._put(request, victims, entered)
        return True

    async def enter_later(
        self, request: Entering, entered: Callable[[Entering], None] = do_nothing
    ) -> None:
        """Wait for memory, then place and queue a request; arguments as of `enter`.

        Raises:
            IskanderError: As `Lane.check`.
            ArenaFull: No memory became free in time.
        """
        lane = request.lane
        lane.entering += 1
        try:
            if self.quotas:
                self._require_quota_capacity(request)
                self._enter_quota(request)
            await self._wait_for_lease(request)
            try:
                lane.check(request, now_ns())
                await self._arena.place_later(request)
                # Other requests may have filled the queue during the copy.
                victims = lane.check(request, now_ns())
            except BaseException:
                self._arena.give_back(request)
                raise
        except BaseException:
            request.leave_quota()
            self._give_back_rate(request)
            raise
        finally:
            lane.entering -= 1
        self._put(request, victims, entered)

    def _put(
        self, request: Entering, victims: list[Request], entered: Callable[[Entering], None]
    ) -> None:
        """Queue a request that has its memory."""
        try:
            entered(request)
        except BaseException:
            self._arena.give_back(request)
            raise
        self._queue(request, victims)

    async def _wait_for_lease(self, request: Request) -> None:
        """Wait until memory is free, `limits.arena_wait_ms` has passed or the request expires."""
        left_s = (request.expires_ns - now_ns()) / NS_PER_S
        try:
            await self._arena.wait_for_lease(request, max(min(self._wait_ms / 1000, left_s), 0))
        except TimeoutError:
            rejection = self._timeout_error(request, now_ns())
            request.lane.count_rejected(request, rejection)
            raise rejection from None

    def _timeout_error(self, request: Request, now: int) -> IskanderError:
        if now >= request.expires_ns:
            return expired_error(request, now)
        arena = self._arena.arena
        return ArenaFull(
            f"input arena full for {self._wait_ms} ms (`limits.arena_wait_ms`): "
            f"{arena.leased_bytes} of {arena.capacity_bytes} bytes leased",
            retry_after_ms=request.lane.retry_after_ms(now),
        )

    def _take_quota(self, request: Request) -> None:
        """Require that the limits of the grant permit a request, and take it from its rates.

        Called once for each request.
        """
        quota = self.quotas.get(request.terms.source.tenant)
        if quota is None or request.is_part:
            return
        sizes = request.whole or (request.rows, sum(map(len, request.tensors)))
        now = now_ns()
        try:
            quota.require_size(sizes[0], sizes[1])
            quota.require_capacity(sizes[0])
            quota.take_rate(sizes[0], now)
        except IskanderError as error:
            request.lane.add_retry_hint(error, now)
            request.lane.count_rejected(request, error)
            raise

    def _give_back_rate(self, request: Request) -> None:
        """Undo what `_take_quota` took from the rates of the grant."""
        quota = self.quotas.get(request.terms.source.tenant)
        if quota is not None and not request.is_part:
            quota.give_back_rate(request.whole[0] if request.whole else request.rows)

    def _require_quota_capacity(self, request: Request) -> None:
        """Check the outstanding rows again: others may have entered since `enter`."""
        quota = self.quotas.get(request.terms.source.tenant)
        if quota is not None and not request.is_part:
            try:
                quota.require_capacity(request.rows)
            except IskanderError as error:
                request.lane.add_retry_hint(error, now_ns())
                request.lane.count_rejected(request, error)
                raise

    def _enter_quota(self, request: Request) -> None:
        """Count the rows of a request as outstanding until `Request.leave_quota`."""
        request.quota = quota = self.quotas.get(request.terms.source.tenant)
        if quota is not None:
            quota.outstanding_rows += request.rows
