"""Backend `python`: a class of the model, with record batches as input and output.

    class Model:
        def load(self, context): ...
        def predict(self, batch): return or yield record batches, together of as many rows as
        `batch`

An exception of the class is reported as the model's failure, with its line. The class runs in
workers of its own, so a crash harms no other model.

Runs on: worker main, of a model with workers of its own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from iskander.contract.backend_manifest import PythonSection
from iskander.contract.compile import declared_graph
from iskander.contract.paths import path_inside
from iskander.errors import Cancelled, ExecutionFailed, IskanderError, ManifestError
from iskander.interprocess.control.messages import ModelSpec
from iskander_worker.backends import Arrays, Run, require_manifest
from iskander_worker.batches.record_batches import from_batch, to_batch
from iskander_worker.loading.weight_files import load_safetensors

MESSAGE_CHARACTERS = 500


class Context:
    """Argument of a class's `load`: the model, compute threads, `[python.settings]`."""

    def __init__(self, spec: ModelSpec, settings: Mapping[str, Any], threads: int) -> None:
        self.name, self.version = spec.name, spec.version
        self.folder = Path(spec.path).parent
        self.threads = threads
        self.rows_max = spec.rows_max
        self.settings = settings
        self._spec = spec
        self._run = Run()

    @property
    def is_cancelled(self) -> bool:
        """Whether the running batch was cancelled; a class polls it in a long computation."""
        return self._run.is_aborted

    def load_safetensors(self, name: str) -> dict[str, np.ndarray]:
        """Map the weights of a safetensors file.

        Bfloat16 weights are uint16 arrays of their bits.
        """
        return load_safetensors(path_inside(self.folder, name))

    def load_skops(self, name: str) -> Any:  # noqa: ANN401
        """Load a scikit-learn estimator; reject types that neither skops nor the model trusts."""
        from skops import io

        path = path_inside(self.folder, name)
        untrusted = io.get_untrusted_types(file=path)
        rejected = [kind for kind in untrusted if kind not in self._spec.trusted_types]
        if rejected:
            raise ManifestError(
                f"`{name}` has untrusted types: {', '.join(sorted(rejected))} (add trusted ones to "
                "trusted_types of the model)"
            )
        return io.load(path, trusted=untrusted)

    def load_pickle(self, name: str) -> Any:  # noqa: ANN401
        """Load a pickle, which can run any code of its author, if the configuration trusts it."""
        import pickle

        if not self._spec.trust_pickle:
            raise ManifestError(
                f"`{name}` is a pickle, which runs code when it is read: allow it with "
                "trust_pickle = true of the model"
            )
        with path_inside(self.folder, name).open("rb") as file:
            return pickle.load(file)  # noqa: S301


def load(spec: ModelSpec, cores: int) -> PythonModel:
    """Import the class that the manifest names and call its `load`, or raise a `ManifestError`."""
    return PythonModel(spec, spec.threads_intra or cores)


class PythonModel:
    """A loaded class."""

    library = f"Python {sys.version.split()[0]}"
    providers = (library,)

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        manifest = require_manifest(spec)
        self.threads = threads
        self.graph = declared_graph(manifest)
        self._context = Context(spec, manifest.python.settings, threads)
        self._folder = self._context.folder.resolve()
        self._pid = os.getpid()
        sys.dont_write_bytecode = True  # A signed folder may contain signed files only.
        try:
            self._model = _class_of(self._folder, manifest.python)()
            self._model.load(self._context)
        except IskanderError:
            raise
        except BaseException as error:  # Some libraries raise a bare `BaseException`.
            raise ManifestError(f"its class cannot be loaded: {self._error_text(error)}") from None
        finally:
            self._require_parent()

    def compute(self, arrays: Arrays, outputs: Sequence[str], run: Run) -> Arrays:
        """Compute one batch; raise `Cancelled` if the run was aborted between two parts."""
        self._context._run = run
        rows = len(next(iter(arrays.values())))
        try:
            answer = self._model.predict(to_batch(arrays))
            parts = answer if isinstance(answer, Iterator) else iter((answer,))
            return self._concatenate(parts, outputs, rows, run)
        except IskanderError:
            raise
        except BaseException as error:
            raise ExecutionFailed(self._error_text(error)) from None
        finally:
            self._require_parent()

    def close(self) -> None:
        """Call the class's `close`, if it has one."""
        if hasattr(self._model, "close"):
            self._model.close()

    def _concatenate(
        self, parts: Iterator[object], outputs: Sequence[str], rows: int, run: Run
    ) -> Arrays:
        """Concatenate the parts; stop reading when they have more rows than the batch."""
        read: list[dict[str, np.ndarray]] = []
        count = 0
        for section in parts:
            if run.is_aborted:
                raise Cancelled("batch cancelled: its callers are gone")
            arrays = from_batch(section, outputs)
            count += len(section)  # type: ignore[arg-type]
            if count < rows:  # The class may fill the same memory for its next part.
                arrays = {name: array.copy() for name, array in arrays.items()}
            read.append(arrays)
            if count > rows:
                break
        if count != rows:
            more = " or more" if count > rows else ""
            raise ExecutionFailed(f"predict returned {count}{more} rows for a batch of {rows}")
        if len(read) == 1:
            return read[0]
        return {name: np.concatenate([section[name] for section in read]) for name in outputs}

    def _require_parent(self) -> None:
        """Exit in a process that the class has forked: it must not continue as a worker."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _error_text(self, error: BaseException) -> str:
        """Return type and message of an error, and the innermost line in the model's own files."""
        try:
            message = str(error)[:MESSAGE_CHARACTERS]
        except BaseException:
            message = "no message"
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(self._folder)]
        if isinstance(error, SyntaxError):
            message = f"{error.msg} (line {error.lineno})"
        where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        return f"{type(error).__name__}: {message}{where}"


def _class_of(folder: Path, section: PythonSection) -> Any:  # noqa: ANN401
    path = path_inside(folder, section.file, is_folder_allowed=True)
    module = _import(path / "__init__.py" if path.is_dir() else path)
    if not hasattr(module, section.class_name):
        raise ManifestError(f"no class `{section.class_name}` in `{section.file}`")
    return getattr(module, section.class_name)


def _import(path: Path) -> ModuleType:
    """Import the model's module under a unique name; it can import the modules of its folder."""
    is_package = path.name == "__init__.py"
    folder = str(path.parent.parent if is_package else path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"iskander_model_{path.parent.name if is_package else path.stem}_{len(sys.modules)}"
    places = [str(path.parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise ManifestError(f"`{path.name}` is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
