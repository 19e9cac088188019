"""Files of references: round trip, damage, and access."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from iskander.sampling.drift.profile import ColumnKey, Profile
from iskander.sampling.drift.reference import (
    InvalidReference,
    Reference,
    read_reference,
    to_profile,
    to_reference,
    write_reference,
)
from iskander.sampling.drift.summary import LabelValues, NumberValues


def profile() -> Profile:
    made = Profile(10)
    numbers = NumberValues(np.random.default_rng(0).normal(size=5000), nulls=3)
    columns = [
        (ColumnKey("input", "x"), numbers),
        (ColumnKey("input", "s"), LabelValues({"a": 4000, "b": 1000})),
        (ColumnKey("output", "x"), NumberValues(np.array([np.nan]))),
    ]
    made.add(5000, columns)
    return made


def reference(**changed: object) -> Reference:
    made = to_reference(profile(), "m", "1", origin="training", is_complete=True, created_s=123)
    return msgspec.structs.replace(made, **changed)


def test_file_keeps_the_profile(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "m.msgpack"
    made = profile()
    stored = to_reference(made, "m", "1", origin="training", is_complete=True, created_s=123)
    write_reference(file, stored)
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    read = read_reference(file)
    assert read == stored
    restored = to_profile(read, 10)
    assert restored.rows == 5000 and restored.summaries.keys() == made.summaries.keys()
    for key, summary in made.summaries.items():
        assert restored.summaries[key].to_stored() == summary.to_stored()
    assert to_profile(read, 2).left_out == 1 and len(to_profile(read, 2).summaries) == 2


def test_no_file(tmp_path: Path) -> None:
    assert read_reference(tmp_path / "m") is None
    assert read_reference(tmp_path / "missing" / "m") is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        msgspec.msgpack.encode(reference())[:-9],
        msgspec.msgpack.encode({"format": 2}),
        msgspec.msgpack.encode(reference(rows=-1)),
        b"\x81\xa5other" + b"\x91" * 3000 + b"\xc0",
    ],
)
def test_other_content(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(InvalidReference, match="no drift reference of format 1"):
        read_reference(tmp_path / "m")


def test_damaged_sketch() -> None:
    good = reference()
    summary = msgspec.structs.replace(good.columns[0].summary, quantiles=b"damaged")
    column = msgspec.structs.replace(good.columns[0], summary=summary)
    with pytest.raises(InvalidReference, match="damaged"):
        to_profile(msgspec.structs.replace(good, columns=(column,)), 10)


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidReference, match="cannot be read"):
        read_reference(tmp_path / "folder")
    with pytest.raises(InvalidReference, match="cannot be written"):
        write_reference(tmp_path / "folder", reference())
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidReference, match="cannot be written"):
        write_reference(tmp_path / "file" / "m", reference())
