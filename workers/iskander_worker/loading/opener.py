"""Opening of a model: file checks, sandboxed load, and choice of the file or shared copy.

The files are compared with the manifest and the server's settings first. A model that is not in the
cache is then loaded in a sandbox, if the server enables it; the verdict and the optimised copy are
cached for the next worker.

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

from iskander.contract.labels import named_files
from iskander.contract.manifest import model_file, read_manifest
from iskander.errors import ConfigError, ManifestError
from iskander.foundation import clock
from iskander.interprocess.control.messages import ModelSpec
from iskander_worker.devices.cuda import DriverError, open_device
from iskander_worker.loading.engines import PROVIDER, key_parts, needs_engines, tensorrt_version
from iskander_worker.loading.measurement import Measurement
from iskander_worker.loading.model_files import (
    ModelFiles,
    inspect_files,
    joined_sha256,
    require_pins,
    require_signature,
    require_unchanged,
    sha256_of,
    stamp_of,
)
from iskander_worker.loading.progress import progress
from iskander_worker.loading.weight_cache import FORMAT, Entry, WeightStore
from iskander_worker.sandbox.client import load_in_sandbox

SHARED_BYTES_MIN = 1 << 20
"""Smaller weights are cheaper as a copy in each worker."""
CRASH_RETRY_NS = 600 * clock.NS_PER_S
"""Time for which a model that crashed or hung its sandbox is not loaded again."""
SANDBOX_S_MIN = 1.0
TRIES = 3
"""Attempts to open an entry, which can be evicted between its creation and its opening."""

_UNPINNED = ("manifest.toml", "manifest.toml.sig")
"""Files that a signature does not cover, if they are in the model's own folder."""


class ModelSource(NamedTuple):
    """Files that an open of a model reads and writes.

    Attributes:
        optimised: Optimised copy, which is opened in place of the model's file.
        engines: Folder of TensorRT's engines; they are written there if `is_building`.
        libraries: Paths of operator libraries.
        save_to: Target of a new optimised copy.
        save_weights: Name of the file with the weights of the new copy, in the same folder.
    """

    optimised: Path | None = None
    engines: Path | None = None
    is_building: bool = False
    libraries: tuple[str, ...] = ()
    save_to: Path | None = None
    save_weights: str = ""


class OpenModel(Protocol):
    """An opened model; `notices` are for the operator.

    `measurement` is what the sandboxed load of the model found out; None without such a load.
    """

    notices: tuple[str, ...]
    files_sha256: str
    measurement: Measurement | None

    def close(self) -> None:
        """Release the model."""


ModelT = TypeVar("ModelT", bound=OpenModel)


def open_model(
    spec: ModelSpec, cores: int, make: Callable[[ModelSpec, int, ModelSource], ModelT], runtime: str
) -> ModelT:
    """Open a model, or raise a `ManifestError`.

    `make` opens a `ModelSource`. `runtime` is the version of the runtime, which uses no optimised
    copies of another version.
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
    required = [*files.paths, *sorted(named_files(manifest))] if is_signed else ()
    require_pins(folder, pins, files.digests, required)
    files_sha256 = joined_sha256({**files.digests, "manifest.toml": _manifest_sha256(folder)})

    def open_source(source: ModelSource) -> ModelT:
        model = make(spec, cores, source)
        model.files_sha256 = files_sha256
        try:
            require_unchanged(files.stamps)
        except ManifestError:
            model.close()
            raise
        return model

    names = manifest.custom_ops if manifest is not None else ()
    source = ModelSource(libraries=libraries_of(names, loading.custom_ops))
    is_shared = _is_shared(spec, files)
    if needs_engines(spec):
        return _open_with_engines(spec, cores, source, files, runtime, open_source)
    if spec.execution_providers != ("cpu",) or not (loading.is_sandboxed or is_shared):
        return open_source(source)
    notices: tuple[str, ...] = ()
    measurement: Measurement | None = None
    try:
        if not loading.cache:
            raise ConfigError("loading.cache has no folder: neither it nor HOME is set")
        store = WeightStore(Path(loading.cache), loading.cache_bytes)
        key = _entry_key(spec, files, source.libraries, runtime)
        load = _CachedLoad(store, key, spec, cores, source, files, loading.sandbox_s, is_shared)
        return load.open(open_source)
    except ConfigError as error:
        notices = (f"weights are not shared: {error.message}",) if is_shared else ()
    if loading.is_sandboxed:
        verdict = load_in_sandbox(spec, cores, source.libraries, seconds=loading.sandbox_s)
        if verdict.refusal or verdict.error:
            raise ManifestError(verdict.refusal or verdict.error)
        measurement = verdict.measurement
    model = open_source(source)
    model.notices, model.measurement = notices, measurement
    return model


def _open_with_engines(
    spec: ModelSpec,
    cores: int,
    source: ModelSource,
    files: ModelFiles,
    runtime: str,
    open_source: Callable[[ModelSource], ModelT],
) -> ModelT:
    """Open a model with TensorRT's engines, which one worker of a card has built in a sandbox."""
    loading = spec.loading
    try:
        if not loading.cache:
            raise ConfigError("loading.cache has no folder: neither it nor HOME is set")
        store = WeightStore(Path(loading.cache), loading.cache_bytes)
        number = int(spec.provider_options.get(PROVIDER, {}).get("device_id", "0"))
        parts = key_parts(spec, open_device(number).name, tensorrt_version())
        key = _entry_key(spec, files, source.libraries, runtime, parts)
        load = _CachedLoad(store, key, spec, cores, source, files, loading.engine_s, False)
        with progress.step("building or waiting for TensorRT engines"):
            return load.open(open_source)
    except DriverError as error:
        raise ManifestError(f"no device for TensorRT: {error}") from None
    except ConfigError as error:
        model = open_source(source)
        model.notices = (
            *model.notices,
            f"TensorRT engines are not cached, so every worker builds them: {error.message}",
        )
        return model


def require_trusted(spec: ModelSpec) -> None:
    """Compare a folder with its manifest, for a backend that opens its files by itself."""
    folder = Path(spec.path).parent
    manifest = read_manifest(Path(spec.path))
    is_signed = require_signature(folder, spec.loading.public_key)
    required = _files_below(folder) if is_signed else ()
    require_pins(folder, manifest.sha256 if manifest is not None else {}, {}, required)


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the files that a signature must cover: all but the manifest and its signature."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            if path.is_symlink():  # `rglob` does not list the files behind the link.
                raise ManifestError(f"`{name[:100]}` is a link to a folder, which cannot be signed")
        elif name not in _UNPINNED:
            yield name


def _is_shared(spec: ModelSpec, files: ModelFiles) -> bool:
    return spec.loading.is_shared and files.weight_bytes >= SHARED_BYTES_MIN


class _CachedLoad(NamedTuple):
    """Load of a model through its cache entry, which the first worker creates."""

    store: WeightStore
    key: str
    spec: ModelSpec
    cores: int
    source: ModelSource
    files: ModelFiles
    seconds: float
    is_shared: bool

    def open(self, open_source: Callable[[ModelSource], ModelT]) -> ModelT:
        """Open the model through its entry; create the entry first if it is missing."""
        # One worker runs the sandboxed load; other workers of the model wait for the new entry.
        deadline_ns = clock.now_ns() + int(self.seconds * clock.NS_PER_S)
        for _ in range(TRIES):
            with self.store.locked(self.key, deadline_ns):
                entry = self._find()
                if entry is not None:
                    return _from_entry(entry, open_source, self.source, self.spec)
            with self.store.locked(self.key, deadline_ns, is_exclusive=True):
                if self._find() is None:
                    self._add(deadline_ns)
        raise ConfigError("the new entry was evicted before its use: raise loading.cache_bytes")

    def _find(self) -> Entry | None:
        """Return the entry; None if there is none, or if it reports a crash of long ago.

        A restart of the machine resets the clock, so an earlier crash counts as one of long ago.
        """
        entry = self.store.find(self.key)
        if entry is None or not entry.record.refusal:
            return entry
        return entry if 0 <= clock.now_ns() - entry.record.refused_ns < CRASH_RETRY_NS else None

    def _add(self, deadline_ns: int) -> None:
        """Run the sandboxed load, and cache its verdict.

        A timeout is reported but not cached if the load had less time than usual, because it waited
        long for the lock, or because a copy crashed before.
        """
        store, key, spec, cores, source, files, limit_s, is_shared = self
        has_engines = needs_engines(spec)
        is_required = spec.loading.is_sandboxed or has_engines
        begun_ns = clock.now_ns()
        seconds = max((deadline_ns - begun_ns) / clock.NS_PER_S, SANDBOX_S_MIN)
        folder = store.prepare(key)
        target = folder if is_shared or has_engines else None
        verdict = load_in_sandbox(spec, cores, source.libraries, seconds=seconds, folder=target)
        note = verdict.note
        if is_shared and verdict.refusal and not verdict.is_late:
            # The optimised copy may crash the runtime where the model itself does not.
            note = f"{verdict.refusal}, when its copy was made"
            passed_s = (clock.now_ns() - begun_ns) / clock.NS_PER_S
            seconds = max(seconds - passed_s, SANDBOX_S_MIN)
            verdict = load_in_sandbox(spec, cores, source.libraries, seconds=seconds)
        is_final = not verdict.is_late or seconds > limit_s / 2
        try:
            require_unchanged(files.stamps)
            if is_required and (verdict.error or not is_final):
                raise ManifestError(verdict.error or verdict.refusal)
            if not is_final and not note:
                raise ConfigError(verdict.refusal)
        except (ConfigError, ManifestError):
            store.discard(key)
            raise
        if is_required:
            store.add(key, note, verdict.refusal, verdict.measurement)
        else:
            store.add(key, note or verdict.refusal or verdict.error, "", verdict.measurement)


def _from_entry(
    entry: Entry,
    open_source: Callable[[ModelSource], ModelT],
    source: ModelSource,
    spec: ModelSpec,
) -> ModelT:
    if entry.record.refusal:
        raise ManifestError(f"{entry.record.refusal}; it is not loaded again for ten minutes")
    measurement = entry.record.measurement
    if entry.model is None and entry.record.digests:
        model = open_source(source._replace(engines=entry.folder))
        model.measurement = measurement
        return model
    reason = entry.record.note
    if needs_engines(spec) and reason:
        raise ConfigError(reason)
    if entry.model is not None:
        try:
            model = open_source(source._replace(optimised=entry.model))
            model.measurement = measurement
            return model
        except ManifestError as error:
            reason = error.message
    model = open_source(source)
    model.notices = (f"weights are not shared: {reason}",) if reason else ()
    model.measurement = measurement
    return model


def _entry_key(
    spec: ModelSpec,
    files: ModelFiles,
    libraries: tuple[str, ...],
    runtime: str,
    more: list[object] | None = None,
) -> str:
    """Return the name of an entry: a hash of everything that its content depends on."""
    parts = [
        FORMAT,
        runtime,
        _processor(),
        sorted(files.digests.items()),
        [(library, os.stat(library).st_mtime_ns) for library in libraries],
        _manifest_sha256(model_file(Path(spec.path)).parent),
        spec.optimization_level,
        spec.rows_max,
        spec.string_bytes,
        (spec.loading.is_sandboxed, spec.loading.is_shared),
        (spec.loading.sandbox_s, spec.loading.sandbox_bytes),
        *(more or ()),
    ]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:40]


def _manifest_sha256(folder: Path) -> str:
    """Return the hash of the manifest; empty if there is none."""
    manifest = folder / "manifest.toml"
    return sha256_of(manifest) if manifest.exists() else ""


def _processor() -> list[str]:
    """Return model and features of the processor, which determine the prepacked weights."""
    found = [platform.machine()]
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "flags", "Features", "CPU part"):
            found.append(value.strip())
        elif not line and len(found) > 1:
            break
    return found


def libraries_of(names: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of the operator libraries that a manifest requests.

    `names` are absolute paths, or packages with a function `get_library_path`. A `ManifestError` is
    raised if the operator does not allow a library, or it is not found.
    """
    paths = []
    for name in names:
        if name not in allowed:
            raise ManifestError(
                f"operator library `{name[:200]}` is not allowed: loading.custom_ops of this "
                f"server allows {', '.join(allowed) or 'none'}"
            )
        path = name
        if not os.path.isabs(name):
            try:
                path = str(import_module(name).get_library_path())
            except (ImportError, AttributeError, ValueError):
                raise ManifestError(
                    f"operator library `{name[:200]}` is no absolute path, and no package here "
                    "with a function `get_library_path`"
                ) from None
        if not os.path.isfile(path):
            raise ManifestError(f"operator library `{name[:200]}` not found on this machine")
        paths.append(path)
    return tuple(paths)
