"""Keys of tickets."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from iskander.errors import ConfigError
from iskander.gateway.sources.keys import KEY_FILE, operators_key, shared_key


def test_key_of_the_operator_ignores_the_end_of_its_line(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"k" * 40)
    other.write_bytes(b"k" * 40 + b"\n")
    assert operators_key(one) == operators_key(other)


@pytest.mark.parametrize("byte", [b" ", b"\n", b"\0"])
def test_key_of_random_bytes_may_end_with_any_byte(tmp_path: Path, byte: bytes) -> None:
    (tmp_path / "key").write_bytes(b"k" * 31 + byte)
    assert len(operators_key(tmp_path / "key")) == 32


@pytest.mark.parametrize("size", [0, 31, 4097])
def test_key_of_a_wrong_size_is_an_error(tmp_path: Path, size: int) -> None:
    (tmp_path / "key").write_bytes(b"k" * size)
    with pytest.raises(ConfigError, match=r"source_reads.key_file key has"):
        operators_key(tmp_path / "key")


def test_missing_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        operators_key(tmp_path / "key")


def test_processes_of_a_gateway_share_a_random_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as executor:
        keys = set(executor.map(shared_key, [tmp_path] * 8))
    assert len(keys) == 1
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [KEY_FILE]
    (tmp_path / "other").mkdir()
    assert shared_key(tmp_path / "other") not in keys
