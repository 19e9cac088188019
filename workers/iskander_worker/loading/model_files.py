"""Files of a model: discovery, size limit, hashes and signature.

An ONNX file names the files that hold its weights, whatever its own name (`onnx_external`).

Runs on: worker main, the process of a sandboxed load, and the operator's tool.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import stat
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from iskander.contract.manifest import MANIFEST_BYTES_MAX
from iskander.contract.paths import path_inside, read_plain
from iskander.errors import ManifestError
from iskander_worker.loading.onnx_external import ExternalTensor, external_tensors

SIGNATURE_BYTES = 64
SIGNATURE_FILE_BYTES_MAX = 1024
FILES_MAX = 4096

Stamp = tuple[int, int, int, int, int]
"""Device, inode, bytes, and times of the last change of content and entry."""


def require_signature(folder: Path, public_key: str) -> bool:
    """Reject a model whose manifest is not signed with a key; return False without a key."""
    if not public_key:
        return False
    try:
        manifest = read_plain(path_inside(folder, "manifest.toml"), MANIFEST_BYTES_MAX)
        signature_file = path_inside(folder, "manifest.toml.sig")
        raw = read_plain(signature_file, SIGNATURE_FILE_BYTES_MAX)
    except (OSError, ManifestError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.message
        raise ManifestError(
            "`manifest.toml` or its signature `manifest.toml.sig` cannot be read, and "
            f"loading.public_key requires signed models: {reason}"
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


class ModelFiles(NamedTuple):
    """The files of a model by name, the model file first; `stamps` are older than `digests`."""

    paths: dict[str, Path]
    digests: dict[str, str]
    weight_bytes: int
    stamps: dict[Path, Stamp | None]


def inspect_files(file: Path, bytes_max: int) -> ModelFiles:
    """Find and hash the files of an ONNX model, or raise a `ManifestError`.

    `bytes_max` limits the files, and the tensors in them.
    """
    size = _size_of(file)
    path_inside(file.parent, file.name)
    stamps = {file: stamp_of(file)}
    _require_size(file.name, size, bytes_max)
    sizes = {file.name: size}
    paths = {file.name: file}
    declared = size
    for external in _external_tensors_of(file) if size else ():
        name = external.location
        if name not in paths:
            paths[name] = path = path_inside(file.parent, name)
            stamps[path], sizes[name] = stamp_of(path), _size_of(path)
            _require_size(file.name, sum(sizes.values()), bytes_max)
            if len(paths) > FILES_MAX:
                raise ManifestError(
                    f"`{file.name}` names too many files of weights, limit {FILES_MAX}"
                )
        length = external.length or max(sizes[name] - external.offset, 0)
        if external.offset + length > sizes[name]:
            raise ManifestError(
                f"`{file.name}` refers to {length} bytes at {external.offset} of `{name}`, which "
                f"has {sizes[name]}: it is truncated, or belongs to another model"
            )
        _require_size(file.name, declared := declared + length, bytes_max)
    digests = {name: sha256_of(path) for name, path in paths.items()}
    return ModelFiles(paths, digests, sum(sizes.values()), stamps)


def stamp_of(path: Path) -> Stamp | None:
    """Return a stamp that changes with the file; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def require_unchanged(stamps: Mapping[Path, Stamp | None]) -> None:
    """Raise a `ManifestError` if a file changed after its inspection."""
    changed = [path.name for path, stamp in stamps.items() if stamp_of(path) != stamp]
    if changed:
        raise ManifestError(f"its file `{changed[0]}` was changed during the load: load it again")


def require_pins(
    folder: Path, pins: Mapping[str, str], digests: Mapping[str, str], required: Iterable[str] = ()
) -> None:
    """Raise a `ManifestError` if a file of a model differs from the hash in its manifest.

    Any file of the folder may be pinned, such as labels; files in `required` must be pinned.
    `digests` are hashes that are known already.
    """
    for name, pin in pins.items():
        found = digests.get(name) or sha256_of(path_inside(folder, name))
        if found != pin.lower():
            raise ManifestError(
                f"`{name}` is not the file that the manifest pins: sha256 {found}, expected "
                f"{pin.lower()}"
            )
    missing = next((name for name in required if name not in pins), None)
    if missing is not None:
        raise ManifestError(
            f"the manifest is signed and pins no sha256 of `{missing}`: its signature does not "
            "cover that file"
        )


def joined_sha256(digests: Mapping[str, str]) -> str:
    """Hash the names and digests of files."""
    text = "\n".join(f"{digest} {name}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def folder_sha256(folder: Path) -> str:
    """Hash the files of a backend that opens them by itself; empty if there are too many.

    Byte code that the interpreter wrote is left out.
    """
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    files = list(islice(paths, FILES_MAX + 1))
    if len(files) > FILES_MAX:
        return ""
    return joined_sha256({file.relative_to(folder).as_posix(): sha256_of(file) for file in files})


def _external_tensors_of(file: Path) -> list[ExternalTensor]:
    try:
        # Mapped, not read, because the file can contain weights.
        raw = np.memmap(file, np.uint8, "r").data
    except (OSError, ValueError) as error:
        raise ManifestError(f"`{file.name}` cannot be read: {error}") from None
    try:
        return external_tensors(raw, file.name)
    finally:
        raw.release()


def sha256_of(path: Path) -> str:
    """Hash a file, or raise a `ManifestError`."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ManifestError(f"`{path.name}` cannot be read: {error.strerror}") from None


def _size_of(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ManifestError(f"model file `{path.name}` not found at the configured path") from None
    except OSError as error:
        raise ManifestError(f"`{path.name}` cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"`{path.name}` is not a file")
    return status.st_size


def _require_size(name: str, found: int, bytes_max: int) -> None:
    if found > bytes_max:
        raise ManifestError(
            f"`{name}` and its weights have {found} bytes or more, limit {bytes_max} "
            "(loading.model_bytes)"
        )
