"""Cost model of batches: run time as a·rows + b, learned for each model and worker.

Least squares on relative errors, so that small batches count as much as large ones, over
exponentially decaying sums: after ten runs, older ones weigh a third. An outlier (a page fault, a
noisy neighbour) counts as at most twice the expected time, so that one outlier changes little and a
lasting change is learned in a few runs. The first runs are dropped as cold after a run with as many
rows in less than half the time.

Pure.
"""

from __future__ import annotations

from typing import Final

DECAY: Final = 0.9
"""Factor of the sums for each later run."""
OUTLIER_RATIO: Final = 2.0
COLD_RATIO: Final = 2.0
LEARNED_SAMPLES: Final = 4
HANG_SAMPLES: Final = 16
"""Runs needed to derive a limit on the run time."""
SLOWEST_DECAY: Final = 0.999
"""Factor of the slowest ratio for each later run."""
VARIANCE_MIN: Final = 1e-3
"""Relative variance of the batch sizes below which slope and constant cannot be separated."""


class CostModel:
    """Run time of one model on one worker.

    Attributes:
        row_ns: a, nanoseconds for each row.
        base_ns: b, nanoseconds for a batch of any size.
        samples: Number of observed runs.
        slowest: Largest ratio of run time to expected time; decays over about 1000 runs.
    """

    __slots__ = ("_r", "_rr", "_rt", "_t", "_w", "base_ns", "row_ns", "samples", "slowest")

    def __init__(self) -> None:
        self.row_ns = self.base_ns = 0.0
        self.samples = 0
        self.slowest = 1.0
        self._w = self._r = self._rr = self._t = self._rt = 0.0  # Sums: weight, row, row², t, row·t

    def __repr__(self) -> str:
        return f"<CostModel {self.row_ns:.0f} ns x rows + {self.base_ns:.0f} ns>"

    def predict_ns(self, rows: int) -> int:
        """Expected run time of a batch; 0 before the first run."""
        return int(self.row_ns * rows + self.base_ns)

    def slowest_ns(self, rows: int) -> int:
        """Run time of a batch as slow as the slowest observed one; 0 before enough runs."""
        if self.samples < HANG_SAMPLES:
            return 0
        return int(self.slowest * (self.row_ns * rows + self.base_ns))

    def observe(self, rows: int, run_ns: int) -> None:
        """Learn from a run."""
        measured, weight = float(max(run_ns, 1)), 1.0
        if self.samples < LEARNED_SAMPLES and self._is_history_cold(rows, measured):
            self._w = self._r = self._rr = self._t = self._rt = 0.0
        if self._w:
            mean_rows = self._r / self._w
            expected = self.row_ns * rows + self.base_ns
            remembered = max(self.slowest * SLOWEST_DECAY, 1.0)
            self.slowest = max(remembered, measured / expected)
            measured = min(measured, expected * OUTLIER_RATIO)
            # Relative to a batch of mean size: a change in speed does not change the weights.
            weight = ((self.row_ns * mean_rows + self.base_ns) / expected) ** 2
        self.samples += 1
        self._w = self._w * DECAY + weight
        self._r = self._r * DECAY + weight * rows
        self._rr = self._rr * DECAY + weight * rows * rows
        self._t = self._t * DECAY + weight * measured
        self._rt = self._rt * DECAY + weight * rows * measured
        self._fit()

    def _is_history_cold(self, rows: int, measured: float) -> bool:
        """Whether the earlier runs, on average, took over twice as long with no more rows."""
        if not self._w:
            return False
        return rows * self._w >= self._r and measured * COLD_RATIO * self._w < self._t

    def _fit(self) -> None:
        """Compute a and b from the sums."""
        mean_rows, mean_ns = self._r / self._w, self._t / self._w
        variance = self._rr / self._w - mean_rows * mean_rows
        if variance > VARIANCE_MIN * mean_rows * mean_rows:
            slope = (self._rt / self._w - mean_rows * mean_ns) / variance
            # Noise must not make a part of the cost negative.
            self.row_ns = min(max(slope, 0.0), mean_ns / mean_rows)
        else:
            # One batch size only: half of the cost for the rows, half for the batch.
            self.row_ns = mean_ns / mean_rows / 2
        self.base_ns = max(mean_ns - self.row_ns * mean_rows, 0.0)
