"""Results as Markdown tables, for the terminal and for the README."""

from __future__ import annotations

from benchmarks.results import Results, Verdict

COLUMNS = {
    "p50_us": "p50 µs",
    "p95_us": "p95 µs",
    "p99_us": "p99 µs",
    "p999_us": "p99.9 µs",
    "requests_per_s": "requests/s",
    "rows_per_s": "rows/s",
    "server_cpu_us": "server CPU µs",
    "client_cpu_us": "client CPU µs",
    "late_p99_us": "sent late p99 µs",
    "drops": "dropped",
    "errors": "failed",
}
"""Every metric with its heading, in column order; CPU is per request."""

METRICS = COLUMNS | {"front_cpu_us": "front CPU µs"}
"""Adds the metrics without a column: not every system has a front process."""

ROUNDS_SHOWN = 9
"""Rounds of a goal; with more, the table has only the minimum and maximum."""


def render_case(results: Results, case: str) -> str:
    """A table of medians, with a row for each system."""
    systems = results.systems(case)
    figures = {
        system: {key: results.median(case, system, key) for key in COLUMNS} for system in systems
    }
    metrics = [key for key in COLUMNS if any(each[key] is not None for each in figures.values())]
    rows = [[system, *(_figure(figures[system][key]) for key in metrics)] for system in systems]
    table = render_table(["system", *(COLUMNS[key] for key in metrics)], rows)
    errors = [
        f"{each['system']}: {each['error_words']}"
        for system in systems
        for each in results.select(case, system)
        if each["error_words"]
    ]
    failures = f"\n\nFirst error: {errors[0]}" if errors else ""
    return f"### {case}\n\n{table}{failures}"


def render_processes(results: Results, case: str) -> str:
    """CPU microseconds per request by server process, with a line for each system."""
    lines = []
    for system in results.systems(case):
        rounds = [each["processes_cpu_us"] for each in results.select(case, system)]
        names = list(dict.fromkeys(name for each in rounds for name in each))
        costs = []
        for name in names:
            values = sorted(each[name] or 0.0 for each in rounds if name in each)
            costs.append(f"{name} {values[len(values) // 2]:,.0f}")
        if costs:
            lines.append(f"- {system}: {', '.join(costs)}")
    return "\n".join(lines)


def render_verdicts(verdicts: list[Verdict]) -> str:
    """The goals and their results."""
    rows = [
        [
            f"{verdict.goal.case}: {METRICS[verdict.goal.metric]}{_variant(verdict.goal.system)}",
            verdict.goal.baseline or "-",
            f"{'≥' if verdict.goal.sense == 'least' else '≤'} {verdict.goal.bound:.2f}",
            _ratio(verdict.value),
            _rounds(verdict.rounds),
            verdict.word,
        ]
        for verdict in verdicts
    ]
    return render_table(["figure", "baseline", "goal", "median", "rounds", "verdict"], rows)


def render_table(headings: list[str], rows: list[list[str]]) -> str:
    """A table with aligned columns; all but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    separators = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        others = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "| " + " | ".join([first, *others]) + " |"

    return "\n".join([line(headings), line(separators), *map(line, rows)])


def _rounds(values: list[float | None]) -> str:
    """All values if they are few; else their range."""
    known = [value for value in values if value is not None]
    if len(values) <= ROUNDS_SHOWN or len(known) < len(values):
        return " ".join(map(_ratio, values))
    return f"{len(known)}, from {_ratio(min(known))} to {_ratio(max(known))}"


def _variant(system: str) -> str:
    """Suffix for a variant of Iskander."""
    return system.replace("iskander-", ", by ") if system != "iskander" else ""


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
