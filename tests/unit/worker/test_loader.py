"""Results of loads that fail, and damaged warm-up samples."""

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
    """The panic of a Rust extension, which is not a subclass of Exception."""


class UnprintableError(Exception):
    """An error whose conversion to text fails."""

    def __str__(self) -> str:
        raise ValueError("no text")


def load_result(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Any:
    """Returns the message to the gateway for a load that raises an error."""

    def fail(spec: Any, cores: int) -> None:
        raise error

    monkeypatch.setattr(loading, "Session", fail)
    loads = loading.LoadQueue(1)
    attachment: Any = SimpleNamespace(executor=SimpleNamespace(sessions={}))
    loads.put(attachment, model_spec(Path("/m"), key=7))
    result = eventually(loads.get, what="end of the load")
    assert not loads.is_busy
    ((response),) = result[1]
    return response


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
        UnprintableError(),
    ],
)
def test_any_library_exception_fails_the_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    response = load_result(monkeypatch, error)

    assert isinstance(response, LoadFailed) and response.model == 7 and response.code == "manifest"
    assert response.message.startswith(f"it cannot be loaded: {type(error).__name__}")
    assert "Traceback" in caplog.text


def test_iskander_error_is_reported_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    response = load_result(monkeypatch, ManifestError("it is wrong"))

    assert (response.code, response.message) == ("manifest", "it is wrong")


def test_own_assertion_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = loading.LoadQueue(1)
    attachment: Any = SimpleNamespace(executor=SimpleNamespace(sessions={}))

    def fail(spec: Any, cores: int) -> None:
        loading._Load.answer(SimpleNamespace(error=None, session=None))  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "Session", fail)
    loads.put(attachment, model_spec(Path("/m")))
    with pytest.raises(AssertionError):
        eventually(loads.get, what="end of the load")


@pytest.mark.parametrize("damage", ["deflate", "header"])
def test_damaged_sample_is_rejected(tmp_path: Path, damage: str) -> None:
    """Invalid deflate data, and an array of 2^50 elements with data for four."""
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


def test_long_error_text_is_truncated_before_paths_are_removed() -> None:
    assert len(error_text(ValueError("/" * 200_000))) <= 4000
    assert error_text(ValueError("at /a/b.cc:12 it failed\nstack")) == "at <source> it failed"
