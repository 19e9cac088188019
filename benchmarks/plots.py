"""Plots of latency distributions on a logarithmic percentile axis.

The axis counts nines, as in HdrHistogram's plots: 90 %, 99 % and 99.9 % are equally far apart, so
the tail gets the same space as the rest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.results import Results

TICKS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
LAST = 0.99995
"""Position of the maximum: a finite number of samples has no hundredth percentile."""


def draw(results: Results, case: str, path: Path) -> None:
    """Write a PNG with a line for each system: the rounds' medians at each percentile."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    for system in results.systems(case):
        rounds = [each for each in results.select(case, system) if each["latencies_us"]]
        if rounds:
            quantiles = np.minimum(rounds[0]["quantiles"], LAST)
            medians = np.median([each["latencies_us"] for each in rounds], axis=0) / 1000
            axes.plot(_nines(quantiles), medians, label=system, linewidth=2 if system == "iskander"
                      else 1.2)  # fmt: skip
    axes.set_xticks(_nines(np.array(TICKS)), [f"{100 * tick:g} %" for tick in TICKS])
    axes.set_yscale("log")
    axes.set_xlabel("percentile of requests")
    axes.set_ylabel("latency in ms, from the due time")
    axes.set_title(case)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _nines(quantiles: np.ndarray) -> np.ndarray:
    return -np.log10(1 - quantiles)
