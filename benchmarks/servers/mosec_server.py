"""mosec server: one Python worker behind its Rust front, tensors as raw bytes.

Without mosec's own batching, which made closed loops slower. Arguments: those of mosec itself; the
model's path is in BENCHMARK_MODEL.
"""

from __future__ import annotations

import os

from mosec import Server, Worker
from onnx_model import OnnxModel


class ModelWorker(Worker):
    """Receives and returns raw tensor bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._model = OnnxModel(os.environ["BENCHMARK_MODEL"])

    def deserialize(self, data: bytes) -> dict[str, object]:
        """Views of the request's body."""
        return self._model.tensors(data)

    def serialize(self, data: bytes) -> bytes:
        """The body of the response."""
        return data

    def forward(self, data: dict[str, object]) -> bytes:
        """Run the model."""
        return self._model.run(data).tobytes()


if __name__ == "__main__":
    server = Server()
    server.append_worker(ModelWorker, num=1)
    server.run()
