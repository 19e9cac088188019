"""The model in the other servers: the same file and ONNX Runtime settings for all.

A body contains the bytes of the input tensors in the model's order; a result contains the bytes of
the output tensor. Needs only onnxruntime and numpy, so it runs in every server's environment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import numpy as np
import onnxruntime as ort

DTYPES = {"tensor(int64)": np.dtype(np.int64), "tensor(float)": np.dtype(np.float32)}


class OnnxModel:
    """A session with one compute thread that never spins.

    Attributes:
        inputs: Name, dtype and row shape of each input, in order.
        output: The output's name.
        output_shape: Of a row.
    """

    def __init__(self, file: str | Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.inputs = [
            (each.name, DTYPES[each.type], tuple(each.shape[1:]))
            for each in self._session.get_inputs()
        ]
        first = self._session.get_outputs()[0]
        self.output = first.name
        self.output_shape = tuple(first.shape[1:])
        self._row_bytes = sum(
            dtype.itemsize * int(np.prod(shape)) for _, dtype, shape in self.inputs
        )

    def run(self, inputs: dict[str, Any]) -> np.ndarray:
        """Run the model on named input tensors."""
        return self._session.run([self.output], inputs)[0]

    def tensors(self, body: bytes) -> dict[str, Any]:
        """Views of a body's tensors."""
        rows = len(body) // self._row_bytes
        inputs, offset = {}, 0
        for name, dtype, shape in self.inputs:
            count = rows * int(np.prod(shape))
            inputs[name] = np.frombuffer(body, dtype, count, offset).reshape(rows, *shape)
            offset += count * dtype.itemsize
        return inputs
