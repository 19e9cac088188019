"""Benchmark on a GPU: what a trace of the driver shows, and the table."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.trace import Copies, intersection, render, summarize, union

IN, OUT = "HtoD (Pinned -> Device)", "DtoH (Device -> Pinned)"
IMAGES, SCORES, WEIGHTS = 19_267_584, 128_000, 9_437_184


def copy(kind: str, length_bytes: int, at_us: float, took_us: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": f"Memcpy {kind}",
        "ts": at_us,
        "dur": took_us,
        "args": {"device": 0, "stream": 7, "bytes": length_bytes},
    }


def kernel(at_us: float, took_us: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "conv", "ts": at_us, "dur": took_us, "args": {}}


EVENTS = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    copy("HtoD (Pageable -> Device)", WEIGHTS, 10, 500),
    kernel(600, 100),
    copy(IN, IMAGES, 1000, 400),
    kernel(1400, 3000),
    copy(IN, IMAGES, 2000, 400),
    kernel(4400, 1000),
    kernel(4600, 800),
    copy("DtoD", 4, 4300, 5),
    copy(OUT, SCORES, 4450, 10),
    copy(IN, IMAGES, 5500, 400),
    copy(OUT, SCORES, 5950, 10),
    {"ph": "X", "cat": "cuda_driver", "name": "cuMemcpyHtoDAsync_v2", "ts": 1, "dur": 9000},
]


def test_trace_has_the_copies_of_batches_and_their_overlap_with_kernels() -> None:
    summary = summarize(EVENTS)
    assert summary.copies == [
        Copies(IN, IMAGES, 3),
        Copies("HtoD (Pageable -> Device)", WEIGHTS, 1),
        Copies(OUT, SCORES, 2),
        Copies("DtoD", 4, 1),
    ]
    # Without the weights and the kernel before the first batch.
    assert (summary.copy_us, summary.kernel_us) == (1220, 4000)
    assert summary.overlap_us == 410
    lines = list(render(summary, 3))
    assert lines[0] == "3 batches by the worker's own count"
    assert lines[1].split() == f"3 copies of 19.268 MB: {IN}".split()
    assert lines[-2] == "copies 0.407 ms a batch, kernels 1.333 ms a batch"
    assert lines[-1] == "kernels ran for 34% of the copies' time"


def test_trace_without_copies_is_no_error() -> None:
    assert list(render(summarize([kernel(0, 5)]), 0))[-1].startswith("kernels ran for 0%")


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ([(0, 10)], [(2, 3), (5, 20)], [(2, 3), (5, 10)]),
        ([(0, 1), (4, 6), (8, 9)], [(0, 5), (5.5, 8.5)], [(0, 1), (4, 5), (5.5, 6), (8, 8.5)]),
        ([(0, 1)], [(1, 2)], []),
        ([], [(1, 2)], []),
    ],
)
def test_time_of_both(first: Any, second: Any, both: Any) -> None:
    assert list(intersection(first, second)) == both
    assert list(intersection(second, first)) == both


def test_overlapping_spans_count_once() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_ways_depend_on_the_provider_and_on_an_installed_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(provider: str) -> list[str]:
        return [way for way, _ in gpu.ways("two-tower", tmp_path, provider, 1.0)]

    monkeypatch.setattr(gpu, "TRITON", tmp_path / "absent")
    assert names("cpu") == ["direct, 1 thread", "direct, 4 threads", "iskander"]
    monkeypatch.setattr(gpu, "TRITON", tmp_path)
    assert names("cuda")[2:] == [
        "on device", "iskander", "iskander, graphs", "triton, 1 instance", "triton, 2 instances",
    ]  # fmt: skip


@pytest.mark.parametrize("module", ["__main__", "trace"])
def test_machine_without_a_gpu_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", load)
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit, match="no GPU: the CUDA driver finds none"):
        import_module(f"benchmarks.gpu.{module}").main()


def test_rates_are_relative_to_the_best_direct_one() -> None:
    found = {
        "direct, 1 thread": [{"rate": 50.0}, {"rate": 70.0}, {"rate": 60.0}],
        "direct, 4 threads": [{"rate": 100.0}],
        "iskander": [{"rate": 90.0, "p50_ms": 1.5, "copied_mb": [19.2, 0.1]}],
    }
    lines = list(gpu.render("resnet50-float32", found))
    assert lines[0].startswith("| resnet50-float32 | direct, 1 thread | 60 | 0.60 |")
    assert lines[2].startswith("| resnet50-float32 | iskander | 90 | 0.90 | 1.5 |  | [19.2, 0.1] |")
