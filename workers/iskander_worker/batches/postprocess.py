"""Post-processing of a graph's outputs: vectorized steps on whole batches.

Every function keeps the first axis, the rows, so results never move to another row. The steps were
chosen when the model was loaded (`iskander.contract.processing.steps`). NaN counts as the smallest
number, equal numbers keep their order, and float16 is computed as float32.

Runs on: worker main. Source: IEEE 754; ONNX `QuantizeLinear` for rounding and saturation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from iskander.contract.dtypes import BY_ARROW
from iskander.contract.outputs import OutputSource, Post, Quantization
from iskander.contract.processing.postprocess import LENGTH, PostProcessing
from iskander.contract.processing.steps import StepOutput
from iskander.errors import ExecutionFailed
from iskander_worker.backends import Arrays, Run
from iskander_worker.batches.arrays import Compute
from iskander_worker.batches.tensors import fits_rows, shape_error


class PostProcessor:
    """Computes a model's results from the `fetched` outputs of its graph."""

    def __init__(self, finishes: tuple[PostProcessing, ...]) -> None:
        sources = [finish.source for finish in finishes]
        names = [name for source in sources for name in (source.tensor, source.lengths) if name]
        self.fetched = tuple(dict.fromkeys(names))
        labels = [np.array(finish.labels, np.object_) for finish in finishes]
        # Tensors with equal sources share the result of the steps.
        numbers: dict[OutputSource, int] = {}
        source_numbers = [numbers.setdefault(source, len(numbers)) for source in sources]
        self._finishes = list(zip(finishes, labels, source_numbers, strict=True))

    def around(self, compute: Compute) -> Compute:
        """Return a `compute` that returns results, from one that returns the graph's outputs."""

        def with_steps(arrays: Arrays, names: Sequence[str], run: Run) -> Arrays:
            rows = len(next(iter(arrays.values())))
            return self.finish(compute(arrays, self.fetched, run), rows)

        return with_steps

    def finish(self, fetched: Mapping[str, Any], rows: int) -> dict[str, np.ndarray]:
        """Compute the results by name. An output is an array, or a list of arrays or of dicts."""
        computed: list[tuple[np.ndarray, np.ndarray | None]] = []
        results = {}
        with np.errstate(all="ignore"):
            for finish, labels, source_number in self._finishes:
                if source_number == len(computed):
                    computed.append(_run_steps(fetched, finish, rows))
                results[finish.spec.tensor] = _select_result(
                    *computed[source_number], finish, labels
                )
        return results


def _run_steps(
    fetched: Mapping[str, Any], finish: PostProcessing, rows: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Run all steps on an output of the graph.

    Returns the tensor, and the indices of `top_k` or the lengths of lists; None without them.
    """
    source, value = finish.source, fetched.get(finish.source.tensor)
    lengths = None
    if source.is_ragged:
        value, lengths = _padded_lists(value, source, rows)
        if source.lengths:
            lengths = np.reshape(fetched.get(source.lengths, ()), -1)
    tensor = _as_tensor(value, source, finish.raw, rows)
    if lengths is None:
        return after_steps(tensor, source)
    longest = tensor.shape[1]
    if source.list_max is not None and longest > source.list_max:
        raise ExecutionFailed(
            f"output `{source.tensor}` has lists of {longest}, limit {source.list_max} (list_max)"
        )
    if len(lengths) != rows or not 0 <= lengths.min() <= lengths.max() <= longest:
        raise ExecutionFailed(
            f"output `{source.lengths}` has no length of 0 to {longest} for each of {rows} rows"
        )
    is_checked = source.post or source.labels or tensor.dtype == np.object_
    if is_checked and source.lengths and lengths.min() < longest:
        tensor = _blanked(tensor, lengths)
    return after_steps(tensor, source)[0], lengths


def _padded_lists(value: Any, source: OutputSource, rows: int) -> tuple[Any, np.ndarray]:  # noqa: ANN401
    """Pad tensors of different lengths with zeros or empty strings; return them and the lengths."""
    if not isinstance(value, list):
        width = value.shape[1] if getattr(value, "ndim", 0) > 1 else 0
        return value, np.full(rows, width)
    if any(np.ndim(entry) == 0 for entry in value):
        raise ExecutionFailed(
            f"output `{source.tensor}` is a sequence with an entry that has no axis for a list"
        )
    lengths = np.array([len(entry) for entry in value])
    shapes = {entry.shape[1:] for entry in value}
    if len(value) != rows or len(shapes) > 1:
        raise ExecutionFailed(
            f"output `{source.tensor}` is a sequence of {len(value)} for {rows} rows, with entries "
            f"of {len(shapes)} shapes"
        )
    blank = "" if value[0].dtype == np.object_ else 0
    padded = np.full((rows, lengths.max(), *shapes.pop()), blank, value[0].dtype)
    for row, entry in zip(padded, value, strict=True):
        row[: len(entry)] = entry
    return padded, lengths


def _blanked(tensor: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Replace the elements beyond each list's length by zeros, which no step rejects."""
    is_valid = np.arange(tensor.shape[1]) < lengths[:, None]
    blank = "" if tensor.dtype == np.object_ else np.zeros((), tensor.dtype)
    return np.where(is_valid.reshape(*is_valid.shape, *[1] * (tensor.ndim - 2)), tensor, blank)


def _as_tensor(value: Any, source: OutputSource, expected: StepOutput, rows: int) -> np.ndarray:  # noqa: ANN401
    """Return an output of the graph as one array; maps become columns, sequences are stacked."""
    if value is None:
        raise ExecutionFailed(f"output `{source.tensor}` is missing")
    try:
        if source.keys:
            rows_of_maps = [[entry[key] for key in source.keys] for entry in value]
            value = np.array(rows_of_maps, BY_ARROW[expected.dtype_name].numpy)
        elif isinstance(value, list):
            value = np.stack(value, axis=1 if source.sequence == "columns" else 0)
    except KeyError as error:
        raise ExecutionFailed(
            f"output `{source.tensor}` has a map without the key {error.args[0]!r}"
        ) from None
    except ValueError:
        raise ExecutionFailed(
            f"output `{source.tensor}` is a sequence of no tensors, or of different shapes"
        ) from None
    found, sizes = value.shape, expected.shape[1:]
    has_rank_and_rows = len(found) == 1 + len(sizes) and found[0] == rows
    if not has_rank_and_rows or any(
        a not in (None, b) for a, b in zip(sizes, found[1:], strict=True)
    ):
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes) and fits_rows(found, rows, known):
            return np.reshape(value, (rows, *known))
        text = ["?" if size is None else size for size in sizes]
        raise shape_error(source.tensor, found, [rows, *text])
    tensor: np.ndarray = value
    return tensor


def after_steps(tensor: np.ndarray, source: OutputSource) -> tuple[np.ndarray, np.ndarray | None]:
    """Apply the steps of a source; return the tensor, and the indices of `top_k` or None."""
    indices = None
    for step in source.post:
        if isinstance(step, str):
            if step != "sigmoid":
                _require_width(tensor, source, 1, step)
            tensor = _STEPS[step](tensor)
        elif step.top_k is not None:
            _require_width(tensor, source, step.top_k, step)
            indices = top_k(tensor, step.top_k)
            tensor = np.take_along_axis(tensor, indices, -1)
        elif step.select is not None:
            _require_width(tensor, source, step.select + 1, step)
            tensor = tensor[..., step.select]
        elif step.threshold is not None:
            tensor = _without_float16(tensor) >= step.threshold
        elif step.quantize is not None:
            tensor = quantize(tensor, step.quantize)
        else:
            assert step.cast is not None
            tensor = _cast(tensor, step.cast, source)
    return tensor, indices


def softmax(tensor: np.ndarray) -> np.ndarray:
    """Softmax of the last axis; a row with a NaN becomes NaN."""
    wide = _without_float16(tensor)
    raised = np.exp(wide - wide.max(axis=-1, keepdims=True))
    result: np.ndarray = raised / raised.sum(axis=-1, keepdims=True)
    return result.astype(tensor.dtype)


def sigmoid(tensor: np.ndarray) -> np.ndarray:
    """Sigmoid of each number, without overflow."""
    wide = _without_float16(tensor)
    shrunk = np.exp(-np.abs(wide))
    result: np.ndarray = np.where(wide < 0, shrunk, 1) / (1 + shrunk)
    return result.astype(tensor.dtype)


def l2(tensor: np.ndarray) -> np.ndarray:
    """Scale the last axis to length 1; zeros stay zeros."""
    wide = _without_float16(tensor)
    # Divided by the largest number first, because squares of large floats overflow.
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    scaled = wide / np.where(largest == 0, 1, largest)
    norm = np.sqrt(np.square(scaled).sum(axis=-1, keepdims=True))
    result: np.ndarray = scaled / np.where(norm == 0, 1, norm)
    return result.astype(tensor.dtype)


def argmax(tensor: np.ndarray) -> np.ndarray:
    """Index of the largest number of the last axis, the first of equals."""
    if np.isnan(tensor).any():
        return top_k(tensor, 1)[..., 0]
    indices: np.ndarray = np.argmax(tensor, axis=-1)
    return indices


def top_k(tensor: np.ndarray, count: int) -> np.ndarray:
    """Indices of the largest numbers of the last axis, in descending order; stable."""
    if np.issubdtype(tensor.dtype, np.floating):
        indices: np.ndarray = np.argsort(-tensor, axis=-1, kind="stable")
    else:
        backwards = np.argsort(tensor[..., ::-1], axis=-1, kind="stable")[..., ::-1]
        indices = tensor.shape[-1] - 1 - backwards
    return indices[..., :count]


def quantize(tensor: np.ndarray, to: Quantization) -> np.ndarray:
    """Quantize to int8, rounding halves to even; NaN becomes the zero point."""
    scaled = np.rint(tensor.astype(np.float64) / to.scale) + to.zero_point
    return np.clip(np.where(np.isnan(scaled), to.zero_point, scaled), -128, 127).astype(np.int8)


def _cast(tensor: np.ndarray, dtype_name: str, source: OutputSource) -> np.ndarray:
    with np.errstate(over="ignore"):
        result: np.ndarray = tensor.astype(BY_ARROW[dtype_name].numpy)
    if tensor.dtype.kind not in "iu":
        return result
    is_out_of_range = np.isinf(result) if result.dtype.kind == "f" else result != tensor
    if is_out_of_range.any():
        raise ExecutionFailed(f"output `{source.tensor}` has a number out of range of {dtype_name}")
    return result


_STEPS: dict[Post, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": softmax, "sigmoid": sigmoid, "argmax": argmax, "l2": l2,
}  # fmt: skip


def _select_result(
    tensor: np.ndarray, indices: np.ndarray | None, finish: PostProcessing, labels: np.ndarray
) -> np.ndarray:
    """Return the result that `finish` names: the tensor, its indices or lengths, or labels."""
    if finish.part in ("index", "label", LENGTH):
        assert indices is not None
        tensor = indices.astype(np.int32) if finish.part == LENGTH else indices
    if len(labels):
        lines = tensor.astype(np.int64)
        if lines.size and not 0 <= lines.min() <= lines.max() < len(labels):
            raise ExecutionFailed(
                f"output `{finish.source.tensor}` has a number without a line in "
                f"`{finish.source.labels}`, which has {len(labels)} lines"
            )
        tensor = labels[lines]
    if not finish.source.is_ragged or finish.part == LENGTH:
        return tensor
    missing = finish.spec.shape[0] - tensor.shape[1]
    if not missing:
        return tensor
    shape = (len(tensor), missing, *tensor.shape[2:])
    padding = np.full(shape, "" if tensor.dtype == np.object_ else 0, tensor.dtype)
    return np.concatenate([tensor, padding], axis=1)


def _without_float16(tensor: np.ndarray) -> np.ndarray:
    return tensor.astype(np.float32) if tensor.dtype == np.float16 else tensor


def _require_width(tensor: np.ndarray, source: OutputSource, width: int, step: Post) -> None:
    if tensor.shape[-1] < width:
        raise ExecutionFailed(
            f"output `{source.tensor}` has {tensor.shape[-1]} elements in the last axis of this "
            f"batch, too few for `{step}`"
        )
