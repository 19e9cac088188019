"""I/O binding of tensors to a batch's buffers.

Runs on: worker main. Source: ONNX Runtime 1.31 Python API (`IOBinding`, `RunOptions`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnxruntime as ort

from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ExecutionFailed
from iskander_worker.backends import Run
from iskander_worker.batches.tensors import (
    error_text,
    fits_rows,
    memory_at,
    pack_booleans,
    shape_error,
)

BFLOAT16: Final = 16
"""ONNX number of the element type bfloat16, which NumPy lacks."""

_LOG_FATAL_ONLY: Final = 4


class Binding:
    """Tensors of a batch of `rows` rows, bound to the addresses of its bodies.

    Booleans are bits in Arrow and bytes in a tensor, and outputs of unknown shape cannot be bound
    in advance: both use private buffers.
    """

    __slots__ = (
        "_io", "_packed", "_rows", "_session", "_targets", "_unbound", "_unpacked", "own_bytes",
    )  # fmt: skip

    def __init__(
        self,
        session: ort.InferenceSession,
        contract: Contract,
        rows: int,
        input_address: int,
        output_address: int,
    ) -> None:
        self._session = session
        self._rows = rows
        self._io = session.io_binding()
        self._unpacked: list[tuple[np.ndarray, np.ndarray]] = []
        self._packed: list[tuple[np.ndarray, np.ndarray]] = []
        self._unbound: list[tuple[int, TensorSpec, np.ndarray]] = []
        self._targets: list[np.ndarray] = []
        self.own_bytes = 0
        self._bind_inputs(contract.inputs, input_address)
        self._bind_outputs(contract.outputs, output_address)

    def _bind_inputs(self, specs: tuple[TensorSpec, ...], input_address: int) -> None:
        io, rows = self._io, self._rows
        offsets, _ = body_layout(specs, rows)
        for spec, offset in zip(specs, offsets, strict=True):
            address, shape = input_address + offset, (rows, *spec.shape)
            if spec.type.dtype_name == "bool":
                tensor = np.empty(shape, np.bool_)
                bits = memory_at(address, spec.buffer_bytes(rows))
                _unpack_booleans(bits, tensor)  # On a GPU the next call copies the tensor.
                self._unpacked.append((bits, tensor))
                self.own_bytes += tensor.nbytes
                address = tensor.ctypes.data
            io.bind_input(spec.tensor, "cpu", 0, element_of(spec), shape, address)

    def _bind_outputs(self, specs: tuple[TensorSpec, ...], output_address: int) -> None:
        io, rows = self._io, self._rows
        offsets, _ = body_layout(specs, rows)
        for position, (spec, offset) in enumerate(zip(specs, offsets, strict=True)):
            address, shape = output_address + offset, (rows, *spec.shape)
            target = memory_at(address, spec.buffer_bytes(rows))
            if not spec.is_bound:
                io.bind_output(spec.tensor, "cpu")
                self._unbound.append((position, spec, target))
                self.own_bytes += rows * spec.elements * np.dtype(spec.type.dtype.numpy).itemsize
                continue
            self._targets.append(target)
            if spec.type.dtype_name == "bool":
                tensor = np.empty(shape, np.bool_)
                self._packed.append((tensor, target))
                self.own_bytes += tensor.nbytes
                address = tensor.ctypes.data
            io.bind_output(spec.tensor, "cpu", 0, element_of(spec), shape, address)

    def fill(self, pattern: int) -> None:
        """Fill the memory of all bound outputs, to prove that a run writes it."""
        for target in self._targets:
            target[:] = pattern
        for tensor, _ in self._packed:
            tensor[...] = pattern & 1

    def run(self, run: Run) -> None:
        """Compute the batch, or raise `ExecutionFailed`; an abort ends it between two nodes."""
        for bits, tensor in self._unpacked:
            _unpack_booleans(bits, tensor)
        for _, spec, _ in self._unbound:
            # For every run, because the runtime keeps the last output bound, with its shape.
            self._io.bind_output(spec.tensor, "cpu")
        try:
            self._session.run_with_iobinding(self._io, run.native or options_of(run))
        except Exception as error:
            raise ExecutionFailed(error_text(error)) from None
        for tensor, bits in self._packed:
            bits[:] = pack_booleans(tensor)
        if self._unbound:
            self._copy_unbound()

    def _copy_unbound(self) -> None:
        outputs = self._io.get_outputs()
        for position, spec, target in self._unbound:
            value = outputs[position]
            if not fits_rows(value.shape(), self._rows, spec.shape):
                raise shape_error(spec.tensor, value.shape(), (self._rows, *spec.shape))
            if spec.type.dtype_name == "bool":
                target[:] = pack_booleans(value.numpy())
            else:
                target[:] = memory_at(value.data_ptr(), len(target))


def _unpack_booleans(bits: np.ndarray, tensor: np.ndarray) -> None:
    """Write Arrow bits to a tensor of booleans."""
    flat = tensor.view(np.uint8).reshape(-1)
    flat[:] = np.unpackbits(bits, count=flat.size, bitorder="little")


def options_of(run: Run) -> ort.RunOptions:
    """Create the options of a run, and store them in `run.native`.

    Setting `terminate` on them from another thread aborts the run. The entry `gpu_graph_id`
    excludes the run from graphs of a GPU. The runtime's Python wrapper reads the entry before every
    run; if it is missing, the wrapper raises and catches an exception, at the cost of a small
    model's run.
    """
    options = ort.RunOptions()
    if run.is_trial:
        options.log_severity_level = _LOG_FATAL_ONLY
    options.add_run_config_entry("gpu_graph_id", "-1")
    run.native = options
    if run.is_aborted:  # Checked after the assignment: a later abort sets `terminate` itself.
        options.terminate = True
    return options


def element_of(spec: TensorSpec) -> np.dtype[Any] | int:
    """Return the element type of a tensor, as the runtime's bindings accept it."""
    return BFLOAT16 if spec.type.dtype_name == "bfloat16" else np.dtype(spec.type.dtype.numpy)
