"""Fuzzing engine: targets, inputs, deterministic mutation, and findings.

A target is a module in `targets/` with

    seeds() -> list[bytes]                    initial inputs, in addition to `corpus/NAME/`
    mutate(raw, other, random) -> bytes       a change that keeps most of the input's structure
    run(raw) -> None                          AssertionError: the parser and its reference disagree
    ITERATIONS                                mutations in the short run of the test suite

Findings are any exception raised by `run`, an input whose CPU time or peak of memory exceeds a
constant times its size, and memory that grows over many executions.

A target may mark the product's part of an execution by `product`; otherwise all of it counts, with
the reference. It declares memory that the product has charged to its caller by `charge`.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import logging
import os
import re
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Final, NamedTuple

from fuzz import mutation

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
CORPUS: Final = HERE / "corpus"
FINDINGS: Final = ROOT / "build" / "fuzz"
INPUT_BYTES_MAX: Final = 8192
INPUT_S: Final = 0.02
BYTE_S: Final = 10e-6
"""Limit of CPU time: for any input, and for each of its bytes."""
INPUT_PEAK_BYTES: Final = 8 << 20
BYTE_PEAK_BYTES: Final = 256
"""Limit of the growth of resident memory during an input: for any, and for each of its bytes."""
INTERRUPT_S: Final = 5.0
"""CPU time after which an input is interrupted, because it may never end."""
TIMINGS: Final = 3
"""Executions of an input above a limit: the least cost counts, so imports and collections of
garbage do not."""
GROWTH_BYTES_MAX: Final = 16 << 20
"""Limit of the growth of resident memory between the first half and the last quarter of a run."""
CORPUS_BYTES_MAX: Final = 2048
"""Maximum size of an input that is added to the corpus."""
PRODUCT: Final = str(ROOT / "iskander")
GROWTH_SAMPLES_MIN: Final = 8
SLOW_INPUTS_MAX: Final = 100
SHRINK_RUNS: Final = 2000
BLIND_SHARE: Final = 0.2
"""Share of mutations that ignore the format."""
_LENGTH: Final = struct.Struct("<I")


class Hang(BaseException):
    """An input was interrupted; a BaseException, so no handler of the product catches it."""


class Costly(Exception):
    """An input exceeded its CPU time or its memory."""


class Cost(NamedTuple):
    """Cost of one execution.

    Attributes:
        cpu_s: CPU time.
        peak_bytes: Growth of resident memory at its peak, without charged memory.
    """

    cpu_s: float
    peak_bytes: int


class _Meter:
    """Cost of the current input: CPU time of the product's part, and charged memory."""

    def __init__(self) -> None:
        self.product_s: float | None = None
        self.charged_bytes = 0

    def reset(self) -> None:
        self.product_s, self.charged_bytes = None, 0


_METER: Final = _Meter()


class Target(NamedTuple):
    """A parser and its reference."""

    name: str
    run: Callable[[bytes], None]
    mutate: Callable[[bytes, bytes, Random], bytes]
    inputs: list[bytes]
    iterations: int


class Finding(NamedTuple):
    """An input that failed.

    Attributes:
        key: Equal for findings with the same likely cause.
        text: The traceback.
    """

    key: str
    raw: bytes
    text: str


def names() -> list[str]:
    """All targets."""
    return sorted(path.stem for path in (HERE / "targets").glob("[a-z]*.py"))


def load(name: str) -> Target:
    """A target with the seeds in its code and its corpus."""
    module: Any = importlib.import_module(f"fuzz.targets.{name}")
    inputs = list(dict.fromkeys([*module.seeds(), *corpus_of(name)]))
    # Collections, which some targets run themselves, then only traverse the objects of an input.
    gc.collect()
    gc.freeze()
    return Target(name, module.run, module.mutate, inputs, module.ITERATIONS)


@contextmanager
def without_logs() -> Iterator[None]:
    """Inputs that are rejected with a log line cost no formatting of it."""
    loggers = [logging.getLogger(name) for name in ("iskander", "opentelemetry")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL + 1)
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


def corpus_of(name: str) -> list[bytes]:
    """The recorded inputs of a target."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*.bin"))]


def guided_inputs(name: str) -> list[bytes]:
    """Inputs of earlier guided runs: with new coverage, or slow while instrumented."""
    folders = (FINDINGS / name / "corpus", FINDINGS / name / "slow")
    return [path.read_bytes() for folder in folders for path in sorted(folder.glob("*"))]


def name_of(raw: bytes) -> str:
    """The file name of an input."""
    return hashlib.sha256(raw).hexdigest()[:12] + ".bin"


def mutated(target: Target, raw: bytes, random: Random) -> bytes:
    """A mutated input, by the target's structure or blindly."""
    other = random.choice(target.inputs)
    for _ in range(1 + min(int(random.expovariate(1.0)), 6)):
        change = mutation.flip if random.random() < BLIND_SHARE else target.mutate
        raw = change(raw, other, random)
    return raw[:INPUT_BYTES_MAX]


def check(target: Target, raw: bytes) -> Finding | None:
    """Run one input; return its finding, if any."""
    limit = limit_of(raw)
    try:
        cost = _measured(target, raw)
        for _ in range(TIMINGS - 1):
            if not _exceeds(cost, limit):
                return None
            cost = Cost(*map(min, cost, _measured(target, raw)))
        if _exceeds(cost, limit):
            raise Costly(_cost_text(cost, limit, len(raw)))
    except (Exception, Hang) as error:
        return Finding(_key(error), raw, traceback.format_exc())
    return None


@contextmanager
def product() -> Iterator[None]:
    """Mark the part of an execution that runs the product: the rest costs nothing."""
    start = time.process_time()
    try:
        yield
    finally:
        used_s = time.process_time() - start
        _METER.product_s = (_METER.product_s or 0.0) + used_s


def charge(size: int) -> None:
    """Declare memory that the product charged to its caller before it used it."""
    _METER.charged_bytes += size


def limit_of(raw: bytes) -> Cost:
    """The cost of an input, above which it is a finding."""
    return Cost(INPUT_S + BYTE_S * len(raw), INPUT_PEAK_BYTES + BYTE_PEAK_BYTES * len(raw))


def _exceeds(cost: Cost, limit: Cost) -> bool:
    return cost.cpu_s > limit.cpu_s or cost.peak_bytes > limit.peak_bytes


def _cost_text(cost: Cost, limit: Cost, size: int) -> str:
    if cost.cpu_s > limit.cpu_s:
        return f"{cost.cpu_s * 1e3:.0f} ms for {size} bytes, limit {limit.cpu_s * 1e3:.0f} ms"
    peak, most = cost.peak_bytes, limit.peak_bytes
    return f"{peak >> 10:,} KiB of memory for {size} bytes, limit {most >> 10:,} KiB"


def growth_bytes(samples: list[int]) -> int:
    """Growth of memory over equidistant samples, without fluctuations.

    It is the difference of the least sample of the last quarter and the greatest one of the first
    half.
    """
    count = len(samples)
    if count < GROWTH_SAMPLES_MIN:
        return 0
    return min(samples[-(count // 4) :]) - max(samples[: count // 2])


def fuzz(
    target: Target, seed: int, iterations: int | None, seconds: float | None
) -> Iterator[tuple[int, Finding | None]]:
    """Run mutations until a count or time is reached; yields the number and the finding."""
    random = Random(f"{target.name} {seed}")
    until = None if seconds is None else time.monotonic() + seconds
    number = 0
    while (iterations is None or number < iterations) and (
        until is None or time.monotonic() < until
    ):
        raw = mutated(target, random.choice(target.inputs), random)
        number += 1
        yield number, check(target, raw)


def inputs_and_mutations(target: Target, seed: int, seconds: float) -> Iterator[Finding | None]:
    """Run each input, then mutations, until a time is reached; yields the findings."""
    until = time.monotonic() + seconds
    for raw in target.inputs:
        if time.monotonic() >= until:
            return
        yield check(target, raw)
    for _, finding in fuzz(target, seed, None, until - time.monotonic()):
        yield finding


class Findings:
    """Keeps one input of each kind of finding.

    Args:
        name: The target's name; its folder is `build/fuzz/NAME`.
    """

    def __init__(self, name: str) -> None:
        self.folder = FINDINGS / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.paths: dict[str, Path] = {}

    def add(self, finding: Finding) -> bool:
        """Keep a finding; return whether its key is new."""
        if finding.key in self.paths:
            return False
        path = self.paths[finding.key] = self.folder / name_of(finding.raw)
        path.write_bytes(finding.raw)
        path.with_suffix(".txt").write_text(f"{finding.key}\n\n{finding.text}")
        return True


class SlowInputs:
    """Keeps inputs that were slow while instrumented, in `build/fuzz/NAME/slow/`."""

    def __init__(self, name: str) -> None:
        self._folder = FINDINGS / name / "slow"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._count = 0

    def add(self, raw: bytes) -> None:
        """Keep an input."""
        self._count += 1
        if self._count <= SLOW_INPUTS_MAX:
            (self._folder / name_of(raw)).write_bytes(raw)


class LastInput:
    """The current input, in a file that is still there after a crash of the interpreter."""

    def __init__(self, name: str) -> None:
        self.path = FINDINGS / name / "last.bin"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def record(self, raw: bytes) -> None:
        """Write an input to the file."""
        os.pwrite(self._file, _LENGTH.pack(len(raw)) + raw, 0)

    def read(self) -> bytes:
        """The last written input."""
        raw = self.path.read_bytes()
        return raw[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(raw)[0]]


def shrunk(target: Target, finding: Finding) -> Finding:
    """A smaller input with the same finding, by leaving out pieces."""
    size, runs = max(len(finding.raw) // 2, 1), 0
    while size:
        at = 0
        while at < len(finding.raw) and runs < SHRINK_RUNS:
            runs += 1
            smaller = check(target, finding.raw[:at] + finding.raw[at + size :])
            if smaller is not None and smaller.key == finding.key:
                finding = smaller
            else:
                at += size
        size //= 2
    return finding


def reached(target: Target, raw: bytes) -> set[tuple[str, int, int]]:
    """Transitions between lines of the product that an input executes."""
    steps: set[tuple[str, int, int]] = set()

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PRODUCT):
            return None
        before = frame.f_lineno

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            steps.add((name, before, frame.f_lineno))
            before = frame.f_lineno
            return step

        return step

    previous = sys.gettrace()
    sys.settrace(enter)
    try:
        check(target, raw)
    finally:
        sys.settrace(previous)
    return steps


def collect(name: str, candidates: list[bytes]) -> list[bytes]:
    """The smallest candidates with line transitions that no recorded input has."""
    target = load(name)
    known_steps: set[tuple[str, int, int]] = set()
    for raw in target.inputs:
        known_steps |= reached(target, raw)
    selected: list[bytes] = []
    for raw in sorted(candidates, key=len):
        if len(raw) <= CORPUS_BYTES_MAX and (new := reached(target, raw) - known_steps):
            known_steps |= new
            selected.append(raw)
    return selected


def _measured(target: Target, raw: bytes) -> Cost:
    """Run one input; return its cost."""
    _METER.reset()
    before = _reset_peak()
    start = time.process_time()
    with bounded():
        target.run(raw)
    used_s = time.process_time() - start
    peak_bytes = _peak_bytes() - before if before else 0
    if _METER.product_s is not None:
        used_s = _METER.product_s
    return Cost(used_s, peak_bytes - _METER.charged_bytes)


def _open_peak() -> int | None:
    try:
        return os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _reset_peak() -> int:
    """Reset the peak of resident memory, and return it; 0 if the kernel cannot reset it.

    Source: proc(5), `clear_refs`.
    """
    if _PEAK_FD is None:
        return 0
    os.pwrite(_PEAK_FD, b"5", 0)
    return _peak_bytes()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


_PEAK_FD: Final = _open_peak()


@contextmanager
def bounded(seconds: float = INTERRUPT_S) -> Iterator[None]:
    """Raise `Hang` if the block exceeds its CPU time."""
    before = signal.signal(signal.SIGVTALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise Hang("an input did not end in time")


def _key(error: BaseException) -> str:
    """The exception's type, the last stack frames, and the beginning of its text."""
    steps = traceback.extract_tb(error.__traceback__)
    where = [
        f"{Path(each.filename).name}:{each.lineno}"
        for each in steps
        if Path(each.filename).parent != HERE
    ][-3:]
    text = re.sub(r"0x[0-9a-f]+|[0-9]+", "", str(error).split("\n", 1)[0][:60])
    return f"{type(error).__name__} {' > '.join(where)} {text}"
