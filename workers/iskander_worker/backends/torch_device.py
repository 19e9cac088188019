"""Launches of a PyTorch program on a GPU, between tensors in device memory.

Inputs are tensors over the workspace's memory, so nothing is copied on the device. Results are
copied from where the program leaves them; they are kept until the next run of the launch.

Runs on: worker main, and its loading thread. Source: PyTorch 2.6 and newer, `ExternalStream`; the
CUDA array interface, version 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ExecutionFailed, ManifestError
from iskander_worker.backends import Run
from iskander_worker.batches.tensors import error_text
from iskander_worker.devices.budgets import Budgets
from iskander_worker.devices.cuda import Device, DriverError, open_device

Call = Callable[[Sequence[torch.Tensor]], Mapping[str, torch.Tensor]]
"""Function from inputs in the program's order to results by name; raises `ExecutionFailed`."""

_TYPES = {
    "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "uint8": torch.uint8, "float16": torch.float16, "float32": torch.float32,
    "float64": torch.float64, "bfloat16": torch.bfloat16,
}  # fmt: skip


@functools.cache
def allocator_budgets() -> Budgets:
    """Return the budgets of this process's programs, which limit PyTorch's allocator."""
    total_bytes: int = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return Budgets(total_bytes, torch.cuda.set_per_process_memory_fraction)


class TorchLauncher:
    """Implements `Launcher` for a PyTorch program; captures no graphs."""

    graph_rows: tuple[int, ...] = ()

    def __init__(self, call: Call, arguments: Sequence[str]) -> None:
        self._call, self._arguments = call, arguments
        torch.cuda.init()
        try:
            self.device: Device = open_device(torch.cuda.current_device())
            self.device.use()
            self.stream = self.device.create_stream()
        except DriverError as error:
            raise ManifestError(str(error)) from None
        self._stream = torch.cuda.ExternalStream(self.stream)

    def prepare(
        self,
        contract: Contract,
        rows: int,
        input_address: int,
        output_address: int,
        *,
        is_captured: bool,
    ) -> TorchLaunch:
        """Implement `Launcher.prepare`; results are not written to the output address."""
        offsets, _ = body_layout(contract.inputs, rows)
        try:
            by_name = {
                spec.tensor: _tensor_at(input_address + offset, (rows, *spec.shape), spec)
                for spec, offset in zip(contract.inputs, offsets, strict=True)
            }
        except (RuntimeError, TypeError, ValueError) as error:
            raise ExecutionFailed(f"the batch's device memory cannot be used: {error}") from None
        inputs = [by_name[name] for name in self._arguments]
        return TorchLaunch(self._call, inputs, contract.outputs, rows, self._stream)

    def close(self) -> None:
        self.device.destroy_stream(self.stream)


class TorchLaunch:
    """Implements `Launch`; calls the program with tensors in device memory."""

    def __init__(
        self,
        call: Call,
        inputs: list[torch.Tensor],
        outputs: tuple[TensorSpec, ...],
        rows: int,
        stream: Any,  # noqa: ANN401
    ) -> None:
        self._call, self._inputs, self._outputs = call, inputs, outputs
        self._rows, self._stream = rows, stream
        self._results: list[torch.Tensor] = []

    def run(self, run: Run) -> Sequence[int]:
        """See `Launch`."""
        self._results.clear()
        with torch.cuda.stream(self._stream):
            named = self._call(self._inputs)
            try:
                self._results += [self._declared_output(spec, named) for spec in self._outputs]
            except RuntimeError as error:  # Such as no memory for a copy of a result.
                raise ExecutionFailed(error_text(error)) from None
        return [tensor.data_ptr() for tensor in self._results]

    def _declared_output(self, spec: TensorSpec, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = named.get(spec.tensor)
        if tensor is None:
            raise ExecutionFailed(f"output `{spec.tensor}` is missing")
        shape = (self._rows, *spec.shape)
        if tuple(tensor.shape) != shape:
            raise ExecutionFailed(
                f"output `{spec.tensor}` has shape {list(tensor.shape)} for this batch, expected "
                f"{list(shape)} by the contract"
            )
        if tensor.dtype != _TYPES.get(spec.type.dtype_name):
            raise ExecutionFailed(
                f"output `{spec.tensor}` has dtype {tensor.dtype}, expected "
                f"{spec.type.dtype_name} by the contract"
            )
        if not tensor.is_cuda:
            return tensor.to("cuda", non_blocking=True)
        return tensor.contiguous()


class _Memory:
    """A range of device memory, as libraries import it."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _tensor_at(address: int, shape: tuple[int, ...], spec: TensorSpec) -> torch.Tensor:
    """Return a tensor over device memory.

    The CUDA array interface has no bfloat16, so such memory is imported as int16.
    """
    name = spec.type.dtype_name
    kind = _TYPES.get(name)
    if kind is None:
        raise ExecutionFailed(f"input `{spec.tensor}` of type {name} has no tensor on a device")
    raw = np.dtype(np.int16 if name == "bfloat16" else spec.type.dtype.numpy)
    tensor = torch.as_tensor(_Memory(address, shape, raw.str), device="cuda")
    return tensor.view(kind)
