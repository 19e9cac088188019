"""Files of drift references, with msgpack as plain values as the reference.

Layout of an input: kind (1 byte: reference, recorded samples), then the file. A profile of an
accepted file can be compared, merged, stored and reported: its report has no NaN and no negative
shares, and the report of the stored profile is the same.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from fuzz import mutation
from fuzz.targets.wire_messages import with_changed_value
from iskander.config.drift import DriftConfig
from iskander.contract.manifest import Manifest, WarmUp
from iskander.foundation.decoders import DECODE_ERRORS
from iskander.sampling.drift.comparison import compare
from iskander.sampling.drift.monitor import _shown
from iskander.sampling.drift.profile import ColumnKey, Profile
from iskander.sampling.drift.reference import (
    InvalidReference,
    Reference,
    read_reference,
    to_profile,
    to_reference,
)
from iskander.sampling.drift.summary import LabelValues, NumberValues
from iskander.sampling.drift.warm_up import read_warm_up

ITERATIONS = 400
COLUMNS_MAX = 4
FOLDER = tempfile.TemporaryDirectory(prefix="isk-fuzz-")
PATH = Path(FOLDER.name, "drift-reference.msgpack")
SAMPLES = "samples.npz"
LIMITS = DriftConfig(rows_min=1)
MANIFEST = Manifest(format=1, inputs=(), outputs=(), warm_up=WarmUp(samples=SAMPLES))
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1 << 40, 1 << 63, -0.5, 1e308, math.nan, math.inf, -math.inf, "", "input",
    "recent", b"", b"\2\1\x0f", [], {}, "9" * 5000,
)  # fmt: skip


def recent() -> Profile:
    """Columns with numbers, integers, labels, and missing values."""
    profile = Profile(COLUMNS_MAX)
    values = np.arange(40.0)
    columns = [
        (ColumnKey("input", "x"), NumberValues(values, 2)),
        (ColumnKey("input", "n"), NumberValues(values % 7, is_integer=True)),
        (ColumnKey("input", "s"), LabelValues({"a": 30, "b": 10})),
        (ColumnKey("output", "y"), NumberValues(np.array([math.nan, math.inf, -1e308, 1e308]))),
    ]
    profile.add(40, columns)
    return profile


def seeds() -> list[bytes]:
    small, large, empty = recent(), Profile(COLUMNS_MAX), Profile(COLUMNS_MAX)
    generator = np.random.default_rng(0)
    large.add(900, [(ColumnKey("input", "x"), NumberValues(generator.normal(size=900)))])
    large.add(900, [(ColumnKey("input", "s"), LabelValues({f"l{n}": n + 1 for n in range(50)}))])
    references = [stored(each) for each in (small, large, empty)]
    archives = [
        {"x": np.arange(6.0), "s": np.array(["a", "b", "c", "a", "b", "c"])},
        {"x": np.arange(12, dtype=np.int8).reshape(6, 2), "b": np.arange(6) > 3},
    ]
    return [
        *(b"\0" + each for each in (*references, b"\x81\xa1x" + b"\x91" * 3000)),
        *(b"\1" + archive(each, is_packed=is_packed) for each in archives for is_packed in (0, 1)),
    ]


def stored(profile: Profile) -> bytes:
    return msgspec.msgpack.encode(reference_of(profile))


def reference_of(profile: Profile) -> Reference:
    return to_reference(profile, "m", "1", origin="training", is_complete=True, created_s=1)


def archive(arrays: dict[str, Any], *, is_packed: int) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if is_packed else np.savez)(file, **arrays)
    return file.getvalue()


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    kind, file = raw[:1], raw[1:]
    if kind != b"\0" or not random.randrange(4):
        return kind + mutation.flip(file, other[1:], random)
    try:
        document = msgspec.msgpack.decode(file)
    except DECODE_ERRORS:
        return kind + mutation.flip(file, other[1:], random)
    columns = document.get("columns") if isinstance(document, dict) else None
    if not isinstance(columns, list) or not columns or not random.randrange(6):
        return kind + msgspec.msgpack.encode(with_changed_value(document, random))
    column = random.choice(columns)
    target = column.get("summary", column) if isinstance(column, dict) else {}
    if isinstance(target, dict) and target:
        name = random.choice(list(target))
        is_sketch = isinstance(target[name], bytes) and random.randrange(8)
        target[name] = changed_sketch(target[name], random) if is_sketch else random.choice(VALUES)
    return kind + msgspec.msgpack.encode(document)


def changed_sketch(raw: bytes, random: Random) -> bytes:
    if random.randrange(2):
        return mutation.patch(raw, random, ("<B", "<H", "<i", "<q"))
    return mutation.flip(raw, raw, random)


def run(raw: bytes) -> None:
    if raw[:1] == b"\1":
        check_samples(raw[1:])
    else:
        check_reference(raw[1:])


def check_samples(file: bytes) -> None:
    (PATH.parent / SAMPLES).write_bytes(file)
    try:
        profile = read_warm_up(PATH.parent, MANIFEST, COLUMNS_MAX)
    except InvalidReference as error:
        assert error.message
        return
    assert profile is not None
    report_of(profile)


def check_reference(file: bytes) -> None:
    PATH.write_bytes(file)
    try:
        reference = read_reference(PATH)
        assert reference is not None
        profile = to_profile(reference, COLUMNS_MAX)
    except InvalidReference as error:
        assert error.message
        return
    with contextlib.suppress(*DECODE_ERRORS):  # Unknown values are not decoded.
        check_values(profile, msgspec.msgpack.decode(file))
    report = report_of(profile)
    again = to_profile(msgspec.msgpack.decode(stored(profile), type=Reference), COLUMNS_MAX)
    assert report_of(again) == report, "another report after it was stored"
    merged = recent()
    merged.merge(profile)
    assert merged.rows == 40 + profile.rows
    report_of(merged)


def check_values(profile: Profile, plain: dict[str, Any]) -> None:
    """Check that a profile has the values of its file."""
    assert profile.rows == plain["rows"] >= 0
    columns = plain["columns"][:COLUMNS_MAX]
    assert profile.left_out == plain["left_out"] + len(plain["columns"]) - len(columns)
    stored = {(each["side"], each["name"]): each["summary"] for each in columns}
    assert profile.summaries.keys() == stored.keys()
    for key, summary in profile.summaries.items():
        for name in ("nulls", "nans", "infinities", "mean", "squares", "minimum", "maximum"):
            value, expected = getattr(summary, name), stored[key][name]
            assert value == expected or math.isnan(value), f"{name}: {value}"


def report_of(profile: Profile) -> list[Any]:
    """What is reported of a reference, and of the columns of `recent` compared with it."""
    report: list[Any] = []
    columns = recent().summaries
    for key, summary in profile.summaries.items():
        shown = _shown(summary)
        report.append((key, msgspec.to_builtins(shown)))
        assert shown.count >= 0 and 0 <= shown.missing <= 1
        assert all(0 <= share <= 1 for share in shown.labels.values())
        assert list(shown.quantiles) == sorted(shown.quantiles)
        for column in columns.values():
            measures = compare(column, summary, LIMITS)
            for name, measure in measures.items():
                assert math.isfinite(measure.value) and measure.limit > 0, f"{name}: {measure}"
            report.append({name: measure.value for name, measure in measures.items()})
    return json.loads(json.dumps(report, default=str), parse_constant=str)  # type: ignore[no-any-return]
