"""Plots of missed deadlines against load, with a line for each policy.

The same figures give the same files, byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

TITLES = {
    "fleet": "A fleet of robots, one model",
    "mixed": "The fleet and a client with large batches",
    "two": "Two models on one worker",
}
STYLE = {
    "svg.hashsalt": "iskander",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLOURS = {
    "deadline_aware": "#c1272d",
    "model_deadline": "#e08214",
    "tiered_deadline": "#8073ac",
    "priority_tiered": "#542788",
    "batch_optimized": "#35978f",
    "round_robin": "#4d4d4d",
    "fifo": "#2b6cb0",
}
DASHES = {"fifo": "--", "priority_tiered": "--", "round_robin": ":", "batch_optimized": "-."}
BARS = {
    "fifo, unnamed": "#9ecae1",
    "fifo, named": "#2b6cb0",
    "deadline_aware, unnamed": "#f4a6a0",
    "deadline_aware, named": "#c1272d",
}


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write `scheduling-*.svg` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.switch_backend("svg")  # Without a display.
    with plt.rc_context(STYLE):
        for name, policies in results["sweep"].items():
            figure, axes = plt.subplots(figsize=(6.4, 3.6))
            for policy, figures in policies.items():
                axes.plot(
                    [float(load) for load in figures],
                    [figures[load]["missed"] for load in figures],
                    DASHES.get(policy, "-"),
                    color=COLOURS[policy],
                    label=policy,
                    linewidth=2.2 if policy == "deadline_aware" else 1.3,
                )
            axes.set(title=TITLES[name], xlabel="load", ylabel="deadlines missed, %")
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False, fontsize=8)
            _save(figure, folder / f"scheduling-{name}.svg")
        _draw_ablation(results["ablation"], folder / "scheduling-hold.svg")


def _draw_ablation(cases: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    width = 0.2
    for index, (heading, colour) in enumerate(BARS.items()):
        axes.bar(
            [position + (index - 1.5) * width for position in range(len(cases))],
            [case["figures"][heading]["missed"] for case in cases],
            width,
            color=colour,
            label=heading,
        )
    labels = [f"{case['robots']}\n{case['base_ms']:g} ms" for case in cases]
    axes.set_xticks(range(len(cases)), labels)
    axes.set(
        title="Clients with and without names",
        xlabel="robots, and cost of a batch",
        ylabel="deadlines missed, %",
    )
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:  # noqa: ANN401
    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
