"""What is opened for a model: its own file, the optimised copy that all workers share, or none.

First the files are held against what the manifest and the server say of them. Then, where the
server has it so, a model that is not known yet is tried out in a process of its own; what came of
it, and the optimised copy, is kept for the next worker.

Runs on: worker main and the operator's tool.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from iskander import clock
from iskander.contract.labels import named_files
from iskander.contract.manifest import model_file, read_manifest
from iskander.control.messages import ModelSpec
from iskander.errors import ConfigError, ManifestError
from iskander_worker.loading.model_files import (
    ModelFiles,
    inspect_files,
    require_pins,
    require_signature,
    require_unchanged,
    stamp_of,
)
from iskander_worker.loading.weight_cache import FORMAT, Entry, WeightStore
from iskander_worker.sandbox.client import load_in_sandbox

SHARED_BYTES_MIN = 1 << 20
"""Weights that are less are cheaper to have in each worker than to look after."""
REFUSED_NS = 600 * clock.NS_PER_S
"""For so long a model that ended or hung its trial is not tried again."""
TRIAL_S_MIN = 1.0
TRIES = 3
"""An entry can be removed, to make room for others, between being made and being opened."""

_UNPINNED = ("manifest.toml", "manifest.toml.sig")
"""Of the folder itself, and of none below it."""


class ModelSource(NamedTuple):
    """What to open.

    Attributes:
        optimised: A copy of the model that needs no more optimising; None for the model's file.
        libraries: Of custom operators, by path.
        save_to: Where to write an optimised copy; None for nowhere.
        save_weights: Name of the file beside it for the weights.
    """

    optimised: Path | None = None
    libraries: tuple[str, ...] = ()
    save_to: Path | None = None
    save_weights: str = ""


class Noticing(Protocol):
    """A model that can say what was not as it should be."""

    notices: tuple[str, ...]

    def close(self) -> None:
        """Give up what it holds."""


ModelT = TypeVar("ModelT", bound=Noticing)


def open_model(
    spec: ModelSpec, cores: int, make: Callable[[ModelSpec, int, ModelSource], ModelT], runtime: str
) -> ModelT:
    """Open a model.

    Args:
        spec: Where the model is and how to run it.
        cores: Compute threads where the spec names none.
        make: Opens what it is told to.
        runtime: Version of what opens it: another one may want its weights otherwise.

    Raises:
        ManifestError: It is not what it should be, or cannot be served; says why.
    """
    loading = spec.loading
    file = model_file(Path(spec.path))
    folder = file.parent
    before = {folder / "manifest.toml": stamp_of(folder / "manifest.toml")}
    manifest = read_manifest(file)
    files = inspect_files(file, loading.model_bytes)
    files.stamps.update(before)
    is_signed = require_signature(folder, loading.public_key)
    pins = manifest.sha256 if manifest is not None else {}
    wanted_pins = [*files.paths, *sorted(named_files(manifest))] if is_signed else ()
    require_pins(folder, pins, files.digests, wanted_pins)

    def make_known(spec: ModelSpec, cores: int, source: ModelSource) -> ModelT:
        """A model of the files that were looked at, and of no others."""
        model = make(spec, cores, source)
        try:
            require_unchanged(files.stamps)
        except ManifestError:
            model.close()
            raise
        return model

    wanted = manifest.custom_ops if manifest is not None else ()
    source = ModelSource(libraries=libraries_of(wanted, loading.custom_ops))
    is_shared = loading.is_shared and files.weight_bytes >= SHARED_BYTES_MIN
    if spec.execution_providers != ("cpu",) or not (loading.is_tried or is_shared):
        return make_known(spec, cores, source)
    notices: tuple[str, ...] = ()
    try:
        if not loading.cache:
            raise ConfigError("loading.cache has no folder: neither it nor HOME is set")
        store = WeightStore(Path(loading.cache), loading.cache_bytes)
        key = entry_key(spec, files, source.libraries, runtime)
        return _from_store(spec, cores, make_known, source, files, store=store, key=key)
    except ConfigError as error:
        notices = (f"{error.message}; every worker has weights of its own",) if is_shared else ()
    if loading.is_tried:
        verdict = load_in_sandbox(spec, cores, source.libraries, seconds=loading.trial_s)
        if verdict.refusal or verdict.error:
            raise ManifestError(verdict.refusal or verdict.error)
    model = make_known(spec, cores, source)
    model.notices = notices
    return model


def require_trusted(spec: ModelSpec) -> None:
    """Hold a folder against its manifest, for a backend that opens its files by itself.

    Raises:
        ManifestError: It is not signed as it has to be, or a file is not the one that is pinned.
    """
    folder = Path(spec.path).parent
    manifest = read_manifest(Path(spec.path))
    is_signed = require_signature(folder, spec.loading.public_key)
    wanted = _files_below(folder) if is_signed else ()
    require_pins(folder, manifest.sha256 if manifest is not None else {}, {}, wanted)


def _files_below(folder: Path) -> Iterator[str]:
    """What a signature has to cover: everything but the signed manifest and its signature.

    Raises:
        ManifestError: There is a link to a folder, in which more could lie than is seen here.
    """
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            if path.is_symlink():
                raise ManifestError(f"`{name[:100]}` is a link to a folder, which cannot be signed")
        elif name not in _UNPINNED:
            yield name


def _from_store(
    spec: ModelSpec,
    cores: int,
    make: Callable[[ModelSpec, int, ModelSource], ModelT],
    source: ModelSource,
    files: ModelFiles,
    *,
    store: WeightStore,
    key: str,
) -> ModelT:
    """Open what the store has of a model, once it has something.

    Raises:
        ConfigError: The store cannot be used.
        ManifestError: The model cannot.
    """
    # One worker tries the model out, and those that want it too wait for that.
    deadline_ns = clock.now_ns() + int(spec.loading.trial_s * clock.NS_PER_S)
    for _ in range(TRIES):
        with store.locked(key, deadline_ns):
            entry = store.find(key)
            if entry is not None and not _is_over(entry):
                return _from_entry(entry, spec, cores, make, source)
        with store.locked(key, deadline_ns, alone=True):
            entry = store.find(key)
            if entry is None or _is_over(entry):
                _add(store, key, spec, cores, source, files, deadline_ns=deadline_ns)
    raise ConfigError("loading.cache_bytes is too little: what was made is gone before it is used")


def _from_entry(
    entry: Entry,
    spec: ModelSpec,
    cores: int,
    make: Callable[[ModelSpec, int, ModelSource], ModelT],
    source: ModelSource,
) -> ModelT:
    record = entry.record
    if record.refusal:
        raise ManifestError(f"{record.refusal}; it is not tried again for ten minutes")
    notes = [f"its weights are not shared: {record.note}"] if record.note else []
    if entry.model is not None:
        try:
            return make(spec, cores, source._replace(optimised=entry.model))
        except ManifestError as error:
            notes = [f"its weights are not shared: {error.message}"]
    model = make(spec, cores, source)
    model.notices = tuple(notes)
    return model


def _add(
    store: WeightStore,
    key: str,
    spec: ModelSpec,
    cores: int,
    source: ModelSource,
    files: ModelFiles,
    *,
    deadline_ns: int,
) -> None:
    """Try a model out, and keep what came of it.

    What took too long after a wait for others is told, and not kept: it had less than its time.

    Raises:
        ConfigError: The store cannot be written.
        ManifestError: The model cannot be served, as the runtime or its contract has it.
    """
    loading = spec.loading
    is_shared = loading.is_shared and files.weight_bytes >= SHARED_BYTES_MIN
    begun_ns = clock.now_ns()
    whole_s = max((deadline_ns - begun_ns) / clock.NS_PER_S, TRIAL_S_MIN)
    folder = store.prepare(key)
    verdict = load_in_sandbox(
        spec,
        cores,
        source.libraries,
        seconds=whole_s,
        folder=folder if is_shared else None,
    )
    note = verdict.note
    if is_shared and verdict.refusal and not verdict.is_late:
        # It may be the copy that the runtime does not stand, and not the model.
        note = f"{verdict.refusal}, when its copy was made"
        left_s = whole_s - (clock.now_ns() - begun_ns) / clock.NS_PER_S
        verdict = load_in_sandbox(spec, cores, source.libraries, seconds=max(left_s, TRIAL_S_MIN))
    is_known = not verdict.is_late or whole_s > loading.trial_s / 2
    try:
        require_unchanged(files.stamps)
        if loading.is_tried and (verdict.error or not is_known):
            raise ManifestError(verdict.error or verdict.refusal)
    except ManifestError:
        store.discard(key)
        raise
    if loading.is_tried:
        store.add(key, note, verdict.refusal)
    else:
        store.add(key, note or verdict.refusal or verdict.error)


def _is_over(entry: Entry) -> bool:
    """Whether an entry is a refusal of so long ago, or of before the machine was started."""
    age_ns = clock.now_ns() - entry.record.refused_ns
    return bool(entry.record.refusal) and not 0 <= age_ns < REFUSED_NS


def entry_key(spec: ModelSpec, files: ModelFiles, libraries: tuple[str, ...], runtime: str) -> str:
    """The name of an entry: a hash of everything that what is in it depends on."""
    manifest = model_file(Path(spec.path)).parent / "manifest.toml"
    parts = [
        FORMAT,
        runtime,
        _processor(),
        sorted(files.digests.items()),
        [(library, os.stat(library).st_mtime_ns) for library in libraries],
        hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else "",
        spec.optimization_level,
        spec.rows_max,
        spec.string_bytes,
        spec.loading.is_shared,
        (spec.loading.trial_s, spec.loading.trial_bytes),
    ]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:40]


def _processor() -> list[str]:
    """What decides how kernels want their weights: the model of the processor and what it can."""
    found = [platform.machine()]
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "flags", "Features", "CPU part"):
            found.append(value.strip())
        elif not line and len(found) > 1:
            break
    return found


def libraries_of(wanted: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The paths of the operator libraries that a manifest asks for.

    Args:
        wanted: Absolute paths, or names of packages that tell where their library is.
        allowed: Those that the server's operator has named.

    Raises:
        ManifestError: One is not allowed, or not there.
    """
    paths = []
    for name in wanted:
        if name not in allowed:
            raise ManifestError(
                f"the model asks for the operator library `{name[:200]}`, and loading.custom_ops "
                f"of this server allows {', '.join(allowed) or 'none'}"
            )
        path = name
        if not os.path.isabs(name):
            try:
                path = str(import_module(name).get_library_path())
            except (ImportError, AttributeError, ValueError):
                raise ManifestError(
                    f"the operator library `{name[:200]}` is no absolute path, and no package here "
                    "that says where its library is"
                ) from None
        if not os.path.isfile(path):
            raise ManifestError(f"there is no operator library `{name[:200]}` on this machine")
        paths.append(path)
    return tuple(paths)
