"""Import rules: package layers, the importers of each library, and pure modules."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# Packages that each package may import. Lower layers come first: a package imports only packages
# above it in the table.
LAYERS = {
    "build_info": "",
    "errors": "",
    "exit_codes": "errors",
    "clock": "",
    "decoders": "",
    "varint": "",
    "_generated": "",
    "logs": "",
    "contract": "errors decoders",
    "config": "errors decoders contract",
    "arrow": "errors config contract",
    "memory": "errors",
    "drift": "errors clock decoders logs contract config arrow",
    "control": "errors clock decoders contract config",
    "file_watcher": "errors clock",
    "auth": "errors clock logs config file_watcher",
    "sources": "errors clock decoders logs config auth",
    "measurement": "errors clock decoders logs",
    "transport": "errors clock logs config memory control file_watcher auth",
    "scheduling": "errors clock logs contract config arrow memory control auth measurement",
    "supervision": (
        "errors clock logs contract config memory control measurement transport scheduling"
    ),
    "repository": (
        "errors clock decoders logs contract config control measurement scheduling supervision"
    ),
    "observation": (
        "errors clock decoders logs contract config memory control measurement scheduling "
        "supervision"
    ),
    "protocols": (
        "errors clock decoders varint _generated logs contract config arrow memory control auth "
        "measurement transport scheduling repository sources"
    ),
    "shadow": "errors clock logs contract config control measurement memory scheduling repository",
    "event_stream": "errors clock logs config transport scheduling",
    "telemetry": (
        "build_info errors clock decoders logs config memory drift file_watcher measurement "
        "transport scheduling supervision repository shadow"
    ),
    "gateway": (
        "build_info errors exit_codes clock logs config arrow memory drift control file_watcher auth "
        "measurement transport scheduling supervision repository sources observation protocols "
        "shadow event_stream telemetry"
    ),
    "doctor": "errors clock config memory control transport supervision",
    "embed": "errors config measurement scheduling protocols gateway",
    # The clock: deadlines of calls and the age of connections.
    "client": "errors clock memory control",
    "scoring": "build_info errors clock client",
    "observer": (
        "errors exit_codes clock logs contract config arrow memory drift observation scoring"
    ),
    "source_reader": "errors decoders logs client scoring sources",
    "engines": "errors clock client scoring",
    "ray": "errors clock client scoring engines",
    # The parts of `ray` without Ray: columns, and the preference of one server.
    "spark": "errors client engines",
    "load_generator": "errors clock client",
    "iskander_worker": (
        "build_info errors exit_codes clock decoders varint _generated logs contract memory control"
    ),
    "cli": (
        "build_info errors exit_codes clock logs contract config arrow memory drift control auth "
        "measurement transport scheduling supervision repository shadow protocols event_stream "
        "gateway doctor client scoring engines ray load_generator iskander_worker"
    ),
}
# Exceptions to the table, for type checkers only.
TYPE_ONLY = {
    ("iskander/telemetry/aggregate.py", "gateway"),
    ("iskander/telemetry/aggregate_status.py", "gateway"),
}

# Modules that may import a library, and the alternative for all others.
IMPORTERS = {
    "prometheus_client": (
        ("iskander/telemetry/metrics.py", "iskander/telemetry/aggregate.py"),
        "iskander.telemetry.metrics",
    ),
    "starlette": (
        (
            "iskander/telemetry/admin.py",
            "iskander/protocols/oip/http/app.py",
            "iskander/protocols/oip/http/body.py",
            "iskander/protocols/oip/http/infer.py",
            "iskander/transport/http1/listener.py",
            "iskander/transport/http1/connection.py",
        ),
        "iskander.telemetry.admin or iskander.transport.http1.listener",
    ),
    "jinja2": (("iskander/telemetry/page/renderer.py",), "iskander.telemetry.page.renderer"),
    "markupsafe": (("iskander/telemetry/page/renderer.py",), "iskander.telemetry.page.renderer"),
    "uvicorn": (
        ("iskander/transport/http1/listener.py", "iskander/transport/http1/connection.py"),
        "iskander.transport.http1.listener",
    ),
    "argon2": (("iskander/auth/passwords.py",), "iskander.auth.passwords"),
    "h11": (("iskander/transport/http1/connection.py",), "iskander.transport.http1.listener"),
    "pyarrow.flight": (("iskander/client/",), "iskander.client"),
    "ray": (("iskander/ray/",), "iskander.ray"),
    "pyspark": ((), "the methods of the caller's DataFrame, as iskander.spark does"),
    "opentelemetry": (
        ("iskander/telemetry/tracing/exporter.py", "iskander/client/trace_context.py"),
        "iskander.telemetry.tracing.exporter, in a process of its own",
    ),
    "stamina": (("iskander/client/retry.py",), "iskander.client.retry"),
    "grpc": (("workers/iskander_worker/remote/server.py",), "iskander.transport.http2"),
    "hpack": (("iskander/transport/http2/header_block_reader.py",), "iskander.transport.http2"),
    "watchfiles": (
        ("iskander/repository/changes.py",),
        "iskander.repository.changes",
    ),
    "zmq": (
        (
            "iskander/control/zmq_channel.py",
            "iskander/event_stream/forwarder.py",
            "iskander/event_stream/subscriber.py",
        ),
        "iskander.control.channel",
    ),
    "uvloop": (("iskander/gateway/__main__.py",), "the running loop"),
    "google.protobuf": (
        ("iskander/protocols/", "workers/iskander_worker/remote/messages.py"),
        "the protocols",
    ),
    "datasketches": (("iskander/drift/sketches.py",), "iskander.drift.sketches"),
    "onnxruntime": (
        (
            "workers/iskander_worker/backends/onnx.py",
            "workers/iskander_worker/backends/onnx_binding.py",
            "workers/iskander_worker/backends/onnx_device.py",
            "iskander/doctor/runtimes.py",
        ),
        "iskander_worker.backends",
    ),
    "pyarrow": (
        (
            "iskander/arrow/",
            "iskander/protocols/flight/",
            "iskander/cli/",
            "iskander/client/",
            "iskander/observer/",
            "iskander/drift/",
            "iskander/load_generator/batches.py",
            "iskander/load_generator/run.py",
            "iskander/scoring/",
            "iskander/source_reader/",
            "iskander/engines/",
            "iskander/ray/",
            "iskander/spark/",
            "workers/iskander_worker/record_batches.py",
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
    "yaml": (("iskander/config/import_inferential.py",), "tomllib"),
    "mmap": (
        ("iskander/memory/segment.py", "iskander/memory/client_segment.py"),
        "iskander.memory.segment",
    ),
    "time": (("iskander/clock.py",), "iskander.clock"),
    "subprocess": (
        (
            "iskander/supervision/worker.py",
            "iskander/supervision/model_check.py",
            "iskander/supervision/gpus/query.py",
            "iskander/scoring/server.py",
            "iskander/sources/readers.py",
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
    "iskander/contract/steps.py",
    "iskander/contract/postprocess.py",
    "iskander/contract/graph.py",
    "iskander/contract/backend_manifest.py",
    "iskander/contract/pipelines.py",
    "iskander/contract/outputs.py",
    "iskander/contract/result_types.py",
    "iskander/contract/steps.py",
    "iskander/contract/inputs.py",
    "iskander/contract/column_types.py",
    "iskander/contract/tensors.py",
    "iskander/contract/dtypes.py",
    "iskander/memory/arena.py",
    "iskander/contract/rows.py",
    "iskander/contract/strings.py",
    "iskander/scheduling/admission.py",
    "iskander/scheduling/batcher.py",
    "iskander/scheduling/arrivals.py",
    "iskander/scheduling/cost.py",
    "iskander/scheduling/lane.py",
    "iskander/scheduling/policies.py",
    "iskander/scheduling/request.py",
    "iskander/drift/comparison.py",
    "iskander/drift/profile.py",
    "iskander/drift/report.py",
    "iskander/drift/summary.py",
    "iskander/drift/window.py",
    "iskander/telemetry/drift_status.py",
    "iskander/observation/holds.py",
    "iskander/observation/messages.py",
    "iskander/observation/sampling.py",
    "iskander/observer/prediction_log/layout.py",
    "iskander/scheduling/queue.py",
    "iskander/scheduling/retry.py",
    "iskander/repository/routing.py",
    "iskander/repository/generation_lifecycle.py",
    "iskander/repository/version_policy.py",
    "iskander/shadow/admission.py",
    "iskander/shadow/comparison.py",
    "iskander/shadow/contract.py",
    "iskander/shadow/routes.py",
    "iskander/measurement/log_scale.py",
    "iskander/telemetry/shadow_status.py",
    "iskander/supervision/lifecycle.py",
    "iskander/supervision/placement.py",
    *(f"iskander/supervision/gpus/{name}.py" for name in ("device", "readings", "budgets")),
    "iskander/supervision/gpus/inventory.py",
    "iskander/supervision/gpus/placement.py",
    "iskander/measurement/histogram.py",
    "iskander/measurement/interval.py",
    "iskander/event_stream/losses.py",
    "iskander/event_stream/messages.py",
    "iskander/event_stream/queue.py",
    "iskander/event_stream/subscriptions.py",
    "iskander/logs/formats.py",
    "iskander/logs/recognition.py",
    "iskander/logs/repeats.py",
    "iskander/telemetry/history.py",
    "iskander/telemetry/status_merge.py",
    "iskander/telemetry/page/formats.py",
    "iskander/telemetry/page/plots.py",
    "iskander/telemetry/page/tables.py",
    "iskander/cli/top_screen.py",
    "iskander/cli/top_snapshot.py",
    "iskander/cli/tables.py",
    "iskander/config/changes.py",
    *(f"iskander/doctor/checks/{name}.py" for name in ("cpus", "limits", "memory", "system")),
    "iskander/doctor/checks/runtimes.py",
    "iskander/doctor/checks/subject.py",
    "iskander/doctor/demand.py",
    "iskander/doctor/diagnosis.py",
    "iskander/load_generator/batches.py",
    "iskander/load_generator/figures.py",
    "iskander/load_generator/schedule.py",
    "iskander/client/matching.py",
    "iskander/client/model.py",
    "iskander/client/slicing.py",
    "iskander/sources/messages.py",
    "iskander/sources/query.py",
    "iskander/sources/tickets.py",
    "iskander/source_reader/parts.py",
    "iskander/spark/schemas.py",
    "workers/iskander_worker/remote/messages.py",
    "workers/iskander_worker/remote/statuses.py",
    "workers/iskander_worker/remote/tensors.py",
    "iskander/protocols/flight/batch_limits.py",
    "iskander/protocols/flight/data.py",
    "iskander/protocols/oip/http/json_values.py",
    "iskander/protocols/oip/http/messages.py",
    "iskander/protocols/oip/http/messages.py",
    "iskander/protocols/oip/request.py",
    "iskander/protocols/oip/tensors.py",
    "iskander/protocols/oip/terms.py",
    "iskander/protocols/oip/typed.py",
    "iskander/protocols/oip/wire.py",
    "iskander/protocols/flight/results.py",
    "iskander/arrow/casts.py",
    "iskander/arrow/request_schema.py",
    "iskander/protocols/tensors.py",
    "iskander/transport/cpu_allowance.py",
    "iskander/arrow/rank.py",
    "iskander/protocols/inferential/terms.py",
    "iskander/protocols/trace_context.py",
    "iskander/telemetry/tracing/records.py",
    "iskander/telemetry/tracing/sampling.py",
    "iskander/telemetry/tracing/spans.py",
    "iskander/protocols/inferential/wire.py",
    "iskander/transport/zmtp/frames.py",
)
IMPURE = {"socket", "threading", "asyncio", "os", "subprocess", "time"}
IMPURE |= {f"iskander.clock.{name}" for name in ("now_ns", "wall_ns", "pause_s")}

SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("iskander", "workers")
    for path in (ROOT / folder).rglob("*.py")
    if "_generated" not in path.parts
)


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Modules that a file imports, including late imports; `from a import b` adds a.b too."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def package_of(module: str) -> str | None:
    """The package of a module in the layers table; None for libraries and the version."""
    first, _, rest = module.partition(".")
    if first == "iskander_worker":
        return first
    package = rest.partition(".")[0] if first == "iskander" else ""
    return package if package in LAYERS else None


@pytest.mark.parametrize("name", SOURCES)
def test_layers(name: str) -> None:
    module = name.removesuffix(".py").removeprefix("workers/").replace("/", ".")
    package = package_of(module)
    used = {other for each in imports(name) if (other := package_of(each)) is not None}
    used -= {target for source, target in TYPE_ONLY if source == name}
    if package is None:
        assert name == "iskander/__init__.py"
        assert not used
    else:
        assert used <= {package, *LAYERS[package].split()}, name


def test_layers_have_no_cycle() -> None:
    """Each package imports only packages above it in the table."""
    above: set[str] = set()
    for package, allowed in LAYERS.items():
        assert set(allowed.split()) <= above, package
        above.add(package)


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
    tree = ast.parse((ROOT / name).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    targets = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            targets |= (names & modules) or ({node.module} & modules)
    return targets - {_module(name)}


@pytest.mark.parametrize("package", [each for each in LAYERS if each != "_generated"])
def test_every_package_is_on_the_architecture_page(package: str) -> None:
    assert f"`{package}" in (ROOT / "docs/architecture.md").read_text()


@pytest.mark.parametrize("library", IMPORTERS)
def test_library_is_imported_only_by_its_modules(library: str) -> None:
    importers, alternative = IMPORTERS[library]
    for name in SOURCES:
        uses = any(m == library or m.startswith(f"{library}.") for m in imports(name))
        if uses and not any(name.startswith(importer) for importer in importers):
            raise AssertionError(f"{name} imports {library}; use {alternative}")


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_have_no_side_effects(name: str) -> None:
    assert not imports(name) & IMPURE
