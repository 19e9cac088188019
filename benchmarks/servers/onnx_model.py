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

DTYPES = {
    "tensor(int64)": np.dtype(np.int64),
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxModel:
    """A session with one compute thread that never spins.

    Attributes:
        inputs: Name, dtype and row shape of each input, in order.
        output: The output's name.
        output_dtype: Its dtype.
        output_shape: Of a row.
    """

    def __init__(self, file: str | Path, provider: str = "cpu") -> None:
        if provider == "cuda":
            ort.preload_dlls(directory="")
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        names = [PROVIDERS[provider]]
        self._session = ort.InferenceSession(str(file), options, providers=names)
        # The runtime falls back to the CPU with only a log line.
        assert self._session.get_providers()[0] == names[0], f"{provider} does not start"
        self.inputs = [
            (each.name, DTYPES[each.type], tuple(each.shape[1:]))
            for each in self._session.get_inputs()
        ]
        first = self._session.get_outputs()[0]
        self.output, self.output_dtype = first.name, DTYPES[first.type]
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
