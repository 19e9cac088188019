"""Writes the fixture `configs/models/wide-tabular`: a cheap model of 64 features.

`--check` compares instead of writing. The weights are multiples of a power of two from a frozen
random stream, so the bytes are the same on every machine.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, checker, helper, numpy_helper

MODELS_DIRECTORY = Path(__file__).resolve().parents[1] / "configs/models"

FEATURES_COUNT = 64
HIDDEN_WIDTH = 8
SEED = 7

WIDE_TABULAR_MANIFEST = """\
format = 1
passthrough = "none"

[[inputs]]
column = "features"
type = "fixed_size_list<float32>[64]"
nullable = false
tensor = "features"

[[outputs]]
tensor = "score"
column = "score"
type = "float32"
"""


def main() -> int:
    """Writes the files, or with `--check` returns 1 if a committed file differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    is_check = parser.parse_args().check

    stale_paths = []
    for relative_path, content in model_files().items():
        path = MODELS_DIRECTORY / relative_path
        if is_check:
            if not path.is_file() or path.read_bytes() != content:
                stale_paths.append(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in stale_paths:
        print(f"{path} is stale: run scripts/make_models.py", file=sys.stderr)
    return 1 if stale_paths else 0


def model_files() -> dict[str, bytes]:
    """Returns the content of every generated file by its path under `configs/models`."""
    return {
        "wide-tabular/1/model.onnx": wide_tabular_model(),
        "wide-tabular/1/manifest.toml": WIDE_TABULAR_MANIFEST.encode(),
    }


def wide_tabular_model() -> bytes:
    """Returns the serialized graph: standardise, Gemm, Relu, Gemm, Sigmoid.

    Shape: `features`: (rows, 64), `score`: (rows,)
    Dtype: float32.
    """
    # NumPy's policy freezes RandomState's stream; Generator's may change between releases.
    random = np.random.RandomState(SEED)

    def dyadic(low: float, high: float, *shape: int) -> npt.NDArray[np.float32]:
        steps = random.randint(int(low * 256), int(high * 256), size=shape)
        return (steps / 256).astype(np.float32)

    constants: dict[str, npt.NDArray[Any]] = {
        "mean": dyadic(-2, 2, FEATURES_COUNT),
        "standard_deviation": dyadic(0.5, 2, FEATURES_COUNT),
        "hidden_weight": dyadic(-0.25, 0.25, FEATURES_COUNT, HIDDEN_WIDTH),
        "hidden_bias": dyadic(-0.25, 0.25, HIDDEN_WIDTH),
        "output_weight": dyadic(-0.5, 0.5, HIDDEN_WIDTH, 1),
        "output_bias": dyadic(-0.25, 0.25, 1),
        "width_axis": np.array([1], dtype=np.int64),
    }
    nodes = [
        helper.make_node("Sub", ["features", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "standard_deviation"], ["standardised"]),
        helper.make_node("Gemm", ["standardised", "hidden_weight", "hidden_bias"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["activated"]),
        helper.make_node("Gemm", ["activated", "output_weight", "output_bias"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["probability"]),
        helper.make_node("Squeeze", ["probability", "width_axis"], ["score"]),
    ]
    for node in nodes:
        node.name = node.output[0]
    graph = helper.make_graph(
        nodes,
        "wide_tabular",
        inputs=[
            helper.make_tensor_value_info("features", TensorProto.FLOAT, ["rows", FEATURES_COUNT])
        ],
        outputs=[helper.make_tensor_value_info("score", TensorProto.FLOAT, ["rows"])],
        initializer=[numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(
        graph,
        producer_name="iskander/scripts/make_models.py",
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 17)],
    )
    checker.check_model(model, full_check=True)
    model_bytes: bytes = model.SerializeToString(deterministic=True)
    return model_bytes


if __name__ == "__main__":
    sys.exit(main())
