"""Requests of several clients for generated graphs: each has the results of its run alone.

The clients use gRPC, HTTP and Flight. The worker is suspended while the requests arrive, so that
all that may be combined is combined. The settings are the defaults, and some that cut and pad.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_suite.cases import Feeds
from onnx_suite.comparison import Bench, Crowd, Verdict, serving
from onnx_suite.reference import Reference
from support.graphs import Generated, generated

GRAPHS_MIN = 200
OUTPUT_BYTES = 64 << 20
AT_ONCE = 8
"""Graphs with requests at the same time."""
ROWS = (3, 1, 2, 5, 1, 17, 4, 1, 2, 8, 3, 1)
"""Rows of each request."""
ROWS_COMBINED = {"default": 18, "cut-and-padded": 8}
"""Rows of the largest batch of a graph whose requests are combined."""
UNCOMPARED = {
    "default": ("unrepeatable",),
    "cut-and-padded": ("unrepeatable", "approximate"),  # A part of a request has another scale.
}
MAGNITUDES = (1.0, 100.0, 0.01)


def test_number_of_graphs() -> None:
    assert len(generated()) >= GRAPHS_MIN


SETTINGS = {
    "default": "",
    "cut-and-padded": "max_batch_rows = 8\n[lane]\npad_to = [2, 8]\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    "is_short", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["one-of-each", "all"]
)
def test_requests_have_the_results_of_their_runs_alone(
    is_short: bool, settings: str, tmp_path: Path
) -> None:
    """Rows of other clients, also of other magnitudes, change no result beyond the tolerance.

    A failure names the graphs; each has fixed seeds.
    """
    graphs = generated(first_only=is_short)
    for graph in graphs:
        folder = tmp_path / "models" / graph.name
        graph.save(folder / "1")
        (folder / "model.toml").write_text(SETTINGS[settings])
    verdicts: list[Verdict] = []
    with serving(tmp_path, OUTPUT_BYTES) as bench:
        for first in range(0, len(graphs), AT_ONCE):
            verdicts += ask(bench, graphs[first : first + AT_ONCE])
    bad, problems = {}, []
    for graph, verdict in zip(graphs, verdicts, strict=True):
        relation = graph.recipe.relation
        if verdict.is_bad and relation not in UNCOMPARED[settings]:
            bad[graph.name] = [*verdict.wrong, *verdict.internal][:2]
        if relation == "filter":
            problems += [graph.name] * ("cannot be assigned to rows" not in verdict.load_error)
        elif verdict.load_error:
            problems.append(f"{graph.name}: {verdict.load_error}")
        elif relation == "independent" and not graph.recipe.rows:
            is_combined = verdict.batch_rows >= ROWS_COMBINED[settings]
            problems += [f"{graph.name}: not combined"] * (not is_combined)
            problems += [f"{graph.name}: not answered"] * (verdict.together < len(ROWS))
    assert bad == {}, f"{len(bad)} of {len(verdicts)}"
    assert problems == []


def ask(bench: Bench, graphs: list[Generated]) -> list[Verdict]:
    """Load some graphs, send requests for all of them at once, and unload them."""
    verdicts = [Verdict(graph.name, graph.recipe.relation) for graph in graphs]
    crowds = []
    for seed, (graph, verdict) in enumerate(zip(graphs, verdicts, strict=True)):
        verdict.load_error = bench.load(graph.name)
        if not verdict.load_error:
            crowds.append(Crowd(graph.name, requests(graph, seed), Reference(graph.model), verdict))
    bench.together(crowds)
    for crowd in crowds:
        bench.unload(crowd.key)
    return verdicts


def requests(graph: Generated, seed: int) -> list[Feeds]:
    """Requests of other rows and magnitudes; not above a fixed first axis."""
    random = np.random.default_rng(seed)
    most = graph.recipe.rows
    counts = [min(rows, most) if most else rows for rows in ROWS]
    return [
        graph.feeds(rows, MAGNITUDES[number % len(MAGNITUDES)], random)
        for number, rows in enumerate(counts)
    ]
