"""Schedules of requests: an open loop with intended send times, or a closed loop.

    open loop     a request is due at a time that does not depend on responses. Its latency counts
                  from then, so that it includes the delay of a late server or generator
    closed loop   each of N clients sends its next request after its last response

Pure. Source: G. Tene on coordinated omission (HdrHistogram, wrk2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from iskander.foundation.clock import NS_PER_S

Arrivals = Literal["poisson", "constant"]
BLOCK = 4096
"""Gaps drawn at a time, so that a long run needs no memory for its schedule."""


class Load(NamedTuple):
    """One point of a run.

    Attributes:
        clients: Threads with a connection each: all of them send in a closed loop; in an open loop
            any idle one sends the next request.
        rate: Requests a second of an open loop; 0: a closed loop.
    """

    clients: int
    rate: float = 0.0
    arrivals: Arrivals = "poisson"

    @property
    def title(self) -> str:
        """Text of the load, such as `200/s` or `4 clients`."""
        return f"{self.rate:g}/s" if self.rate else f"{self.clients} clients"


def due_times_ns(rate: float, arrivals: Arrivals, seed: int) -> Iterator[int]:
    """Yield the intended send times since the start, without an end.

    Args:
        rate: Requests a second; above 0.
        arrivals: Poisson arrivals have exponential gaps; constant ones are evenly spaced.
        seed: Seed of the random gaps between requests.
    """
    generator = np.random.default_rng(seed)
    due_ns, gap_ns = 0.0, NS_PER_S / rate
    while True:
        gaps = generator.exponential(gap_ns, BLOCK) if arrivals == "poisson" else [gap_ns] * BLOCK
        for gap in gaps:
            due_ns += gap
            yield int(due_ns)
