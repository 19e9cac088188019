"""What a worker answers to a load, whatever ended it."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from iskander_worker.loading import loader as loading
from iskander_worker.tensors import error_text
from iskander_worker.warm_up import read_arrays
from support.processes import eventually
from support.scripted import model_spec

from iskander.control.messages import LoadFailed
from iskander.errors import ManifestError


class PanicException(BaseException):
    """As a library in Rust raises it."""


class Wordless(Exception):
    """An error whose words cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no words")


def answer_of(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Any:
    """What is sent to the gateway for a load that ends so."""

    def fail(spec: Any, cores: int) -> None:
        raise error

    monkeypatch.setattr(loading, "Session", fail)
    loads = loading.LoadQueue(1)
    attachment: Any = SimpleNamespace(executor=SimpleNamespace(sessions={}))
    loads.put(attachment, model_spec(Path("/m"), key=7))
    done = eventually(loads.get, what="its end")
    assert not loads.is_busy
    ((answer),) = done[1]
    return answer


@pytest.mark.parametrize(
    "error",
    [
        RecursionError("too deep"),
        ValueError("embedded null byte"),
        OSError(36, "File name too long"),
        BlockingIOError(11, "Resource temporarily unavailable"),
        MemoryError(),
        zlib.error("incorrect header check"),
        AssertionError("a library's"),
        PanicException("called `unwrap()` on a `None` value"),
        SystemExit(3),
        Wordless(),
    ],
)
def test_what_a_library_raises_is_the_loads_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: BaseException
) -> None:
    answer = answer_of(monkeypatch, error)

    assert isinstance(answer, LoadFailed) and answer.model == 7 and answer.code == "manifest"
    assert answer.message.startswith(f"it cannot be loaded: {type(error).__name__}")
    assert "Traceback" in capfd.readouterr().err


def test_an_error_with_a_name_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answer_of(monkeypatch, ManifestError("it is wrong"))

    assert (answer.code, answer.message) == ("manifest", "it is wrong")


def test_an_assertion_of_this_programs_own_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = loading.LoadQueue(1)
    attachment: Any = SimpleNamespace(executor=SimpleNamespace(sessions={}))

    def fail(spec: Any, cores: int) -> None:
        loading._Load.answer(SimpleNamespace(error=None, session=None))  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "Session", fail)
    loads.put(attachment, model_spec(Path("/m")))
    with pytest.raises(AssertionError):
        eventually(loads.get, what="its end")


@pytest.mark.parametrize("damage", ["deflate", "header"])
def test_a_damaged_sample_is_named(tmp_path: Path, damage: str) -> None:
    """Packed bytes that cannot be unpacked; an array of 2^50 numbers with four of them there."""
    file = tmp_path / "s.npz"
    if damage == "deflate":
        np.savez_compressed(file, x=np.arange(4000))
        raw = bytearray(file.read_bytes())
        raw[60:90] = b"\xff" * 30
        file.write_bytes(raw)
    else:
        array = io.BytesIO()
        header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)}
        np.lib.format.write_array_header_1_0(array, header)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x.npy", array.getvalue() + bytes(32))

    with pytest.raises(ManifestError, match=r"`s\.npz` is no `\.npz` file of plain arrays"):
        read_arrays(tmp_path, "s.npz")


def test_a_long_error_is_cut_before_it_is_searched() -> None:
    assert len(error_text(ValueError("/" * 200_000))) <= 4000
    assert error_text(ValueError("at /a/b.cc:12 it failed\nstack")) == "at <source> it failed"
