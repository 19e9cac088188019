"""Files of labels beside a model: a line for each class, or for each word of a vocabulary.

Read by the worker that loads the model and by the operator's tool.
"""

from __future__ import annotations

from pathlib import Path

from iskander.contract.manifest import Manifest, model_file
from iskander.contract.paths import path_inside
from iskander.errors import ManifestError

LABELS_MAX = 1 << 20
LABELS_BYTES_MAX = 16 << 20

Labels = dict[str, tuple[str, ...]]


def read_labels(path: Path, manifest: Manifest | None) -> Labels:
    """The lines of every file of labels that a manifest names, by the file's name.

    Raises:
        ManifestError: One cannot be read, is too large or empty, or is not beside the model.
    """
    folder = model_file(path).parent
    return {name: _read(folder, name) for name in _names(manifest)}


def named_files(manifest: Manifest | None) -> set[str]:
    """Every file beside a graph that its manifest names: labels, vocabularies, samples."""
    if manifest is None:
        return set()
    plan = manifest.warm_up
    return _names(manifest) | {name for name in (plan.samples, plan.results) if name}


def _names(manifest: Manifest | None) -> set[str]:
    if manifest is None:
        return set()
    named = {source.labels for entry in manifest.outputs for source in entry.sources}
    named |= {entry.vocabulary for entry in manifest.inputs}
    return {name for name in named if name}


def _read(folder: Path, name: str) -> tuple[str, ...]:
    if "/" in name or name in (".", ".."):
        raise ManifestError(f"labels `{name}` has to be the name of a file beside the model")
    try:
        with path_inside(folder, name).open("rb") as opened:
            raw = opened.read(LABELS_BYTES_MAX + 1)
    except OSError as error:
        raise ManifestError(f"labels `{name}` cannot be read: {error.strerror}") from None
    if len(raw) > LABELS_BYTES_MAX:
        raise ManifestError(f"labels `{name}` has more than {LABELS_BYTES_MAX} bytes")
    try:
        lines = raw.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise ManifestError(f"labels `{name}` is not UTF-8") from None
    if len(lines) > LABELS_MAX or lines == [""]:
        raise ManifestError(f"labels `{name}` is empty, or has more than {LABELS_MAX} lines")
    return tuple(line.removesuffix("\r") for line in lines)
