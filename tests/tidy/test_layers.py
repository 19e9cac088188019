"""Import rules: the importers of each library, pure modules, no cycles. Layers: `lint-imports`."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from support.loops import for_each

ROOT = Path(__file__).resolve().parent.parent.parent

# Modules that may import a library, and the alternative for all others.
IMPORTERS = {
    "prometheus_client": (
        (
            "iskander/gateway/telemetry/metrics/exposition.py",
            "iskander/gateway/telemetry/metrics/aggregate.py",
        ),
        "iskander.gateway.telemetry.metrics.exposition",
    ),
    "starlette": (
        (
            "iskander/gateway/telemetry/admin.py",
            "iskander/gateway/event_stream/endpoint.py",
            "iskander/gateway/protocols/oip/http/app.py",
            "iskander/gateway/protocols/oip/http/body.py",
            "iskander/gateway/protocols/oip/http/infer.py",
            "iskander/gateway/transport/http1/listener.py",
            "iskander/gateway/transport/http1/connection.py",
            "iskander/gateway/transport/http1/asgi_call.py",
        ),
        "iskander.gateway.telemetry.admin or iskander.gateway.transport.http1.listener",
    ),
    "jinja2": (
        ("iskander/gateway/telemetry/page/renderer.py",),
        "iskander.gateway.telemetry.page.renderer",
    ),
    "markupsafe": (
        ("iskander/gateway/telemetry/page/renderer.py",),
        "iskander.gateway.telemetry.page.renderer",
    ),
    "argon2": (("iskander/gateway/auth/passwords.py",), "iskander.gateway.auth.passwords"),
    "h11": (
        (
            "iskander/gateway/transport/http1/connection.py",
            "iskander/gateway/transport/http1/asgi_call.py",
        ),
        "iskander.gateway.transport.http1.listener",
    ),
    "pyarrow.flight": (("iskander/client/",), "iskander.client"),
    "ray": (("iskander/ray/",), "iskander.ray"),
    "pyspark": ((), "the methods of the caller's DataFrame, as iskander.spark does"),
    "opentelemetry": (
        (
            "iskander/gateway/telemetry/tracing/exporter.py",
            "iskander/client/calls/trace_context.py",
        ),
        "iskander.gateway.telemetry.tracing.exporter, in a process of its own",
    ),
    "grpc": (("workers/iskander_worker/remote/server.py",), "iskander.gateway.transport.http2"),
    "hpack": (
        ("iskander/gateway/transport/http2/header_block_reader.py",),
        "iskander.gateway.transport.http2",
    ),
    "watchfiles": (
        ("iskander/gateway/repository/changes.py",),
        "iskander.gateway.repository.changes",
    ),
    "zmq": (
        ("iskander/interprocess/control/zmq_channel.py",),
        "iskander.interprocess.control.channel",
    ),
    "uvloop": (("iskander/gateway/__main__.py",), "the running loop"),
    "google.protobuf": (
        ("iskander/gateway/protocols/", "workers/iskander_worker/remote/messages.py"),
        "the protocols",
    ),
    "datasketches": (("iskander/sampling/drift/sketches.py",), "iskander.sampling.drift.sketches"),
    "onnxruntime": (
        (
            "workers/iskander_worker/backends/onnx.py",
            "workers/iskander_worker/backends/onnx_binding.py",
            "workers/iskander_worker/backends/onnx_device.py",
            "iskander/cli/doctor/runtimes.py",
        ),
        "iskander_worker.backends",
    ),
    "pyarrow": (
        (
            "iskander/arrow/",
            "iskander/gateway/protocols/flight/",
            "iskander/cli/",
            "iskander/client/",
            "iskander/sampling/",
            "iskander/sampling/drift/",
            "iskander/cli/load_generator/batches.py",
            "iskander/cli/load_generator/run.py",
            "iskander/lake/",
            "iskander/lake/reader/",
            "iskander/engines/",
            "iskander/ray/",
            "iskander/spark/",
            "workers/iskander_worker/batches/record_batches.py",
        ),
        "no alternative: only workers of models that use Arrow load it",
    ),
    "torch": (
        (
            "workers/iskander_worker/backends/torch.py",
            "workers/iskander_worker/backends/torch_device.py",
        ),
        "iskander_worker.backends.torch",
    ),
    "skops": (("workers/iskander_worker/backends/python.py",), "iskander_worker.backends.python"),
    "yaml": (("iskander/config/migration/import_inferential.py",), "tomllib"),
    "mmap": (
        (
            "iskander/interprocess/memory/segment.py",
            "iskander/interprocess/memory/client_segment.py",
        ),
        "iskander.interprocess.memory.segment",
    ),
    "time": (("iskander/foundation/clock.py",), "iskander.foundation.clock"),
    "subprocess": (
        (
            "iskander/gateway/supervision/worker.py",
            "iskander/gateway/supervision/gpus/query.py",
            "iskander/lake/run/server.py",
            "workers/iskander_worker/sandbox/client.py",
        ),
        "the supervisor, or iskander_worker.sandbox.client",
    ),
    "multiprocessing": ((), "a worker process"),
    "pickle": (("workers/iskander_worker/backends/python.py",), "msgspec"),
}

PURE = (
    "iskander/contract/column_types.py",
    "iskander/contract/compile.py",
    "iskander/contract/processing/steps.py",
    "iskander/contract/processing/postprocess.py",
    "iskander/contract/graph.py",
    "iskander/contract/backend_manifest.py",
    "iskander/contract/processing/pipelines.py",
    "iskander/contract/outputs.py",
    "iskander/contract/result_types.py",
    "iskander/contract/processing/steps.py",
    "iskander/contract/inputs.py",
    "iskander/contract/column_types.py",
    "iskander/contract/tensors.py",
    "iskander/contract/dtypes.py",
    "iskander/interprocess/memory/arena.py",
    "iskander/contract/processing/rows.py",
    "iskander/contract/processing/strings.py",
    "iskander/gateway/scheduling/lanes/admission.py",
    "iskander/gateway/scheduling/lanes/batcher.py",
    "iskander/gateway/scheduling/lanes/arrivals.py",
    "iskander/gateway/scheduling/lanes/cost.py",
    "iskander/gateway/scheduling/lanes/lane.py",
    "iskander/gateway/scheduling/lanes/policies.py",
    "iskander/gateway/scheduling/request.py",
    "iskander/sampling/drift/comparison.py",
    "iskander/sampling/drift/profile.py",
    "iskander/gateway/observation/drift_report.py",
    "iskander/sampling/drift/summary.py",
    "iskander/sampling/drift/window.py",
    "iskander/gateway/telemetry/status/drift_status.py",
    "iskander/gateway/observation/holds.py",
    "iskander/gateway/observation/messages.py",
    "iskander/gateway/observation/sampling.py",
    "iskander/sampling/prediction_log/layout.py",
    "iskander/gateway/scheduling/lanes/queue.py",
    "iskander/gateway/scheduling/retry.py",
    "iskander/gateway/repository/routing.py",
    "iskander/gateway/repository/generation_lifecycle.py",
    "iskander/gateway/repository/version_policy.py",
    "iskander/gateway/shadow/admission.py",
    "iskander/gateway/shadow/comparison.py",
    "iskander/gateway/shadow/contract.py",
    "iskander/gateway/shadow/routes.py",
    "iskander/foundation/measurement/log_scale.py",
    "iskander/gateway/telemetry/status/shadow_status.py",
    "iskander/gateway/supervision/lifecycle.py",
    "iskander/gateway/supervision/placement/plan.py",
    *(f"iskander/gateway/supervision/gpus/{name}.py" for name in ("device", "readings", "budgets")),
    "iskander/gateway/supervision/gpus/inventory.py",
    "iskander/gateway/supervision/gpus/placement.py",
    "iskander/foundation/measurement/histogram.py",
    "iskander/gateway/event_stream/buffer.py",
    "iskander/gateway/event_stream/messages.py",
    "iskander/foundation/logs/formats.py",
    "iskander/foundation/logs/repeats.py",
    "iskander/gateway/telemetry/status/history.py",
    "iskander/gateway/telemetry/status/merge.py",
    "iskander/gateway/telemetry/status/stats.py",
    "iskander/gateway/telemetry/page/formats.py",
    "iskander/gateway/telemetry/page/plots.py",
    "iskander/gateway/telemetry/page/tables.py",
    "iskander/cli/top/screen.py",
    "iskander/cli/top/snapshot.py",
    "iskander/cli/tables.py",
    "iskander/config/changes.py",
    *(f"iskander/cli/doctor/checks/{name}.py" for name in ("cpus", "limits", "memory", "system")),
    "iskander/cli/doctor/checks/runtimes.py",
    "iskander/cli/doctor/checks/subject.py",
    "iskander/cli/doctor/demand.py",
    "iskander/cli/doctor/diagnosis.py",
    "iskander/cli/load_generator/batches.py",
    "iskander/cli/load_generator/figures.py",
    "iskander/cli/load_generator/schedule.py",
    "iskander/client/matching.py",
    "iskander/client/model.py",
    "iskander/client/slicing.py",
    "iskander/gateway/sources/messages.py",
    "iskander/gateway/sources/query.py",
    "iskander/gateway/sources/tickets.py",
    "iskander/lake/reader/parts.py",
    "iskander/spark/schemas.py",
    "workers/iskander_worker/remote/messages.py",
    "workers/iskander_worker/remote/statuses.py",
    "workers/iskander_worker/remote/tensors.py",
    "iskander/gateway/protocols/flight/columns/batch_limits.py",
    "iskander/gateway/protocols/flight/data.py",
    "iskander/gateway/protocols/oip/http/json_values.py",
    "iskander/gateway/protocols/oip/http/messages.py",
    "iskander/gateway/protocols/oip/http/messages.py",
    "iskander/gateway/protocols/oip/request.py",
    "iskander/gateway/protocols/oip/tensors.py",
    "iskander/gateway/protocols/oip/terms.py",
    "iskander/gateway/protocols/oip/typed.py",
    "iskander/gateway/protocols/oip/wire.py",
    "iskander/gateway/protocols/flight/columns/results.py",
    "iskander/arrow/casts.py",
    "iskander/arrow/request_schema.py",
    "iskander/gateway/protocols/tensors.py",
    "iskander/gateway/transport/limits/cpu_allowance.py",
    "iskander/arrow/rank.py",
    "iskander/gateway/protocols/inferential/terms.py",
    "iskander/gateway/protocols/trace_context.py",
    "iskander/gateway/telemetry/tracing/records.py",
    "iskander/gateway/telemetry/tracing/sampling.py",
    "iskander/gateway/telemetry/tracing/spans.py",
    "iskander/gateway/protocols/inferential/wire.py",
    "iskander/gateway/transport/zmtp/frames.py",
)
IMPURE = {"socket", "threading", "asyncio", "os", "subprocess", "time"}
IMPURE |= {f"iskander.foundation.clock.{name}" for name in ("now_ns", "wall_ns", "pause_s")}

SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("iskander", "workers")
    for path in (ROOT / folder).rglob("*.py")
    if "_generated" not in path.parts
)


@functools.cache
def import_nodes(name: str) -> tuple[list[ast.Import | ast.ImportFrom], set[int]]:
    """All imports of a file, and the identities of those for type checkers."""
    found, unused = [], set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            unused |= {id(each) for each in node.body}
    return found, unused


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Modules that a file imports, including late imports; `from a import b` adds a.b too."""
    names = set()
    for node in import_nodes(name)[0]:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def test_no_import_cycle_at_run_time() -> None:
    """Late imports count; imports for type checkers do not."""
    modules = {_module(name): name for name in SOURCES}
    graph = {module: _runtime_imports(name, set(modules)) for module, name in modules.items()}
    while leaves := {module for module, targets in graph.items() if not targets & graph.keys()}:
        graph = {module: targets for module, targets in graph.items() if module not in leaves}
    assert not graph


def _module(name: str) -> str:
    dotted = name.removesuffix(".py").removeprefix("workers/").replace("/", ".")
    return dotted.removesuffix(".__init__")


def _runtime_imports(name: str, modules: set[str]) -> set[str]:
    nodes, unused = import_nodes(name)
    targets = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in unused:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            targets |= (names & modules) or ({node.module} & modules)
    return targets - {_module(name)}


@for_each(IMPORTERS)
def test_library_is_imported_only_by_its_modules(library: str) -> None:
    importers, alternative = IMPORTERS[library]
    for name in SOURCES:
        uses = any(m == library or m.startswith(f"{library}.") for m in imports(name))
        if uses and not any(name.startswith(importer) for importer in importers):
            raise AssertionError(f"{name} imports {library}; use {alternative}")


@for_each(PURE)
def test_pure_modules_have_no_side_effects(name: str) -> None:
    assert not imports(name) & IMPURE
