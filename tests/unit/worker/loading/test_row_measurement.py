"""Measurement of rows: the verdict about small graphs, in process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from iskander_worker.backends import Run
from iskander_worker.loading.generated_rows import RowGenerator, Values
from iskander_worker.loading.measurement import Measurement
from iskander_worker.loading.row_measurement import RowVerdict, measure_rows
from iskander_worker.session import Session
from onnx import TensorProto
from support import row_graphs
from support.scripted import model_spec

from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ExecutionFailed, ManifestError

X = TensorSpec("x", "x", ColumnType("float32"), ())
Y = TensorSpec("y", "y", ColumnType("float32"), ())


def verdict_of(folder: Path) -> RowVerdict:
    """Measure a graph as its sandboxed load does."""
    session = Session(model_spec(folder), 1)
    try:
        session.warm_up(1000)
        session.measure(is_confined=True)
        return RowVerdict(session.relation.verdict, session.relation.evidence)
    finally:
        session.close()


def named(graph: Callable[[Path], Path]) -> str:
    """Name of a test's case."""
    return graph.__name__


@pytest.mark.parametrize("graph", row_graphs.INDEPENDENT, ids=named)
def test_independent(graph: Callable[[Path], Path], tmp_path: Path) -> None:
    """Results that are equal within rounding in every batch."""
    verdict, evidence, _ = verdict_of(graph(tmp_path / "m"))
    assert (verdict, "8 rows" in evidence) == ("independent", True), evidence


@pytest.mark.parametrize("graph", row_graphs.DEPENDENT, ids=named)
def test_dependent(graph: Callable[[Path], Path], tmp_path: Path) -> None:
    """The evidence names an output and a row, or the failure of a batch."""
    verdict, evidence, _ = verdict_of(graph(tmp_path / "m"))
    assert verdict == "dependent", evidence
    assert "output `y`" in evidence


@pytest.mark.parametrize("marker", [0.0, -1.0, -999.0])
def test_marker_that_is_replaced_by_a_mean(marker: float, tmp_path: Path) -> None:
    """Rows interact only where a value equals a marker of missing values."""
    folder = row_graphs.marker_mean(tmp_path / "m", marker)
    assert verdict_of(folder).verdict == "dependent"


@pytest.mark.parametrize("is_threshold", [False, True], ids=["equal", "greater"])
@pytest.mark.parametrize("marker", [37.25, -12345.0, 3e15])
def test_constant_of_the_graph(marker: float, is_threshold: bool, tmp_path: Path) -> None:
    """A value that is replaced by a mean is no usual marker, but a constant of the graph."""
    if is_threshold and marker < 0:
        pytest.skip("all usual rows exceed a negative threshold")
    folder = row_graphs.marker_mean(tmp_path / "m", marker, is_threshold=is_threshold)
    assert verdict_of(folder).verdict in ("approximate", "dependent")


@pytest.mark.parametrize(
    ("marker", "element"),
    [(-999, TensorProto.INT64), (255, TensorProto.UINT8), (0, 7), (421, TensorProto.INT32)],
)
def test_integer_marker(marker: int, element: int, tmp_path: Path) -> None:
    """The same for integers, which generated rows have not by chance."""
    folder = row_graphs.integer_marker_mean(tmp_path / "m", marker, element)
    # A large marker dominates the mean, so that the difference is small beside it.
    assert verdict_of(folder).verdict in ("approximate", "dependent")


def test_padding_beside_a_division_of_floats(tmp_path: Path) -> None:
    """Zeros are tried although the graph has a division, last, because they could be a crash."""
    session = Session(model_spec(row_graphs.trimmed_tokens(tmp_path / "m")), 1)
    before: list[Measurement] = []
    try:
        session.warm_up(1000)
        session.measure(is_confined=True, on_risk=before.append)
        assert session.relation.verdict == "dependent", session.relation.evidence
    finally:
        session.close()
    assert [found.verdict for found in before] == ["independent"]
    assert "integers below 1 crash it" in before[0].evidence


@pytest.mark.parametrize(
    ("threshold", "element"),
    [(1e11, TensorProto.INT64), (7e5, TensorProto.INT32), (1e11, TensorProto.FLOAT), (3e18, 11)],
)
def test_threshold_for_the_whole_batch(threshold: float, element: int, tmp_path: Path) -> None:
    """A neighbour's large value changes small ones; the threshold is a constant of the graph."""
    folder = row_graphs.unit_of_the_largest(tmp_path / "m", threshold, element)
    assert verdict_of(folder).verdict == "dependent"


@pytest.mark.parametrize("row", [0, -1])
def test_missing_value_in_the_first_or_last_row(row: int, tmp_path: Path) -> None:
    """Rows of one caller are the first or the last ones of a combined batch."""
    assert verdict_of(row_graphs.missing_in_row(tmp_path / "m", row)).verdict == "dependent"


def test_texts_with_different_numbers_of_words(tmp_path: Path) -> None:
    """Padding to the longest text of the batch."""
    assert verdict_of(row_graphs.padded_words(tmp_path / "m")).verdict == "dependent"


def test_other_number_of_results_than_rows(tmp_path: Path) -> None:
    """A filter of rows fails to load, unless its manifest accepts that some requests fail."""
    folder = row_graphs.positive_rows(tmp_path / "m")
    with pytest.raises(ManifestError, match=r"output `y` has shape .* cannot be assigned to rows"):
        verdict_of(folder)
    (folder / "manifest.toml").write_text(
        "format = 1\ncombine = false\n"
        'inputs = [{tensor = "x", column = "x", type = "fixed_size_list<float32>[3]"}]\n'
        'outputs = [{tensor = "y", column = "y", type = "fixed_size_list<float32>[3]"}]\n'
    )
    assert verdict_of(folder).verdict == "dependent"


def test_scale_of_the_batch_is_approximate(tmp_path: Path) -> None:
    """Dynamic quantization: rows of one size change each other little, larger ones much."""
    verdict, evidence, _ = verdict_of(row_graphs.dynamic_quantization(tmp_path / "m"))
    assert verdict == "approximate"
    assert "among rows 1000 times as large" in evidence


@pytest.mark.parametrize(
    ("graph", "expected"),
    [(row_graphs.linear, "independent"), (row_graphs.cumulative_sum, "dependent")],
    ids=["linear", "cumulative_sum"],
)
def test_fixed_number_of_rows(graph: Callable[..., Path], expected: str, tmp_path: Path) -> None:
    """A fixed first axis is rows only if the others do not matter."""
    assert verdict_of(graph(tmp_path / "m", rows=4)).verdict == expected


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (row_graphs.random, "differs between two runs"),
        (row_graphs.constant, "the same result for all rows"),
    ],
    ids=["random", "constant"],
)
def test_undecided(graph: Callable[[Path], Path], reason: str, tmp_path: Path) -> None:
    """Results that show nothing about other rows."""
    verdict, evidence, _ = verdict_of(graph(tmp_path / "m"))
    assert verdict == "undecided"
    assert reason in evidence


def test_samples_decide_where_generated_values_fail(tmp_path: Path) -> None:
    """A graph that rejects all generated values; its samples show that rows are independent."""
    folder = row_graphs.table(tmp_path / "m", length=1)
    assert verdict_of(folder).verdict == "undecided"
    np.savez(folder / "samples.npz", x=np.zeros((8, row_graphs.WIDTH), np.int64))
    (folder / "manifest.toml").write_text(
        'format = 1\ninputs = [{tensor = "x", column = "x", type = "fixed_size_list<int64>[3]"}]\n'
        'outputs = [{tensor = "y", column = "y", type = "fixed_size_list<fixed_size_list<float32>'
        '[3]>[1]"}]\n[warm_up]\nsamples = "samples.npz"\n'
    )
    # All samples are the only valid row: their results cannot be told apart.
    assert "the same result" in verdict_of(folder).evidence
    folder = row_graphs.cumulative_sum(tmp_path / "sum")
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    np.savez(folder / "samples.npz", x=rows)
    (folder / "manifest.toml").write_text(
        'format = 1\ninputs = [{tensor = "x", column = "x", type = "fixed_size_list<float32>[3]"}]'
        '\noutputs = [{tensor = "y", column = "y", type = "fixed_size_list<float32>[3]"}]\n'
        '[warm_up]\nsamples = "samples.npz"\n'
    )
    assert verdict_of(folder).verdict == "dependent"


def test_manifest_overrides_the_measurement(tmp_path: Path) -> None:
    """`combine = true` joins rows that are dependent, and the relation says so."""
    folder = row_graphs.cumulative_sum(tmp_path / "m")
    (folder / "manifest.toml").write_text(
        "format = 1\ncombine = true\n"
        'inputs = [{tensor = "x", column = "x", type = "fixed_size_list<float32>[3]"}]\n'
        'outputs = [{tensor = "y", column = "y", type = "fixed_size_list<float32>[3]"}]\n'
    )
    session = Session(model_spec(folder), 1)
    session.measure(is_confined=True)
    assert session.relation.is_combinable
    assert session.relation.verdict == "dependent"
    session.close()


class ScriptedModel:
    """A model of one number a row, computed by a function of the batch and its run."""

    def __init__(self, function: Callable[[np.ndarray, Run], np.ndarray]) -> None:
        self.contract = Contract((X,), (Y,))
        self._function = function

    def results(self, rows: int, arrays: dict[str, np.ndarray], run: Run) -> dict[str, np.ndarray]:
        """As `Session.results`."""
        assert len(arrays["x"]) == rows
        return {"y": self._function(arrays["x"], run)}


def measured(
    function: Callable[[np.ndarray, Run], np.ndarray], seconds: float = 10.0
) -> RowVerdict:
    """Measure a scripted model."""
    model = ScriptedModel(function)
    return measure_rows(model, {}, {}, Path(), is_confined=True, seconds=seconds)


def test_hanging_run_ends_at_the_time_limit() -> None:
    """The run is aborted, and the verdict names the limit."""

    def hang(x: np.ndarray, run: Run) -> np.ndarray:
        while len(x) > 1 and not run.is_aborted:
            pass
        if run.is_aborted:
            raise ExecutionFailed("aborted")
        return x * 2

    verdict, evidence, _ = measured(hang, seconds=0.2)
    assert (verdict, evidence) == ("undecided", "the measurement took more than 0.2 s")


def test_failure_of_several_rows() -> None:
    """A graph that reshapes to one row."""

    def single(x: np.ndarray, run: Run) -> np.ndarray:
        if len(x) > 1:
            raise ExecutionFailed("cannot reshape")
        return x

    verdict, evidence, _ = measured(single)
    assert verdict == "dependent"
    assert evidence == "rows that run alone fail in a batch of 8 rows: cannot reshape"


def test_failure_of_one_row_alone() -> None:
    """A model that needs several rows cannot be compared with single ones."""

    def pairs(x: np.ndarray, run: Run) -> np.ndarray:
        if len(x) == 1:
            raise ExecutionFailed("needs two rows")
        return x

    assert "a batch of one row fails" in measured(pairs).evidence


def test_no_run_at_all() -> None:
    """The reason has the error of the first kind of values."""

    def fail(x: np.ndarray, run: Run) -> np.ndarray:
        raise ExecutionFailed("no such index")

    verdict, evidence, _ = measured(fail)
    assert verdict == "undecided"
    assert evidence.startswith("no batch of generated rows runs: no such index; add warm-up")


def test_dependence_in_large_batches_only() -> None:
    """A window over more rows than the measured ones."""

    def window(x: np.ndarray, run: Run) -> np.ndarray:
        return x + (x.sum() if len(x) > 20 else 0)

    assert "in a batch of 64 rows" in measured(window).evidence


def test_rare_result_is_searched() -> None:
    """A label that few rows have; the neighbour decides it, which only such rows show."""

    def rare(x: np.ndarray, run: Run) -> np.ndarray:
        label = (np.abs(x) > 280).astype(np.float32)
        return np.maximum(label, np.roll(label, 1))

    assert measured(rare).verdict == "dependent"
    alone = measured(lambda x, run: (np.abs(x) > 280).astype(np.float32))
    assert alone.verdict == "independent"


def test_rows_of_a_kind_vary_and_repeat() -> None:
    """Equal seeds make equal rows; integers begin at 1, because a division by 0 ends a process."""
    specs = (X, TensorSpec("n", "n", ColumnType("int64"), (2,)))
    generator = RowGenerator(specs, {})
    first, again = (generator.rows(8, Values(high=3), seed=5) for _ in range(2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert len(np.unique(first["x"])) == 8
    assert first["n"].min() >= 1
    assert first["n"].max() <= 3


def test_dependence_beyond_a_thousand_rows() -> None:
    """A window over more rows than a usual batch has; a fast model is run with 65,536 rows."""

    def window(x: np.ndarray, run: Run) -> np.ndarray:
        return x + (x.sum() if len(x) > 20_000 else 0)

    assert "behind 65528 rows" in measured(window).evidence
    assert "1 to 65536 rows" in measured(lambda x, run: x + 1).evidence


def test_no_larger_batch_than_a_slow_model_runs_in_time() -> None:
    """Rows of 20 us would take twice the time limit of a batch of 65,536."""

    def slow(x: np.ndarray, run: Run) -> np.ndarray:
        time.sleep(len(x) * 2e-5)
        return x + 1

    rows = int(re.findall(r"1 to (\d+) rows", measured(slow).evidence)[0])
    assert 1024 <= rows < 16_384
