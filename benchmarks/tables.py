"""Results as Markdown: read well in a terminal, and go into the README as they are."""

from __future__ import annotations

from typing import Any

COLUMNS = {
    "p50_us": "p50 µs",
    "p95_us": "p95 µs",
    "p99_us": "p99 µs",
    "requests_per_s": "requests/s",
    "rows_per_s": "rows/s",
    "front_cpu_us": "server CPU µs/request",
    "workers_cpu_us": "workers CPU µs/request",
    "client_cpu_us": "client CPU µs/request",
    "late_p99_us": "sent late p99 µs",
    "drops": "dropped",
    "errors": "errors",
}
"""Every metric with its heading, in the order of the columns."""


def render_results(results: dict[str, Any]) -> str:
    """Results, as `harness.run_benchmark` writes them: a table for each case, then the ratios."""
    parts = [f"## {results['title']}", *map(_render_case, results["cases"])]
    if results["targets"]:
        parts.append(f"### Target ratios\n\n{render_targets(results['targets'])}")
    return "\n\n".join(parts)


def render_targets(targets: list[dict[str, Any]]) -> str:
    """What was aimed at, and whether it was met."""
    rows = [
        [
            f"{target['case']}: {COLUMNS[target['metric']]}",
            f"{'≥' if target['is_minimum'] else '≤'} {target['bound']:.2f}",
            _ratio(target["ratio"]),
            " ".join(_ratio(ratio) for ratio in target["rounds"]),
            "met" if target["is_met"] else "missed",
        ]
        for target in targets
    ]
    return render_table(["Iskander / echo", "target", "median", "rounds", "verdict"], rows)


def render_table(headings: list[str], rows: list[list[str]]) -> str:
    """A table whose columns line up as plain text too; all but the first are to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        others = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "| " + " | ".join([first, *others]) + " |"

    return "\n".join([line(headings), line(rules), *map(line, rows)])


def _render_case(case: dict[str, Any]) -> str:
    medians = {name: system["median"] for name, system in case["systems"].items()}
    metrics = [key for key in COLUMNS if any(key in median for median in medians.values())]
    rows = [
        [name, *(_figure(median.get(key)) for key in metrics)] for name, median in medians.items()
    ]
    table = render_table(["system", *(COLUMNS[key] for key in metrics)], rows)
    words = [word for system in case["systems"].values() for word in system["error_words"]]
    failures = f"\n\nFirst error: {words[0]}" if words else ""
    return f"### {case['name']}\n\n{table}{failures}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
