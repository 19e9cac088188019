"""The model inside Triton: its Python backend loads this file as `model.py`."""

from __future__ import annotations

import json
import os
import sys

# The stub starts a Python of its own, which knows nothing of the environment.
sys.path.insert(0, os.environ["BENCHMARK_SITE"])
import triton_python_backend_utils as pb_utils
from onnx_model import OnnxModel


class TritonPythonModel:
    """Triton's name for the class that it looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the model that the configuration names."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._model = OnnxModel(parameters["file"]["string_value"])

    def execute(self, requests: list[object]) -> list[object]:
        """Run request by request, as they come."""
        responses = []
        for request in requests:
            inputs = {
                name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                for name, _, _ in self._model.inputs
            }
            output = pb_utils.Tensor(self._model.output, self._model.run(inputs))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
