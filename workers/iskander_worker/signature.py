"""Whether a manifest is signed by whom the server believes: Ed25519, beside the manifest.

`manifest.toml.sig` holds the signature of the bytes of `manifest.toml`: 64 bytes, or their base64.
The manifest pins the model's files by their hashes, so the signature is theirs too.

Runs on: worker main and the operator's tool. Source: RFC 8032; the package `cryptography`.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from iskander.contract.confined import read_plain
from iskander.contract.manifest import MANIFEST_BYTES_MAX
from iskander.errors import ManifestError

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
