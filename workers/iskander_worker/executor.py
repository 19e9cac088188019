"""One batch: a binding over the leased buffers, made once per address and rows, and run.

Runs on: worker main.
"""

from __future__ import annotations

from iskander.contract.tensors import body_layout
from iskander.memory.segment import Segment
from iskander.wire.messages import Execute
from iskander_worker.session import Binding, Session

BINDINGS_MAX = 512
BINDING_BYTES_MAX = 65_536
"""Making a binding costs some 60 us more than using one. Each keeps a few kilobytes, and memory of
its own where it unpacks booleans or holds outputs of unknown shape: large ones are made anew."""


class Executor:
    """Runs batches that lie in one pair of arenas.

    Args:
        input_segment: Mapped read-only.
        output_segment: This worker's own.
    """

    def __init__(self, input_segment: Segment, output_segment: Segment) -> None:
        self._input = input_segment
        self._output = output_segment
        self._bindings: dict[tuple[int, int, int, int], Binding] = {}
        self.sessions: dict[int, Session] = {}

    def execute(self, message: Execute) -> None:
        """Run one batch; its results lie at `message.output_offset` when this returns.

        Raises:
            ExecutionFailed: The model did not compute it.
        """
        # Step 7
        key = (message.model, message.rows, message.input_offset, message.output_offset)
        binding = self._bindings.pop(key, None)
        if binding is None:
            binding = self._bind(message)
            if len(self._bindings) >= BINDINGS_MAX:
                self._bindings.pop(next(iter(self._bindings)))
        is_reusable = self.sessions[message.model].is_binding_reusable
        if is_reusable and binding.own_bytes <= BINDING_BYTES_MAX:
            self._bindings[key] = binding  # Last in the dict's order: the least recent is first.
        binding.run()

    def forget(self) -> None:
        """Drop every binding: the arenas are about to be unmapped."""
        self._bindings.clear()

    def _bind(self, message: Execute) -> Binding:
        session = self.sessions[message.model]
        _, input_bytes = body_layout(session.contract.inputs, message.rows)
        _, output_bytes = body_layout(session.contract.outputs, message.rows)
        assert 0 <= message.input_offset <= len(self._input) - input_bytes, "input beyond the arena"
        assert 0 <= message.output_offset <= len(self._output) - output_bytes, (
            "output beyond the arena"
        )
        return session.bind(
            message.rows,
            self._input.address + message.input_offset,
            self._output.address + message.output_offset,
        )
