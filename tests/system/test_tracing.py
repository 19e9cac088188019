"""Traces of a running server, as an OTLP endpoint in another process receives them.

Slow tests send them through an OpenTelemetry collector, Rotel, to that endpoint.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import tritonclient.grpc as triton
from opentelemetry.sdk.trace import TracerProvider
from support import models, python_models
from support.otlp_collector import Collector, collecting
from support.processes import Gateway, eventually, running
from support.robots import address_of, ask, connected
from support.rotel import forwarding
from system.test_pipelines import text_pipeline

from iskander import __version__
from iskander.client import Client
from iskander.errors import ContractError, DeadlineExceeded, ExecutionFailed, PoisonedRequest

EXCHANGE = "arrow.flight.protocol.FlightService/DoExchange"
BATCH = pa.record_batch({"x": [1, 2]})
SLOW_MS = 400
SLEEPING = """
import time
class Model(Base):
    def predict(self, batch):
        time.sleep(batch.column("x")[0].as_py() / 1000)
        return tripled(batch)
"""
"""A model that takes as many milliseconds as the first row says."""
TRACER = TracerProvider().get_tracer("test")
REMOTE, LOCAL = 0x300, 0x100
"""Bits of a span's flags: its parent is in another process, or not."""
STAGES = ["admission", "queue", "dispatch", "run", "response"]
REQUEST_SPANS = 2 + len(STAGES)
"""Of a request in a batch of its own: the server's, its stages, and the batch."""

Span = dict[str, Any]


@dataclass
class Traced:
    """A gateway, and the endpoint that receives its spans."""

    gateway: Gateway
    collector: Collector

    def trace(self, trace_id: str, ending: str = "response") -> dict[str, list[Span]]:
        """The spans of a trace by name, once one with the name `ending` is exported."""

        def found() -> dict[str, list[Span]] | None:
            spans = [span for span in self.collector.spans() if span["trace_id"] == trace_id]
            names = {span["name"] for span in spans}
            by_name = {n: [span for span in spans if span["name"] == n] for n in names}
            return by_name if ending in by_name else None

        traces: dict[str, list[Span]] = eventually(found, what=f"trace {trace_id}")
        return traces

    def servers(self, model: str, outcome: str = "ok") -> list[Span]:
        """Server spans of a model with an outcome."""
        wanted = {"iskander.model": model, "iskander.outcome": outcome}.items()
        return [span for span in self.collector.spans() if wanted <= span["attributes"].items()
                and span["kind"] == "SPAN_KIND_SERVER"]  # fmt: skip


def context(*, is_sampled: bool = True) -> tuple[str, str]:
    """A trace id, and a `traceparent` of it."""
    trace_id = secrets.token_hex(16)
    return trace_id, f"00-{trace_id}-{secrets.token_hex(8)}-{'01' if is_sampled else '00'}"


def parent_of(traceparent: str) -> str:
    return traceparent.split("-")[2]


def counts(gateway: Gateway) -> dict[str, float]:
    """`iskander_trace_spans_total` by outcome."""
    url = f"http://{gateway.stats()['admin_address']}/metrics"
    with urllib.request.urlopen(url, timeout=20) as response:
        lines = response.read().decode().splitlines()
    found = [line for line in lines if line.startswith("iskander_trace_spans_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def failures(gateway: Gateway) -> list[str]:
    """Log lines of failed exports."""
    return [line for line in gateway.text().splitlines() if "spans cannot be exported" in line]


@pytest.fixture(scope="module", params=["direct", pytest.param("rotel", marks=pytest.mark.slow)])
def traced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Traced]:
    """A server that traces only sampled callers, errors and slow requests."""
    folder = tmp_path_factory.mktemp("tracing")
    together = {"linger_us": 10_000_000, "refuse_late": False}
    served = [
        {"name": "ids", "path": str(models.row_ids(folder / "ids"))},
        {
            "name": "together",
            "path": str(models.row_ids(folder / "together")),
            "max_batch_rows": 4,
            "lane": together,
        },
        {"name": "picky", "path": str(models.picky(folder / "picky", 100))},
        python_models.entry(folder / "slow", SLEEPING, workers=1),
        text_pipeline(folder / "texts", workers=1),
    ]
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(collecting(folder))
        url = collector.url
        if request.param == "rotel":
            url = stack.enter_context(forwarding(folder, collector.base)).url
        gateway = running(
            folder,
            served,
            workers={"groups": ["0"]},
            http={"address": "127.0.0.1:0"},
            inferential={"address": "tcp://127.0.0.1:0"},
            tracing={
                "enabled": True,
                "ratio": 0.0,
                "slow_ms": SLOW_MS,
                "endpoint": url,
            },
        )
        yield Traced(stack.enter_context(gateway), collector)


def require_nested(trace: dict[str, list[Span]]) -> None:
    """Every span lies within its parent, and the stages follow each other."""
    spans = {span["span_id"]: span for each in trace.values() for span in each}
    for span in spans.values():
        assert span["start_ns"] <= span["end_ns"]
        parent = spans.get(span["parent_id"])
        if parent is not None:
            assert parent["start_ns"] <= span["start_ns"], span["name"]
            assert span["end_ns"] <= parent["end_ns"], span["name"]
    stages = [trace[name][0] for name in STAGES]
    for before, after in pairwise(stages):
        assert before["end_ns"] == after["start_ns"], after["name"]


def test_client_span_is_the_parent_of_the_servers(traced: Traced) -> None:
    with TRACER.start_as_current_span("score") as span, traced.gateway.client() as client:
        before_ns = time.time_ns()
        client.score("ids", BATCH)
        after_ns = time.time_ns()
    caller = span.get_span_context()
    trace = traced.trace(f"{caller.trace_id:032x}")
    (server,) = trace[EXCHANGE]
    assert server["parent_id"] == f"{caller.span_id:016x}"
    assert server["kind"] == "SPAN_KIND_SERVER"
    assert sorted(trace) == sorted([EXCHANGE, *STAGES])
    assert {trace[name][0]["parent_id"] for name in STAGES} == {server["span_id"]}
    require_nested(trace)
    slack_ns = 5_000_000  # The offset between the clocks is measured at the export.
    assert before_ns - slack_ns <= server["start_ns"] < server["end_ns"] <= after_ns + slack_ns
    host, port = traced.gateway.address.split(":")
    expected = {
        "rpc.system.name": "grpc",
        "rpc.method": EXCHANGE,
        "rpc.response.status_code": "OK",
        "server.address": host,
        "server.port": int(port),
        "iskander.model": "ids",
        "iskander.version": "1",
        "iskander.rows": 2,
        "iskander.outcome": "ok",
        "iskander.sampled_by": "head",
    }
    assert expected.items() <= server["attributes"].items()
    worker = traced.gateway.stats()["workers"][0]
    expected = {"iskander.worker.pid": worker["pid"], "iskander.batch.rows": 2}
    assert expected.items() <= trace["run"][0]["attributes"].items()
    resource = server["resource"]
    assert resource["service.name"] == "iskander"
    assert resource["process.pid"] == traced.gateway.pid
    assert resource["iskander.process"] == 0
    assert server["scope"] == ["iskander", __version__]
    assert server["flags"] & REMOTE == REMOTE
    assert {trace[name][0]["flags"] & REMOTE for name in STAGES} == {LOCAL}


def test_each_batch_of_a_stream_has_a_span_and_its_own_context_first(traced: Traced) -> None:
    """The iterator opens a span for the second batch only."""

    def batches() -> Iterator[pa.RecordBatch]:
        yield BATCH
        with TRACER.start_as_current_span("observation") as span:
            own.append(span.get_span_context())
            yield BATCH

    own: list[Any] = []
    with TRACER.start_as_current_span("stream") as span, traced.gateway.client() as client:
        assert len(list(client.stream("ids", batches()))) == 2
    for caller in (span.get_span_context(), *own):
        (server,) = traced.trace(f"{caller.trace_id:032x}")[EXCHANGE]
        assert server["parent_id"] == f"{caller.span_id:016x}"


def test_batch_metadata_overrides_the_context_of_the_stream(traced: Traced) -> None:
    first, parent = context()
    other, unsampled = context(is_sampled=False)
    terms = [{"traceparent": parent, "tracestate": "vendor=1"}, {"traceparent": unsampled}, None]
    with TRACER.start_as_current_span("stream") as span, traced.gateway.client() as client:
        assert len(list(client.stream("ids", [(BATCH, each) for each in terms]))) == 3
    (server,) = traced.trace(first)[EXCHANGE]
    assert (server["parent_id"], server["state"]) == (parent_of(parent), "vendor=1")
    assert len(traced.trace(f"{span.get_span_context().trace_id:032x}")[EXCHANGE]) == 1
    assert [each for each in traced.collector.spans() if each["trace_id"] == other] == []


def test_one_batch_span_links_to_the_requests_of_two_clients(traced: Traced) -> None:
    contexts = [context() for _ in range(2)]

    def score(parent: str) -> None:
        with Client(traced.gateway.address) as client:
            (_,) = client.stream("together", [(BATCH, {"traceparent": parent})])

    threads = [threading.Thread(target=score, args=(parent,)) for _, parent in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    traces = [traced.trace(trace_id) for trace_id, _ in contexts]
    servers = [trace[EXCHANGE][0] for trace in traces]
    links = {tuple(link) for server in servers for link in server["links"]}
    ((trace_id, span_id),) = links  # Both link to the same batch.
    (batch,) = traced.trace(trace_id, "batch")["batch"]
    assert batch["span_id"] == span_id
    linked = {(server["trace_id"], server["span_id"]) for server in servers}
    assert {tuple(link) for link in batch["links"]} == linked
    assert batch["attributes"]["iskander.batch.rows"] == 4
    assert batch["attributes"]["iskander.batch.parts"] == 2
    for trace in traces:
        assert trace["dispatch"][0]["start_ns"] == batch["start_ns"]
        assert [tuple(link) for link in trace["run"][0]["links"]] == [(trace_id, span_id)]


def test_pipeline_steps_are_children_of_the_run(traced: Traced) -> None:
    trace_id, parent = context()
    texts = pa.record_batch({"text": ["a b", "c"]})
    with traced.gateway.client() as client:
        (_,) = client.stream("texts", [(texts, {"traceparent": parent})])
    trace = traced.trace(trace_id)
    require_nested(trace)
    steps = [trace[f"step {name}"][0] for name in ("tokenise", "embed", "normalise")]
    assert {step["parent_id"] for step in steps} == {trace["run"][0]["span_id"]}
    assert steps[0]["end_ns"] == steps[1]["start_ns"]
    assert all(step["end_ns"] > step["start_ns"] for step in steps)


def test_open_inference_calls_and_observations_are_traced(traced: Traced) -> None:
    address = traced.gateway.stats()["http_address"]
    over_grpc, over_http, streamed, observed = (context() for _ in range(4))
    values = np.array([1, 2])
    tensor = triton.InferInput("x", [2], "INT64")
    tensor.set_data_from_numpy(values)
    with triton.InferenceServerClient(traced.gateway.address) as client:
        client.infer("ids", [tensor], headers={"traceparent": over_grpc[1]})
        results: list[Any] = []
        client.start_stream(lambda result, error: results.append(error or result))
        client.async_stream_infer("ids", [tensor], parameters={"iskander_traceparent": streamed[1]})
        client.stop_stream()
    body = {"inputs": [{"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2]}]}
    connection = http.client.HTTPConnection(address, timeout=30)
    headers = {"traceparent": over_http[1]}
    connection.request("POST", "/v2/models/ids/infer", json.dumps(body), headers)
    assert connection.getresponse().status == 200
    connection.close()
    with connected(address_of(traced.gateway)) as robot:
        assert ask(robot.model("ids"), x=values, traceparent=observed[1]) is not None
    service = "inference.GRPCInferenceService"
    for (trace_id, parent), name, expected in (
        (over_grpc, f"{service}/ModelInfer", {"rpc.system.name": "grpc"}),
        (streamed, f"{service}/ModelStreamInfer", {"rpc.system.name": "grpc"}),
        (over_http, "POST /v2/models/{name}/infer", {"http.response.status_code": 200}),
        (observed, "Observation", {"rpc.system.name": "zmq"}),
    ):
        trace = traced.trace(trace_id)
        (server,) = trace[name]
        assert server["parent_id"] == parent_of(parent)
        assert expected.items() <= server["attributes"].items()
        require_nested(trace)


def test_failures_are_traced_at_ratio_0_and_faults_of_callers_are_not(traced: Traced) -> None:
    with traced.gateway.client() as client:
        with pytest.raises(ContractError):
            client.score("picky", pa.record_batch({"y": ["text"]}))
        # Of the model, as far as the worker knows; and of the caller, once the model has run.
        with pytest.raises(ExecutionFailed) as caught:
            client.score("picky", pa.record_batch({"x": [1000]}))
        assert caught.value.fault == "model"
        client.score("picky", BATCH)
        with pytest.raises(ExecutionFailed, match="row 0, column `x`: ") as caught:
            client.score("picky", pa.record_batch({"x": [1000]}))
        assert caught.value.fault == "client"
        with pytest.raises(DeadlineExceeded):
            client.score("picky", BATCH, terms={"deadline_ms": 0})
    (late,) = eventually(lambda: traced.servers("picky", "deadline_exceeded"))
    assert set(traced.trace(late["trace_id"], "admission")) == {EXCHANGE, "admission"}
    (server,) = eventually(lambda: traced.servers("picky", "execution_failed"))
    assert server["is_error"]
    assert server["parent_id"] == ""
    expected = {
        "error.type": "execution_failed",
        "iskander.sampled_by": "error",
        "rpc.response.status_code": "INTERNAL",
    }
    assert expected.items() <= server["attributes"].items()
    assert [name for name, _ in server["events"]] == ["batch failed"]
    assert traced.servers("picky") == []
    assert traced.servers("picky", "contract") == []


def test_slow_request_is_traced_at_ratio_0(traced: Traced) -> None:
    with traced.gateway.client() as client:
        for milliseconds in (0, SLOW_MS):
            client.score("slow", pa.record_batch({"x": [milliseconds]}))
    (server,) = eventually(lambda: traced.servers("slow"))
    assert server["attributes"]["iskander.sampled_by"] == "slow"
    assert server["end_ns"] - server["start_ns"] > SLOW_MS * 1_000_000


def test_counts_equal_the_received_spans(traced: Traced) -> None:
    trace_id, parent = context()
    with traced.gateway.client() as client:
        (_,) = client.stream("ids", [(BATCH, {"traceparent": parent})])
    traced.trace(trace_id)
    eventually(lambda: counts(traced.gateway)["exported"] == len(traced.collector.spans()))
    found = counts(traced.gateway)
    assert (found["failed"], found["limited"], found["queue_full"]) == (0, 0, 0)


def test_lost_worker_and_retry_are_events(tmp_path: Path) -> None:
    """A worker dies twice with the same request; the request is poisoned."""
    served = [{"name": "fragile", "path": str(models.fragile(tmp_path / "fragile"))}]
    least = np.iinfo(np.int64).min
    with (
        collecting(tmp_path) as collector,
        running(
            tmp_path,
            served,
            workers={"groups": ["0", "1"]},
            tracing={"enabled": True, "ratio": 0.0, "endpoint": collector.url},
        ) as gateway,
    ):
        with gateway.client() as client, pytest.raises(PoisonedRequest):
            client.score("fragile", pa.record_batch({"x": [least]}))
        traced = Traced(gateway, collector)
        (server,) = eventually(lambda: traced.servers("fragile", "poisoned"))
        assert [name for name, _ in server["events"]] == ["worker lost", "retry", "worker lost"]
        trace = traced.trace(server["trace_id"], "dispatch")
        assert (len(trace["queue"]), len(trace["dispatch"])) == (2, 2)
        assert "run" not in trace
        assert "response" not in trace
        batches = [span for span in collector.spans() if span["name"] == "batch"]
        assert [span["is_error"] for span in batches] == [True, True]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("hang", ""),
        pytest.param("reject", "code: 400", marks=pytest.mark.slow),
        pytest.param("absent", "Connection refused", marks=pytest.mark.slow),
    ],
)
def test_requests_do_not_depend_on_the_collector(tmp_path: Path, mode: str, reason: str) -> None:
    """Spans that are not exported are counted, the log has the reason, the shutdown has a limit."""
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with collecting(tmp_path, mode) as collector:
        if mode == "absent":
            collector.process.kill()
            collector.process.wait()
        tracing = {"enabled": True, "ratio": 1.0, "queue": 20, "endpoint": collector.url}
        with running(tmp_path, served, workers={"groups": ["0"]}, tracing=tracing) as gateway:

            def has_dropped() -> float:
                with gateway.client() as client:
                    results = list(client.stream("ids", [BATCH] * 200))
                assert [each["y"].to_pylist() for each in results] == [[4, 7]] * 200
                return counts(gateway)["failed" if mode == "reject" else "queue_full"]

            eventually(has_dropped, what="dropped spans")
            if reason:
                (line,) = eventually(lambda: failures(gateway))
                assert reason in line
            assert collector.spans() == []
        if mode == "hang":
            assert "spans that are not exported" in gateway.text()


@pytest.mark.slow
def test_killed_collector_loses_counted_spans_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs, is killed, and starts again: every request is answered, every span is counted."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    tracing = {"enabled": True, "ratio": 1.0, "queue": 20, "spans_per_s": 1_000_000}
    with (
        collecting(tmp_path) as collector,
        forwarding(tmp_path, collector.base) as rotel,
        running(
            tmp_path, served, workers={"groups": ["0"]}, tracing=tracing | {"endpoint": rotel.url}
        ) as gateway,
        gateway.client() as client,
    ):
        spans = 0

        def score(count: int) -> None:
            nonlocal spans
            for _ in range(count):
                assert client.score("ids", BATCH)["y"].to_pylist() == [4, 7]
            spans += count * REQUEST_SPANS

        def is_full() -> bool:
            score(200)
            return counts(gateway)["queue_full"] > 0

        def is_resumed() -> bool:
            score(1)
            return "spans are exported again" in gateway.text()

        score(5)
        eventually(lambda: len(collector.spans()) == spans, what="spans before the failure")
        before = collector.spans()
        rotel.process.send_signal(signal.SIGSTOP)
        eventually(is_full, what="a full queue")
        assert collector.spans() == before
        rotel.kill()
        eventually(lambda: failures(gateway), what="a failed export")
        rotel.start()
        eventually(is_resumed, what="exports to the new process")
        eventually(lambda: sum(counts(gateway).values()) == spans, what="an empty queue")
        found = counts(gateway)
        assert found["failed"] > 0
        eventually(lambda: len(collector.spans()) == found["exported"], what="the exported spans")
        trace_id, parent = context()
        (_,) = client.stream("ids", [(BATCH, {"traceparent": parent})])
        (server,) = Traced(gateway, collector).trace(trace_id)[EXCHANGE]
        assert server["parent_id"] == parent_of(parent)


def test_export_process_is_replaced_and_the_last_spans_are_flushed(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    trace_id, parent = context()
    with collecting(tmp_path) as collector:
        with running(
            tmp_path,
            served,
            workers={"groups": ["0"]},
            tracing={"enabled": True, "ratio": 0.0, "endpoint": collector.url},
        ) as gateway:
            (exporter,) = exporters(gateway)
            os.kill(exporter.pid, signal.SIGTERM)  # It ends with the gateway only.
            os.kill(exporter.pid, signal.SIGKILL)
            eventually(lambda: exporters(gateway) not in ([], [exporter]), what="another process")
            with gateway.client() as client:
                (_,) = client.stream("ids", [(BATCH, {"traceparent": parent})])
            (exporter,) = exporters(gateway)
        assert not exporter.is_running()
        assert {each["trace_id"] for each in collector.spans() if each["name"] == EXCHANGE} == {
            trace_id
        }


@pytest.mark.slow
def test_exception_of_the_export_process_is_an_event(tmp_path: Path) -> None:
    """OpenTelemetry rejects a variable of the environment."""
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    sections: dict[str, Any] = {"tracing": {"enabled": True}, "admin": {"log_format": "json"}}
    gateway = Gateway(tmp_path, served, **sections)
    provider = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"
    try:
        gateway.start(**{provider: "missing"})
        eventually(lambda: "export_process_ended" in gateway.text())
        lines = [json.loads(line) for line in gateway.text().splitlines()]
        crash = next(line for line in lines if line["event"] == "auxiliary_process_crashed")
        assert crash["logger"] == "iskander.auxiliary"
        assert "missing" in crash["exception"]
        assert gateway.stop() == 0
    finally:
        gateway.end()


def exporters(gateway: Gateway) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(gateway.pid).children(recursive=True):
        with contextlib.suppress(psutil.ZombieProcess):
            if "iskander.gateway.telemetry.tracing.exporter" in child.cmdline():
                found.append(child)
    return found


@pytest.mark.slow
def test_each_gateway_process_exports_with_the_environments_resource(tmp_path: Path) -> None:
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with collecting(tmp_path) as collector:
        gateway = Gateway(
            tmp_path,
            served,
            server={"processes": 2},
            workers={"groups": ["0"]},
            tracing={"enabled": True, "ratio": 1.0},
        )
        try:
            gateway.start(
                OTEL_EXPORTER_OTLP_ENDPOINT=collector.base,
                OTEL_SERVICE_NAME="scores",
                OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
            )

            def processes() -> bool:
                with gateway.client() as client:
                    client.score("ids", BATCH)
                resources = [span["resource"] for span in collector.spans()]
                assert all(each["service.name"] == "scores" for each in resources)
                assert all(each["deployment.environment.name"] == "test" for each in resources)
                return {each["iskander.process"] for each in resources} == {0, 1}

            eventually(processes, what="spans of both processes")
            assert gateway.stop() == 0
        finally:
            gateway.end()


def test_missing_extra_is_named(tmp_path: Path) -> None:
    """A package without the exporter hides the installed one."""
    hiding = tmp_path / "hiding" / "opentelemetry"
    hiding.mkdir(parents=True)
    (hiding / "__init__.py").touch()
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    gateway = Gateway(tmp_path, served, tracing={"enabled": True})
    gateway.start(is_ready=False, PYTHONPATH=str(hiding.parent))
    try:
        assert gateway.wait() == 78
        assert "`tracing.enabled` needs the extra `otel`" in gateway.text()
    finally:
        gateway.end()
