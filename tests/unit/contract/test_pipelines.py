"""Pipelines: which tensor goes where, and what does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from iskander_worker.backends import Run
from iskander_worker.backends.pipeline import Pipeline

from iskander.contract.backend_manifest import PipelineStep
from iskander.contract.graph import Dimension, Graph, GraphTensor
from iskander.contract.pipelines import connect_steps
from iskander.errors import Cancelled, ExecutionFailed, ManifestError


def tensor(name: str, *shape: Dimension, element: str = "tensor(float)") -> GraphTensor:
    return GraphTensor(name, element, ("n", *shape))


def step(name: str, inputs: Any = None, outputs: Any = None) -> PipelineStep:
    return PipelineStep(name, name, inputs=inputs or {}, outputs=outputs or {})


DOUBLE = Graph((tensor("x", 2),), (tensor("y", 2), tensor("unused", 2)))
SUM = Graph((tensor("a", 2), tensor("b", None)), (tensor("total", 2),))


def test_what_no_step_makes_is_an_input_and_whatever_is_made_an_output() -> None:
    steps = (step("double"), step("sum", {"a": "y", "b": "x"}, {"total": "sum"}))
    flow = connect_steps(steps, (DOUBLE, SUM))
    assert [joint.inputs for joint in flow.joints] == [{"x": "x"}, {"a": "y", "b": "x"}]
    assert flow.graph.inputs == (GraphTensor("x", "tensor(float)", ("rows", 2)),)
    assert [each.name for each in flow.graph.outputs] == ["y", "unused", "sum"]


@pytest.mark.parametrize(
    ("steps", "graphs", "told"),
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
def test_steps_that_do_not_fit_are_refused(steps: Any, graphs: Any, told: str) -> None:
    with pytest.raises(ManifestError, match=told):
        connect_steps(steps, graphs)


def model(compute: Any) -> Any:
    return SimpleNamespace(compute=compute, threads=1, providers=("test",))


def double(arrays: Any, wanted: Any, run: Run) -> Any:
    return {name: arrays["x"] * 2 for name in wanted}


def total(arrays: Any, wanted: Any, run: Run) -> Any:
    return {"total": arrays["a"] + arrays["b"]}


def pipeline(*computes: Any) -> Pipeline:
    steps = (step("double"), step("sum", {"a": "y", "b": "x"}))
    return Pipeline([model(each) for each in computes], connect_steps(steps, (DOUBLE, SUM)))


def test_steps_are_computed_in_order_and_each_is_timed() -> None:
    run, x = Run(), np.ones((3, 2), np.float32)
    results = pipeline(double, total).compute({"x": x}, ["total"], run)
    assert list(results) == ["total"]
    assert (results["total"] == 3).all()
    assert [name for name, took_ns in run.steps if took_ns >= 0] == ["double", "sum"]


def test_what_nobody_wants_is_not_computed() -> None:
    def refuse(arrays: Any, wanted: Any, run: Run) -> Any:
        raise AssertionError

    run = Run()
    pipeline(double, refuse).compute({"x": np.ones((1, 2))}, ["y"], run)
    assert [name for name, _ in run.steps] == ["double"]


def test_a_failure_names_its_step() -> None:
    def fail(arrays: Any, wanted: Any, run: Run) -> Any:
        raise ExecutionFailed("no")

    with pytest.raises(ExecutionFailed, match="step `sum`: no"):
        pipeline(double, fail).compute({"x": np.ones((1, 2))}, ["total"], Run())


def test_a_run_that_nobody_waits_for_ends_between_two_steps() -> None:
    def give_up(arrays: Any, wanted: Any, run: Run) -> Any:
        run.abort()
        return double(arrays, wanted, run)

    with pytest.raises(Cancelled):
        pipeline(give_up, total).compute({"x": np.ones((1, 2))}, ["total"], Run())
