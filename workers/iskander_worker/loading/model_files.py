"""Which files a model is made of, and whether they are what they should be, before any is opened.

An ONNX file names the files that hold its weights, whatever it is called itself (`external`).

Runs on: worker main, the process that tries a model out, and the operator's tool.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from iskander.contract.manifest import MANIFEST_BYTES_MAX
from iskander.contract.paths import path_inside, read_plain
from iskander.errors import ManifestError
from iskander_worker.loading.onnx_external import ExternalTensor, external_tensors

SIGNATURE_BYTES = 64
FILE_BYTES_MAX = 1024


def require_signature(folder: Path, public_key: str) -> bool:
    """Refuse a model whose manifest is not signed.

    Args:
        folder: Of the model.
        public_key: 32 bytes as base64; empty where no signature is wanted.

    Returns:
        Whether there was one to check.

    Raises:
        ManifestError: It is missing, of another key, or of another manifest, or cannot be checked.
    """
    if not public_key:
        return False
    try:
        manifest = read_plain(folder / "manifest.toml", MANIFEST_BYTES_MAX)
        raw = read_plain(folder / "manifest.toml.sig", FILE_BYTES_MAX)
    except OSError as error:
        raise ManifestError(
            "loading.public_key wants signed models, and `manifest.toml` or `manifest.toml.sig` "
            f"beside this one cannot be read: {error.strerror}"
        ) from None
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise ManifestError(
            "loading.public_key needs the package `cryptography`: install `iskander[signed]`"
        ) from None
    try:
        signature = raw if len(raw) == SIGNATURE_BYTES else base64.b64decode(raw, validate=False)
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key))
        key.verify(signature, manifest)
    except (InvalidSignature, ValueError, binascii.Error):
        raise ManifestError(
            "`manifest.toml.sig` is not the signature of `manifest.toml` by loading.public_key"
        ) from None
    return True


FILES_MAX = 4096

Stamp = tuple[int, int, int, int, int]
"""Device, inode, bytes, and when content and entry were changed last: other ones, another file."""


class ModelFiles(NamedTuple):
    """What a model is made of.

    Attributes:
        paths: By name relative to the model's folder; the model file first.
        digests: SHA-256 of each, as hexadecimal text.
        weight_bytes: Of the files together: what loading takes at least.
        stamps: Of each, from before it was read.
    """

    paths: dict[str, Path]
    digests: dict[str, str]
    weight_bytes: int
    stamps: dict[Path, Stamp | None]


def inspect_files(file: Path, bytes_max: int) -> ModelFiles:
    """Find, bound and hash the files of a model.

    Args:
        file: The model file.
        bytes_max: The most bytes of them together, and of all that the tensors say to hold.

    Raises:
        ManifestError: One is missing, cut off, too large, or outside of the model's folder.
    """
    size = _size_of(file)
    stamps = {file: stamp_of(file)}
    _require_bytes(file.name, size, bytes_max)
    sizes = {file.name: size}
    paths = {file.name: file}
    declared = size
    for external in _externals(file) if size else ():
        name = external.location
        if name not in paths:
            paths[name] = path = path_inside(file.parent, name)
            stamps[path], sizes[name] = stamp_of(path), _size_of(path)
            _require_bytes(file.name, sum(sizes.values()), bytes_max)
            if len(paths) > FILES_MAX:
                raise ManifestError(f"`{file.name}` names more than {FILES_MAX} files of weights")
        length = external.length or max(sizes[name] - external.offset, 0)
        if external.offset + length > sizes[name]:
            raise ManifestError(
                f"`{file.name}` wants {length} bytes at {external.offset} of `{name}`, which has "
                f"{sizes[name]}: it is cut off, or another's"
            )
        _require_bytes(file.name, declared := declared + length, bytes_max)
    digests = {name: _digest(path) for name, path in paths.items()}
    return ModelFiles(paths, digests, sum(sizes.values()), stamps)


def stamp_of(path: Path) -> Stamp | None:
    """What tells a file from what it was before; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def require_unchanged(stamps: Mapping[Path, Stamp | None]) -> None:
    """Refuse files that are not those that were looked at: what was found is of others.

    Raises:
        ManifestError: One was changed.
    """
    changed = [path.name for path, stamp in stamps.items() if stamp_of(path) != stamp]
    if changed:
        raise ManifestError(
            f"its files were changed while it was tried out, `{changed[0]}` was: load it again"
        )


def require_pins(
    folder: Path,
    pins: Mapping[str, str],
    digests: Mapping[str, str],
    wanted: Iterable[str] = (),
) -> None:
    """Hold the files of a model against the hashes that its manifest pins them to.

    Args:
        folder: Of the model.
        pins: SHA-256 by file name; a name may be of any file in the folder, such as labels.
        digests: Those that are known already.
        wanted: Names that have to be pinned, as where the manifest is signed for them.

    Raises:
        ManifestError: Names the file, what was pinned and what was found.
    """
    for name, pin in pins.items():
        found = digests.get(name)
        if found is None:
            found = _digest(path_inside(folder, name))
        if found != pin.lower():
            raise ManifestError(
                f"`{name}` is not the file that the manifest pins: sha256 wanted {pin.lower()}, "
                f"got {found}"
            )
    missing = next((name for name in wanted if name not in pins), None)
    if missing is not None:
        raise ManifestError(
            f"the manifest is signed and pins no sha256 of `{missing}`: what it does not pin, "
            "its signature does not cover"
        )


def _externals(file: Path) -> list[ExternalTensor]:
    try:
        # Mapped, not read: the weights in it stay where they are.
        raw = np.memmap(file, np.uint8, "r").data
    except (OSError, ValueError) as error:
        raise ManifestError(f"`{file.name}` cannot be read: {error}") from None
    try:
        return external_tensors(raw, file.name)
    finally:
        raw.release()


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ManifestError(f"`{path.name}` cannot be read: {error.strerror}") from None


def _size_of(path: Path) -> int:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise ManifestError(
            f"there is no model file `{path.name}` where the configuration says"
        ) from None
    except OSError as error:
        raise ManifestError(f"`{path.name}` cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"`{path.name}` is not a file")
    return status.st_size


def _require_bytes(name: str, found: int, bytes_max: int) -> None:
    if found > bytes_max:
        raise ManifestError(
            f"`{name}` and its weights are {found} bytes or more, and loading.model_bytes is "
            f"{bytes_max}"
        )
