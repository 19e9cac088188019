"""Execution of one batch: in place on the leased ranges, or gathered in a buffer first.

    one whole request       inputs and results bound in place: no copy
    anything else           rows gathered in a stage of this worker, run there, results scattered
    a model on a device     enqueued with its copies (`devices`), and ended by the worker loop

A binding is cached by its addresses and rows, unless the batch runs on arrays (`arrays`).

Runs on: worker main.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from iskander.contract.processing.rows import RowCopier
from iskander.interprocess.control.messages import Execute, Slice
from iskander.interprocess.memory.segment import Segment
from iskander_worker.backends import Bound, Run
from iskander_worker.batches.arrays import ArrayStage
from iskander_worker.batches.slices import gather, scatter
from iskander_worker.devices.arenas import PageLockedArenas
from iskander_worker.devices.cuda import Device
from iskander_worker.devices.pipeline import Pipeline
from iskander_worker.session import Session

BINDINGS_MAX: Final = 512
BINDING_BYTES_MAX: Final = 65_536
"""Creating a binding costs some 60 us more than using one. A binding has a few kilobytes, and
private buffers for booleans and outputs of unknown shape; with larger buffers it is not cached.
Eviction is first in, first out, because tracking the use would cost time in every batch."""


class Executor:
    """Runs batches between the read-only input arena and this worker's output arena."""

    def __init__(self, input_segment: Segment, output_segment: Segment) -> None:
        self._input = input_segment
        self._output = output_segment
        self._bindings: dict[tuple[int, int, int, int, int], Bound] = {}
        self._stages: dict[tuple[int, int], _Stage | ArrayStage] = {}
        self._arenas: PageLockedArenas | None = None
        self.sessions: dict[int, Session] = {}

    def execute(self, message: Execute, run: Run) -> None:
        """Run one batch and write the results of each slice, or raise `ExecutionFailed`.

        Another thread may abort the run.
        """
        # Step 8
        first = message.slices[0]
        if first.rows == first.request_rows == message.rows:
            source = self._input.address + first.input_offset
            target = self._output.address + first.output_offset
            self._binding(message, source, target).run(run)
            return
        self._run_staged(message, run).scatter(self._output.view, message.slices, message.rows)

    def try_rows(self, message: Execute, run: Run) -> None:
        """Run a batch and discard its results, or raise `ExecutionFailed`."""
        self._run_staged(message, run)

    def _run_staged(self, message: Execute, run: Run) -> _Stage | ArrayStage:
        """Gather a batch in a stage and run it there; return the stage, which has the results."""
        self._require_inside(message)
        stage = self._stages.get((message.model, message.bucket))
        if stage is None or stage.rows < message.rows:
            stage = self._create_stage(message)
        stage.gather(self._input.view, message.slices, message.rows)
        self._binding(message, stage.input_address, stage.output_address).run(run)
        return stage

    def input_body(self, offset: int) -> memoryview:
        """Return the input arena from `offset`, where the body of a request begins, to its end."""
        return self._input.view[offset:]

    def needs_launch(self, message: Execute) -> bool:
        """Whether a batch must run by `launch`, because its model is on a device."""
        session = self.sessions.get(message.model)
        return session is not None and session.launcher is not None

    def launch(self, message: Execute, run: Run, pipeline: Pipeline) -> None:
        """Enqueue one batch on a device, or raise `ExecutionFailed`; `pipeline` reports its end."""
        session = self.sessions[message.model].bucket(message.bucket)
        self._require_inside(message)
        assert self._arenas is not None
        pipeline.launch(session, self._arenas, message, run)

    def page_lock(self, device: Device) -> list[str]:
        """Page-lock the arenas for a device, once; return notices of what failed."""
        if self._arenas is not None:
            return []
        self._arenas = PageLockedArenas(device, self._input, self._output)
        return self._arenas.notices

    def drop(self, model: int) -> None:
        """Remove a model after its last batch."""
        self.sessions.pop(model, None)
        self._stages = {key: kept for key, kept in self._stages.items() if key[0] != model}
        self._bindings = {key: kept for key, kept in self._bindings.items() if key[0] != model}

    def clear(self) -> None:
        """Release every binding before the arenas are unmapped; no batch is in flight."""
        if self._arenas is not None:
            self._arenas.release()
        self._bindings.clear()
        self._stages.clear()

    def _binding(self, message: Execute, input_address: int, output_address: int) -> Bound:
        key = (message.model, message.bucket, message.rows, input_address, output_address)
        binding = self._bindings.get(key)
        if binding is not None:
            return binding
        session = self.sessions[message.model].bucket(message.bucket)
        self._require_inside(message)
        binding = session.bind(message.rows, input_address, output_address)
        if session.is_binding_reusable and binding.own_bytes <= BINDING_BYTES_MAX:
            if len(self._bindings) >= BINDINGS_MAX:
                del self._bindings[next(iter(self._bindings))]
            self._bindings[key] = binding
        return binding

    def _create_stage(self, message: Execute) -> _Stage | ArrayStage:
        """Create a stage, and drop the bindings to the one before it.

        Its rows are rounded up to a power of two, so that it seldom grows.
        """
        key, rows = (message.model, message.bucket), message.rows
        self._bindings = {
            cached: kept for cached, kept in self._bindings.items() if cached[:2] != key
        }
        session = self.sessions[message.model].bucket(message.bucket)
        if session.inputs.has_strings or session.outputs.has_strings:
            stage: _Stage | ArrayStage = ArrayStage(session)
        else:
            stage = _Stage(session, 1 << (rows - 1).bit_length())
        self._stages[key] = stage
        return stage

    def _require_inside(self, message: Execute) -> None:
        session = self.sessions[message.model].bucket(message.bucket)
        for part in message.slices:
            _, input_bytes = session.inputs.layout(part.request_rows)
            _, output_bytes = session.outputs.layout(part.rows)
            assert 0 <= part.input_offset <= len(self._input) - input_bytes, "beyond the arena"
            assert 0 <= part.output_offset <= len(self._output) - output_bytes, "beyond the arena"
            assert 0 <= part.first <= part.request_rows - part.rows, "beyond the request"
            if session.inputs.has_strings:
                body = self._input.view[part.input_offset :]
                session.inputs.string_ranges(body, part.request_rows)


class _Stage:
    """Buffers for a gathered batch of up to `rows` rows, and for its results."""

    def __init__(self, session: Session, rows: int) -> None:
        self.rows = rows
        self._inputs: RowCopier = session.inputs
        self._outputs: RowCopier = session.outputs
        inputs = np.zeros(session.inputs.layout(rows)[1] + 64, np.uint8)
        outputs = np.zeros(session.outputs.layout(rows)[1] + 64, np.uint8)
        self._input_view, self._output_view = inputs.data, outputs.data
        self.input_address = inputs.ctypes.data
        self.output_address = outputs.ctypes.data

    def gather(self, source: memoryview, slices: tuple[Slice, ...], rows: int) -> None:
        """Concatenate the rows of the slices; repeat the last row up to `rows` rows."""
        gather(self._inputs, source, slices, self._input_view, rows)

    def scatter(self, target: memoryview, slices: tuple[Slice, ...], rows: int) -> None:
        """Copy the results of each slice to its output offset."""
        scatter(self._outputs, self._output_view, rows, target, slices)
