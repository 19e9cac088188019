"""Runs cases on gateways and judges each: right, refused with a reason, wrong, internal or crashed.

Before each request, neighbours' requests fill the memory for results with other values, so that
memory that a run does not write shows. Then several clients send variants of the inputs at once:
other values, other orders and other numbers of rows, while the worker is suspended, so that
requests are combined.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper
from support import models
from support.processes import MIB, Gateway, suspended

from iskander.client import OFF, Client
from iskander.errors import IskanderError
from onnx_suite.cases import Case, Feeds
from onnx_suite.clients import Caller, Flight, Grpc, Http, Refused
from onnx_suite.reference import (
    Reference,
    Results,
    alone,
    beyond_tolerance,
    bit_difference,
    form_difference,
)

OUTPUT_BYTES = 4 * MIB
FILLING_ROWS = 3 * MIB // 4
PATTERNS = (0x5A5A5A5A, 0x3FC00000, -0x3DF00000)
"""As float32: 1.5e16, 1.5 and -36."""
GRPC_CLIENTS = 4
"""Clients of requests at once, beside one of HTTP and one of Flight."""
THREADS = 32
VARIANTS_MAX = 12
LOAD_S = 300.0
ARRIVAL_S = 0.25
"""Time for the requests to arrive before the suspended worker continues."""
BROKEN = ("internal", "execution_failed", "poisoned", "protocol", "segment")
"""Codes that blame the model or the server."""
SHAPE = "a result has another shape than the graph declares"


@dataclass
class Verdict:
    """Judgement of a case.

    Attributes:
        load_error: Reason of a failed load; the requests are then not sent.
        runtime_error: Reason for which ONNX Runtime in process does not load or run the case.
        refused: By protocol, code and text of a rejected request.
        wrong: Results that differ from those in process.
        internal: Failures of the server where ONNX Runtime succeeds.
        crashed: Deaths of the worker.
        is_random: Results differ between two runs in process: only types and shapes are compared.
        answers: Number of compared requests that ran alone.
        together: Number of compared requests of several clients at once.
        batch_rows: Rows of the largest batch.
    """

    name: str
    kind: str
    load_error: str = ""
    runtime_error: str = ""
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    internal: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    is_random: bool = False
    answers: int = 0
    together: int = 0
    batch_rows: int = 0

    @property
    def is_bad(self) -> bool:
        return bool(self.wrong or self.internal or self.crashed)


@dataclass
class Crowd:
    """Requests of several clients for one model."""

    key: str
    variants: Sequence[Feeds]
    reference: Reference
    verdict: Verdict

    def expected(self) -> Iterator[tuple[int, Feeds, Results | None]]:
        """Number and tensors of each request, and its results alone."""
        for number, feeds in enumerate(self.variants):
            yield number, feeds, alone(self.reference, feeds)


def judge(cases: Sequence[Case], on_verdict: Callable[[Verdict], None]) -> None:
    """Serve the cases from one gateway and report the verdict of each."""
    with tempfile.TemporaryDirectory(prefix="isk-suite-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for case in cases:
            case.save(folder / "models" / case.key / "1")
            settings = folder / "models" / case.key / "model.toml"
            settings.write_text("intra_threads = 1\nmax_batch_rows = 64\n")
        with serving(folder) as bench:
            for case in cases:
                on_verdict(bench.judge(case))


@contextlib.contextmanager
def serving(folder: Path, output_bytes: int = OUTPUT_BYTES) -> Iterator[Bench]:
    """A gateway with the repository `folder/models`, of which calls load the models.

    All other settings that affect batches are the defaults.
    """
    fixed = {"intra_threads": 1}
    filling = {"path": str(_filling(folder / "filling")), "max_batch_rows": FILLING_ROWS}
    gateway = Gateway(
        folder,
        [{"name": "filling", **filling, **fixed}],
        http={"address": "127.0.0.1:0"},
        repository={"path": str(folder / "models"), "control": "explicit"},
        workers={"groups": ["0"], "reattach_s": 5.0},
        arena={"output_bytes": output_bytes},
        limits={"rows": FILLING_ROWS},
        loading={"cache": str(folder / "cache")},
    )
    try:
        gateway.start()
        bench = Bench(gateway)
        try:
            yield bench
        finally:
            bench.close()
        code = gateway.stop()
        assert code == 0, f"exit code {code}"
    finally:
        gateway.end()


class Bench:
    """Clients of one gateway, and the reference."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._admin = Client(gateway.address, timeout_s=LOAD_S, retry=OFF)
        self._grpc = Grpc(gateway.address)
        self._http_address = gateway.stats()["http_address"]
        self._callers: dict[str, Caller] = {
            "gRPC": self._grpc,
            "HTTP": Http(self._http_address),
            "Flight": Flight(gateway.address),
        }
        self._clients = [Grpc(gateway.address) for _ in range(GRPC_CLIENTS)]
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="client")
        self._turn = 0
        self._pids = gateway.worker_pids()

    def close(self) -> None:
        self._threads.shutdown()
        self._admin.close()
        for each in (*self._callers.values(), *self._clients):
            each.close()

    def judge(self, case: Case) -> Verdict:
        """Load a case, send its requests, and unload it."""
        verdict = Verdict(case.name, case.kind)
        verdict.load_error = self.load(case.key)
        self._note_deaths(verdict, "load")
        reference = None
        try:
            reference = Reference(case.model)
        except Exception as error:
            verdict.runtime_error = _line(error)
        if verdict.load_error:
            return verdict
        if reference is None:
            verdict.wrong.append(f"loaded, but not in process: {verdict.runtime_error}")
        else:
            self._requests(case, reference, verdict)
            self._note_deaths(verdict, "requests")
        self.unload(case.key)
        return verdict

    def load(self, key: str) -> str:
        """Load a model; returns the error."""
        try:
            self._admin.load(key)
        except IskanderError as error:
            return error.message
        return ""

    def _requests(self, case: Case, reference: Reference, verdict: Verdict) -> None:
        for feeds in case.feeds:
            expected = None
            try:
                expected = reference.run(feeds)
                again = reference.run(feeds)
            except Exception as error:
                expected = alone(reference, feeds)
                verdict.runtime_error = "" if expected else _line(error)
            else:
                pairs = [(again[name], array) for name, array in expected.items()]
                verdict.is_random |= any(bit_difference(*pair) for pair in pairs)
            for protocol, caller in self._callers.items():
                self._neighbours(case, feeds)
                try:
                    found = caller.infer(case.key, feeds)
                except Refused as error:
                    _refusal(error, protocol, feeds, expected, reference, verdict)
                    continue
                verdict.answers += 1
                _compare(found, expected, protocol, verdict)
        if not verdict.is_random and "gRPC" not in verdict.refused and case.feeds:
            variants = list(_variants(case.feeds[0], reference))[:VARIANTS_MAX]
            self.together([Crowd(case.key, variants, reference, verdict)])

    def together(self, crowds: Sequence[Crowd]) -> None:
        """Send requests of several clients at once; compare each with its run alone."""
        sent = 0
        calls = []
        with suspended(self._pids[0]):
            for number in range(max((len(crowd.variants) for crowd in crowds), default=0)):
                for crowd in crowds:
                    if number < len(crowd.variants):
                        calls.append((crowd, self._start(number, crowd)))
                        sent += 1
            # The worker has up to two batches; requests that the server rejects do not arrive.
            deadline = time.monotonic() + ARRIVAL_S
            while self._queued(crowds) < sent - 2 and time.monotonic() < deadline:
                pass
        expected = {id(crowd): iter(crowd.expected()) for crowd in crowds}
        for crowd, call in calls:
            number, feeds, wanted = next(expected[id(crowd)])
            verdict, where = crowd.verdict, f"together, request {number}"
            try:
                found = call()
            except Refused as error:
                _refusal(error, "together", feeds, wanted, crowd.reference, verdict)
                continue
            if wanted is None:
                verdict.wrong.append(f"{where}: answered, but not in process")
                continue
            verdict.together += 1
            for name, array in wanted.items():
                problem = beyond_tolerance(found[name], array)
                if problem:
                    verdict.wrong.append(f"{where}: {name}: {problem}")
        lanes = self.gateway.stats()["lanes"]
        for crowd in crowds:
            runs = lanes[f"{crowd.key}/1"]["batch_rows"]
            crowd.verdict.batch_rows = max(crowd.verdict.batch_rows, int(runs["max"]))

    def _start(self, number: int, crowd: Crowd) -> Callable[[], Feeds]:
        """Start a request of the client with this number; the returned call waits for it."""
        key, feeds = crowd.key, crowd.variants[number]
        client = number % (len(self._clients) + 2)
        if client < len(self._clients):
            call = self._clients[client].send(key, feeds)
            return lambda: Grpc.result(call)
        caller = self._by_http if client == len(self._clients) else self._callers["Flight"].infer
        return self._threads.submit(caller, key, feeds).result

    def _by_http(self, key: str, feeds: Feeds) -> Feeds:
        """A request on a connection of its own: HTTP/1.1 has one at a time."""
        with contextlib.closing(Http(self._http_address)) as caller:
            return caller.infer(key, feeds)

    def _queued(self, crowds: Sequence[Crowd]) -> int:
        lanes = self.gateway.stats()["lanes"]
        return sum(lanes[f"{crowd.key}/1"]["queue"]["requests"] for crowd in crowds)

    def unload(self, key: str) -> None:
        """Unload a model."""
        self._admin.unload(key)

    def _neighbours(self, case: Case, feeds: Feeds) -> None:
        """Fill the memory for results with a pattern, and with results of other values."""
        self._turn += 1
        value = PATTERNS[self._turn % len(PATTERNS)]
        self._grpc.infer("filling", {"x": np.full(FILLING_ROWS, value, np.int32)})
        with contextlib.suppress(Refused):
            self._grpc.infer(case.key, {name: _other(array) for name, array in feeds.items()})

    def _note_deaths(self, verdict: Verdict, step: str) -> None:
        pids = self.gateway.worker_pids()
        if pids != self._pids:
            verdict.crashed.append(f"the worker died at the {step}")
            self.gateway.wait_ready()
            self._pids = self.gateway.worker_pids()


def _refusal(
    error: Refused,
    where: str,
    feeds: Feeds,
    expected: Results | None,
    reference: Reference,
    verdict: Verdict,
) -> None:
    rows = len(next(iter(feeds.values()))) if feeds and next(iter(feeds.values())).ndim else 0
    if error.code not in BROKEN or expected is None:
        verdict.refused.setdefault(where, (error.code, str(error)))
    elif not reference.is_declared(expected, rows):
        verdict.refused.setdefault(where, (error.code, SHAPE))
    else:
        verdict.internal.append(f"{where}: {error.code}: {error}")


def _compare(found: Feeds, expected: Results | None, protocol: str, verdict: Verdict) -> None:
    if expected is None:
        verdict.wrong.append(f"{protocol}: answered, in process: {verdict.runtime_error}")
        return
    difference = form_difference if verdict.is_random else bit_difference
    for name, array in expected.items():
        problem = difference(found[name], array) if name in found else "missing"
        if problem:
            verdict.wrong.append(f"{protocol}: {name}: {problem}")


def _filling(folder: Path) -> Path:
    """`y = x + 0`."""
    return models.save(
        folder,
        [helper.make_node("Add", ["x", "zero"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.INT32, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["rows"])],
        [helper.make_tensor("zero", TensorProto.INT32, [], [0])],
    )


def _variants(feeds: Feeds, reference: Reference) -> Iterator[Feeds]:
    """Other values, orders and numbers of rows of a request."""
    lengths = {len(array) if array.ndim else 0 for array in feeds.values()}
    rows = lengths.pop() if len(lengths) == 1 else 0
    yield feeds
    for factor in (3.0, -1.0, 0.25):
        yield {name: _scaled(array, factor) for name, array in feeds.items()}
    for shift in range(1, min(rows, 4)):
        yield {name: np.roll(array, shift, 0) for name, array in feeds.items()}
    for count in range(1, min(rows, 3)):
        yield {name: array[:count] for name, array in feeds.items()}
        yield {name: _scaled(array[-count:], 3.0) for name, array in feeds.items()}
    if rows and not reference.fixed_rows:
        yield {name: np.concatenate([array, array[::-1]]) for name, array in feeds.items()}
    yield {name: _scaled(array, 2.0) for name, array in feeds.items()}
    yield feeds


def _other(array: np.ndarray) -> np.ndarray:
    """The same elements, in another order or scale; negated booleans."""
    if array.dtype == np.bool_:
        return ~array
    return _scaled(array[::-1] if array.ndim else array, -3.0)


def _scaled(array: np.ndarray, factor: float) -> np.ndarray:
    if array.dtype.kind != "f" or array.size < 2:
        return array
    with np.errstate(all="ignore"):
        return (array * array.dtype.type(factor)).astype(array.dtype)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
