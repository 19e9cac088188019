"""Reuse of bindings for batches that consist of one whole request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from iskander_worker import executor
from iskander_worker.backends import Run
from iskander_worker.executor import BINDING_BYTES_MAX, Executor
from support.lanes import CONTRACT

from iskander.contract.processing.rows import RowCopier
from iskander.interprocess.control.messages import Execute, Slice
from iskander.interprocess.memory.segment import Segment

ROWS = 4


class FakeBinding:
    def __init__(self, own_bytes: int) -> None:
        self.own_bytes = own_bytes

    def run(self, run: Run) -> None:
        """Computes nothing."""


class FakeSession:
    """Records bindings.

    Attributes:
        bound: Input addresses in the order of binding.
        own_bytes: Size of the next binding.
    """

    inputs, outputs = RowCopier(CONTRACT.inputs), RowCopier(CONTRACT.outputs)
    is_binding_reusable = True

    def __init__(self) -> None:
        self.bound: list[int] = []
        self.own_bytes = 0

    def bucket(self, number: int) -> FakeSession:
        return self

    def bind(self, rows: int, input_address: int, output_address: int) -> FakeBinding:
        self.bound.append(input_address)
        return FakeBinding(self.own_bytes)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Executor, FakeSession]]:
    monkeypatch.setattr(executor, "BINDINGS_MAX", 2)
    source, target = Segment.create("in", 1 << 16), Segment.create("out", 1 << 16)
    runner, session = Executor(source, target), FakeSession()
    runner.sessions[0] = session  # type: ignore[assignment]
    yield runner, session
    source.close()
    target.close()


def run(runner: Executor, position: int) -> None:
    """Runs a request at a position of the input arena, in units of 4096 bytes."""
    each = Slice(position * 4096, ROWS, 0, ROWS, 0)
    runner.execute(Execute(1, 0, ROWS, (each,)), Run())


def test_binding_is_reused_for_the_same_position(harness: tuple[Executor, FakeSession]) -> None:
    runner, session = harness
    for position in (0, 1, 0, 1, 0):
        run(runner, position)
    assert len(session.bound) == 2


def test_bindings_of_an_unloaded_model_are_released(harness: tuple[Executor, FakeSession]) -> None:
    """A binding keeps its session, and so the memory of the model."""
    runner, session = harness
    run(runner, 0)
    runner.drop(0)

    runner.sessions[0] = session  # type: ignore[assignment]
    run(runner, 0)

    assert len(session.bound) == 2


def test_oldest_binding_is_evicted(harness: tuple[Executor, FakeSession]) -> None:
    runner, session = harness
    for position in (0, 1, 0, 2, 1, 2):
        run(runner, position)
    assert len(session.bound) == 3
    run(runner, 0)
    assert len(session.bound) == 4


def test_oversized_binding_is_not_kept_and_evicts_nothing(
    harness: tuple[Executor, FakeSession],
) -> None:
    runner, session = harness
    for position in (0, 1):
        run(runner, position)
    session.own_bytes = BINDING_BYTES_MAX + 1
    for position in (2, 2, 0, 1):
        run(runner, position)
    assert len(session.bound) == 4
