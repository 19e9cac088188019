"""Results as Markdown: read well in a terminal, and go into the README as they are."""

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
"""Every metric with its heading, in the order of the columns; CPU is of one request."""

METRICS = COLUMNS | {"front_cpu_us": "front CPU µs"}
"""With those that have no column: what users talk to is not a process of its own everywhere."""

ROUNDS_SHOWN = 9
"""Of a goal; of more than these the least and the greatest."""


def render_case(results: Results, case: str) -> str:
    """A table of medians, a system a line."""
    systems = results.systems(case)
    figures = {
        system: {key: results.median(case, system, key) for key in COLUMNS} for system in systems
    }
    metrics = [key for key in COLUMNS if any(each[key] is not None for each in figures.values())]
    rows = [[system, *(_figure(figures[system][key]) for key in metrics)] for system in systems]
    table = render_table(["system", *(COLUMNS[key] for key in metrics)], rows)
    words = [
        f"{each['system']}: {each['error_words']}"
        for system in systems
        for each in results.of(case, system)
        if each["error_words"]
    ]
    failures = f"\n\nFirst error: {words[0]}" if words else ""
    return f"### {case}\n\n{table}{failures}"


def render_processes(results: Results, case: str) -> str:
    """CPU microseconds of a request by server process, a system a line."""
    lines = []
    for system in results.systems(case):
        rounds = [each["processes_cpu_us"] for each in results.of(case, system)]
        names = list(dict.fromkeys(name for each in rounds for name in each))
        told = []
        for name in names:
            values = sorted(each[name] or 0.0 for each in rounds if name in each)
            told.append(f"{name} {values[len(values) // 2]:,.0f}")
        if told:
            lines.append(f"- {system}: {', '.join(told)}")
    return "\n".join(lines)


def render_verdicts(verdicts: list[Verdict]) -> str:
    """What was aimed at, and whether it was met."""
    rows = [
        [
            f"{verdict.goal.case}: {METRICS[verdict.goal.metric]}{_asked(verdict.goal.of)}",
            verdict.goal.than or "-",
            f"{'≥' if verdict.goal.sense == 'least' else '≤'} {verdict.goal.bound:.2f}",
            _ratio(verdict.value),
            _rounds(verdict.rounds),
            verdict.word,
        ]
        for verdict in verdicts
    ]
    return render_table(["Iskander's", "against", "goal", "median", "rounds", "verdict"], rows)


def render_table(headings: list[str], rows: list[list[str]]) -> str:
    """A table whose columns line up as plain text too; all but the first are to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        others = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "| " + " | ".join([first, *others]) + " |"

    return "\n".join([line(headings), line(rules), *map(line, rows)])


def _rounds(values: list[float | None]) -> str:
    """Each of them where they are few."""
    known = [value for value in values if value is not None]
    if len(values) <= ROUNDS_SHOWN or len(known) < len(values):
        return " ".join(map(_ratio, values))
    return f"{len(known)}, from {_ratio(min(known))} to {_ratio(max(known))}"


def _asked(system: str) -> str:
    """How Iskander was asked, where not by Flight."""
    return system.replace("iskander-", ", by ") if system != "iskander" else ""


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
