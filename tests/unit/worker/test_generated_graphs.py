"""Measurement of rows: the verdict about each generated graph, in process."""

from __future__ import annotations

from pathlib import Path

import pytest
from iskander_worker.loading.graph_constants import constants_of
from iskander_worker.session import Session
from support.graphs import Generated, generated
from support.scripted import model_spec

from iskander.errors import ManifestError

OTHERWISE = {
    "quantized-tanh-float-4": "dependent",  # Its steps are above 5 % of the results.
}
VERDICTS = {"constant": "undecided", "unrepeatable": "undecided"}
"""Verdicts of graphs whose results show nothing about other rows."""


@pytest.mark.long
@pytest.mark.parametrize("graph", generated(), ids=lambda graph: graph.name)
def test_verdict(graph: Generated, tmp_path: Path) -> None:
    """No dependent graph is measured as independent, and no independent one as dependent."""
    session = Session(model_spec(graph.save(tmp_path / "m")), 1)
    try:
        session.warm_up(1000)
        session.measure(is_confined=True)
    except ManifestError as error:
        assert graph.recipe.relation == "filter"
        assert "cannot be assigned to rows" in error.message
        return
    finally:
        session.close()
    relation = graph.recipe.relation
    expected = OTHERWISE.get(graph.name, VERDICTS.get(relation, relation))
    assert session.relation.verdict == expected, session.relation.evidence


def test_divisions_of_a_graph(tmp_path: Path) -> None:
    """Zeros end a process that divides integers, so such graphs get none."""
    found = {}
    for graph in generated():
        if graph.name in ("lookup-int64-1", "add-int64-3", "standardize-float-4"):
            folder = graph.save(tmp_path / graph.name)
            found[graph.name] = constants_of(folder / "model.onnx").has_divisions
    assert found == {"lookup-int64-1": True, "add-int64-3": False, "standardize-float-4": True}
    assert constants_of(tmp_path / "absent").has_divisions
