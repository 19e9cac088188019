"""`[remote]` of a manifest: addresses, headers and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.remotes import remote

from iskander.contract.backend_manifest import RemoteSection
from iskander.contract.manifest import read_manifest
from iskander.errors import ManifestError

ADDRESSES = ["host:8001", "10.0.0.1:1", "[::1]:50051", "unix:/run/a.sock", "a-b.c_d.example:65535"]


def read(folder: Path, *addresses: str, **settings: Any) -> RemoteSection:
    manifest = read_manifest(remote(folder, *addresses, **settings) / "manifest.toml")
    assert manifest is not None and manifest.remote is not None
    return manifest.remote


def test_addresses_and_defaults(tmp_path: Path) -> None:
    section = read(tmp_path, *ADDRESSES)
    assert section.addresses == tuple(ADDRESSES)
    assert (section.version, section.tls, section.is_metadata_checked) == ("", None, True)
    assert (section.timeout_s, section.connect_s) == (30.0, 5.0)


@pytest.mark.parametrize(
    "address", ["", "host", "http://host:1", "host:port", ":1", "unix:", "a b:1"]
)
def test_invalid_address(tmp_path: Path, address: str) -> None:
    with pytest.raises(ManifestError, match=r"remote\.addresses\[0\]"):
        read(tmp_path, address)


@pytest.mark.parametrize(
    "settings",
    [
        {"metadata": {"Application": "a"}},
        {"metadata": {"trace-bin": "a"}},
        {"metadata": {"grpc-timeout": "1S"}},
        {"metadata": {"iskander-hops": "0"}},
        {"metadata": {"application": "a\nb"}},
        {"timeout_s": 0},
        {"connect_s": 0.01},
        {"message_bytes": 2**31},
        {"addressess": []},
    ],
    ids=str,
)
def test_invalid_setting(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match=r"manifest\.toml: .*remote"):
        read(tmp_path, "host:1", **settings)


def test_no_address(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"remote\.addresses"):
        read(tmp_path)
