"""The backend `python`: a class of the model's own, record batch in, record batch out.

    class Model:
        def load(self, context): ...
        def predict(self, batch): return or yield record batches, of as many rows in all

What the class raises is the model's failure, told with the line that raised it. It runs in workers
that serve nothing else, so what it does to its process harms no other model.

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
from iskander.contract.declared_graph import declared_graph
from iskander.contract.manifest import read_manifest
from iskander.contract.paths import path_inside
from iskander.control.messages import ModelSpec
from iskander.errors import Cancelled, ExecutionFailed, IskanderError, ManifestError
from iskander_worker.backends import Arrays, Run
from iskander_worker.loading.weight_files import load_safetensors
from iskander_worker.record_batches import from_batch, to_batch

MESSAGE_CHARACTERS = 500


class Context:
    """What a class is loaded with.

    Attributes:
        name: Of the model.
        version: Of the model.
        folder: Where its files are.
        threads: That it may compute with.
        rows_max: The most rows of a batch.
        settings: `[python.settings]` of the manifest.
    """

    def __init__(self, spec: ModelSpec, settings: Mapping[str, Any], threads: int) -> None:
        self.name, self.version = spec.name, spec.version
        self.folder = Path(spec.path).parent
        self.threads = threads
        self.rows_max = spec.rows_max
        self.settings = settings
        self._spec = spec
        self._run = Run()

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for the batch any more; for a class that computes for long."""
        return self._run.is_aborted

    def load_safetensors(self, name: str) -> dict[str, np.ndarray]:
        """Weights by name, mapped; bfloat16 as its bits, uint16.

        Raises:
            ManifestError: It is no such file, or lies outside of the folder.
        """
        return load_safetensors(path_inside(self.folder, name))

    def load_skops(self, name: str) -> Any:  # noqa: ANN401
        """An estimator of scikit-learn that skops wrote.

        Raises:
            ManifestError: It holds types that neither skops nor `trusted_types` trust; names them.
        """
        from skops import io

        path = path_inside(self.folder, name)
        untrusted = io.get_untrusted_types(file=path)
        refused = [each for each in untrusted if each not in self._spec.trusted_types]
        if refused:
            raise ManifestError(
                f"`{name}` holds types that are not trusted: {', '.join(sorted(refused))}; where "
                "they should be, name them in trusted_types of the model"
            )
        return io.load(path, trusted=untrusted)

    def load_pickle(self, name: str) -> Any:  # noqa: ANN401
        """What a pickle holds; reading one runs whatever its author wrote.

        Raises:
            ManifestError: The configuration does not trust it.
        """
        import pickle

        if not self._spec.trust_pickle:
            raise ManifestError(
                f"`{name}` is a pickle, which runs code when it is read; the model's trust_pickle "
                "= true would allow it"
            )
        with path_inside(self.folder, name).open("rb") as file:
            return pickle.load(file)  # noqa: S301


def load(spec: ModelSpec, cores: int) -> PythonModel:
    """Import the class that the manifest names, and let it load.

    Raises:
        ManifestError: It has no manifest or no such class, or its `load` failed; says where.
    """
    return PythonModel(spec, spec.threads_intra or cores)


class PythonModel:
    """A loaded class.

    Args:
        spec: Where the model is.
        threads: That it may compute with.

    Raises:
        ManifestError: It cannot be loaded.
    """

    providers = (f"Python {sys.version.split()[0]}",)

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        if not spec.pool:
            raise ManifestError("the backend `python` runs in workers of its own: set workers = 1")
        manifest = read_manifest(Path(spec.path))
        if manifest is None:
            raise ManifestError("there is no manifest.toml, which says what the class takes")
        self.threads = threads
        self.graph = declared_graph(manifest)
        self._context = Context(spec, manifest.python.settings, threads)
        self._folder = self._context.folder.resolve()
        self._pid = os.getpid()
        sys.dont_write_bytecode = True  # A signed folder holds what was signed, and nothing more.
        try:
            self._model = _class_of(self._folder, manifest.python)()
            self._model.load(self._context)
        except IskanderError:
            raise
        except BaseException as error:  # Some libraries' are no `Exception`; no signal raises here.
            raise ManifestError(f"its class cannot be loaded: {self._told(error)}") from None
        finally:
            self._require_parent()

    def compute(self, arrays: Arrays, wanted: Sequence[str], run: Run) -> Arrays:
        """Compute one batch.

        Raises:
            ExecutionFailed: The class raised, or did not return what the manifest says.
            Cancelled: It yielded its results in parts, and nobody waited for the next one.
        """
        self._context._run = run
        rows = len(next(iter(arrays.values())))
        try:
            answer = self._model.predict(to_batch(arrays))
            parts = answer if isinstance(answer, Iterator) else iter((answer,))
            return self._put_together(parts, wanted, rows, run)
        except IskanderError:
            raise
        except BaseException as error:
            raise ExecutionFailed(self._told(error)) from None
        finally:
            self._require_parent()

    def close(self) -> None:
        """Let the class close what it holds, if it has a `close`."""
        if hasattr(self._model, "close"):
            self._model.close()

    def _put_together(
        self, parts: Iterator[object], wanted: Sequence[str], rows: int, run: Run
    ) -> Arrays:
        """All parts as one; no more of them are taken than the batch has rows for."""
        taken: list[dict[str, np.ndarray]] = []
        count = 0
        for part in parts:
            if run.is_aborted:
                raise Cancelled("nobody waited for this batch any more")
            taken.append(from_batch(part, wanted))
            count += len(part)  # type: ignore[arg-type]
            if count > rows:
                break
        if count != rows:
            more = " or more" if count > rows else ""
            raise ExecutionFailed(f"predict returned {count}{more} rows for a batch of {rows}")
        if len(taken) == 1:
            return taken[0]
        return {name: np.concatenate([part[name] for part in taken]) for name in wanted}

    def _require_parent(self) -> None:
        """End what the class has forked: it is no worker, and must not go on as one."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _told(self, error: BaseException) -> str:
        """Type, message, and the last line of the model's own files."""
        try:
            message = str(error)[:MESSAGE_CHARACTERS]
        except BaseException:
            message = "its message cannot be had"
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if Path(each.filename).is_relative_to(self._folder)]
        if isinstance(error, SyntaxError):
            message = f"{error.msg} (line {error.lineno})"
        where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        return f"{type(error).__name__}: {message}{where}"


def _class_of(folder: Path, part: PythonSection) -> Any:  # noqa: ANN401
    path = path_inside(folder, part.file, is_folder_allowed=True)
    module = _import(path / "__init__.py" if path.is_dir() else path)
    if not hasattr(module, part.class_name):
        raise ManifestError(f"there is no class `{part.class_name}` in `{part.file}`")
    return getattr(module, part.class_name)


def _import(path: Path) -> ModuleType:
    """The model's module, under a name that no other has; its folder's modules can be imported."""
    is_package = path.name == "__init__.py"
    home = path.parent.parent if is_package else path.parent
    if str(home) not in sys.path:
        sys.path.append(str(home))
    name = f"iskander_model_{path.parent.name if is_package else path.stem}_{len(sys.modules)}"
    places = [str(path.parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise ManifestError(f"`{path.name}` is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
