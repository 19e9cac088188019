"""Custom MLServer runtime for the model, and its settings files.

python mlserver_model.py PORT MODEL_FILE NAME FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput
from onnx_model import OnnxModel


class OnnxRuntimeModel(MLModel):
    """Runs the model file of BENCHMARK_MODEL."""

    async def load(self) -> bool:
        """Load the model."""
        self._model = OnnxModel(os.environ["BENCHMARK_MODEL"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Decode the inputs, run the model, encode its output."""
        inputs = {each.name: NumpyCodec.decode_input(each) for each in payload.inputs}
        for name, _, shape in self._model.inputs:
            inputs[name] = inputs[name].reshape(-1, *shape)
        score = self._model.run(inputs)
        output: ResponseOutput = NumpyCodec.encode_output(self._model.output, np.asarray(score))
        return InferenceResponse(model_name=self.name, outputs=[output])


def main() -> None:
    """Write the settings and execute the server."""
    port, file, name, folder = sys.argv[1:]
    settings = {
        "host": "127.0.0.1",
        "http_port": 0,
        "grpc_port": int(port),
        "metrics_endpoint": None,
        "parallel_workers": 0,
        "debug": False,
        "grpc_max_message_length": 1 << 30,
    }
    model = {"name": name, "implementation": "mlserver_model.OnnxRuntimeModel"}
    (Path(folder) / "settings.json").write_text(json.dumps(settings), "utf-8")
    (Path(folder) / "model-settings.json").write_text(json.dumps(model), "utf-8")
    environment = {
        **os.environ,
        "BENCHMARK_MODEL": file,
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = str(Path(sys.executable).with_name("mlserver"))
    os.execve(command, [command, "start", folder], environment)


if __name__ == "__main__":
    main()
