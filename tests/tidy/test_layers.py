"""Who may import whom, and which library comes in by which door: read from the source."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# What each part may import of ours. A folder stands for everything in it.
LAYERS = {
    "iskander/__init__.py": (),
    "iskander/errors.py": (),
    "iskander/clock.py": (),
    "iskander/prepared.py": (),
    "iskander/contract/": ("errors", "prepared", "contract"),
    "iskander/config_section.py": (),
    "iskander/config_models.py": ("config_section", "contract"),
    "iskander/config_access.py": ("config_section", "prepared"),
    "iskander/config_loading.py": ("config_section",),
    "iskander/config_repository.py": ("config_models", "config_section", "prepared"),
    "iskander/config.py": (
        "config_access", "config_loading", "config_models", "config_repository", "config_section",
        "prepared",
    ),
    "iskander/config_reference.py": ("config", "config_models", "config_repository"),
    "iskander/config_inferential.py": ("errors", "config", "config_models", "config_reference"),
    "iskander/config_file.py": (
        "errors", "config", "config_models", "config_reference", "config_repository",
        "config_section",
    ),
    "iskander/tokens.py": ("clock", "errors", "config_access"),
    "iskander/memory/": ("errors", "memory"),
    "iskander/wire/": ("errors", "prepared", "contract", "wire"),
    "iskander/client/": ("errors", "client", "memory", "wire"),
    "iskander/tables.py": (),
    "iskander/embed.py": ("errors", "config_file", "gateway"),
    "iskander/gateway/": (
        "", "errors", "clock", "prepared", "config", "config_access", "config_file",
        "config_models", "config_repository", "contract", "memory", "tokens", "wire", "gateway",
        "_generated",
    ),
    "iskander/checking.py": (
        "errors", "config", "contract", "memory", "gateway", "tables", "tokens", "wire",
        "iskander_worker",
    ),
    "iskander/cli.py": (
        "", "errors", "checking", "config", "config_file", "config_inferential", "config_reference",
        "contract", "client", "gateway", "tables", "tokens", "iskander_worker",
    ),
    "workers/iskander_worker/": (
        "", "errors", "clock", "prepared", "contract", "memory", "wire", "iskander_worker",
    ),
}  # fmt: skip

PARTS = {Path(prefix).stem for prefix in LAYERS} | {"_generated"}

# Where each library may be imported; what to use elsewhere.
DOORS = {
    "prometheus_client": (
        ("iskander/gateway/telemetry/metrics.py", "iskander/gateway/telemetry/merged.py"),
        "iskander.gateway.telemetry.metrics",
    ),
    "starlette": (
        (
            "iskander/gateway/telemetry/admin.py",
            "iskander/gateway/frontends/oip_http.py",
            "iskander/gateway/frontends/oip_http_body.py",
            "iskander/gateway/frontends/oip_http_infer.py",
            "iskander/gateway/http1.py",
            "iskander/gateway/http1_connection.py",
        ),
        "iskander.gateway.telemetry.admin or iskander.gateway.http1",
    ),
    "uvicorn": (
        ("iskander/gateway/http1.py", "iskander/gateway/http1_connection.py"),
        "iskander.gateway.http1",
    ),
    "h11": (("iskander/gateway/http1_connection.py",), "iskander.gateway.http1"),
    "pyarrow.flight": (("iskander/client/",), "iskander.client"),
    "grpc": ((), "iskander.gateway.http2"),
    "hpack": (("iskander/gateway/http2/header_blocks.py",), "iskander.gateway.http2"),
    "watchfiles": (
        ("iskander/gateway/repository/watching.py",),
        "iskander.gateway.repository.watching",
    ),
    "uvloop": (("iskander/gateway/__main__.py",), "the running loop"),
    "google.protobuf": (("iskander/gateway/frontends/",), "the frontends"),
    "onnxruntime": (
        (
            "workers/iskander_worker/backends/onnx.py",
            "workers/iskander_worker/backends/onnx_binding.py",
        ),
        "iskander_worker.backends",
    ),
    "pyarrow": (
        ("iskander/gateway/", "iskander/client/", "workers/iskander_worker/arrow.py"),
        "nothing: only the worker of a model that speaks Arrow has it",
    ),
    "torch": (("workers/iskander_worker/backends/torch.py",), "iskander_worker.backends.torch"),
    "skops": (("workers/iskander_worker/backends/python.py",), "iskander_worker.backends.python"),
    "yaml": (("iskander/config_inferential.py",), "tomllib"),
    "mmap": (
        ("iskander/memory/segment.py", "iskander/memory/loan.py"),
        "iskander.memory.segment",
    ),
    "time": (("iskander/clock.py",), "iskander.clock"),
    "subprocess": (
        (
            "iskander/gateway/supervision/workers.py",
            "iskander/gateway/supervision/trial.py",
            "iskander/gateway/process.py",
            "workers/iskander_worker/tryout.py",
        ),
        "the supervisor, or iskander_worker.tryout",
    ),
    "multiprocessing": ((), "a worker of its own command"),
    "pickle": (("workers/iskander_worker/backends/python.py",), "msgspec"),
}

PURE = (
    "iskander/contract/columns.py",
    "iskander/contract/compile.py",
    "iskander/contract/fetched.py",
    "iskander/contract/finishing.py",
    "iskander/contract/declared.py",
    "iskander/contract/graph.py",
    "iskander/contract/parts.py",
    "iskander/contract/pipelines.py",
    "iskander/contract/outputs.py",
    "iskander/contract/result_types.py",
    "iskander/contract/steps.py",
    "iskander/contract/inputs.py",
    "iskander/contract/sent.py",
    "iskander/contract/tensors.py",
    "iskander/contract/dtypes.py",
    "iskander/memory/arena.py",
    "iskander/contract/rows.py",
    "iskander/contract/strings.py",
    "iskander/gateway/lanes/admission.py",
    "iskander/gateway/lanes/batcher.py",
    "iskander/gateway/lanes/cadence.py",
    "iskander/gateway/lanes/cost.py",
    "iskander/gateway/lanes/lane.py",
    "iskander/gateway/lanes/policies.py",
    "iskander/gateway/lanes/request.py",
    "iskander/gateway/lanes/waiting.py",
    "iskander/gateway/recovery.py",
    "iskander/gateway/repository/routing.py",
    "iskander/gateway/repository/stages.py",
    "iskander/gateway/repository/wanted.py",
    "iskander/gateway/supervision/lifecycle.py",
    "iskander/gateway/supervision/placement.py",
    "iskander/gateway/telemetry/histogram.py",
    "iskander/tables.py",
    "iskander/gateway/frontends/flight_data.py",
    "iskander/gateway/frontends/oip_http_json.py",
    "iskander/gateway/frontends/oip_http_messages.py",
    "iskander/gateway/frontends/oip_http_plain.py",
    "iskander/gateway/frontends/oip_request.py",
    "iskander/gateway/frontends/oip_tensors.py",
    "iskander/gateway/frontends/oip_terms.py",
    "iskander/gateway/frontends/oip_typed.py",
    "iskander/gateway/frontends/oip_wire.py",
    "iskander/gateway/frontends/flight_results.py",
    "iskander/gateway/casts.py",
    "iskander/gateway/sent_schema.py",
    "iskander/gateway/offered.py",
    "iskander/gateway/cpu_allowance.py",
    "iskander/gateway/ranking.py",
    "iskander/gateway/frontends/inferential_terms.py",
    "iskander/gateway/frontends/inferential_wire.py",
    "iskander/gateway/zmtp/frames.py",
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
    """Every module that a file imports, late imports too; `from a import b` counts as a.b too."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def part_of(module: str) -> str | None:
    """Our part that a module belongs to; None for a library."""
    first, _, rest = module.partition(".")
    if first == "iskander_worker":
        return first
    return rest.partition(".")[0] if first == "iskander" else None


@pytest.mark.parametrize("name", SOURCES)
def test_layers(name: str) -> None:
    """A file imports only what its layer may."""
    allowed = next(parts for prefix, parts in LAYERS.items() if name.startswith(prefix))
    used = {part for module in imports(name) if (part := part_of(module)) is not None}
    assert used & PARTS <= set(allowed), name


@pytest.mark.parametrize("library", DOORS)
def test_one_library_one_door(library: str) -> None:
    """A library is imported at its door and nowhere else."""
    doors, instead = DOORS[library]
    for name in SOURCES:
        uses = any(m == library or m.startswith(f"{library}.") for m in imports(name))
        if uses and not any(name.startswith(door) for door in doors):
            raise AssertionError(f"{name} imports {library}; use {instead}")


@pytest.mark.parametrize("name", PURE)
def test_what_decides_does_nothing_else(name: str) -> None:
    """Pure modules import no socket, thread, process or clock."""
    assert not imports(name) & IMPURE
