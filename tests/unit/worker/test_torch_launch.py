"""Launches of a PyTorch program, with a stand-in for PyTorch."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from iskander_worker import backends
from iskander_worker.backends import Run

from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import TensorSpec
from iskander.errors import ExecutionFailed

MODULE = "iskander_worker.backends.torch_device"


class OutOfMemoryError(RuntimeError):
    """As PyTorch's allocator raises it."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch = MagicMock()
    torch.cuda.stream = lambda stream: nullcontext()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(backends, "torch_device", None, raising=False)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = import_module(MODULE)
    yield module
    del sys.modules[MODULE]


@pytest.mark.parametrize("is_cuda", [True, False])
def test_copy_of_a_result_without_memory_fails_the_batch_only(module: Any, is_cuda: bool) -> None:
    def copy(*_: Any, **__: Any) -> Any:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    kind = module._TYPES["float32"]
    result = SimpleNamespace(shape=(3,), dtype=kind, is_cuda=is_cuda, contiguous=copy, to=copy)
    spec = TensorSpec("y", "y", ColumnType("float32"), ())
    launch = module.TorchLaunch(lambda inputs: {"y": result}, [], (spec,), 3, None)
    with pytest.raises(ExecutionFailed, match=r"CUDA out of memory. Tried to allocate 2 GiB$"):
        launch.run(Run())
