"""Output of `iskander bench`: table, JSON, CSV, text plot, and a plot by matplotlib."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from iskander.cli.command import UsageError
from iskander.cli.load_generator.figures import Figures
from iskander.cli.tables import render_table
from iskander.errors import ConfigError

BAR = 60
"""Characters of the longest bar of a text plot."""
BUSY_SHARE = 0.01
PERCENTILES = ("p50", "p90", "p95", "p99")
SUFFIXES = (".png", ".svg")


def render(found: Sequence[Figures]) -> Iterator[str]:
    """Return a table, and a line for each mark."""
    head = ("load", "due/s", "ok/s", "rows/s", "failed", "p50 ms", "p90", "p95", "p99", "max")
    rows = [
        (
            each.title,
            f"{each.offered:,.1f}",
            f"{each.completed:,.1f}",
            f"{each.rows_per_s:,.0f}",
            str(sum(each.errors.values()) + each.unanswered),
            *(f"{getattr(each, name):.2f}" for name in (*PERCENTILES, "max")),
            f"{each.lag_p99:.2f}",
        )
        for each in found
    ]
    yield from render_table((*head, "lag p99"), rows, numbers_from=1)
    for each in found:
        yield from _marks(each)


def _marks(figures: Figures) -> Iterator[str]:
    for code, count in sorted(figures.errors.items()):
        yield f"{figures.title}: {count:,} requests failed with {code}"
    if figures.unanswered:
        text = f"{figures.unanswered:,} requests without an answer"
        yield f"{figures.title}: {text}; the percentiles do not contain them"
    if figures.is_late:
        text = f"the generator itself was late by {figures.lag_p99:.2f} ms (p99)"
        yield f"{figures.title}: {text}, which the latencies contain"
    if figures.is_saturated:
        text = f"the generator used {figures.cpu:.0%} of a core, and may be the limit"
        yield f"{figures.title}: {text}; the server may be faster"
    if figures.busy > BUSY_SHARE:
        text = f"{figures.busy:.0%} of the requests waited for an idle client"
        slow = "the generator or the server" if figures.is_saturated else "the server"
        yield f"{figures.title}: {text}: {slow} is too slow for the rate, or --clients too few"
    if not figures.is_stable:
        yield f"{figures.title}: unstable: the rates of its thirds differ by more than 10 %"


def to_json(model: str, found: Sequence[Figures]) -> dict[str, Any]:
    return {"model": model, "points": [each._asdict() for each in found]}


def write_csv(path: Path, found: Sequence[Figures]) -> None:
    """Write a line for each point; raise ConfigError if the file cannot be written."""
    try:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Figures._fields)
            for each in found:
                errors = " ".join(f"{code}={count}" for code, count in each.errors.items())
                writer.writerow(each._replace(errors=errors))  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(f"--csv {path.name}: cannot be written: {error.strerror}") from None


def require_plot(target: str | None) -> None:
    """Raise UsageError if a plot cannot be drawn, before the run."""
    if not target or target == "-":
        return
    if Path(target).suffix not in SUFFIXES:
        raise UsageError(f"--plot {target}: expected a name with {' or '.join(SUFFIXES)}, or -")
    if find_spec("matplotlib") is None:
        raise UsageError(f"--plot {target}: matplotlib is not installed; --plot - needs none")


def plot(target: str, model: str, found: Sequence[Figures]) -> list[str]:
    """Draw latency by load to a file, or return a text plot."""
    if target == "-":
        return ["", *text_plot(found)]
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    loads = [each.rate or each.clients for each in found]
    for name in PERCENTILES:
        axes.plot(loads, [getattr(each, name) for each in found], marker="o", label=name)
    axes.set(
        title=model,
        xlabel="requests/s" if found[0].rate else "clients",
        ylabel="latency, ms",
        yscale="log",
    )
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(target)
    except OSError as error:
        raise ConfigError(f"--plot {target}: cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)
    return []


def text_plot(found: Sequence[Figures]) -> list[str]:
    """Return a bar for the 50th and the 99th percentile of each point."""
    longest = max(each.p99 for each in found) or 1.0
    width = max(len(each.title) for each in found)
    lines = []
    for each in found:
        for title, name in ((each.title, "p50"), ("", "p99")):
            value = getattr(each, name)
            bar = "#" * round(value / longest * BAR)
            lines.append(f"{title:>{width}}  {name}  {bar} {value:.2f} ms")
    return lines
