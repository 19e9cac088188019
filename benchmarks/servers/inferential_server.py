"""Inferential's server with the model in its local dispatcher.

python inferential_server.py PORT MODEL_FILE NAME
"""

from __future__ import annotations

import asyncio
import sys

from inferential.dispatch import LocalDispatcher
from inferential.server import Server
from onnx_model import OnnxModel


def main() -> None:
    """Serve until SIGTERM."""
    port, file, name = sys.argv[1:]
    model = OnnxModel(file)

    def run(observation: dict[str, object]) -> dict[str, object]:
        inputs = {each: observation[each] for each, _, _ in model.inputs}
        return {model.output: model.run(inputs)}

    server = Server(
        bind=f"tcp://127.0.0.1:{port}", models=[name], dispatcher=LocalDispatcher({name: run})
    )
    started = server.run()
    if asyncio.iscoroutine(started):
        asyncio.run(started)


if __name__ == "__main__":
    main()
