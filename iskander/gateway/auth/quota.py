"""Limits of each grant: rate of requests and rows, rows outstanding, size of a batch.

The limits are those of a grant's name: all tokens of one name share them. Each gateway process
enforces its part, the limit divided by the number of processes, because they share no counters.

Pure. Source: the token bucket of RFC 2697 and RFC 4115, with a debt for batches above its size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from iskander.config.auth import GrantLimits
from iskander.errors import ClientOverShare, IskanderError, LimitExceeded, RateLimited
from iskander.foundation.clock import NS_PER_MS, NS_PER_S

NO_LIMITS: Final = GrantLimits()
RETRY_MAX_MS: Final = 3_600_000
NAMES_MAX: Final = 256
"""Names with metrics of their own."""
OTHER: Final = "(other)"


class TokenBucket:
    """Permits that accrue over time up to a capacity; a cost above the capacity leaves a debt.

    A rate of 0 is no limit.
    """

    def __init__(self) -> None:
        self._rate = self._capacity = self._level = 0.0
        self._at_ns = 0

    def configure(self, rate: float, capacity: float) -> None:
        """Set permits per second and the capacity; a new bucket, or one without limit, is full."""
        is_new = not self._rate
        self._rate, self._capacity = rate, capacity
        self._level = capacity if is_new else min(self._level, capacity)

    def wait_ns(self, cost: float, now_ns: int) -> int:
        """Time until a cost can be taken; 0: now."""
        if not self._rate:
            return 0
        gained = max(now_ns - self._at_ns, 0) * self._rate / NS_PER_S
        self._level = min(self._level + gained, self._capacity)
        self._at_ns = now_ns
        missing = min(cost, self._capacity) - self._level
        return math.ceil(missing * NS_PER_S / self._rate) if missing > 0 else 0

    def take(self, cost: float) -> None:
        """Take a cost for which `wait_ns` has returned 0."""
        if self._rate:
            self._level -= cost

    def give_back(self, cost: float) -> None:
        """Return a cost that was taken."""
        if self._rate:
            self._level = min(self._level + cost, self._capacity)


class Quota:
    """Usage of one grant in this process, and its limits.

    Attributes:
        outstanding_rows: Rows of admitted requests that are not computed yet.
        counts: `requests` and `rows` within the rates, and refusals by `refused.CODE`.
    """

    def __init__(self, name: str, processes: int) -> None:
        self.name = name
        self.limits = NO_LIMITS
        self.outstanding_rows = 0
        self.counts: Counter[str] = Counter()
        self._processes = processes
        self._requests, self._rows = TokenBucket(), TokenBucket()
        self._outstanding_max = 0.0

    def configure(self, limits: GrantLimits) -> None:
        """Apply limits; usage and accrued permits stay."""
        self.limits = limits
        rate, rows = limits.requests_per_s / self._processes, limits.rows_per_s / self._processes
        burst = (limits.burst_requests or limits.requests_per_s) / self._processes
        self._requests.configure(rate, max(burst, 1.0))
        self._rows.configure(rows, max(rows, 1.0))
        self._outstanding_max = limits.outstanding_rows / self._processes or math.inf

    def require_size(self, rows: int, size: int) -> None:
        """Raise LimitExceeded for a batch that is larger than the grant permits."""
        limits = self.limits
        for amount, unit, limit, setting in (
            (rows, "rows", limits.batch_rows, "batch_rows"),
            (size, "bytes of inputs", limits.batch_bytes, "batch_bytes"),
            (rows, "rows", limits.outstanding_rows, "outstanding_rows"),
        ):
            if limit and amount > limit:
                raise self._refused(
                    LimitExceeded(
                        f"batch of {amount:,} {unit}, limit {limit:,} for the token of "
                        f"`{self.name}` (`limits.{setting}` in the token file)",
                        wanted=limit,
                    )
                )

    def require_capacity(self, rows: int) -> None:
        """Raise ClientOverShare if more rows may not be outstanding.

        A grant without outstanding rows may always send a batch: its part of the limit in this
        process may be less than one.
        """
        used = self.outstanding_rows
        if used and used + rows > self._outstanding_max:
            part = f" in each of {self._processes} processes" if self._processes > 1 else ""
            raise self._refused(
                ClientOverShare(
                    f"{used:,} rows of the token of `{self.name}` outstanding, {rows:,} more sent, "
                    f"limit {int(self._outstanding_max):,}{part} (`limits.outstanding_rows` in the "
                    "token file)"
                )
            )

    def take_rate(self, rows: int, now_ns: int) -> None:
        """Count a request against the rates, or raise RateLimited with the time to wait."""
        limits = self.limits
        wait_ns = self._requests.wait_ns(1, now_ns)
        rate, setting = f"{limits.requests_per_s:g} requests/s", "requests_per_s"
        rows_wait_ns = self._rows.wait_ns(rows, now_ns)
        if rows_wait_ns > wait_ns:
            rate, setting = f"{limits.rows_per_s:g} rows/s", "rows_per_s"
            wait_ns = rows_wait_ns
        if wait_ns:
            part = f", divided over {self._processes} processes" if self._processes > 1 else ""
            raise self._refused(
                RateLimited(
                    f"more than {rate} by the token of `{self.name}`{part} "
                    f"(`limits.{setting}` in the token file)",
                    retry_after_ms=min(math.ceil(wait_ns / NS_PER_MS), RETRY_MAX_MS),
                )
            )
        self._requests.take(1)
        self._rows.take(rows)
        self.counts["requests"] += 1
        self.counts["rows"] += rows

    def give_back_rate(self, rows: int) -> None:
        """Return what `take_rate` took for a request that was rejected later."""
        self._requests.give_back(1)
        self._rows.give_back(rows)

    def _refused(self, error: IskanderError) -> IskanderError:
        self.counts[f"refused.{error.code}"] += 1
        return error


class Usage(NamedTuple):
    """Usage of one grant; `counts` as in `Quota`."""

    grant: str
    outstanding_rows: int
    counts: Counter[str]


class Quotas:
    """Quotas of the grants that have limits, by name.

    Attributes:
        by_name: Empty if no grant has limits.
    """

    def __init__(self, processes: int = 1) -> None:
        self.by_name: dict[str, Quota] = {}
        self._processes = processes

    def configure(self, limits: Mapping[str, GrantLimits]) -> None:
        """Apply the limits of all names; a name that keeps limits keeps its usage."""
        for name in self.by_name.keys() - limits.keys():
            del self.by_name[name]
        for name, each in limits.items():
            quota = self.by_name.get(name)
            if quota is None:
                quota = self.by_name[name] = Quota(name, self._processes)
            quota.configure(each)

    def usage(self) -> list[Usage]:
        """Return the usage of at most `NAMES_MAX` names; that of all others as `(other)`."""
        found = [Usage(each.name, each.outstanding_rows, each.counts) for each in self]
        if len(found) > NAMES_MAX:
            others = found[NAMES_MAX - 1 :]
            counts = sum((each.counts for each in others), Counter())
            total = Usage(OTHER, sum(each.outstanding_rows for each in others), counts)
            found[NAMES_MAX - 1 :] = [total]
        return found

    def __iter__(self) -> Iterator[Quota]:
        return iter(self.by_name.values())
