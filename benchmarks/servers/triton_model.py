"""The model in Triton: its Python backend loads this file as `model.py`."""

from __future__ import annotations

import json
import os
import sys

# The stub starts its own Python interpreter, without the environment's packages.
sys.path.insert(0, os.environ["BENCHMARK_SITE"])
import triton_python_backend_utils as pb_utils
from onnx_model import OnnxModel


class TritonPythonModel:
    """The class that Triton's Python backend loads, by its name."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model file of the configuration."""
        parameters = json.loads(args["model_config"])["parameters"]
        values = (parameters[name]["string_value"] for name in ("file", "provider"))
        self._model = OnnxModel(*values)

    def execute(self, requests: list[object]) -> list[object]:
        """Run the requests one by one."""
        responses = []
        for request in requests:
            inputs = {
                name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                for name, _, _ in self._model.inputs
            }
            output = pb_utils.Tensor(self._model.output, self._model.run(inputs))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
