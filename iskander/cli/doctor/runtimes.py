"""Version of ONNX Runtime, load errors of its execution providers, and GPUs.

Runs on: the operator's tool. Source: ONNX Runtime (capi/libonnxruntime_providers_*.so), NVML.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from iskander.gateway.supervision.gpus.query import ask_nvml

RUNTIMES = ("onnxruntime-gpu", "onnxruntime")
"""Distributions with the module `onnxruntime`."""


class Gpu(NamedTuple):
    """A GPU as NVML reports it."""

    name: str
    memory_bytes: int


class Runtimes(NamedTuple):
    """Inference runtime.

    Attributes:
        version: Version of ONNX Runtime; empty if it is not installed.
        provider_errors: Why the library of a provider does not load, by the name in the settings;
            empty texts for those that load.
        driver: Version of the NVIDIA driver; empty without NVML.
    """

    version: str = ""
    provider_errors: tuple[tuple[str, str], ...] = ()
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()


def read_runtimes(providers: Sequence[str], preload: Callable[[], None]) -> Runtimes:
    """Load the libraries of the execution providers, as ONNX Runtime would.

    `preload` loads those of TensorRT.
    """
    driver, gpus = _read_gpus()
    errors = tuple((name, _load_error(name, preload)) for name in providers if name != "cpu")
    return Runtimes(_version(), errors, driver, gpus)


def _version() -> str:
    for name in RUNTIMES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _load_error(provider: str, preload: Callable[[], None]) -> str:
    spec = find_spec("onnxruntime")
    folder = Path(spec.origin).parent / "capi" if spec and spec.origin else Path()
    library = folder / f"libonnxruntime_providers_{provider}.so"
    if not library.exists():
        return f"this ONNX Runtime was built without {provider}"
    import onnxruntime

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            # Workers do the same. `preload` prints the libraries that it does not find.
            onnxruntime.preload_dlls(directory="")
        if provider == "tensorrt":
            preload()
        # Defines symbols that the providers' libraries need.
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return ""


def _read_gpus() -> tuple[str, tuple[Gpu, ...]]:
    """Driver and GPUs of NVML."""
    report = ask_nvml()
    return report.driver, tuple(Gpu(card.name, card.memory_bytes) for card in report.cards)
