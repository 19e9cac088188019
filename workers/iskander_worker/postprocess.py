"""The steps between a graph's tensors and the results: arithmetic on whole batches, row by row.

Every function here leaves the first axis, the rows, as it is, so that no row can come to another's
place. What each step makes of which elements was decided when the model was loaded
(`iskander.contract.steps`). Numbers that are none (NaN) are the least of all, equal ones keep their
order, and halves are computed as float32.

Runs on: worker main. Source: IEEE 754; ONNX `QuantizeLinear` for rounding and saturation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from iskander.contract.dtypes import BY_ARROW
from iskander.contract.outputs import Post, Quantization, Source
from iskander.contract.postprocess import LENGTH, PostProcessing
from iskander.contract.steps import StepOutput
from iskander.errors import ExecutionFailed
from iskander_worker.arrays import Compute
from iskander_worker.backends import Arrays, Run


class PostProcessor:
    """Makes a model's results of what its graph made.

    Args:
        finishes: One for each tensor of the results.

    Attributes:
        fetched: Outputs of the graph that it needs, each once.
    """

    def __init__(self, finishes: tuple[PostProcessing, ...]) -> None:
        self._finishes = finishes
        sources = [finish.source for finish in finishes]
        names = [name for source in sources for name in (source.tensor, source.lengths) if name]
        self.fetched = tuple(dict.fromkeys(names))
        self._labels = [np.array(finish.labels, np.object_) for finish in finishes]
        # What is made of one source in one way is made once, for all of its parts.
        places: dict[Source, int] = {}
        self._places = [places.setdefault(source, len(places)) for source in sources]

    def around(self, compute: Compute) -> Compute:
        """What computes the results where `compute` computes the graph's outputs."""

        def finished(arrays: Arrays, wanted: Sequence[str], run: Run) -> Arrays:
            rows = len(next(iter(arrays.values())))
            return self.finish(compute(arrays, self.fetched, run), rows)

        return finished

    def finish(self, fetched: Mapping[str, Any], rows: int) -> dict[str, np.ndarray]:
        """The tensors of the results, by name.

        Args:
            fetched: What the graph made: arrays, or lists of arrays or of dicts.
            rows: Of the batch.

        Raises:
            ExecutionFailed: An output has not the shape, keys or labels that it was to have.
        """
        made: list[tuple[np.ndarray, np.ndarray | None]] = []
        results = {}
        with np.errstate(all="ignore"):
            parts = zip(self._finishes, self._labels, self._places, strict=True)
            for finish, labels, place in parts:
                if place == len(made):
                    made.append(_made(fetched, finish, rows))
                results[finish.spec.tensor] = _part(*made[place], finish, labels)
        return results


def _made(
    fetched: Mapping[str, Any], finish: PostProcessing, rows: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """What a source comes to, and indices of `top_k` or lengths of lists beside it."""
    source, value = finish.source, fetched.get(finish.source.tensor)
    lengths = None
    if source.is_ragged:
        value, lengths = as_lists(value, source, rows)
        if source.lengths:
            lengths = np.reshape(fetched.get(source.lengths, ()), -1)
    tensor = as_tensor(value, source, finish.raw, rows)
    if lengths is None:
        return after_steps(tensor, source)
    most = tensor.shape[1]
    if source.list_max is not None and most > source.list_max:
        raise ExecutionFailed(
            f"output `{source.tensor}` has lists of {most}, and list_max is {source.list_max}"
        )
    if len(lengths) != rows or not 0 <= lengths.min() <= lengths.max() <= most:
        raise ExecutionFailed(
            f"output `{source.lengths}` has not a length of 0 to {most} for each of {rows} rows"
        )
    is_judged = source.post or source.labels or tensor.dtype == np.object_
    if is_judged and source.lengths and lengths.min() < most:
        tensor = _blanked(tensor, lengths)
    return after_steps(tensor, source)[0], lengths


def as_lists(value: Any, source: Source, rows: int) -> tuple[Any, np.ndarray]:  # noqa: ANN401
    """A sequence of tensors of different lengths filled up with zeros, and how long each was."""
    if not isinstance(value, list):
        most = value.shape[1] if getattr(value, "ndim", 0) > 1 else 0
        return value, np.full(rows, most)
    if any(np.ndim(each) == 0 for each in value):
        raise ExecutionFailed(
            f"output `{source.tensor}` is a sequence with an entry that has no axis for a list"
        )
    lengths = np.array([len(each) for each in value])
    shapes = {each.shape[1:] for each in value}
    if len(value) != rows or len(shapes) > 1:
        raise ExecutionFailed(
            f"output `{source.tensor}` is a sequence of {len(value)} for {rows} rows, with entries "
            f"of {len(shapes)} shapes"
        )
    filled = np.zeros((rows, lengths.max(), *shapes.pop()), value[0].dtype)
    for row, each in zip(filled, value, strict=True):
        row[: len(each)] = each
    return filled, lengths


def _blanked(tensor: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Lists with nothing in them that a step could refuse beyond what is meant of each."""
    is_meant = np.arange(tensor.shape[1]) < lengths[:, None]
    blank = "" if tensor.dtype == np.object_ else np.zeros((), tensor.dtype)
    return np.where(is_meant.reshape(*is_meant.shape, *[1] * (tensor.ndim - 2)), tensor, blank)


def as_tensor(
    value: Any,  # noqa: ANN401
    source: Source,
    wanted: StepOutput,
    rows: int,
) -> np.ndarray:
    """What a graph made, as one array: maps by their keys, sequences stacked.

    Raises:
        ExecutionFailed: It has another shape, or a key is missing.
    """
    if value is None:
        raise ExecutionFailed(f"output `{source.tensor}` did not come")
    try:
        if source.keys:
            rows_of_maps = [[each[key] for key in source.keys] for each in value]
            value = np.array(rows_of_maps, BY_ARROW[wanted.dtype_name].numpy)
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
    found, sizes = value.shape, wanted.shape[1:]
    is_right = len(found) == 1 + len(sizes) and found[0] == rows
    if not is_right or any(a not in (None, b) for a, b in zip(sizes, found[1:], strict=True)):
        text = ["?" if size is None else size for size in sizes]
        raise ExecutionFailed(
            f"output `{source.tensor}` has the shape {list(found)} for this batch, and the "
            f"contract says {[rows, *text]}"
        )
    tensor: np.ndarray = value
    return tensor


def after_steps(tensor: np.ndarray, source: Source) -> tuple[np.ndarray, np.ndarray | None]:
    """What the steps make of a tensor; of `top_k`, scores and indices.

    Shape:
        The first axis is the rows', and stays.

    Raises:
        ExecutionFailed: The batch's last axis is shorter than a step needs, or a cast loses.
    """
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
            tensor = tensor >= step.threshold
        elif step.quantize is not None:
            tensor = quantize(tensor, step.quantize)
        else:
            assert step.cast is not None
            tensor = cast(tensor, step.cast, source)
    return tensor, indices


def softmax(tensor: np.ndarray) -> np.ndarray:
    """Of the last axis; a row with a NaN is NaN."""
    wide = _wide(tensor)
    raised = np.exp(wide - wide.max(axis=-1, keepdims=True))
    result: np.ndarray = raised / raised.sum(axis=-1, keepdims=True)
    return result.astype(tensor.dtype)


def sigmoid(tensor: np.ndarray) -> np.ndarray:
    """Of each number, without overflow."""
    wide = _wide(tensor)
    shrunk = np.exp(-np.abs(wide))
    result: np.ndarray = np.where(wide < 0, shrunk, 1) / (1 + shrunk)
    return result.astype(tensor.dtype)


def l2(tensor: np.ndarray) -> np.ndarray:
    """The last axis at length 1; one of zeros stays."""
    wide = _wide(tensor)
    # By its largest first, since squares of large numbers are beyond what floats can say.
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    scaled = wide / np.where(largest == 0, 1, largest)
    norm = np.sqrt(np.square(scaled).sum(axis=-1, keepdims=True))
    result: np.ndarray = scaled / np.where(norm == 0, 1, norm)
    return result.astype(tensor.dtype)


def argmax(tensor: np.ndarray) -> np.ndarray:
    """Where the largest of the last axis is; the first of equals, and a NaN only among NaNs."""
    if np.isnan(tensor).any():
        return top_k(tensor, 1)[..., 0]
    places: np.ndarray = np.argmax(tensor, axis=-1)
    return places


def top_k(tensor: np.ndarray, count: int) -> np.ndarray:
    """Where the largest of the last axis are, from the largest on; equals in their order."""
    if np.issubdtype(tensor.dtype, np.floating):
        places: np.ndarray = np.argsort(-tensor, axis=-1, kind="stable")
    else:
        backwards = np.argsort(tensor[..., ::-1], axis=-1, kind="stable")[..., ::-1]
        places = tensor.shape[-1] - 1 - backwards
    return places[..., :count]


def quantize(tensor: np.ndarray, to: Quantization) -> np.ndarray:
    """As int8, halves to even; a NaN is the zero point."""
    scaled = np.rint(tensor.astype(np.float64) / to.scale) + to.zero_point
    return np.clip(np.where(np.isnan(scaled), to.zero_point, scaled), -128, 127).astype(np.int8)


def cast(tensor: np.ndarray, dtype_name: str, source: Source) -> np.ndarray:
    """As other numbers.

    Raises:
        ExecutionFailed: A whole number is beyond what they can say.
    """
    result: np.ndarray = tensor.astype(BY_ARROW[dtype_name].numpy)
    if result.dtype.kind in "iu" and tensor.dtype.kind in "iu" and (result != tensor).any():
        raise ExecutionFailed(f"output `{source.tensor}` has a number that is none of {dtype_name}")
    return result


_STEPS: dict[Post, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "argmax": argmax,
    "l2": l2,
}


def _part(
    tensor: np.ndarray, indices: np.ndarray | None, finish: PostProcessing, labels: np.ndarray
) -> np.ndarray:
    """What of it all is the result: a tensor or what is beside it, and labels for numbers."""
    if finish.part in ("index", "label", LENGTH):
        assert indices is not None
        tensor = indices.astype(np.int32) if finish.part == LENGTH else indices
    if len(labels):
        places = tensor.astype(np.int64)
        if places.size and not 0 <= places.min() <= places.max() < len(labels):
            raise ExecutionFailed(
                f"output `{finish.source.tensor}` has a number without a line in "
                f"`{finish.source.labels}`, which has {len(labels)}"
            )
        tensor = labels[places]
    if finish.source.is_ragged and finish.part != LENGTH:
        return _filled_up(tensor, finish.spec.shape[0])
    return tensor


def _filled_up(tensor: np.ndarray, most: int) -> np.ndarray:
    """Lists with as many entries as there is room for; what is added is not meant."""
    missing = most - tensor.shape[1]
    if not missing:
        return tensor
    shape = (len(tensor), missing, *tensor.shape[2:])
    filling = np.full(shape, "" if tensor.dtype == np.object_ else 0, tensor.dtype)
    return np.concatenate([tensor, filling], axis=1)


def _wide(tensor: np.ndarray) -> np.ndarray:
    return tensor.astype(np.float32) if tensor.dtype == np.float16 else tensor


def _require_width(tensor: np.ndarray, source: Source, width: int, step: Post) -> None:
    if tensor.shape[-1] < width:
        raise ExecutionFailed(
            f"output `{source.tensor}` has {tensor.shape[-1]} in the last axis of this batch, too "
            f"few for `{step}`"
        )
