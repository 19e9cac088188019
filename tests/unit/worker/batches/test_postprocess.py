"""Post-processing steps: formulas, edge cases, and independence of rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from iskander_worker.batches import postprocess
from iskander_worker.batches.postprocess import PostProcessor
from support.random_examples import up_to

from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.outputs import OutputColumn, OutputSource, Quantization, Step
from iskander.contract.processing.postprocess import compile_outputs
from iskander.errors import ExecutionFailed

NAN = math.nan
LABELS = {"labels.txt": ("cat", "dog", "ünï")}
FLOATS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.just(3)),
    elements=st.floats(width=32, allow_subnormal=False),
)


def processor_of(
    *entries: OutputColumn, element: str = "tensor(float)", shape: Any = ("N", 3)
) -> PostProcessor:
    graph = Graph((), (GraphTensor("y", element, shape),))
    return PostProcessor(compile_outputs(entries, graph, LABELS, 256).finishes)


def column(*steps: Any, type: str = "fixed_size_list<float32>[3]", **keys: Any) -> OutputColumn:
    return OutputColumn("finished", type, "y", tuple(steps), **keys)


def finish(entry: OutputColumn, value: Any, **options: Any) -> list[np.ndarray]:
    return list(processor_of(entry, **options).finish({"y": value}, len(value)).values())


# Single steps.


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_softmax_matches_its_formula(dtype: str) -> None:
    rows = np.array([[1, 2, 3], [-1, 0, 1], [0, 0, 0]], dtype)
    result = postprocess.softmax(rows)
    assert result.dtype == dtype
    for row, actual in zip(rows.tolist(), result.tolist(), strict=True):
        total = sum(map(math.exp, row))
        assert actual == pytest.approx([math.exp(each) / total for each in row], rel=2e-3)


def test_softmax_of_large_numbers_does_not_overflow() -> None:
    rows = np.array([[1e38, 0, -1e38], [11, 11, -math.inf], [NAN, 1, 2]], np.float32)
    result = postprocess.softmax(rows).tolist()
    assert result[:2] == [[1, 0, 0], [0.5, 0.5, 0]]
    assert all(map(math.isnan, result[2]))


def test_sigmoid_matches_its_formula() -> None:
    numbers = np.array([-1000, -2, -0.0, 0, 3, 1000, math.inf, -math.inf], np.float64)
    expected = [0, 1 / (1 + math.e**2), 0.5, 0.5, 1 / (1 + math.e**-3), 1, 1, 0]
    assert postprocess.sigmoid(numbers).tolist() == pytest.approx(expected)
    assert math.isnan(postprocess.sigmoid(np.array([NAN]))[0])


def test_l2_matches_its_formula() -> None:
    rows = np.array([[3, 4, 0], [0, 0, 0], [1e30, 0, 1e30], [1e-30, 0, 0]], np.float32)
    half = math.sqrt(0.5)
    expected = [0.6, 0.8, 0, 0, 0, 0, half, 0, half, 1, 0, 0]
    assert postprocess.l2(rows).reshape(-1).tolist() == pytest.approx(expected)


def test_quantize_rounds_to_even_and_saturates() -> None:
    numbers = np.array([0.25, 0.75, -0.25, 1e9, -1e9, math.inf, NAN, 1], np.float32)
    result = postprocess.quantize(numbers, Quantization(0.5, 3))
    assert result.dtype == np.int8
    assert result.tolist() == [3, 5, 3, 127, -128, 127, 3, 5]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int64"])
def test_top_k_is_descending_and_stable(dtype: str) -> None:
    rows = np.array([[1, 7, 7, 0], [5, 5, 5, 5]], dtype)
    assert postprocess.top_k(rows, 3).tolist() == [[1, 2, 0], [0, 1, 2]]
    assert postprocess.argmax(rows).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_top_k_of_many_equal_values_is_stable(dtype: str) -> None:
    """Enough values that an unstable sort would change the order."""
    rows = np.tile(np.arange(7), 143)[None].astype(dtype)
    expected = sorted(range(rows.size), key=lambda index: (-rows[0, index], index))
    assert postprocess.top_k(rows, rows.size).tolist() == [expected]


def test_top_k_of_integer_limits() -> None:
    rows = np.array([[-128, 127, 0]], np.int8)
    assert postprocess.top_k(rows, 3).tolist() == [[1, 2, 0]]
    assert postprocess.top_k(np.array([[0, 255, 3]], np.uint8), 2).tolist() == [[1, 2]]


def test_nan_is_the_smallest_value() -> None:
    rows = np.array([[NAN, -math.inf, NAN], [NAN, 1, 2], [NAN, NAN, NAN]], np.float32)
    assert postprocess.argmax(rows).tolist() == [1, 2, 0]
    assert postprocess.top_k(rows, 3).tolist() == [[1, 0, 2], [2, 1, 0], [0, 1, 2]]
    (above,) = finish(column(Step(threshold=0.5), type="fixed_size_list<bool>[3]"), rows)
    assert above.tolist() == [[False] * 3, [False, True, True], [False] * 3]


@given(FLOATS)
@settings(max_examples=up_to(40), deadline=None)
def test_results_match_scipy(rows: np.ndarray) -> None:
    special = pytest.importorskip("scipy.special")
    with np.errstate(all="ignore"):
        wide = rows.astype(np.float64)
        shares, chances = special.softmax(wide, axis=-1), special.expit(wide)
        softmax, sigmoid = postprocess.softmax(rows), postprocess.sigmoid(rows)
    np.testing.assert_allclose(softmax, shares, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sigmoid, chances, rtol=1e-4, atol=1e-6)


@given(FLOATS)
@settings(max_examples=up_to(60), deadline=None)
def test_rows_are_independent(rows: np.ndarray) -> None:
    """A batch has the same results as its rows in single batches."""
    entries = (
        column("softmax"),
        OutputColumn("above", "fixed_size_list<bool>[3]", "y", ("sigmoid", Step(threshold=0.5))),
        OutputColumn("class", "utf8", "y", ("argmax",), "labels.txt"),
        OutputColumn("unit", "fixed_size_list<float32>[3]", "y", ("l2",)),
        OutputColumn("small", "int8", "y", (Step(select=1), Step(quantize=Quantization(0.5)))),
        OutputColumn(
            "top",
            "list<struct<label: utf8, score: float32, index: int64>>",
            "y",
            (Step(top_k=2),),
            "labels.txt",
        ),
    )
    processor = processor_of(*entries)
    together = processor.finish({"y": rows}, len(rows))
    assert len(together) == 8
    for index in range(len(rows)):
        alone = processor.finish({"y": rows[index : index + 1]}, 1)
        for name, whole in together.items():
            assert whole.dtype == alone[name].dtype
            np.testing.assert_array_equal(whole[index : index + 1], alone[name])


# Combinations of steps.


def test_argmax_as_label() -> None:
    (label,) = finish(
        column("argmax", type="utf8", labels="labels.txt"), np.float32([[0, 1, 0], [0, 0, 9]])
    )
    assert label.tolist() == ["dog", "ünï"]


def test_top_k_as_labels_indices_and_scores() -> None:
    kind = "fixed_size_list<struct<score: float32, index: int64, label: utf8>>[2]"
    rows = np.float32([[0, 1, 0.5], [3, 2, 3]])
    score, index, label = finish(column(Step(top_k=2), type=kind, labels="labels.txt"), rows)
    assert score.tolist() == [[1, 0.5], [3, 3]]
    assert index.tolist() == [[1, 2], [0, 2]]
    assert label.tolist() == [["dog", "ünï"], ["cat", "ünï"]]


def test_value_at_the_threshold_is_true() -> None:
    (above,) = finish(
        column(Step(threshold=0.5), type="bool"), np.float32([0.5, 0.25, 0.75]), shape=("N",)
    )
    assert above.tolist() == [True, False, True]


def test_labels_of_integer_outputs() -> None:
    entry = column(type="utf8", labels="labels.txt")
    (label,) = finish(entry, np.array([2, 0]), element="tensor(int64)", shape=("N",))
    assert label.tolist() == ["ünï", "cat"]
    with pytest.raises(ExecutionFailed, match="without a line in `labels"):
        finish(entry, np.array([0, 3]), element="tensor(int64)", shape=("N",))
    with pytest.raises(ExecutionFailed, match="without a line"):
        finish(entry, np.array([0, -1]), element="tensor(int64)", shape=("N",))


STRING_LIST = "list<utf8>"


def label_lists(**keys: Any) -> OutputColumn:
    return column("argmax", type=STRING_LIST, labels="labels.txt", list_max=4, **keys)


@pytest.mark.parametrize("width", [0, 1, 4])
def test_list_length_is_the_width_of_the_batch(width: int) -> None:
    rows = np.zeros((2, width, 3), np.float32)
    values, length = finish(label_lists(), rows, shape=("N", "width", 3))
    assert values.shape == (2, 4)
    assert values.tolist() == 2 * [width * ["cat"] + (4 - width) * [""]]
    assert (length.dtype, length.tolist()) == (np.int32, [width, width])


def test_batch_wider_than_list_max_fails() -> None:
    with pytest.raises(ExecutionFailed, match=r"has lists of 5, limit 4 \(list_max\)"):
        finish(label_lists(), np.zeros((2, 5, 3), np.float32), shape=("N", "width", 3))


def test_tensors_of_different_lengths_become_lists() -> None:
    entry = column(Step(cast="float64"), type="list<float64>", list_max=4)
    tensors = [np.float32([1, 2]), np.float32([]), np.float32([3])]
    values, length = finish(entry, tensors, element="seq(tensor(float))", shape=())
    assert values.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0]]
    assert length.tolist() == [2, 0, 1]
    uneven = [np.zeros((1, 2), np.float32), np.zeros((1, 3), np.float32)]
    with pytest.raises(ExecutionFailed, match="with entries of 2 shapes"):
        finish(entry, uneven, element="seq(tensor(float))", shape=())


def test_strings_of_different_lengths_become_lists() -> None:
    entry = column(type="list<utf8>", list_max=4)
    tensors = [np.array(["a", "b"], object), np.array([], object)]
    values, length = finish(entry, tensors, element="seq(tensor(string))", shape=())
    assert values.tolist() == [["a", "b", "", ""], ["", "", "", ""]]
    assert length.tolist() == [2, 0]


def test_threshold_of_float16_is_compared_as_float32() -> None:
    entry = column(Step(threshold=0.1), type="bool")
    (result,) = finish(entry, np.float16([0.1]), element="tensor(float16)", shape=("N",))
    assert result.tolist() == [False]


def test_integer_beyond_float16_fails_the_run() -> None:
    entry = column(Step(cast="float16"), type="float16")
    with pytest.raises(ExecutionFailed, match="out of range of float16"):
        finish(entry, np.array([70_000]), element="tensor(int64)", shape=("N",))


def test_list_lengths_from_another_tensor() -> None:
    graph = Graph(
        (),
        (
            GraphTensor("y", "tensor(float)", ("N", 3)),
            GraphTensor("counts", "tensor(int64)", ("N",)),
        ),
    )
    entry = column(type="list<float32>", lengths="counts")
    processor = PostProcessor(compile_outputs((entry,), graph, {}, 256).finishes)
    assert processor.fetched == ("y", "counts")
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    results = processor.finish({"y": rows, "counts": np.array([3, 0])}, 2)
    assert results["finished"].tolist() == rows.tolist()
    assert results["finished.length"].tolist() == [3, 0]
    for counts in ([4, 0], [-1, 0], [1], [1, 1, 1]):
        with pytest.raises(ExecutionFailed, match="has no length of 0 to 3 for each of 2"):
            processor.finish({"y": rows, "counts": np.array(counts)}, 2)


def with_lengths(entry: OutputColumn, element: str = "int64", *more: Any) -> PostProcessor:
    """A processor of lists of up to four elements, with their lengths in tensor `n`."""
    graph = Graph(
        (),
        (
            GraphTensor("y", f"tensor({element})", ("N", 4, *more)),
            GraphTensor("n", "tensor(int32)", ("N",)),
        ),
    )
    return PostProcessor(compile_outputs((entry,), graph, LABELS, 256).finishes)


def test_values_beyond_a_list_length_are_ignored() -> None:
    """They need no valid label, cast or string."""
    rows, lengths = np.array([[0, 1, -1, -1], [2, 9, -7, 300]]), np.int32([2, 1])
    processor = with_lengths(column(type=STRING_LIST, labels="labels.txt", lengths="n"))
    results = processor.finish({"y": rows, "n": lengths}, 2)
    assert results["finished"].tolist() == [
        ["cat", "dog", "cat", "cat"],
        ["ünï", "cat", "cat", "cat"],
    ]
    assert rows[0, 3] == -1
    with pytest.raises(ExecutionFailed, match="without a line"):
        processor.finish({"y": rows, "n": np.int32([3, 1])}, 2)
    processor = with_lengths(column(Step(cast="uint8"), type="list<uint8>", lengths="n"))
    results = processor.finish({"y": rows, "n": lengths}, 2)
    assert results["finished"].tolist() == [[0, 1, 0, 0], [2, 0, 0, 0]]
    with pytest.raises(ExecutionFailed, match="out of range of uint8"):
        processor.finish({"y": rows, "n": np.int32([2, 4])}, 2)
    pairs = column(Step(cast="uint8"), type="list<fixed_size_list<uint8>[2]>", lengths="n")
    results = with_lengths(pairs, "int64", 2).finish(
        {"y": np.full((1, 4, 2), -1), "n": np.int32([0])}, 1
    )
    assert results["finished"].tolist() == [[[0, 0]] * 4]


def test_strings_beyond_a_list_length_are_empty() -> None:
    rows = np.array([["a", "b" * 999, "c", "d"]], np.object_)
    processor = with_lengths(column(type=STRING_LIST, lengths="n"), "string")
    assert processor.finish({"y": rows, "n": np.int32([1])}, 1)["finished"].tolist() == [
        ["a", "", "", ""]
    ]


MAPS = "seq(map(int64,tensor(float)))"


def test_maps_are_read_by_their_keys() -> None:
    entry = column(keys=(7, 3), type="fixed_size_list<float32>[2]")
    maps = [{3: 1.0, 7: 2.0}, {7: 4.0, 3: 3.0, 9: 0.0}]
    (result,) = finish(entry, maps, element=MAPS, shape=())
    assert result.tolist() == [[2, 1], [4, 3]]
    assert result.dtype == np.float32
    with pytest.raises(ExecutionFailed, match="a map without the key 3"):
        finish(entry, [{7: 1.0}], element=MAPS, shape=())


def test_map_with_string_keys_gives_one_number_per_row() -> None:
    entry = column(keys=("yes",), type="float32")
    element = "seq(map(string,tensor(float)))"
    (result,) = finish(entry, [{"no": 0.25, "yes": 0.75}], element=element, shape=())
    assert result.tolist() == [[0.75]]


def test_sequences_of_tensors_by_rows_and_by_columns() -> None:
    element, kind = "seq(tensor(float))", "fixed_size_list<float32>[2]"
    tensors = [np.float32([1, 2]), np.float32([3, 4])]
    rows = finish(column(sequence="rows", type=kind), tensors, element=element, shape=())
    columns = finish(column(sequence="columns", type=kind), tensors, element=element, shape=())
    assert rows[0].tolist() == [[1, 2], [3, 4]]
    assert columns[0].tolist() == [[1, 3], [2, 4]]
    uneven = [np.float32([1, 2]), np.float32([3])]
    with pytest.raises(ExecutionFailed, match="of different shapes"):
        finish(column(sequence="rows", type=kind), uneven, element=element, shape=())


def test_step_reduces_a_sequence() -> None:
    entry = column("argmax", sequence="rows", shape=(3,), type="int64")
    (result,) = finish(
        entry,
        [np.float32([0, 1, 0]), np.float32([5, 1, 0])],
        element="seq(tensor(float))",
        shape=(),
    )
    assert result.tolist() == [1, 0]


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 3, 1), (1, 3)])
def test_tensor_of_another_shape_fails_the_run(shape: tuple[int, ...]) -> None:
    """A step on the last axis would mix rows if it were the only axis."""
    with pytest.raises(ExecutionFailed, match="by the contract"):
        processor_of(column("softmax"), shape=("N", "classes")).finish({"y": np.zeros(shape)}, 2)


def test_too_few_classes_for_top_k_fail_the_run() -> None:
    entry = column(Step(top_k=2), type="list<struct<index: int64>>")
    with pytest.raises(ExecutionFailed, match="too few for `top_k 2`"):
        finish(entry, np.zeros((4, 1), np.float32), shape=("N", "classes"))


@pytest.mark.parametrize("step", ["softmax", "argmax", "l2"])
def test_batch_without_classes_fails_the_run(step: str) -> None:
    kind = "int64" if step == "argmax" else "fixed_size_list<float32>[3]"
    processor = processor_of(column(step, type=kind), shape=("N", "classes"))
    with pytest.raises(
        ExecutionFailed, match=f"has 0 elements in the last axis.*too few for `{step}`"
    ):
        processor.finish({"y": np.zeros((2, 0), np.float32)}, 2)


def test_sequence_of_scalars_is_rejected_as_lists() -> None:
    entry = column(type="list<float32>", list_max=4)
    for value in ([np.float32(1), np.float32(2)], [np.float32([1]), np.float32(2)]):
        with pytest.raises(ExecutionFailed, match="with an entry that has no axis"):
            finish(entry, value, element="seq(tensor(float))", shape=())


def test_cast_out_of_range_fails() -> None:
    entry = column(Step(cast="int8"), type="fixed_size_list<int8>[3]")
    (result,) = finish(entry, np.array([[1, -128, 127]]), element="tensor(int64)")
    assert result.tolist() == [[1, -128, 127]]
    with pytest.raises(ExecutionFailed, match="a number out of range of int8"):
        finish(entry, np.array([[1, 128, 0]]), element="tensor(int64)")


def test_one_tensor_is_fetched_and_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several results may share it."""
    calls: list[OutputSource] = []

    def counted(raw: np.ndarray, source: OutputSource) -> tuple[np.ndarray, np.ndarray]:
        calls.append(source)
        return raw, np.zeros((1, 2), np.int64)

    monkeypatch.setattr(postprocess, "after_steps", counted)
    kind = "list<struct<label: utf8, score: float32>>"
    raw = OutputColumn("raw", "fixed_size_list<float32>[3]", "y")
    processor = processor_of(column(Step(top_k=2), type=kind, labels="labels.txt"), raw)
    assert processor.fetched == ("y",)
    processor.finish({"y": np.zeros((1, 3), np.float32)}, 1)
    assert len(calls) == 2
