"""Keyed hashes of columns, and their key."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iskander.errors import ConfigError
from iskander.sampling.prediction_log.hashing import hash_column, read_key

KEY = bytes(range(64))


def hashes(values: Any, kind: pa.DataType, key: bytes = KEY) -> list[str]:
    found: list[str] = hash_column(pa.array(values, kind), key).to_pylist()
    return found


def expected(value: bytes) -> str:
    return blake2b(value, digest_size=16, key=KEY).hexdigest()


def test_text_and_numbers_are_hashed_as_their_bytes() -> None:
    assert hashes(["ann", "ü", ""], pa.utf8()) == [expected(b"ann"), expected(b"\xc3\xbc"),
                                                   expected(b"")]  # fmt: skip
    assert hashes([b"\xff"], pa.binary()) == [expected(b"\xff")]
    assert hashes([-2], pa.int64()) == [expected((-2).to_bytes(8, "little", signed=True))]
    assert hashes([True, False], pa.bool_()) == [expected(b"\1"), expected(b"\0")]
    assert hashes([0.5], pa.float32()) == [expected(np.float32(0.5).tobytes())]


def test_rows_of_a_tensor_are_hashed_as_a_whole() -> None:
    two = pa.list_(pa.int16(), 2)
    assert hashes([[1, 2], [3, 4]], two) == [expected(b"\1\0\2\0"), expected(b"\3\0\4\0")]
    nested = pa.list_(two, 1)
    assert hashes([[[1, 2]]], nested) == [expected(b"\1\0\2\0")]


def test_texts_of_a_row_are_told_apart() -> None:
    kind = pa.list_(pa.utf8(), 2)
    first, second = hashes([["ab", "c"], ["a", "bc"]], kind)
    assert first != second
    assert hashes([["x"]], pa.list_(pa.utf8(), 1)) == hashes(["x"], pa.utf8())


def test_slices_are_hashed_by_their_own_rows() -> None:
    array = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2))
    assert hash_column(array[1:], KEY).to_pylist() == hash_column(array, KEY).to_pylist()[1:]


def test_hash_depends_on_the_key() -> None:
    assert hashes(["ann"], pa.utf8()) != hashes(["ann"], pa.utf8(), b"other" * 8)


def test_key_is_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "log.key"
    key = read_key(path)
    assert len(key) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path) == key
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("length", [0, 31, 4097])
def test_key_of_a_wrong_length_is_rejected(tmp_path: Path, length: int) -> None:
    path = tmp_path / "log.key"
    path.write_bytes(bytes(length))
    with pytest.raises(ConfigError, match=f"has {min(length, 4097)} bytes, expected 32 to 4096"):
        read_key(path)


def test_key_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key(tmp_path / "missing" / "log.key")
