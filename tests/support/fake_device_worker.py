"""`iskander-worker` with the backend `fake`: `y = 3 * x + 1` on a fake device.

A batch with the value `SLOW` takes long, and one with `FAULT` ends the device. The provider option
`refused` names the mappings that cannot be page-locked, and `streams_max` limits the streams;
`build_s` is the time of a step of the load, which is reported after `REPORT_S`. The log has each
start and end of a model. Unused models are kept for `$REUSE_S`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from iskander.contract.graph import Graph, GraphTensor
from iskander.interprocess.control.messages import ModelSpec

SLOW, FAULT = 777, 666
SLOW_S = 1.2
REPORT_S = 0.2


def load(spec: ModelSpec, cores: int) -> Any:
    """The backend."""
    from iskander_worker.loading.progress import progress

    with progress.step("building engines"):
        time.sleep(float(spec.provider_options["cuda"].get("build_s", "0")))
    return _Model(spec)


class _Model:
    graph = Graph(
        (GraphTensor("x", "tensor(int64)", ("rows",)),),
        (GraphTensor("y", "tensor(int64)", ("rows",)),),
    )
    providers = ("fake",)
    threads = 1

    def __init__(self, spec: ModelSpec) -> None:
        from support.fake_device import FakeLauncher

        options = spec.provider_options.get("cuda", {})
        device = _device(options.get("refused", ""), int(options.get("device_id", "0")))
        device.streams_max = int(options.get("streams_max", "1000"))
        self.launcher = FakeLauncher(device, self._run)
        self._name = spec.name
        os.write(2, f"opened {spec.name}\n".encode())

    def _run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        from iskander_worker.devices.cuda import DriverError

        x = inputs["x"]
        if SLOW in x:
            time.sleep(SLOW_S)
        if FAULT in x:
            text = "cuStreamQuery failed: illegal address (CUDA error 700)"
            self.launcher.device.fault = DriverError(700, text)
        return {"y": 3 * x + 1}

    def compute(self, arrays: Any, outputs: Sequence[str], run: Any) -> Any:
        """For the proof of a load, which compares these results with those on the device."""
        return self._run(arrays)

    def close(self) -> None:
        self.launcher.close()
        os.write(2, f"closed {self._name}\n".encode())


_devices: dict[int, Any] = {}


def _device(refused: str, number: int) -> Any:
    from support.fake_device import FakeDevice

    if number not in _devices:
        _devices[number] = FakeDevice(refused=tuple(refused.split()), number=number)
        _devices[number].start()
    return _devices[number]


if __name__ == "__main__":
    from iskander_worker import backends
    from iskander_worker.__main__ import main
    from iskander_worker.loading import loader
    from iskander_worker.loading import progress as progress_module

    from iskander.foundation.clock import NS_PER_S

    progress_module.FIRST_S = REPORT_S
    loader.REUSE_NS = int(float(os.environ.get("REUSE_S", "30")) * NS_PER_S)
    backends.BUILT_IN["fake"] = "support.fake_device_worker"
    main()
