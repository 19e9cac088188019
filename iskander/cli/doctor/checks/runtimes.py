"""Checks of ONNX Runtime, its execution providers and GPUs.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from iskander.cli.doctor.checks.subject import Check, Subject, mib
from iskander.cli.doctor.finding import Finding, State

OLDEST_RUNTIME = (1, 27)
FIXES = {
    "cuda": "pip install 'iskander[gpu]', and the NVIDIA driver",
    "tensorrt": "pip install 'iskander[gpu]' 'tensorrt-cu13-libs>=10,<11', and the NVIDIA driver",
}


def check_runtime(subject: Subject) -> Iterator[Finding]:
    """Version of ONNX Runtime."""
    version = subject.probes.runtimes.version
    least = ".".join(map(str, OLDEST_RUNTIME))
    why = f"Results and the cache of optimized models are tested from version {least} on."
    fix = f"pip install 'onnxruntime-gpu>={least}'"
    if not version:
        found = f"ONNX Runtime is not installed, {least} needed"
        yield Finding(
            "onnx_runtime", State.PROBLEM, found, why, fix, "pip uninstall onnxruntime-gpu"
        )
        return
    found = f"ONNX Runtime {version}, {least} needed"
    if tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_RUNTIME:
        yield Finding("onnx_runtime", State.OK, found, why)
    else:
        undo = f"pip install 'onnxruntime-gpu=={version}'"
        yield Finding("onnx_runtime", State.PROBLEM, found, why, fix, undo)


def check_providers(subject: Subject) -> Iterator[Finding]:
    """Libraries of the execution providers that models name, and GPUs."""
    runtimes = subject.probes.runtimes
    why = "A model whose provider is missing does not load: the CPU is not used instead."
    for name, error in runtimes.provider_errors:
        if error:
            fix = FIXES[name]
            undo = f"set execution_providers without {name} in the configuration"
            yield Finding("providers", State.PROBLEM, f"{name}: {error}", why, fix, undo)
        else:
            yield Finding("providers", State.OK, f"{name}: its libraries load", why)
    if not runtimes.provider_errors:
        yield Finding("providers", State.OK, "all models run on the CPU", why)
    if not runtimes.gpus:
        state = State.NOTE if runtimes.provider_errors else State.OK
        found = "no GPU visible through NVML"
        why = "Without NVML the memory of a card is unknown, and its state is not monitored."
        fix = "pip install nvidia-ml-py, and the NVIDIA driver"
        yield Finding("gpus", state, found, why, fix, "pip uninstall nvidia-ml-py")
        return
    names = ", ".join(f"{gpu.name} with {mib(gpu.memory_bytes)}" for gpu in runtimes.gpus)
    yield Finding("gpus", State.OK, f"{names}; driver {runtimes.driver}")


CHECKS: tuple[Check, ...] = (check_runtime, check_providers)
