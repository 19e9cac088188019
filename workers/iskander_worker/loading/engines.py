"""TensorRT engines: cache key, cache folder, and the batch sizes that an engine serves.

An engine is built for one card, one version of the libraries and a range of batch sizes, in seconds
to minutes. The sandboxed load builds it into a new entry of the weight cache; workers open the
entry. A range from 1 row to the model's maximum leaves no reason to build during a batch.

Pure but for `preload_libraries` and `tensorrt_version`.

Runs on: worker main, and the process of a sandboxed load. Source: ONNX Runtime 1.31, TensorRT
execution provider: `trt_engine_cache_*`, `trt_timing_cache_*`, `trt_profile_*`; the wheel
tensorrt-cu13-libs, whose package is `tensorrt_libs`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from iskander.contract.graph import Graph
from iskander.interprocess.control.messages import ModelSpec

PROVIDER = "tensorrt"
LIBRARY = "libnvinfer.so.10"
LIBRARIES = (LIBRARY, "libnvinfer_plugin.so.10", "libnvonnxparser.so.10")
"""Libraries in the order of loading: a library comes after those that it needs."""
PACKAGE = "tensorrt_libs"
OWN_CACHE = frozenset(("trt_engine_cache_enable", "trt_engine_cache_path"))
"""Options with which the configuration replaces the cache of this module."""


def has_own_cache(spec: ModelSpec) -> bool:
    """Whether the configuration sets the provider's own cache of engines, on or off."""
    return not OWN_CACHE.isdisjoint(spec.provider_options.get(PROVIDER, {}))


def needs_engines(spec: ModelSpec) -> bool:
    """Whether the engines of a model are built before its first load, and cached."""
    return spec.execution_providers[0] == PROVIDER and not has_own_cache(spec)


def cache_options(folder: Path, *, is_building: bool) -> dict[str, str]:
    """Return options to read engines from a folder, and to write missing engines there.

    Times of kernels are cached only during a build: in a worker the provider would rewrite their
    file. The provider rejects `1` and `0` for booleans.
    """
    options = {"trt_engine_cache_enable": "true", "trt_engine_cache_path": str(folder)}
    if is_building:
        options |= {"trt_timing_cache_enable": "true", "trt_timing_cache_path": str(folder)}
    return options


def profile_options(spec: ModelSpec, graph: Graph) -> dict[str, str]:
    """Return options for engines of 1 to `rows_max` rows, fastest at the largest of `pad_to`.

    No options if no input has a variable number of rows, if another dimension is variable, or if
    the configuration has a profile.
    """
    options = spec.provider_options.get(PROVIDER, {})
    if any(name.startswith("trt_profile_") for name in options):
        return {}
    variable = [
        tensor for tensor in graph.inputs if not all(isinstance(n, int) for n in tensor.shape)
    ]
    inner = [size for tensor in variable for size in tensor.shape[1:]]
    if not variable or not all(isinstance(size, int) for size in inner):
        return {}
    best = max(spec.pad_to, default=spec.rows_max)

    def shapes(rows: int) -> str:
        return ",".join(
            f"{tensor.name}:{'x'.join(map(str, (rows, *tensor.shape[1:])))}" for tensor in variable
        )

    return {
        "trt_profile_min_shapes": shapes(1),
        "trt_profile_opt_shapes": shapes(best),
        "trt_profile_max_shapes": shapes(spec.rows_max),
    }


def key_parts(spec: ModelSpec, device_name: str, tensorrt: str) -> list[object]:
    """Return what an engine depends on, beside the model's files and ONNX Runtime's version."""
    options: Mapping[str, Mapping[str, str]] = spec.provider_options
    return [
        device_name,
        tensorrt,
        spec.execution_providers,
        sorted((name, sorted(values.items())) for name, values in options.items()),
        spec.rows_max,
        spec.pad_to,
    ]


def preload_libraries() -> None:
    """Load TensorRT from its Python package, if that is installed.

    The provider then finds these libraries by their names, like libraries of the system.
    """
    package = find_spec(PACKAGE)
    for folder in (package.submodule_search_locations if package is not None else None) or ():
        for name in LIBRARIES:
            # The load of the provider reports a library that is missing or cannot be loaded.
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(Path(folder) / name), ctypes.RTLD_GLOBAL)


def tensorrt_version() -> str:
    """Return the version of TensorRT that the provider loads; empty if there is none."""
    preload_libraries()
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return ""
    return str(library.getInferLibVersion())
