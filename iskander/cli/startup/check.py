"""`iskander check`: runs the checks of a startup in order, and loads the models.

A startup fails if a model of the configuration does not load. It continues, not ready, if a model
of the repository does not load.

Runs on: the operator's tool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from iskander_worker.affinity import set_library_environment

from iskander.cli.tables import render_table
from iskander.config.schema import ArenaConfig, Config
from iskander.contract.inputs import columns_of, entries_of, require_smallest_request
from iskander.contract.tensors import require_output_space
from iskander.errors import ConfigError, IskanderError
from iskander.gateway.repository import version_policy
from iskander.gateway.repository.model_reader import ModelReader
from iskander.gateway.repository.models import configured_shares
from iskander.gateway.repository.scan import list_models
from iskander.gateway.repository.specs import loading_spec, model_spec
from iskander.gateway.scheduling.lanes.policies import make_policy
from iskander.gateway.secrets import require_secrets
from iskander.gateway.shadow.contract import match_outputs
from iskander.gateway.supervision.gpus.budgets import spec_for
from iskander.gateway.supervision.gpus.device import format_gib
from iskander.gateway.supervision.loading.model_check import check_model
from iskander.gateway.supervision.placement.machine import plan_machine
from iskander.gateway.supervision.placement.plan import PlacementPlan
from iskander.gateway.supervision.placement.topology import render_cpu_list
from iskander.gateway.transport.addresses import admin_address, require_addresses
from iskander.interprocess.control.messages import Loaded, ModelSpec
from iskander.interprocess.memory import backing
from iskander.interprocess.memory.arena import usable_bytes


class CheckedModel(NamedTuple):
    """A version of a model: its name, with its version if known, and its message or load error."""

    name: str
    title: str
    loaded: Loaded | None
    error: str = ""


class CheckResult(NamedTuple):
    """The models and the placement of a startup."""

    models: list[CheckedModel]
    placed: PlacementPlan


def check(config: Config) -> CheckResult:
    """Run the startup checks and load the models.

    Raises:
        IskanderError: The startup would fail. The message has the error of each model of the
            configuration, and the type is that of the first one.
    """
    placed = plan_machine(config)
    require_addresses(config)
    require_secrets(config)
    for model in config.models:
        make_policy(model.lane)
    loading = loading_spec(config)
    specs = [model_spec(key, model, loading) for key, model in enumerate(config.models)]
    set_library_environment()
    checked: list[CheckedModel] = []
    errors: list[IskanderError] = []
    for spec, model in zip(specs, config.models, strict=True):
        title = f"{spec.name}/{spec.version}"
        try:
            loaded = _load(spec, model.python, placed, config)
            checked.append(CheckedModel(spec.name, title, loaded))
        except IskanderError as error:
            errors.append(type(error)(f"model `{title}`: {error.message}"))
    if errors:
        raise type(errors[0])("\n".join(error.message for error in errors))
    shadows = [f"{name}/{version}" for name, version in configured_shares(config)]
    checked = _compared(checked, shadows)
    if config.repository.path:
        checked += _repository_models(placed, config)
    return CheckResult(checked, placed)


def render(result: CheckResult, config: Config) -> Iterator[str]:
    """The result as lines of text."""
    rows = [row for model in result.models for row in _rows(model)]
    yield from render_table(("model", "runs on", "threads", "columns"), rows)
    yield ""
    yield from render_plan(result.placed)
    others = [config.inferential.address, config.http.address, admin_address(config.admin)]
    yield f"\nlistens on {', '.join([*config.addresses, *filter(None, others)])}"
    yield from _memory(config.arena, len(result.placed.slots), config.server.processes)


def to_json(result: CheckResult, config: Config) -> dict[str, Any]:
    """The result as plain values for JSON."""
    sizes = _arena_bytes(config.arena, len(result.placed.slots), config.server.processes)
    return {
        "models": [_model_to_json(model) for model in result.models],
        "gateway_cpus": list(result.placed.gateway),
        "workers": [msgspec.to_builtins(slot) for slot in result.placed.slots],
        "notes": list(result.placed.notes),
        "shared_memory_bytes": sum(sizes),
    }


def _model_to_json(model: CheckedModel) -> dict[str, Any]:
    loaded = model.loaded
    shown: dict[str, Any] = {"model": model.title, "error": model.error}
    if loaded is not None:
        shown |= {"provider": loaded.providers[0], "threads": loaded.threads}
        contract = loaded.contract
        shown["inputs"] = [
            {"columns": columns_of(entry), "type": str(entry.type)}
            for entry in entries_of(contract)
        ]
        shown["outputs"] = [
            {"column": column.column, "type": str(column.type)}
            for column in contract.columns or contract.outputs
        ]
        shown["rows"] = loaded.rows.to_wire()
    return shown


def _repository_models(placed: PlacementPlan, config: Config) -> Iterator[CheckedModel]:
    """The versions in the repository that a startup loads, and their load errors."""
    settings, reader = config.repository, ModelReader(config)
    listed = list_models(Path(settings.path), settings.marker)
    for name in sorted(version_policy.names_at_start(settings, listed)):
        found = listed.get(name)
        if reader.is_configured(name):
            yield CheckedModel(name, name, None, "its name is in [[models]] too")
        elif found is None:
            yield CheckedModel(name, name, None, "no such folder in the repository")
        elif found.error:
            yield CheckedModel(name, name, None, found.error)
        else:
            yield from _versions(name, found.versions, reader, placed, config)


def _versions(
    name: str, listed: Mapping[str, str], reader: ModelReader, placed: PlacementPlan, config: Config
) -> Iterator[CheckedModel]:
    """The versions of one repository model that a startup loads, and their errors."""
    try:
        own, routing = reader.settings(name)
    except IskanderError as error:
        yield CheckedModel(name, name, None, error.message)
        return
    policy = version_policy.policy_of(config.repository, own)
    versions = version_policy.wanted_versions(listed, policy, routing)
    if not versions:
        yield CheckedModel(name, name, None, "the version policy selects no version")
    if problem := version_policy.targets_error(routing, versions):
        yield CheckedModel(name, name, None, problem)
    stamps = {version: listed[version] for version in versions}
    checked = []
    for version, found in reader.of_folder(name, own, stamps).items():
        title = f"{name}/{version}"
        try:
            if isinstance(found, IskanderError):
                raise found
            loaded = _load(found.spec, found.settings.python, placed, config)
            checked.append(CheckedModel(name, title, loaded))
        except IskanderError as error:
            checked.append(CheckedModel(name, title, None, error.message))
    yield from _compared(checked, [f"{name}/{version}" for version in routing.shadow_shares()])


def _compared(models: list[CheckedModel], shadows: Collection[str]) -> list[CheckedModel]:
    """Add an error to each shadow version that cannot be compared with a served one."""
    served = [model for model in models if model.title not in shadows]
    return [
        model
        if model.title not in shadows
        else next(filter(None, (_incomparable(model, other) for other in served)), model)
        for model in models
    ]


def _incomparable(candidate: CheckedModel, served: CheckedModel) -> CheckedModel | None:
    """Return a candidate with an error if its results cannot be compared; None if they can."""
    if served.name != candidate.name or served.loaded is None or candidate.loaded is None:
        return None
    matches = match_outputs(served.loaded.contract, candidate.loaded.contract)
    if not isinstance(matches, str):
        return None
    return candidate._replace(error=f"not comparable with {served.title}: {matches}")


def _load(spec: ModelSpec, python: str, placed: PlacementPlan, config: Config) -> Loaded:
    """Load and warm a model: here, or in a process like its own workers.

    Raises:
        IskanderError: It does not load, or its results do not fit in the output arena.
    """
    slots = [s for s in placed.slots if s.pool == spec.pool and s.device in spec.devices]
    if not slots:
        raise ConfigError("it needs a GPU, and workers.groups lists none")
    # A worker with a GPU has the execution providers that the model prefers.
    slot = min(slots, key=lambda each: (each.gpu is None, each.cores))
    spec = spec_for(spec, slot.device)
    if spec.pool or slot.gpu is not None:
        wait_s = config.workers.start_s
        loaded = check_model(spec, python, slot.cores, wait_s, slot.environment)
    else:
        from iskander_worker.sandbox.check import check_load

        loaded = check_load(spec, slot.cores)
    require_output_space(loaded.contract, spec.rows_max, usable_bytes(config.arena.output_bytes))
    limits = config.limits
    require_smallest_request(
        loaded.contract,
        columns=limits.columns,
        batch_bytes=limits.bytes,
        result_bytes=limits.result_bytes,
    )
    return loaded


def _rows(model: CheckedModel) -> Iterator[tuple[str, str, str, str]]:
    loaded = model.loaded
    if loaded is None:
        yield model.title, "-", "-", f"cannot be loaded: {model.error}"
        return
    contract = loaded.contract
    entries = entries_of(contract)
    columns = ", ".join(f"{' + '.join(columns_of(entry))} {entry.type}" for entry in entries)
    outputs = contract.columns or contract.outputs
    results = ", ".join(f"{column.column} {column.type}" for column in outputs)
    yield model.title, loaded.providers[0], str(loaded.threads), columns
    yield "", "", "", f"-> {results}"
    yield "", "", "", f"rows {loaded.rows.summary}"


def render_plan(placed: PlacementPlan) -> list[str]:
    """The cpus of each process, and the notes of the plan."""
    gateway = ("gateway", "-", render_cpu_list(placed.gateway) or "any", "-", "-", "-", "-")
    rows = [gateway]
    rows += [
        (
            f"worker {slot.index}" + (f" of {slot.pool}" if slot.pool else ""),
            str(slot.group),
            render_cpu_list(slot.cpus),
            str(slot.cores),
            "-" if slot.node is None else str(slot.node),
            render_cpu_list(slot.domains) or "-",
            slot.gpu.number if slot.gpu is not None else "-",
        )
        for slot in placed.slots
    ]
    head = ("process", "group", "cpus", "cores", "node", "L3", "GPU")
    has_gpus = any(slot.gpu is not None for slot in placed.slots)
    table = (
        render_table(head, rows) if has_gpus else render_table(head[:-1], [r[:-1] for r in rows])
    )
    table += render_gpus(placed) if has_gpus else []
    return [*table, *(f"note: {note}" for note in placed.notes)]


def render_gpus(placed: PlacementPlan) -> list[str]:
    """The devices of the plan, with their memory for models."""
    devices = {slot.gpu: slot.gpu_budget_bytes for slot in placed.slots if slot.gpu is not None}
    rows = [
        (
            gpu.number,
            gpu.uuid,
            gpu.pci,
            "-" if gpu.node is None else str(gpu.node),
            " ".join(filter(None, (gpu.name, gpu.profile))) or "-",
            format_gib(gpu.memory_bytes) if gpu.memory_bytes else "unknown",
            format_gib(budget) if budget else "unknown",
        )
        for gpu, budget in devices.items()
    ]
    head = ("GPU", "UUID", "PCI address", "node", "kind", "memory", "for models")
    return ["", *render_table(head, rows)]


def _arena_bytes(arena: ArenaConfig, workers: int, processes: int) -> list[int]:
    return processes * ([arena.input_bytes] + workers * [arena.output_bytes])


def _memory(arena: ArenaConfig, workers: int, processes: int) -> list[str]:
    """Memory of the arenas; a startup may still find less of it available."""
    sizes = _arena_bytes(arena, workers, processes)
    total = f"{sum(sizes) / backing.MIB:.0f} MiB"
    lines = [f"shared memory {total}, allocated at startup"]
    if arena.huge_pages:
        pages, free = sum(map(backing.huge_pages_needed, sizes)), backing.huge_pages_free()
        rule = f"transparent ones for shared memory: {backing.transparent_setting()}"
        lines.append(f"huge pages: {pages} needed, {free} reserved and free now; {rule}")
    limit = backing.lock_limit_bytes()
    if arena.lock and limit is not None:
        allowed = f"{limit / backing.MIB:g} MiB allowed without CAP_IPC_LOCK"
        lines.append(f"locked memory: {total} needed, {allowed}")
    return lines
