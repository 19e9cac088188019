"""Train a tokenizer on a few sentences and write a text-embedding graph to `1/`.

The graph has a byte-level BPE tokenizer, as in GPT-2, and a table of vectors. The vectors are
random numbers from a fixed seed, so only shared words make two texts similar.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tokenizers import ByteLevelBPETokenizer

SENTENCES = (
    "A record batch holds columns, and every column holds values of one type.",
    "The server reads the columns of a batch and sends back the columns of the results.",
    "Rain fell on the hills all night, and in the morning the river was high.",
    "The river carries the rain of the hills down to the sea.",
    "She bought bread, butter and two bottles of milk at the corner shop.",
    "The shop at the corner sells fresh bread in the morning.",
    "A worker waits for a batch, computes it and waits for the next one.",
    "The next train to the sea leaves in the morning, when the night train has come.",
    "Birds sing before the sun rises over the hills.",
    "The sun rises, the birds sing, and the shop opens its doors.",
)
TOKENS = 480
WIDTH = 384
SEED = 11


def train() -> ByteLevelBPETokenizer:
    """A tokenizer with the pieces of the sentences, and one token for every other byte."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(SENTENCES, TOKENS, min_frequency=2, show_progress=False)
    return tokenizer


def vectors(tokens: int) -> np.ndarray:
    """A vector for each token."""
    return np.random.default_rng(SEED).standard_normal((tokens, WIDTH), np.float32)


def build(tokenizer: ByteLevelBPETokenizer) -> ModelProto:
    """The graph: texts to tokens, tokens to vectors, sum of the vectors of a text."""
    model = json.loads(tokenizer.to_str())["model"]
    merges = "".join(f"{' '.join(pair)}\n" for pair in model["merges"])
    nodes = [
        helper.make_node(
            "GPT2Tokenizer",
            ["text"],
            ["tokens", "mask"],
            domain="ai.onnx.contrib",
            vocab=json.dumps(model["vocab"]),
            merges=merges,
            padding_length=-1,
        ),
        helper.make_node("Gather", ["vectors", "tokens"], ["found"]),
        helper.make_node("Cast", ["mask"], ["counted"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["counted", "last"], ["weights"]),
        helper.make_node("Mul", ["found", "weights"], ["meant"]),
        helper.make_node("ReduceSum", ["meant", "second"], ["sum"], keepdims=0),
    ]
    constants = [
        numpy_helper.from_array(vectors(len(model["vocab"])), "vectors"),
        numpy_helper.from_array(np.array([2], np.int64), "last"),
        numpy_helper.from_array(np.array([1], np.int64), "second"),
    ]
    text = helper.make_tensor_value_info("text", TensorProto.STRING, ["rows"])
    total = helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["rows", WIDTH])
    graph = helper.make_graph(nodes, "text-embedding", [text], [total], constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.contrib", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def main(folder: Path) -> None:
    """Write the model."""
    onnx.save(build(train()), folder / "model.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "1")
