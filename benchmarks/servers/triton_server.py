"""Starts the `tritonserver` binary of the nvidia-pytriton wheel with a model repository.

The wheel contains the server, its Python backend, and a stub for each Python version. The backend
needs the stub of the running version in its folder, and the wheel's and Python's libraries in the
library path.

    python triton_server.py PORT MODEL_FILE NAME FOLDER [cpu|cuda INSTANCES]

The backend's processes open the model on the GPU themselves, so Triton's own kind of instance is
that of the CPU.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from onnx_model import OnnxModel

HERE = Path(__file__).parent
TYPES = {"int64": "TYPE_INT64", "float32": "TYPE_FP32", "float16": "TYPE_FP16"}
CONFIG = """name: "{name}"
backend: "python"
max_batch_size: {rows_max}
input [{inputs}]
output [{output}]
instance_group [{{ kind: KIND_CPU count: {instances} }}]
parameters {{ key: "file" value: {{ string_value: "{file}" }} }}
parameters {{ key: "provider" value: {{ string_value: "{provider}" }} }}
"""
ROWS_MAX = 1 << 20


def main() -> None:
    """Write the repository and execute the server."""
    port, file, name, folder = sys.argv[1:5]
    provider, instances = sys.argv[5:] or ("cpu", "1")
    site = Path(sysconfig.get_paths()["purelib"])
    server = site / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    backend = server / "backends" / "python"
    if not (backend / stub.name).exists():
        shutil.copy(stub, backend)
    repository = Path(folder) / "repository"
    (repository / name / "1").mkdir(parents=True)
    config = _config(name, file, provider, instances)
    (repository / name / "config.pbtxt").write_text(config, "utf-8")
    shutil.copy(HERE / "triton_model.py", repository / name / "1" / "model.py")
    shutil.copy(HERE / "onnx_model.py", repository / name / "1")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{site / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}",
        "BENCHMARK_SITE": str(site),
    }
    command = [
        str(server / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={server / 'backends'}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={port}",
        "--allow-http=false",
        "--allow-metrics=false",
    ]
    os.execve(command[0], command, environment)


def _config(name: str, file: str, provider: str, instances: str) -> str:
    model = OnnxModel(file)
    inputs = [_tensor(each, str(dtype), shape) for each, dtype, shape in model.inputs]
    output = _tensor(model.output, str(model.output_dtype), model.output_shape)
    return CONFIG.format(
        name=name,
        rows_max=ROWS_MAX,
        inputs=", ".join(inputs),
        output=output,
        file=file,
        provider=provider,
        instances=instances,
    )


def _tensor(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    # Triton needs one dimension for a scalar row; the model needs none.
    dims = list(shape) or [1]
    reshape = "" if shape else " reshape: { shape: [] }"
    return f'{{ name: "{name}" data_type: {TYPES[dtype]} dims: {dims}{reshape} }}'


if __name__ == "__main__":
    main()
