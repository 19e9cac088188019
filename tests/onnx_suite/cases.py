"""Cases of ONNX's backend test suite, generated from the installed package `onnx`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "real")
OPSET_MAX, IR_MAX = 26, 13
"""The newest versions that the runtime reads; newer cases are lowered to them."""
ROOT = Path(onnx.__file__).parent.parent

Feeds = dict[str, np.ndarray]


@dataclass
class Case:
    """One model with its inputs.

    Attributes:
        key: Name of the model in the server.
        feeds: Inputs of each request; values that are no tensors are absent.
    """

    name: str
    kind: str
    key: str
    model: onnx.ModelProto
    feeds: list[Feeds] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write the model as `folder/model.onnx`."""
        folder.mkdir(parents=True)
        onnx.save(self.model, folder / "model.onnx")


def suite(kinds: tuple[str, ...] = KINDS, words: tuple[str, ...] = ()) -> Iterator[Case]:
    """The cases of these kinds whose names contain one of the words; without words, all.

    The models of kind `real` that need a download are left out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        collected = [case for kind in kinds for case in load_model_tests(kind=kind)]
    number = 0
    for case in collected:
        if words and not any(word in case.name for word in words):
            continue
        model, sets = _read(case)
        if model is None:
            continue
        number += 1
        _lower(model)
        feeds = [_feeds(model, inputs) for inputs in sets]
        yield Case(case.name, case.kind, f"case-{number:04d}", model, feeds)


def inputs_of(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs of a graph that are not initializers."""
    constant = {tensor.name for tensor in model.graph.initializer}
    return [each for each in model.graph.input if each.name not in constant]


def _read(case: Any) -> tuple[onnx.ModelProto | None, list[list[Any]]]:
    """Model and input values of each data set."""
    if case.model is not None:
        return case.model, [list(inputs) for inputs, _ in case.data_sets]
    if case.model_dir is not None:
        folder = Path(case.model_dir)
        model = onnx.load(folder / "model.onnx")
        sets = []
        for data in sorted(folder.glob("test_data_set_*")):
            count = len(list(data.glob("input_*.pb")))
            raw = [(data / f"input_{index}.pb").read_bytes() for index in range(count)]
            infos = model.graph.input[:count]
            sets.append([_value(info, each) for info, each in zip(infos, raw, strict=True)])
        return model, sets
    if case.url is not None and case.url.startswith("onnx/"):
        model = onnx.load(ROOT / case.url)
        random = np.random.default_rng(0)
        return model, [[_random(each, random) for each in inputs_of(model)]]
    return None, []


def _value(info: onnx.ValueInfoProto, raw: bytes) -> Any:
    if not info.type.HasField("tensor_type"):
        return None
    return onnx.TensorProto.FromString(raw)


def _random(info: onnx.ValueInfoProto, random: np.random.Generator) -> np.ndarray:
    shape = [axis.dim_value or 1 for axis in info.type.tensor_type.shape.dim]
    return random.standard_normal(shape).astype(np.float32)


def _lower(model: onnx.ModelProto) -> None:
    model.ir_version = min(model.ir_version, IR_MAX)
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = min(opset.version, OPSET_MAX)


def _feeds(model: onnx.ModelProto, values: list[Any]) -> Feeds:
    feeds: Feeds = {}
    infos = inputs_of(model)
    names = [info.name for info in (infos if len(infos) == len(values) else model.graph.input)]
    for name, value in zip(names, values, strict=False):
        if isinstance(value, onnx.TensorProto):
            feeds[name] = numpy_helper.to_array(value)
        elif isinstance(value, np.ndarray | np.generic):
            feeds[name] = np.asarray(value)
    return feeds


def folder(root: Path, words: tuple[str, ...] = ()) -> Iterator[Case]:
    """The cases `NAME/model.onnx` with `inputs.npz` of a folder; a slash in a name is `|` there."""
    for number, path in enumerate(sorted(root.glob("*/model.onnx"))):
        name = path.parent.name
        if words and not any(word in name for word in words):
            continue
        with np.load(path.parent / "inputs.npz", allow_pickle=False) as data:
            feeds = {key.replace("|", "/"): data[key] for key in data.files}
        feeds = {key: v.astype(object) if v.dtype.kind in "US" else v for key, v in feeds.items()}
        yield Case(name, "folder", f"case-{number:04d}", onnx.load(path), [feeds])
