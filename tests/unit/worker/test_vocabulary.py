"""Text looked up in a vocabulary: numbers, one-hot rows, and what is unknown."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from iskander_worker.backends import Arrays, Run
from iskander_worker.vocabulary import Vocabularies

from iskander.contract.compile import compile_contract
from iskander.contract.graph import Dimension, Graph, GraphTensor
from iskander.contract.manifest import Manifest
from iskander.errors import ContractError, ManifestError

LINES = ("red", "green", "")


def looked_up(
    text: Any, lines: tuple[str, ...] = LINES, element: str = "int64",
    trailing: tuple[Dimension, ...] = (), **keys: Any,
) -> np.ndarray:  # fmt: skip
    """What a graph is given for a tensor of text."""
    entry = {"tensor": "x", "column": "c", "vocabulary": "words.txt"} | keys
    output = {"tensor": "y", "column": "y", "type": "float32"}
    manifest = msgspec.convert({"format": 1, "inputs": [entry], "outputs": [output]}, Manifest)
    inputs = [GraphTensor("x", f"tensor({element})", ("rows", *trailing))]
    if keys.get("mask"):
        inputs.append(GraphTensor("m", "tensor(bool)", ("rows", *trailing)))
    graph = Graph(
        tuple(inputs),
        (GraphTensor("y", "tensor(float)", ("rows",)),),
    )
    contract = compile_contract(manifest, graph)
    assert contract.inputs[0].is_string
    seen: dict[str, np.ndarray] = {}

    def compute(arrays: Arrays, _wanted: Any, _run: Run) -> Arrays:
        seen.update(arrays)
        return {}

    lookups = Vocabularies(contract, graph, {"words.txt": lines})
    lookups.around(compute)({"x": np.array(text, object)}, ["y"], Run())
    return seen["x"]


def test_numbers_of_lines() -> None:
    found = looked_up(["", "red", "green"])
    assert found.tolist() == [2, 0, 1] and found.dtype == np.int64
    assert looked_up(["green"], element="int32").dtype == np.int32


def test_one_hot_rows_have_as_many_places_as_the_graph() -> None:
    found = looked_up(["", "red"], trailing=(4,), element="float", one_hot=True)
    assert found.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]] and found.dtype == np.float32
    found = looked_up(["no"], trailing=("n",), element="bool", one_hot=True, unknown=3)
    assert found.tolist() == [[False, False, False, True]]


def test_lists_of_words() -> None:
    found = looked_up(
        [["red", ""], ["?", "green"]], type="list<utf8>", max_length=2, trailing=(2,), unknown=9
    )
    assert found.tolist() == [[0, 2], [9, 1]]


def test_an_unknown_word_is_its_callers_fault() -> None:
    with pytest.raises(ContractError, match=r"`c` has `blue`.*`words.txt` \(1 of 2 values\)"):
        looked_up(["red", "blue"])


LIST = {"type": "list<utf8>", "max_length": 3, "trailing": (3,)}
MASKED = {"nulls": "mask", "mask": "m"}


@pytest.mark.parametrize(
    ("words", "lines", "keys"),
    [
        ("has the padding ``", ("red",), LIST),
        ("has the padding `PAD`", LINES, LIST | {"padding": "PAD"}),
        ("has the padding ``", ("red",), LIST | {"fill": "red"}),
        ("has the fill ``", ("red",), MASKED),
        ("has the fill `none`", ("red",), MASKED | {"fill": "none"}),
        ("has the fill `none`", LINES, {"fill": "none"}),
        ("has the fill `none`", LINES, LIST | {"fill": "none"}),
    ],
)
def test_what_the_server_puts_in_has_to_be_in_the_vocabulary(
    words: str, lines: Any, keys: dict[str, Any]
) -> None:
    """Or every row with it is refused, as if the client had sent it."""
    with pytest.raises(ManifestError, match=rf"{words}, which is not in.*no `unknown`"):
        looked_up(["red"], lines, **keys)
    shape: Any = [["red"]] if "type" in keys else ["red"]
    for more, known in ((("PAD", "none", ""), {}), ((), {"unknown": 7})):
        found = looked_up(shape, (*dict.fromkeys((*lines, *more)),), **keys, **known)
        assert found.reshape(-1).tolist() == [0]


@pytest.mark.parametrize(
    ("words", "lines", "keys"),
    [
        ("a line twice", ("a", "a"), {}),
        ("has 3 numbers, and the graph accepts 2", LINES,
         {"trailing": (2,), "element": "float", "one_hot": True}),
        ("has 9 numbers, and the graph accepts 4", LINES,
         {"trailing": (4,), "element": "float", "one_hot": True, "unknown": 8}),
        ("a vocabulary makes int32, int64", LINES, {"element": "float"}),
        ("expected a file beside the model", LINES, {"vocabulary": "../words.txt"}),
        ("looks up text", LINES, {"type": "float32"}),
    ],
)  # fmt: skip
def test_a_vocabulary_that_does_not_fit(words: str, lines: Any, keys: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match=words):
        looked_up(["red"], lines, **keys)
