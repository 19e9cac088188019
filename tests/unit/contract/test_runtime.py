"""Runtimes of a model version: their names, their number, and the ones that a caller expects."""

from __future__ import annotations

from iskander.contract.runtime import (
    LIBRARY_CHARACTERS_MAX,
    RUNTIMES_MAX,
    SEPARATOR,
    Runtime,
    make_runtime,
    unexpected_runtimes,
    with_runtime,
)

ONE = Runtime("ONNX Runtime 1.31.1", ("CPUExecutionProvider",), 1)
TWO = ONE._replace(threads=2)


def test_name_identifies_library_providers_and_threads() -> None:
    assert ONE.name == "ONNX Runtime 1.31.1, CPUExecutionProvider, threads 1"
    others = [
        TWO,
        ONE._replace(library="ONNX Runtime 1.32.0"),
        ONE._replace(providers=("CUDAExecutionProvider", "CPUExecutionProvider")),
    ]
    assert len({each.name for each in (ONE, *others)}) == 4
    odd = Runtime("a | ü", (), 1).name
    assert odd.isascii() and SEPARATOR not in odd


def test_runtimes_of_workers_are_sorted_and_limited() -> None:
    assert with_runtime(with_runtime((), TWO), ONE) == (ONE, TWO)
    assert with_runtime((ONE,), ONE) == (ONE,)
    known: tuple[Runtime, ...] = ()
    for threads in range(1000):
        known = with_runtime(known, make_runtime("x" * 10_000, ["y" * 10_000] * 1000, threads))
    assert len(known) == RUNTIMES_MAX
    assert len(known[0].library) == LIBRARY_CHARACTERS_MAX and len(known[0].name) < 10_000


def test_only_runtimes_that_are_not_expected_are_named() -> None:
    assert unexpected_runtimes((ONE,), ONE.name) == ""
    assert unexpected_runtimes((ONE,), SEPARATOR.join((ONE.name, TWO.name))) == ""
    assert unexpected_runtimes((ONE, TWO), ONE.name) == TWO.name
    assert unexpected_runtimes((), ONE.name) == ""
