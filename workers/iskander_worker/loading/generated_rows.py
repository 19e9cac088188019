"""Rows of generated values, with which a load measures a model.

Values vary from row to row, so that the results of two rows differ. A model may reject a kind of
values: its runs then fail, and the next kind is tried.

Runs on: worker main, and the process of a sandboxed load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from iskander.contract.tensors import TensorSpec
from iskander_worker.warm_up import is_bfloat16, to_element_type

DIGITS = tuple("123456789")
FLOAT16_SCALE_MAX = 1000.0
FLOAT16_MAX = 65504.0
RARE_SHARE = 0.2
"""Share of the elements that have a rare value."""


class Values(NamedTuple):
    """Ranges and special values of one kind of generated rows.

    Attributes:
        scale: Standard deviation of floats around 0; for positive floats, their maximum.
        high: Largest integer.
        low: Smallest integer. By default 1: a division by 0 ends the process.
        rare: Special floats, such as NaN. A fifth of the elements of a float input have one of
            them, and all elements of the first and the last row: a graph may treat these rows
            differently.
        rare_integer: Special integer, at such elements of the integer inputs that can hold it.
        are_positive: Floats are positive.
        words: Words of the texts; digits if it is empty.
        words_of_text: Maximum number of words in a text.
    """

    scale: float = 1.0
    high: int = 2
    low: int = 1
    rare: tuple[float, ...] = ()
    rare_integer: int | None = None
    are_positive: bool = False
    words: tuple[str, ...] = ()
    words_of_text: int = 1


class RowGenerator:
    """Generates the inputs of batches; equal seeds make equal rows.

    `accepted_texts` has the only texts that an input accepts, by tensor: words of a vocabulary.
    """

    def __init__(
        self, specs: tuple[TensorSpec, ...], accepted_texts: Mapping[str, Sequence[str]]
    ) -> None:
        self._specs = specs
        self._accepted_texts = accepted_texts

    @property
    def has_floats(self) -> bool:
        """Whether an input has floats."""
        return any(_is_float(spec) for spec in self._specs)

    @property
    def has_integers(self) -> bool:
        """Whether an input has integers."""
        return any(_is_integer(spec) for spec in self._specs)

    @property
    def has_texts(self) -> bool:
        """Whether an input accepts any text."""
        return any(
            spec.is_string and spec.tensor not in self._accepted_texts for spec in self._specs
        )

    def rows(self, count: int, values: Values, seed: int) -> dict[str, np.ndarray]:
        """Generate the arrays of a batch of `count` rows, by tensor."""
        random = np.random.default_rng(seed)
        return {
            spec.tensor: self._generate_tensor(spec, count, values, random) for spec in self._specs
        }

    def _generate_tensor(
        self, spec: TensorSpec, count: int, values: Values, random: np.random.Generator
    ) -> np.ndarray:
        shape = (count, *spec.shape)
        array: np.ndarray
        if spec.is_string:
            array = np.empty(count * spec.elements, np.object_)
            array[:] = self._generate_texts(spec, len(array), values, random)
            return array.reshape(shape)
        if _is_float(spec):
            is_half = spec.type.dtype_name == "float16"
            scale = min(values.scale, FLOAT16_SCALE_MAX) if is_half else values.scale
            array = scale * (
                random.random(shape) if values.are_positive else random.standard_normal(shape)
            )
            if values.rare:
                chosen = np.array(values.rare)[random.integers(len(values.rare), size=shape)]
                array = np.where(_rare_mask(shape, random), chosen, array)
                if is_half:
                    is_finite = np.isfinite(array)
                    array[is_finite] = array[is_finite].clip(-FLOAT16_MAX, FLOAT16_MAX)
        elif spec.type.dtype_name == "bool":
            array = random.integers(0, 1, shape, endpoint=True)
        else:
            array = random.integers(values.low, values.high, shape, endpoint=True)
            limits = np.iinfo(np.dtype(spec.type.dtype.numpy))
            if limits.min == 0:
                array = np.abs(array)
            rare = values.rare_integer
            if rare is not None and limits.min <= rare <= limits.max:
                array = np.where(_rare_mask(shape, random), rare, array)
        return to_element_type(spec, array)

    def _generate_texts(
        self, spec: TensorSpec, count: int, values: Values, random: np.random.Generator
    ) -> list[str]:
        texts_of_input = self._accepted_texts.get(spec.tensor)
        if texts_of_input is not None:
            return [
                texts_of_input[index] for index in random.integers(len(texts_of_input), size=count)
            ]
        words = values.words or DIGITS
        texts = []
        for _ in range(count):
            length = int(random.integers(1, values.words_of_text, endpoint=True))
            texts.append(" ".join(words[at] for at in random.integers(len(words), size=length)))
        return texts


def _rare_mask(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Return the mask of the elements that get a rare value."""
    mask = random.random(shape) < RARE_SHARE
    mask[[0, -1]] = True
    return mask


def _is_float(spec: TensorSpec) -> bool:
    return is_bfloat16(spec) or spec.type.dtype_name in ("float16", "float32", "float64")


def _is_integer(spec: TensorSpec) -> bool:
    return not (spec.is_string or _is_float(spec) or spec.type.dtype_name == "bool")
