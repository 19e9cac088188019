"""Files that a process wrote itself, after damage, with JSON and the intact lines as references.

Layout of an input: kind (1 byte: journal, plan, load intent), then the file. The only errors are
those with which a job or a gateway reports a damaged file.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa

from fuzz import mutation
from iskander.gateway.repository.load_intents import FOLDER as INTENTS
from iskander.gateway.repository.load_intents import LoadIntent, LoadIntents
from iskander.lake.errors import JobConflict
from iskander.lake.journal import JOURNAL, Finished, _read_finished
from iskander.lake.plan import JobPlan, canonical, decode_plan, encode_plan, make_unit

ITERATIONS = 800
FOLDER = tempfile.TemporaryDirectory(prefix="isk-fuzz-")
PATH = Path(FOLDER.name, JOURNAL)
INTENT = Path(FOLDER.name, INTENTS, "0.json")
UNITS = tuple(
    make_unit(index, {"path": f"f{index}", "groups": [0, index]}, rows=index or None, bytes=10)
    for index in range(3)
)
PLAN = JobPlan(
    UNITS, "f" * 64, "m", "1", "d", {"a": "b"}, pa.schema([("x", pa.int64())]), {"threads": "2"}
)
WORDS = [b"null", b"true", b"-1", b"1e999", b'"x"', b"[", b"]", b"{", b"}", b",", b":", b"\n"]
WORDS += [b"[" * 3000, b"9" * 5000, b"\xff", b"\0", b"\\ud800", b"0", b"1", b"2", b"3.5", b"units"]
WORDS += [b"format", b"index", b"schema", b"QVJST1c=", b"NaN"]


def seeds() -> list[bytes]:
    lines = [
        canonical(asdict(Finished(index=each.index, name=each.name, rows_in=1, rows_out=1,
                                  quarantined=0, rejected=0, bytes=9))) + b"\n"
        for each in UNITS
    ]  # fmt: skip
    return [
        b"\0" + b"".join(lines),
        b"\0" + lines[0] + lines[1][:-20],
        b"\1" + encode_plan(PLAN),
        b"\2" + msgspec.json.encode(LoadIntent("m", excluded=("1", "2"))),
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    if not random.randrange(3):
        return raw[:1] + mutation.flip(raw[1:], other[1:], random)
    at = random.randint(min(1, len(raw)), len(raw))
    end = min(at + random.choice((0, 1, 2, 8)), len(raw))
    return raw[:at] + random.choice(WORDS) + raw[end:]


def run(raw: bytes) -> None:
    kind, text = raw[:1], raw[1:]
    if kind == b"\2":
        check_intent(text)
    elif kind == b"\1":
        check_plan(text)
    else:
        check_journal(text)


def check_journal(text: bytes) -> None:
    PATH.write_bytes(text)
    try:
        finished = _read_finished(PATH, PLAN)
    except JobConflict as error:
        assert str(error)
        return
    expected = {}
    for line in text.split(b"\n")[:-1]:
        values: dict[str, Any] = json.loads(line)
        expected[values["index"]] = values
    assert finished.keys() == expected.keys()
    for index, each in finished.items():
        assert 0 <= index < len(UNITS) and UNITS[index].name == each.name
        for name, value in asdict(each).items():
            assert value == expected[index][name]
            assert type(value) is (str if name == "name" else int)


def check_plan(text: bytes) -> None:
    try:
        plan = decode_plan(text)
    except JobConflict as error:
        assert str(error)
        return
    assert decode_plan(encode_plan(plan)) == plan
    assert all(each.index >= 0 for each in plan.units)


def check_intent(text: bytes) -> None:
    INTENT.parent.mkdir(exist_ok=True)
    INTENT.write_bytes(text)
    found = list(LoadIntents(Path(FOLDER.name)))
    assert len(found) <= 1
    for intent in found if is_utf8(text) else ():
        assert json.loads(text)["model"] == intent.model


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
