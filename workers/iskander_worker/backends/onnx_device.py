"""Launches of an ONNX Runtime session on a GPU: bindings to device memory, and CUDA graphs.

The session computes on the launcher's stream and does not wait for it. The first run of a captured
launch records the kernels as a graph, which later runs replay with one call.

Runs on: worker main, and its loading thread. Source: ONNX Runtime 1.31, CUDA execution provider:
`user_compute_stream`, `enable_cuda_graph`; run options `gpu_graph_id` (-1: no graph) and
`disable_synchronize_execution_providers`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import onnxruntime as ort

from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ExecutionFailed
from iskander_worker.backends import Run
from iskander_worker.backends.onnx_binding import element_of
from iskander_worker.batches.tensors import error_text, fits_rows, shape_error
from iskander_worker.devices.cuda import Device, capture_lock

NO_GRAPH: Final = -1


def has_graphs(options: Mapping[str, str]) -> bool:
    """Whether the options of the CUDA provider enable graphs."""
    return options.get("enable_cuda_graph", "0").lower() in ("1", "true")


class OnnxLauncher:
    """Implements `Launcher` for a session of ONNX Runtime."""

    def __init__(
        self,
        session: ort.InferenceSession,
        device: Device,
        stream: int,
        graph_rows: tuple[int, ...],
    ) -> None:
        self.device, self.stream, self.graph_rows = device, stream, graph_rows
        self._session = session
        self._graph_ids = itertools.count(1)

    def prepare(
        self,
        contract: Contract,
        rows: int,
        input_address: int,
        output_address: int,
        *,
        is_captured: bool,
    ) -> OnnxLaunch:
        """See `Launcher`."""
        # A graph repeats its addresses, so it cannot have outputs that the runtime allocates.
        has_graph = is_captured and all(spec.is_bound for spec in contract.outputs)
        graph_id = next(self._graph_ids) if has_graph else NO_GRAPH
        io = self._session.io_binding()
        number = self.device.number
        addresses: list[int] = []
        try:
            offsets, _ = body_layout(contract.inputs, rows)
            for spec, offset in zip(contract.inputs, offsets, strict=True):
                shape, address = (rows, *spec.shape), input_address + offset
                io.bind_input(spec.tensor, "cuda", number, element_of(spec), shape, address)
            offsets, _ = body_layout(contract.outputs, rows)
            for spec, offset in zip(contract.outputs, offsets, strict=True):
                shape, address = (rows, *spec.shape), output_address + offset
                if spec.is_bound:
                    io.bind_output(spec.tensor, "cuda", number, element_of(spec), shape, address)
                else:
                    io.bind_output(spec.tensor, "cuda", number)
                addresses.append(address)
        except Exception as error:
            raise ExecutionFailed(
                f"the batch's device memory cannot be bound: {error_text(error)}"
            ) from None
        return OnnxLaunch(
            self._session,
            io,
            contract.outputs,
            rows,
            addresses,
            device_number=number,
            graph_id=graph_id,
        )

    def close(self) -> None:
        """See `Launcher`."""
        del self._session
        self.device.destroy_stream(self.stream)


class OnnxLaunch:
    """Implements `Launch`; runs a binding to device memory, or replays its graph."""

    def __init__(
        self,
        session: ort.InferenceSession,
        io: Any,  # noqa: ANN401
        outputs: tuple[TensorSpec, ...],
        rows: int,
        addresses: list[int],
        *,
        device_number: int,
        graph_id: int,
    ) -> None:
        self._session, self._io = session, io
        self._addresses = addresses
        self._rows, self._number = rows, device_number
        self._unbound = [(i, spec) for i, spec in enumerate(outputs) if not spec.is_bound]
        self._is_captured = graph_id == NO_GRAPH
        self._graph_id = graph_id
        self._run_options = _run_options(graph_id)

    def run(self, run: Run) -> Sequence[int]:
        """Implement `Launch.run`; an abort ends the run between the enqueueing of two nodes."""
        if not self._is_captured:
            self._capture(run)
        if self._run_options.terminate:
            self._run_options = _run_options(self._graph_id)
        for _, spec in self._unbound:
            # For every run, because the runtime keeps the last output bound, with its shape.
            self._io.bind_output(spec.tensor, "cuda", self._number)
        self._run(self._run_options, run)
        if self._unbound:
            self._find_unbound()
        return self._addresses

    def _capture(self, run: Run) -> None:
        """Record the graph. A run before it selects the kernels and allocates their memory."""
        self._run(_run_options(NO_GRAPH), run)
        with capture_lock:
            self._run(_run_options(self._graph_id), run)
        self._is_captured = True

    def _run(self, options: ort.RunOptions, run: Run) -> None:
        run.native = options
        if run.is_aborted:  # Checked after the assignment: a later abort sets `terminate` itself.
            options.terminate = True
        try:
            self._session.run_with_iobinding(self._io, options)
        except Exception as error:
            raise ExecutionFailed(error_text(error)) from None
        finally:
            run.native = None

    def _find_unbound(self) -> None:
        """Store the addresses of the outputs that the runtime allocated.

        Valid until the next run.
        """
        outputs = self._io.get_outputs()
        for position, spec in self._unbound:
            value = outputs[position]
            if not fits_rows(value.shape(), self._rows, spec.shape):
                raise shape_error(spec.tensor, value.shape(), (self._rows, *spec.shape))
            self._addresses[position] = value.data_ptr()


def _run_options(graph_id: int) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options
