"""When a client's next request will come, learned from when its last ones came.

The mean time between two requests and its mean deviation, both exponentially weighted. A client
whose requests come regularly enough is expected at its last arrival plus one period.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

ALPHA: Final = 0.3
SAMPLES_LEAST: Final = 4
DEVIATION_MOST: Final = 0.25
"""Of the period. Requests that come less regularly than that predict nothing."""
CLIENTS_MAX: Final = 1024


class _Rhythm:
    __slots__ = ("budget_ns", "deviation_ns", "expected_ns", "last_ns", "period_ns", "samples")

    def __init__(self, now_ns: int) -> None:
        self.last_ns = now_ns
        self.period_ns = self.deviation_ns = 0.0
        self.samples = 0
        self.expected_ns = self.budget_ns = 0


class ArrivalPredictor:
    """The rhythms of one lane's clients; of the last `CLIENTS_MAX` that were heard of."""

    def __init__(self) -> None:
        self._rhythms: dict[str, _Rhythm] = {}
        self._expected: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._rhythms)

    def observe(self, client: str, now_ns: int, budget_ns: int) -> None:
        """A request of a client came, and is due so much later; 0: never."""
        rhythm = self._rhythms.pop(client, None)
        if rhythm is None:
            if len(self._rhythms) >= CLIENTS_MAX:
                self._forget(next(iter(self._rhythms)))
            self._rhythms[client] = _Rhythm(now_ns)
            return
        self._rhythms[client] = rhythm  # Last in the dict's order: the least recent is first.
        interval = now_ns - rhythm.last_ns
        rhythm.last_ns = now_ns
        rhythm.budget_ns = budget_ns
        rhythm.samples += 1
        if rhythm.samples == 1:
            rhythm.period_ns = float(interval)
        else:
            error = interval - rhythm.period_ns
            rhythm.period_ns += ALPHA * error
            rhythm.deviation_ns += ALPHA * (abs(error) - rhythm.deviation_ns)
        self._unexpect(client, rhythm)
        if _is_steady(rhythm) and budget_ns:
            rhythm.expected_ns = now_ns + int(rhythm.period_ns)
            insort(self._expected, (rhythm.expected_ns, client))

    def period_ns(self, client: str) -> int:
        """Of a client's requests; 0 where it is not known or not regular."""
        rhythm = self._rhythms.get(client)
        return int(rhythm.period_ns) if rhythm is not None and _is_steady(rhythm) else 0

    def expected(self, now_ns: int) -> Iterator[tuple[int, int]]:
        """The next request of each client that is not here yet, the soonest first.

        Yields:
            Until when it is worth waiting for, and when it will be due.
        """
        expected = self._expected
        while expected and expected[0][0] < now_ns:
            at_ns, client = expected[0]
            rhythm = self._rhythms[client]
            if now_ns - at_ns <= rhythm.deviation_ns:
                break
            # It has missed its time. The next request says when to expect it again.
            del expected[0]
            rhythm.expected_ns = 0
        for at_ns, client in expected:
            rhythm = self._rhythms[client]
            # A moment more than expected, since half of all requests are later than the mean.
            yield at_ns + int(rhythm.deviation_ns), at_ns + rhythm.budget_ns

    def clients(self) -> list[tuple[str, int, int]]:
        """Every client with its period in nanoseconds (0: not regular) and samples."""
        return [
            (client, int(rhythm.period_ns) if _is_steady(rhythm) else 0, rhythm.samples)
            for client, rhythm in self._rhythms.items()
        ]

    def _forget(self, client: str) -> None:
        self._unexpect(client, self._rhythms.pop(client))

    def _unexpect(self, client: str, rhythm: _Rhythm) -> None:
        if rhythm.expected_ns:
            del self._expected[bisect_left(self._expected, (rhythm.expected_ns, client))]
            rhythm.expected_ns = 0


def _is_steady(rhythm: _Rhythm) -> bool:
    return (
        rhythm.samples >= SAMPLES_LEAST and rhythm.deviation_ns <= DEVIATION_MOST * rhythm.period_ns
    )
