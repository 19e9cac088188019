"""A batch that is one whole request runs where it lies; its binding is kept for a while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from iskander_worker import executor
from iskander_worker.backends import Run
from iskander_worker.executor import BINDING_BYTES_MAX, Executor
from support.lanes import CONTRACT

from iskander.contract.rows import RowCopier
from iskander.control.messages import Execute, Slice
from iskander.memory.segment import Segment

ROWS = 4


class PlayedBinding:
    def __init__(self, own_bytes: int) -> None:
        self.own_bytes = own_bytes

    def run(self, run: Run) -> None:
        """Nothing is computed."""


class PlayedSession:
    """Counts what is bound.

    Attributes:
        bound: Addresses of inputs, in the order in which they were bound.
        own_bytes: Of the next binding.
    """

    inputs, outputs = RowCopier(CONTRACT.inputs), RowCopier(CONTRACT.outputs)
    is_binding_reusable = True

    def __init__(self) -> None:
        self.bound: list[int] = []
        self.own_bytes = 0

    def bucket(self, number: int) -> PlayedSession:
        return self

    def bind(self, rows: int, input_address: int, output_address: int) -> PlayedBinding:
        self.bound.append(input_address)
        return PlayedBinding(self.own_bytes)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Executor, PlayedSession]]:
    monkeypatch.setattr(executor, "BINDINGS_MAX", 2)
    source, target = Segment.create("in", 1 << 16), Segment.create("out", 1 << 16)
    runner, session = Executor(source, target), PlayedSession()
    runner.sessions[0] = session  # type: ignore[assignment]
    yield runner, session
    source.close()
    target.close()


def run(runner: Executor, place: int) -> None:
    """Run a request that lies at one of some places."""
    each = Slice(place * 4096, ROWS, 0, ROWS, 0)
    runner.execute(Execute(1, 0, ROWS, (each,)), Run())


def test_a_binding_is_made_once_for_its_place(played: tuple[Executor, PlayedSession]) -> None:
    runner, session = played
    for place in (0, 1, 0, 1, 0):
        run(runner, place)
    assert len(session.bound) == 2


def test_the_oldest_makes_room(played: tuple[Executor, PlayedSession]) -> None:
    runner, session = played
    for place in (0, 1, 0, 2, 1, 2):
        run(runner, place)
    assert len(session.bound) == 3
    run(runner, 0)
    assert len(session.bound) == 4


def test_one_that_is_too_large_to_keep_makes_none_go(
    played: tuple[Executor, PlayedSession],
) -> None:
    runner, session = played
    for place in (0, 1):
        run(runner, place)
    session.own_bytes = BINDING_BYTES_MAX + 1
    for place in (2, 2, 0, 1):
        run(runner, place)
    assert len(session.bound) == 4
