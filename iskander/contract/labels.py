"""Label files beside a model: one line for each class, or for each word of a vocabulary.

Runs on: the worker that loads the model, and the operator's tool.
"""

from __future__ import annotations

from pathlib import Path

from iskander.contract.manifest import Manifest, model_file
from iskander.contract.paths import path_inside
from iskander.contract.validation import require
from iskander.errors import ManifestError

LABELS_MAX = 1 << 20
LABELS_BYTES_MAX = 16 << 20

Labels = dict[str, tuple[str, ...]]


def read_labels(path: Path, manifest: Manifest | None) -> Labels:
    """Return the lines of every label file that a manifest names, by file name.

    Raises:
        ManifestError: A file cannot be read, is too large or empty, or is not beside the model.
    """
    folder = model_file(path).parent
    return {name: _read_label_file(folder, name) for name in _label_files(manifest)}


def named_files(manifest: Manifest | None) -> set[str]:
    """Return files that a manifest names: labels, vocabularies, samples, results."""
    if manifest is None:
        return set()
    warm_up = manifest.warm_up
    return _label_files(manifest) | {name for name in (warm_up.samples, warm_up.results) if name}


def _label_files(manifest: Manifest | None) -> set[str]:
    if manifest is None:
        return set()
    named = {source.labels for entry in manifest.outputs for source in entry.sources}
    return (named | {entry.vocabulary for entry in manifest.inputs}) - {""}


def _read_label_file(folder: Path, name: str) -> tuple[str, ...]:
    is_name = "/" not in name and name not in (".", "..")
    require(is_name, f"labels `{name}` has to be the name of a file beside the model")
    try:
        with path_inside(folder, name).open("rb") as opened:
            raw = opened.read(LABELS_BYTES_MAX + 1)
    except OSError as error:
        raise ManifestError(f"labels `{name}` cannot be read: {error.strerror}") from None
    is_small = len(raw) <= LABELS_BYTES_MAX
    require(is_small, f"labels `{name}` has more than {LABELS_BYTES_MAX} bytes")
    try:
        lines = raw.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise ManifestError(f"labels `{name}` is not UTF-8") from None
    is_counted = len(lines) <= LABELS_MAX and lines != [""]
    require(is_counted, f"labels `{name}` is empty, or has more than {LABELS_MAX} lines")
    return tuple(line.removesuffix("\r") for line in lines)
