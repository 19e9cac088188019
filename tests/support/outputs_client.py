"""Triton's own client in its own process: results and metadata as plain values.

It uses grpcio, which must not share a process with pyarrow.flight.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import reference_client
from support.reference_client import Facts


def infer(address: str, model: str, inputs: dict[str, Any]) -> Facts:
    """Results by name; an input is `[NumPy's name of its type, its values]`."""
    asked = []
    for name, (dtype, values) in inputs.items():
        is_text = dtype == "str"
        array = np.array(values, np.object_ if is_text else dtype)
        kind = "BYTES" if is_text else np_to_triton_dtype(array.dtype)
        tensor = triton.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        asked.append(tensor)
    with triton.InferenceServerClient(address) as client:
        result = client.infer(model, asked)
        return {
            output.name: [output.datatype, plain(result.as_numpy(output.name).tolist())]
            for output in result.get_response().outputs
        }


def plain(value: Any) -> Any:
    """Nested lists with text instead of bytes."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.decode() if isinstance(value, bytes) else value


def outputs(address: str, model: str) -> Facts:
    """Name, datatype and shape of each output in the model's metadata."""
    with triton.InferenceServerClient(address) as client:
        found = client.get_model_metadata(model)
        return [[each.name, each.datatype, list(each.shape)] for each in found.outputs]


if __name__ == "__main__":
    reference_client.serve(infer, outputs)
