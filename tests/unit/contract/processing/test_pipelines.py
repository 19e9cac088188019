"""Pipelines: connection of tensors between steps, rejected steps, and execution."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from iskander_worker.backends import Run
from iskander_worker.backends.pipeline import Pipeline

from iskander.contract.backend_manifest import PipelineStep
from iskander.contract.graph import Dimension, Graph, GraphTensor
from iskander.contract.processing.pipelines import connect_steps
from iskander.errors import Cancelled, ExecutionFailed, ManifestError


def tensor(name: str, *shape: Dimension, element: str = "tensor(float)") -> GraphTensor:
    return GraphTensor(name, element, ("n", *shape))


def step(name: str, inputs: Any = None, outputs: Any = None) -> PipelineStep:
    return PipelineStep(name, name, inputs=inputs or {}, outputs=outputs or {})


DOUBLE = Graph((tensor("x", 2),), (tensor("y", 2), tensor("unused", 2)))
SUM = Graph((tensor("a", 2), tensor("b", None)), (tensor("total", 2),))


def test_unproduced_tensors_are_inputs_and_produced_ones_are_outputs() -> None:
    steps = (step("double"), step("sum", {"a": "y", "b": "x"}, {"total": "sum"}))
    flow = connect_steps(steps, (DOUBLE, SUM))
    assert [step.inputs for step in flow.steps] == [{"x": "x"}, {"a": "y", "b": "x"}]
    assert flow.graph.inputs == (GraphTensor("x", "tensor(float)", ("rows", 2)),)
    assert [each.name for each in flow.graph.outputs] == ["y", "unused", "sum"]


@pytest.mark.parametrize(
    ("steps", "graphs", "message"),
    [
        ((step("a"), step("a")), (DOUBLE, SUM), "two steps are called `a`"),
        ((step("a", {"z": "x"}),), (DOUBLE,), "has no `z` among its inputs, which are x"),
        ((step("a", {}, {"y": "q", "unused": "q"}),), (DOUBLE,), "two of its outputs have one"),
        ((step("a"), step("b")), (DOUBLE, DOUBLE), "step `b` makes `y`, which exists already"),
        ((step("a", {}, {"y": "x"}),), (DOUBLE,), "step `a` makes `x`, which exists already"),
        (
            (step("a"), step("b", {"i": "y"})),
            (DOUBLE, Graph((tensor("i", 3),), ())),
            r"step `b` takes `y` as tensor\(float\) \['n', 3\], and it is .* \['n', 2\]",
        ),
        (
            (step("a"), step("b", {"i": "y"})),
            (DOUBLE, Graph((tensor("i", 2, element="tensor(int64)"),), ())),
            r"takes `y` as tensor\(int64\)",
        ),
        (
            (step("a"), step("b", {"i": "x"})),
            (DOUBLE, Graph((tensor("i"),), ())),
            "step `b` takes `x` as",
        ),
    ],
)
def test_inconsistent_steps_are_rejected(steps: Any, graphs: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        connect_steps(steps, graphs)


def model(compute: Any) -> Any:
    return SimpleNamespace(compute=compute, threads=1, providers=("test",))


def double(arrays: Any, requested: Any, run: Run) -> Any:
    return {name: arrays["x"] * 2 for name in requested}


def total(arrays: Any, requested: Any, run: Run) -> Any:
    return {"total": arrays["a"] + arrays["b"]}


def pipeline(*computes: Any) -> Pipeline:
    steps = (step("double"), step("sum", {"a": "y", "b": "x"}))
    return Pipeline([model(each) for each in computes], connect_steps(steps, (DOUBLE, SUM)))


def test_steps_run_in_order_and_are_timed() -> None:
    run, x = Run(), np.ones((3, 2), np.float32)
    results = pipeline(double, total).compute({"x": x}, ["total"], run)
    assert list(results) == ["total"]
    assert (results["total"] == 3).all()
    assert [name for name, took_ns in run.steps if took_ns >= 0] == ["double", "sum"]


def test_step_without_requested_outputs_does_not_run() -> None:
    def unexpected(arrays: Any, requested: Any, run: Run) -> Any:
        raise AssertionError

    run = Run()
    pipeline(double, unexpected).compute({"x": np.ones((1, 2))}, ["y"], run)
    assert [name for name, _ in run.steps] == ["double"]


def test_error_of_a_step_names_it() -> None:
    def fail(arrays: Any, requested: Any, run: Run) -> Any:
        raise ExecutionFailed("no")

    with pytest.raises(ExecutionFailed, match="step `sum`: no"):
        pipeline(double, fail).compute({"x": np.ones((1, 2))}, ["total"], Run())


def test_aborted_run_stops_before_the_next_step() -> None:
    def abort(arrays: Any, requested: Any, run: Run) -> Any:
        run.abort()
        return double(arrays, requested, run)

    with pytest.raises(Cancelled):
        pipeline(abort, total).compute({"x": np.ones((1, 2))}, ["total"], Run())
