"""What a start would do with a configuration: its checks, in its order, without starting.

The models are loaded: those of the configuration, for which a start stops where one cannot be, and
those that are in the repository, without which it goes on and is not ready.

Runs on: the operator's tool.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from iskander_worker.affinity import set_library_environment

from iskander.cli.tables import render_table
from iskander.config.schema import ArenaConfig, Config
from iskander.contract.inputs import columns_of, entries_of
from iskander.contract.tensors import require_room
from iskander.control.messages import Loaded, ModelSpec
from iskander.errors import IskanderError
from iskander.gateway.secrets import require_secrets
from iskander.memory.arena import usable_bytes
from iskander.memory.backing import (
    MIB,
    huge_pages_free,
    lock_limit_bytes,
    pages_huge,
    transparent_rule,
)
from iskander.repository.model_reader import FoundModel, ModelReader
from iskander.repository.scan import list_models
from iskander.repository.specs import loading_spec, model_spec
from iskander.repository.version_policy import (
    complaint_about_targets,
    names_at_start,
    policy_of,
    wanted_versions,
)
from iskander.scheduling.policies import make_policy
from iskander.supervision.model_check import try_model
from iskander.supervision.placement import PlacementPlan, plan
from iskander.supervision.topology import read_topology, render_cpu_list
from iskander.transport.addresses import admin_address, require_addresses


class Checked(NamedTuple):
    """A version of a model.

    Attributes:
        title: Its name, and its version where that is known.
        loaded: As a worker would tell; None where it cannot be loaded.
        error: Why not.
    """

    name: str
    title: str
    loaded: Loaded | None
    error: str = ""


class Findings(NamedTuple):
    """What a start would come to."""

    models: list[Checked]
    placed: PlacementPlan


def check(config: Config) -> Findings:
    """Do what a start does up to its first process, and load the models.

    Raises:
        IskanderError: It would stop at this.
    """
    placed = plan(config, read_topology(os.sched_getaffinity(0)))
    require_addresses(config)
    require_secrets(config)
    for model in config.models:
        make_policy(model.lane)
    loading = loading_spec(config)
    specs = [model_spec(key, model, loading) for key, model in enumerate(config.models)]
    set_library_environment()
    checked = []
    for spec, model in zip(specs, config.models, strict=True):
        title = f"{spec.name}/{spec.version}"
        try:
            loaded = _loaded(spec, model.python, placed, config)
        except IskanderError as error:
            raise type(error)(f"model `{title}`: {error.message}") from None
        checked.append(Checked(spec.name, title, loaded))
    if config.repository.path:
        checked += _of_folder(placed, config)
    return Findings(checked, placed)


def render(found: Findings, config: Config) -> Iterator[str]:
    """For people, a line each."""
    yield from render_table(
        ("model", "runs on", "threads", "columns"),
        [row for each in found.models for row in _rows(each)],
    )
    yield ""
    yield from _render_plan(found.placed)
    others = [config.inferential.address, config.http.address, admin_address(config.admin)]
    yield f"\nlistens on {', '.join([*config.addresses, *filter(None, others)])}"
    yield from _memory(config.arena, len(found.placed.places), config.server.processes)


def _of_folder(placed: PlacementPlan, config: Config) -> Iterator[Checked]:
    """The versions of the repository that a start would load, and what would keep it from that."""
    settings, reader = config.repository, ModelReader(config)
    listed = list_models(Path(settings.path), settings.marker)
    for name in sorted(names_at_start(settings, listed)):
        if reader.is_configured(name):
            yield Checked(name, name, None, "it is one of the configuration too")
            continue
        there = listed.get(name)
        if there is None or there.error:
            problem = there.error if there else "there is nothing of it in the folder"
            yield Checked(name, name, None, problem)
            continue
        try:
            own, routing = reader.settings(name)
        except IskanderError as error:
            yield Checked(name, name, None, error.message)
            continue
        versions = wanted_versions(there.versions, policy_of(settings, own), routing)
        if not versions:
            yield Checked(name, name, None, "there is nothing of it that is to be served")
        if problem := complaint_about_targets(routing, versions):
            yield Checked(name, name, None, problem)
        stamps = {version: there.versions[version] for version in versions}
        for version, each in reader.of_folder(name, own, stamps).items():
            yield _one_of_folder(name, f"{name}/{version}", each, placed, config)


def _one_of_folder(
    name: str, title: str, found: FoundModel | IskanderError, placed: PlacementPlan, config: Config
) -> Checked:
    try:
        if isinstance(found, IskanderError):
            raise found
        return Checked(name, title, _loaded(found.spec, found.settings.python, placed, config))
    except IskanderError as error:
        return Checked(name, title, None, error.message)


def _loaded(spec: ModelSpec, python: str, placed: PlacementPlan, config: Config) -> Loaded:
    """Load and warm a model: here, or in a process like its own workers.

    Raises:
        IskanderError: It cannot be, or a result of it would not fit.
    """
    cores = min(place.cores for place in placed.places if place.pool == spec.pool)
    if spec.pool:
        loaded = try_model(spec, python, cores, config.workers.start_s)
    else:
        from iskander_worker.sandbox.check import check_load

        loaded = check_load(spec, cores)
    require_room(loaded.contract, spec.rows_max, usable_bytes(config.arena.output_bytes))
    return loaded


def _rows(checked: Checked) -> Iterator[tuple[str, str, str, str]]:
    loaded = checked.loaded
    if loaded is None:
        yield checked.title, "-", "-", f"cannot be loaded: {checked.error}"
        return
    contract = loaded.contract
    columns = ", ".join(
        f"{' + '.join(columns_of(entry))} {entry.type}" for entry in entries_of(contract)
    )
    made = contract.columns or contract.outputs
    results = ", ".join(f"{column.column} {column.type}" for column in made)
    yield checked.title, loaded.providers[0], str(loaded.threads), columns
    yield "", "", "", f"-> {results}"


def _render_plan(placed: PlacementPlan) -> list[str]:
    """Where each process would run, and what could not be as it was asked for."""
    rows = [("gateway", "-", render_cpu_list(placed.gateway) or "any", "-", "-", "-")]
    rows += [
        (
            f"worker {place.index}" + (f" of {place.pool}" if place.pool else ""),
            str(place.group),
            render_cpu_list(place.cpus),
            str(place.cores),
            "-" if place.node is None else str(place.node),
            render_cpu_list(place.domains) or "-",
        )
        for place in placed.places
    ]
    table = render_table(("process", "group", "cpus", "cores", "node", "L3"), rows)
    return [*table, *(f"note: {note}" for note in placed.notes)]


def _memory(arena: ArenaConfig, workers: int, processes: int) -> list[str]:
    """The arenas, and whether there is what they ask for; it is had or not when they start."""
    sizes = processes * ([arena.input_bytes] + workers * [arena.output_bytes])
    total = f"{sum(sizes) / MIB:.0f} MiB"
    lines = [f"shared memory {total}, taken at start"]
    if arena.huge_pages:
        lines.append(
            f"huge pages: {sum(map(pages_huge, sizes))} wanted, {huge_pages_free()} reserved and "
            f"free now; transparent ones for shared memory: {transparent_rule()}"
        )
    limit = lock_limit_bytes()
    if arena.lock and limit is not None:
        lines.append(
            f"locked memory: {total} wanted, {limit / MIB:g} MiB allowed without CAP_IPC_LOCK"
        )
    return lines
