"""Report of a scoring job: rows, seconds by stage, and latency of batches, as text and JSON.

Runs in: the operator's tool; `Counters` are shared by the threads of a job.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

LATENCIES_MAX: Final = 8192
"""Limit of the kept latencies; when it is reached, every second one is dropped."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of one run.

    Attributes:
        model: Name of the model.
        version: Version of the model.
        digest: Digest of the model.
        output: Output of the job.
        state: `done`, `interrupted` or `failed`.
        units: Units of the plan.
        units_resumed: Units that an earlier run had finished.
        rows_in: Rows that were read, after the filter, in all runs of the job.
        rows_out: Rows of the output.
        quarantined: Rows in the quarantine folder.
        rejected: Rows that the model or the server rejected.
        bytes_out: Bytes of the output, before units are joined.
        seconds: Duration of this run.
        read_s: Total time of the threads that read.
        score_s: Total time of waits for results of the server.
        write_s: Total time of the threads that wrote.
        batch_p50_ms: Median time from sending a batch to its result; None without batches.
        batch_p95_ms: 95th percentile of this time.
    """

    model: str
    version: str
    digest: str
    output: str
    state: str
    units: int
    units_resumed: int
    rows_in: int
    rows_out: int
    quarantined: int
    rejected: int
    bytes_out: int
    seconds: float
    read_s: float
    score_s: float
    write_s: float
    batch_p50_ms: float | None
    batch_p95_ms: float | None

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Render for a terminal."""
        rate = self.rows_in / self.seconds if self.seconds > 0 else 0.0
        resumed = f", {self.units_resumed} from an earlier run" if self.units_resumed else ""
        lines = [
            f"model     {self.model}, version {self.version}",
            f"output    {self.output} ({self.state})",
            f"units     {self.units}{resumed}",
            f"rows      {self.rows_in:,} in, {self.rows_out:,} out, "
            f"{self.quarantined:,} quarantined, {self.rejected:,} rejected",
            f"time      {self.seconds:.1f} s ({rate:,.0f} rows/s); threads: read "
            f"{self.read_s:.1f} s, score {self.score_s:.1f} s, write {self.write_s:.1f} s",
        ]
        if self.batch_p50_ms is not None:
            lines.append(
                f"batches   p50 {self.batch_p50_ms:.1f} ms, p95 {self.batch_p95_ms:.1f} ms"
            )
        return lines


class Latencies:
    """Bounded sample of a job's durations, spread evenly over the job."""

    def __init__(self, count_max: int = LATENCIES_MAX) -> None:
        self._count_max = count_max
        self._values: list[float] = []
        self._step = 1
        self._skipped = 0

    def add(self, value: float) -> None:
        """Add a duration to the sample, or skip it."""
        self._skipped += 1
        if self._skipped < self._step:
            return
        self._skipped = 0
        self._values.append(value)
        if len(self._values) >= self._count_max:
            self._values = self._values[1::2]
            self._step *= 2

    def percentile(self, percent: float) -> float | None:
        """Return the value that `percent` of the durations do not exceed.

        None without durations.
        """
        if not self._values:
            return None
        return float(np.percentile(self._values, percent, method="inverted_cdf"))


class Counters:
    """Sums and latencies of a running job; threads share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latencies = Latencies()
        self.rows_in = self.rows_out = self.quarantined = self.rejected = self.bytes_out = 0
        self.read_s = self.score_s = self.write_s = 0.0

    def add(self, **values: float) -> None:
        """Add values to the sums with these names."""
        with self._lock:
            for name, value in values.items():
                setattr(self, name, getattr(self, name) + value)

    def times(self) -> dict[str, float]:
        """Return the seconds by name, for `add` in another process."""
        return {"read_s": self.read_s, "score_s": self.score_s, "write_s": self.write_s}

    def add_latency(self, ms: float) -> None:
        """Add the latency of a batch."""
        with self._lock:
            self._latencies.add(ms)

    def percentile(self, percent: float) -> float | None:
        """Return a percentile of the latencies."""
        with self._lock:
            return self._latencies.percentile(percent)
