"""Predicts the next request of each client from the intervals between its last ones.

Keeps the exponentially weighted mean interval and its mean deviation. A client with regular
requests is expected one period after its last arrival.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

ALPHA: Final = 0.3
SAMPLES_LEAST: Final = 4
DEVIATION_MOST: Final = 0.25
"""As a share of the period. Less regular requests give no prediction."""
CLIENTS_MAX: Final = 1024


class _Rhythm:
    """Requests of one client; `expected_ns` is the predicted next arrival, 0 for none."""

    __slots__ = ("budget_ns", "deviation_ns", "expected_ns", "last_ns", "period_ns", "samples")

    def __init__(self, now_ns: int) -> None:
        self.last_ns = now_ns
        self.period_ns = self.deviation_ns = 0.0
        self.samples = 0
        self.expected_ns = self.budget_ns = 0


class ArrivalPredictor:
    """Arrival rhythms of the `CLIENTS_MAX` most recent clients of one lane."""

    def __init__(self) -> None:
        self._rhythms: dict[str, _Rhythm] = {}
        self._expected: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._rhythms)

    def observe(self, client: str, now_ns: int, budget_ns: int) -> None:
        """Record an arrival; `budget_ns` is the time to the deadline, 0 without one."""
        rhythm = self._rhythms.pop(client, None)
        if rhythm is None:
            if len(self._rhythms) >= CLIENTS_MAX:
                oldest = next(iter(self._rhythms))
                self._remove_prediction(oldest, self._rhythms.pop(oldest))
            self._rhythms[client] = _Rhythm(now_ns)
            return
        self._rhythms[client] = rhythm  # Moves it to the end: the least recent is first.
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
        self._remove_prediction(client, rhythm)
        if _is_steady(rhythm) and budget_ns:
            rhythm.expected_ns = now_ns + int(rhythm.period_ns)
            insort(self._expected, (rhythm.expected_ns, client))

    def period_ns(self, client: str) -> int:
        """Period of a client's requests; 0 if unknown or irregular."""
        rhythm = self._rhythms.get(client)
        return int(rhythm.period_ns) if rhythm is not None and _is_steady(rhythm) else 0

    def expected(self, now_ns: int) -> Iterator[tuple[int, int]]:
        """Predicted next requests in order of arrival.

        Yields:
            The latest time to wait for the request, and its deadline.
        """
        expected = self._expected
        while expected and expected[0][0] < now_ns:
            at_ns, client = expected[0]
            rhythm = self._rhythms[client]
            if now_ns - at_ns <= rhythm.deviation_ns:
                break
            # Overdue: no prediction until the next request of this client.
            del expected[0]
            rhythm.expected_ns = 0
        for at_ns, client in expected:
            rhythm = self._rhythms[client]
            # Plus the deviation, since half of all requests are later than the mean.
            yield at_ns + int(rhythm.deviation_ns), at_ns + rhythm.budget_ns

    def clients(self) -> list[tuple[str, int, int]]:
        """Every client with its period in nanoseconds (0: irregular) and its sample count."""
        return [
            (client, self.period_ns(client), rhythm.samples)
            for client, rhythm in self._rhythms.items()
        ]

    def _remove_prediction(self, client: str, rhythm: _Rhythm) -> None:
        """Remove the prediction for a client."""
        if rhythm.expected_ns:
            del self._expected[bisect_left(self._expected, (rhythm.expected_ns, client))]
            rhythm.expected_ns = 0


def _is_steady(rhythm: _Rhythm) -> bool:
    return (
        rhythm.samples >= SAMPLES_LEAST and rhythm.deviation_ns <= DEVIATION_MOST * rhythm.period_ns
    )
